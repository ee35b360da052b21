"""The story's app as an agent watches it, with a task that is skipped and one that fails."""

from celery import Celery

from celery_redlock import LockedTask
from neighbours.agent_reports import AGENTS
from neighbours.story_setup import read_setup
from neighbours.story_tasks import add_tasks, settings

AGENTS[read_setup().more["agent"]].begin()
app = Celery("neighbours.watched_app")
app.conf.update(settings())
work, once = add_tasks(app)


@app.task(name="story.skipped", base=LockedTask, lock_key="story:{key}", lock_on_conflict="skip")
def skipped(key: str) -> None:
    """Be skipped, because another task holds the key."""


@app.task(name="story.failed", base=LockedTask, lock_key="failed")
def failed() -> None:
    """Fail, so that the agent is seen to report the errors of a body."""
    raise ValueError("of a body")


@app.task(name="story.retried", bind=True, base=LockedTask, lock_key="retried")
def retried(task: LockedTask) -> None:
    """Run twice, by Celery's own exception Retry."""
    if not task.request.retries:
        raise task.retry(countdown=0)
