"""The public signals, and the frozen record that each carries as `event`.

They are Celery signals. The sender is the task, or the `Redlock` without a task. Each is sent in
the process and thread in which its event happens. What a receiver raises changes nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from celery.utils.dispatch import Signal

from celery_redlock.lock.engine.events import Observer
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.tasks.body.monitored import notify_bodies


def _signal(name: str) -> Any:
    signal = Signal(name=name, providing_args={"event"})
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

# what a worker's main process does for a release, or without one; see LockHandedOffEvent
HANDOFF_STEPS = ("named", "acted", "ladder", "fallback")


@dataclass(frozen=True)
class LockAcquiredEvent:
    """A lock was acquired. ttl: seconds. fencing_token: 0 without the option `fencing`."""

    resource: str
    ttl: float
    fencing_token: int = 0


@dataclass(frozen=True)
class LockDeferredEvent:
    """A message was deferred. waited: seconds since its first try; countdown: until the next."""

    resource: str
    holder: str
    deferrals: int
    waited: float
    countdown: float


@dataclass(frozen=True)
class LockHandedOffEvent:
    """One step of a hand-off, in a worker's main process. resource: that the messages wait for.

    step: "named": a release named this worker as a successor. The other steps say why the worker's
    first message was dispatched. "acted": the worker was named first. "ladder": a worker that was
    named before it did not act. "fallback": the message's own timer ended, and no release had named
    the worker.
    """

    resource: str
    step: str


@dataclass(frozen=True)
class LockSkippedEvent:
    """A run was skipped. reason: for people."""

    resource: str
    reason: str


@dataclass(frozen=True)
class LockReleasedEvent:
    """A lock was released. held_for: seconds. by: "holder", or "parent" of a killed holder."""

    resource: str
    held_for: float
    by: str = "holder"


@dataclass(frozen=True)
class LockLostEvent:
    """A lock was lost. reason: for people."""

    resource: str
    reason: str


@dataclass(frozen=True)
class LockExtendedEvent:
    """A quorum renewed a lock. remaining: seconds for which it is valid from now on."""

    resource: str
    remaining: float


@dataclass(frozen=True)
class NodeFailedEvent:
    """A node stopped replying. node: its address. cause: the server's or the system's message."""

    node: str
    cause: str
    resource: str = ""


@dataclass(frozen=True)
class NodeRecoveredEvent:
    """A node replies again."""

    node: str
    resource: str = ""


class SignalObserver(Observer):
    """Sends a signal for each event of the lock's floor; costs nothing without receivers."""

    def acquired(self, redlock: Any, acquisition: Acquisition) -> None:
        """Send lock_acquired."""
        if lock_acquired.receivers:
            event = LockAcquiredEvent(
                acquisition.resource, acquisition.options.ttl, acquisition.fencing_token
            )
            lock_acquired.send(_sender(redlock, acquisition), event=event)

    def released(self, redlock: Any, acquisition: Acquisition) -> None:
        """Send lock_released."""
        if lock_released.receivers:
            send_released(redlock, acquisition)

    def extended(self, redlock: Any, acquisition: Acquisition) -> None:
        """Send lock_extended."""
        event = LockExtendedEvent(
            acquisition.resource, acquisition.remaining(redlock.session.clock.now())
        )
        lock_extended.send(_sender(redlock, acquisition), event=event)

    @property
    def hears_extensions(self) -> bool:
        """Whether lock_extended has receivers."""
        return bool(lock_extended.receivers)

    def lost(self, redlock: Any, acquisition: Acquisition, reason: str) -> None:
        """Interrupt the bodies that run under the lock, and send lock_lost."""
        notify_bodies()  # first: a receiver may take its time
        lock_lost.send(
            _sender(redlock, acquisition), event=LockLostEvent(acquisition.resource, reason)
        )

    def node_failed(self, redlock: Any, node: str, cause: str) -> None:
        """Send node_failed."""
        node_failed.send(redlock, event=NodeFailedEvent(node, cause))

    def node_recovered(self, redlock: Any, node: str) -> None:
        """Send node_recovered."""
        node_recovered.send(redlock, event=NodeRecoveredEvent(node))


def send_released(redlock: Any, acquisition: Acquisition, by: str = "holder") -> None:
    """Send lock_released."""
    if lock_released.receivers:
        event = LockReleasedEvent(
            acquisition.resource, acquisition.held_for(redlock.session.clock.now()), by
        )
        lock_released.send(_sender(redlock, acquisition), event=event)


def _sender(redlock: Any, acquisition: Acquisition) -> Any:
    sender = acquisition.options.sender
    return redlock if sender is None else sender
