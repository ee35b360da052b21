"""The story's app with Sentry Crons, and a periodic task that another run may hold up.

The excluded entries have no check-in of beat: the body has one of its own.
"""

from contextlib import nullcontext
from typing import Any

import sentry_sdk
from celery import Celery
from celery.schedules import crontab
from sentry_sdk.integrations.celery import CeleryIntegration

from celery_redlock import LockedTask
from neighbours.story_setup import read_setup
from neighbours.story_tasks import LOCKED, add_tasks, body, settings

SKIPPED, WAITS, RUNS, FAILS = ENTRIES = ("skipped", "waits", "runs", "fails")
EXCLUDED = list(ENTRIES) if read_setup().more["excluded"] else []

sentry_sdk.init(
    integrations=[CeleryIntegration(monitor_beat_tasks=True, exclude_beat_tasks=EXCLUDED)]
)
app = Celery("neighbours.crons_app")
app.conf.update(settings())
work, once = add_tasks(app)


@app.task(name="story.periodic", bind=True, **LOCKED)
def periodic(task: LockedTask, key: str) -> None:
    """Be what an entry sends. key: the name of the entry, and of its monitor."""
    with sentry_sdk.monitor(monitor_slug=key) if EXCLUDED else nullcontext():
        body(task.request.id, key)
        if key == FAILS:
            raise ValueError("of a body")


def _entry(name: str) -> dict[str, Any]:
    lock = {"on_conflict": "skip"} if name == SKIPPED else {}
    # each minute: Sentry has no monitor of an entry that is sent more often
    return {
        "task": periodic.name, "schedule": crontab(), "args": [name], "options": {"lock": lock},
    }  # fmt: skip


app.conf.beat_schedule = {name: _entry(name) for name in ENTRIES}
