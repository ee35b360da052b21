"""Locks for Celery tasks: a Redlock on a majority of independent Redis or Valkey nodes.

A task with `@app.task(base=LockedTask)` runs once at a time for the same arguments; see README.md.
Three floors: `lock/` knows no Celery, `tasks/` is the lock in a task's life, `operate/` is for the
people who run workers. `testing/` is for tests. Beside the folders:

- `errors.py`: every error, and how its text describes a holder (also one that no longer renews).
- `label.py`: the holder's label, with the run's name in it. `anchors.py`: links into the pages.
- `signals.py`: the public signals. `wiring.py`: when Celery calls which part, in one list.
- `django.py`: a locked task that is sent at the end of a transaction.
- `compatibility.py`: the private names of Celery and others that the package uses, in one list.
"""

from celery_redlock import compatibility  # noqa: F401 - first: it checks what the others import
from celery_redlock.errors import (
    DuplicateTask,
    LockLost,
    LockTaken,
    NodeError,
    NotAcquired,
    QuorumUnreachable,
    RedlockError,
    SettingsError,
)
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.lock import Lock
from celery_redlock.tasks.execution.deferral import Contention
from celery_redlock.tasks.settings.options import Backoff
from celery_redlock.tasks.startup import install
from celery_redlock.tasks.task import LockedTask, current_lock
from celery_redlock.tasks.typed_options import CallOptions, TaskOptions
from celery_redlock.tasks.unique.send import send_unique
from celery_redlock.wiring import begin

begin()

__version__ = "0.1.0"

__all__ = [
    "Backoff",
    "CallOptions",
    "Contention",
    "DuplicateTask",
    "Lock",
    "LockLost",
    "LockTaken",
    "LockedTask",
    "NodeError",
    "NotAcquired",
    "QuorumUnreachable",
    "Redlock",
    "RedlockError",
    "SettingsError",
    "TaskOptions",
    "current_lock",
    "install",
    "send_unique",
]
