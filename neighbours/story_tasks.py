"""The tasks of the story, and the settings of its app, for the story's own app or a neighbour's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from celery import Celery

from celery_redlock import Backoff, LockedTask
from neighbours.bodies import note
from neighbours.story_setup import read_setup, run_folder

KEYS = ("a", "b", "c")
LATE: dict[str, Any] = {"acks_late": True}
LOCKED: dict[str, Any] = {
    **LATE,
    "base": LockedTask,
    "lock_key": "story:{key}",
    "lock_backoff": Backoff(first=0.1, cap=1.0),
}
UNIQUE: dict[str, Any] = {"lock_unique_for": 600}


def settings() -> dict[str, Any]:
    """Return the settings of the story's app, with those of the neighbour."""
    setup = read_setup()
    return {
        "broker_url": setup.broker, "result_backend": setup.backend or None,
        "redlock_nodes": list(setup.nodes), "broker_connection_retry_on_startup": True,
        "redlock_ttl": 10,  # the run of a killed worker begins again when its lock has expired
        **setup.conf,
    }  # fmt: skip


def body(task_id: str, key: str, until: str = "") -> str:
    """Be what a task of the story does: note its begin and its end. until: a file to wait for."""
    notes = run_folder() / "notes"
    note(notes, "begin", task_id, key)
    time.sleep(0.05)  # so that two bodies without a lock would overlap
    while until and not Path(until).exists():
        time.sleep(0.05)
    note(notes, "end", task_id, key)
    return key


def add_tasks(
    app: Celery, options: Mapping[str, Any] = LOCKED, unique: Mapping[str, Any] = UNIQUE,
    check: Callable[[], object] = bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Return both tasks of the story, of an app. unique: the second one's, beside the options.

    check: called in each body; raises if the body lacks what the neighbour's class gives.
    """

    def work(task: Any, key: str, until: str = "") -> str:
        check()
        return body(task.request.id, key, until)

    def once(task: Any, key: str, until: str = "") -> str:
        check()
        return body(task.request.id, key, until)

    return (
        app.task(work, name="story.work", bind=True, **options),
        app.task(once, name="story.once", bind=True, **options, **unique),
    )
