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
    "RunUnlockedEvent",
    "SendDeduplicatedEvent",
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
    "run_unlocked",
    "send_deduplicated",
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
run_unlocked = _signal("run_unlocked")
send_deduplicated = _signal("send_deduplicated")

# what a deduplicated send has done; see SendDeduplicatedEvent
DEDUPLICATIONS = ("dropped", "debounced", "replaced")
# what a worker's main process does for a release, or without one; see LockHandedOffEvent
HANDOFF_STEPS = ("named", "acted", "ladder", "fallback")


@dataclass(frozen=True)
class LockDeferredEvent:
    """A message was deferred. waited: seconds since its first try; countdown: until the next.

    rate: that of the resource, as "100/h", if its starts are used up; else "".
    """

    resource: str
    holder: str
    deferrals: int
    waited: float
    countdown: float
    rate: str = ""


@dataclass(frozen=True)
class LockHandedOffEvent:
    """One step of a hand-off, in a worker's main process. resource: the messages wait for it.

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

    worker: the name of the dead worker. messages: the number of messages that were moved. kept: the
    number that stayed, because they had been moved too often in a row. The sender is the consumer
    of the worker that moved them. The signal is sent in a thread of that worker's main process.
    """

    worker: str
    messages: int
    kept: int = 0


@dataclass(frozen=True)
class RunUnlockedEvent:
    """A run begins without its lock, as on_unreachable="run" says. reason: for people."""

    resource: str
    reason: str


@dataclass(frozen=True)
class SendDeduplicatedEvent:
    """A send met an earlier one of its task and resource, in the sender's process.

    how: "dropped": the send is a duplicate, and was not published. "debounced" or "replaced": it
    was published, and the earlier message ends as REVOKED. task_id: that of the earlier send. The
    sender of the signal is the task, or None in a process without it.
    """

    resource: str
    task: str
    task_id: str
    how: str


SIGNALS = {  # of the records that the lock's floor makes
    LockAcquiredEvent: lock_acquired,
    LockReleasedEvent: lock_released,
    LockLostEvent: lock_lost,
    LockExtendedEvent: lock_extended,
    NodeFailedEvent: node_failed,
    NodeRecoveredEvent: node_recovered,
}


def _connect_nothing() -> None:
    """Do nothing: the callback while no import is awaited."""


# the module whose import is awaited; None: no module, or it has been imported
_awaited_module: str | None = None
_connect_receivers: Callable[[], object] = _connect_nothing


def connect_on_import(module: str, connect: Callable[[], object]) -> None:
    """Call `connect` at the first acquired lock after a module is imported.

    The lock's signal reaches the receivers that `connect` adds. For processes that run no task and
    may finalize no app, such as a web server.
    """
    global _awaited_module, _connect_receivers
    _connect_receivers = connect
    _awaited_module = module


def wants(kind: type[Any]) -> bool:
    """Return whether the signal of a record's class has receivers.

    Calls the callback of `connect_on_import` first if its module has been imported.
    """
    global _awaited_module
    # runs at each acquire, so the cheap conditions come first
    if kind is LockAcquiredEvent and _awaited_module and _awaited_module in sys.modules:
        _connect_receivers()
        _awaited_module = None
    return bool(SIGNALS[kind].receivers)


def send(sender: Any, event: Any) -> None:
    SIGNALS[type(event)].send(sender, event=event)
