"""A periodic task that is skipped while its last run is still at work."""

from celery import Celery
from celery_redlock import LockedTask

from reports import make_report

app = Celery(
    "shop", broker="redis://localhost", backend="redis://localhost"
)
app.conf.redlock_nodes = ["redis://a", "redis://b", "redis://c"]
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True


# lock_args=[]: one run of the task at a time, whatever its arguments.
# "skip": a run that finds the lock taken is not run, and ends as REVOKED.
@app.task(
    name="shop.report",
    base=LockedTask,
    lock_args=[],
    lock_on_conflict="skip",
)
def report() -> None:
    """Make the report of the last minute."""
    make_report()


app.conf.beat_schedule = {
    "report": {
        "task": "shop.report",
        "schedule": 60.0,
        # A message that no worker has taken for a minute is not run.
        "options": {"expires": 60.0},
    },
}
