"""Locks for Celery tasks: a Redlock on a majority of independent Redis or Valkey nodes.

A task with `@app.task(base=LockedTask)` runs once at a time for the same arguments; see README.md.
Read `wiring.py` first: when Celery calls which part. Then read `lock/lock.py` and `tasks/task.py`.

- `lock/`: `Redlock`, `Lock`: quorum, leases, fencing tokens, watchdog, restart guard. It imports no
  Celery.
- `tasks/`: `LockedTask`: options, keys, deduplication, deferral, redelivery, recovery of dead
  workers.
- `operate/`: for the people who run workers: the command `celery redlock`, metrics, traces, checks
  of the settings.
- `testing/`: `FakeNode`, `EmbeddedNode`, `hold`: support for tests.
- `wiring.py`: `RECEIVERS`, `STEPS`, `connect`: all receivers of Celery's signals, bootsteps and
  commands, in one list.
- `beat.py`: `LockedScheduler`, `WrappedScheduler`: the periodic scheduler for several `celery beat`
  processes. Only the holder of one lock (the leader) sends periodic tasks.
- `signals.py`: `lock_acquired`, `lock_lost`, `LockDeferredEvent`, `send`: the public signals, and
  the records that they carry.
- `errors.py`: `RedlockError`, `LockTaken`, `QuorumUnreachable`, `LockLost`: every error.
  `describe_taken` says who holds a lock.
- `label.py`: `RunId`, `Holder`: the text in a lock's value that names its holder. `escaped` makes a
  text of others safe to show.
- `anchors.py`: `command_for`, `see`: the command in an error or a log line that prints the passage
  of the documentation.
- `django/`: what a Django project takes from the package, as `LockedDjangoTask`.
- `sqlalchemy.py`: `fenced_update`, `fenced_update_async`: an UPDATE that raises if a later holder
  of the lock has written.
- `compatibility.py`: `ANYWHERE`, `IN_WORKERS`, `check`, `find`: the private names of Celery, kombu,
  billiard and redis-py that the package uses. A version that lacks a required name is refused.
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
