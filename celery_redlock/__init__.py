"""Mutual exclusion for Celery tasks: a Redlock over independent Redis or Valkey nodes.

`@app.task(base=LockedTask)` runs one at a time for the same arguments; see the README.
"""

import celery_redlock.operate.control
import celery_redlock.operate.lints
import celery_redlock.operate.metrics  # noqa: F401 - these three hear of workers and of apps
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
from celery_redlock.tasks.backoff import Backoff
from celery_redlock.tasks.contention import Contention
from celery_redlock.tasks.task import LockedTask, current_lock, install, send_unique

__version__ = "0.1.0"

__all__ = [
    "Backoff",
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
    "current_lock",
    "install",
    "send_unique",
]
