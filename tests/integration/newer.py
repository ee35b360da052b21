"""The test app in a newer version: a task of it has been given one more argument.

Only workers import it: what a test sends is of the older version, as what waits in a queue is.
"""

from __future__ import annotations

from typing import Any

from celery_redlock import LockedTask
from tests.integration.app import QUICK, app, rebuild, step, task, write


def newer(old: Any, **options: Any) -> Any:
    """Return what makes a function the newer version of a task."""
    del app.tasks[old.name]
    return task(base=LockedTask, lock_key="k:{key}", lock_backoff=QUICK, name=old.name, **options)


@newer(rebuild)
def rebuild_since(key: str, since: int, *, until: str = "") -> str:
    write("begin", key)
    return key


@newer(step, autoretry_for=(Exception,), default_retry_delay=0.1, max_retries=2)
def step_since(key: str, since: int) -> str:
    write("begin", key)
    return key
