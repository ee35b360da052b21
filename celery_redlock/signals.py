"""The public signals, and the frozen records that they carry as `event`.

They are Celery signals. `lock/engine/events.py` has the records of locks and nodes, and makes them;
the others are here, and `tasks/` makes them. The sender is the task, or the `Redlock` without a
task. Each is sent in the process and thread in which its event happens. What a receiver raises
changes nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import signals as celery_signals

from celery_redlock.lock.engine.events import (
    LockAcquiredEvent,
    LockExtendedEvent,
    LockLostEvent,
    LockReleasedEvent,
    NodeFailedEvent,
    NodeRecoveredEvent,
)

__all__ = [
    "LockAcquiredEvent",
    "LockDeferredEvent",
    "LockExtendedEvent",
    "LockHandedOffEvent",
    "LockLostEvent",
    "LockReleasedEvent",
    "LockSkippedEvent",
    "MessagesRecoveredEvent",
    "NodeFailedEvent",
    "NodeRecoveredEvent",
    "lock_acquired",
    "lock_deferred",
    "lock_extended",
    "lock_handed_off",
    "lock_lost",
    "lock_released",
    "lock_skipped",
    "messages_recovered",
    "node_failed",
    "node_recovered",
]


def _signal(name: str) -> Any:
    # by the class of Celery's own, which no public module names
    signal: Any = type(celery_signals.before_task_publish)(name=name, providing_args={"event"})
    # Celery's own lock is not reentrant: a finalizer that releases inside `send` would deadlock
    signal.lock = threading.RLock()
    return signal


lock_acquired = _signal("lock_acquired")
lock_deferred = _signal("lock_deferred")
lock_handed_off = _signal("lock_handed_off")
lock_skipped = _signal("lock_skipped")
lock_released = _signal("lock_released")
lock_lost = _signal("lock_lost")
lock_extended = _signal("lock_extended")
node_failed = _signal("node_failed")
node_recovered = _signal("node_recovered")
messages_recovered = _signal("messages_recovered")

# what a worker's main process does for a release, or without one; see LockHandedOffEvent
HANDOFF_STEPS = ("named", "acted", "ladder", "fallback")


@dataclass(frozen=True)
class LockDeferredEvent:
    """A message was deferred. waited: seconds since its first try; countdown: until the next.

    rate: that of the resource, as "100/h", if its starts are used up; "" if its lock is taken.
    """

    resource: str
    holder: str
    deferrals: int
    waited: float
    countdown: float
    rate: str = ""


@dataclass(frozen=True)
class LockHandedOffEvent:
    """One step of a hand-off, in a worker's main process. resource: that the messages wait for.

    step: "named": a release named this worker as a successor. The other steps say why the worker's
    first message was dispatched. "acted": the worker was named first. "ladder": a worker that was
    named before it did not act. "fallback": no release named the worker, which asked by itself.
    """

    resource: str
    step: str


@dataclass(frozen=True)
class LockSkippedEvent:
    """A run was skipped. reason: for people. rate: as of `LockDeferredEvent`."""

    resource: str
    reason: str
    rate: str = ""


@dataclass(frozen=True)
class MessagesRecoveredEvent:
    """A worker moved the messages of a dead worker back to their queues.

    worker: the name of the dead one. messages: how many were moved. kept: how many were not, as
    they were moved too often in a row. The sender is the consumer of
    the worker that moved them; sent in a thread of its main process.
    """

    worker: str
    messages: int
    kept: int = 0


SIGNALS = {  # of the records that the lock's floor makes
    LockAcquiredEvent: lock_acquired,
    LockReleasedEvent: lock_released,
    LockLostEvent: lock_lost,
    LockExtendedEvent: lock_extended,
    NodeFailedEvent: node_failed,
    NodeRecoveredEvent: node_recovered,
}


def _connect_nothing() -> None:
    """Stand for the connection that no module has asked for."""


# the module whose import is awaited; None: no module, or it has been imported
_awaited: str | None = None
_connect_awaited: Callable[[], object] = _connect_nothing


def connect_on_import(module: str, connect: Callable[[], object]) -> None:
    """Have receivers connected before the first lock that is acquired after a module's import.

    For processes that run no task and may finalize no app, such as a web server.
    """
    global _awaited, _connect_awaited
    _connect_awaited = connect
    _awaited = module


def wants(kind: type[Any]) -> bool:
    """Return whether records of a class have receivers; `connect_on_import` may add some before."""
    global _awaited
    if kind is LockAcquiredEvent and _awaited and _awaited in sys.modules:  # each lock pays for it
        _connect_awaited()
        _awaited = None
    return bool(SIGNALS[kind].receivers)


def send(sender: Any, event: Any) -> None:
    SIGNALS[type(event)].send(sender, event=event)
