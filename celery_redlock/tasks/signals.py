"""The public signals, and the frozen record that each carries as `event`.

Celery signals: the sender is the task, or the `Redlock` where no task is in play. They fire in
the process and thread where it happens, and tell; what a receiver raises changes nothing.
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
    # Celery's own is not re-entrant: a finalizer that releases in `send` would wait for itself
    signal.lock = threading.RLock()
    return signal


lock_acquired = _signal("lock_acquired")
lock_deferred = _signal("lock_deferred")
lock_skipped = _signal("lock_skipped")
lock_released = _signal("lock_released")
lock_lost = _signal("lock_lost")
lock_extended = _signal("lock_extended")
node_failed = _signal("node_failed")
node_recovered = _signal("node_recovered")


@dataclass(frozen=True)
class LockAcquiredEvent:
    """A lock is held. ttl: s. fencing_token: 0 where none was asked for."""

    resource: str
    ttl: float
    fencing_token: int = 0


@dataclass(frozen=True)
class LockDeferredEvent:
    """A message was put back. waited: s since the first try; countdown: s until the next."""

    resource: str
    holder: str
    deferrals: int
    waited: float
    countdown: float


@dataclass(frozen=True)
class LockSkippedEvent:
    """A run was skipped. reason: in words."""

    resource: str
    reason: str


@dataclass(frozen=True)
class LockReleasedEvent:
    """A lock was given back. held_for: s. by: "holder", or "parent" where that one was killed."""

    resource: str
    held_for: float
    by: str = "holder"


@dataclass(frozen=True)
class LockLostEvent:
    """A lock is lost. reason: in words."""

    resource: str
    reason: str


@dataclass(frozen=True)
class LockExtendedEvent:
    """A quorum renewed a lock. remaining: s of validity from now on."""

    resource: str
    remaining: float


@dataclass(frozen=True)
class NodeFailedEvent:
    """A node stopped answering. node: its address; cause: in the server's or the system's words."""

    node: str
    cause: str
    resource: str = ""


@dataclass(frozen=True)
class NodeRecoveredEvent:
    """A node answers again."""

    node: str
    resource: str = ""


class SignalObserver(Observer):
    """Turns what the lock's floor observes into signals; free where nobody listens."""

    def acquired(self, redlock: Any, acquisition: Acquisition) -> None:
        """Send lock_acquired."""
        if lock_acquired.receivers:
            event = LockAcquiredEvent(
                acquisition.resource, acquisition.options.ttl, acquisition.fencing_token
            )
            lock_acquired.send(_sender(redlock, acquisition), event=event)

    def released(self, redlock: Any, acquisition: Acquisition) -> None:
        """Send lock_released."""
        send_released(redlock, acquisition)

    def extended(self, redlock: Any, acquisition: Acquisition) -> None:
        """Send lock_extended."""
        event = LockExtendedEvent(
            acquisition.resource, acquisition.remaining(redlock.session.clock.now())
        )
        lock_extended.send(_sender(redlock, acquisition), event=event)

    @property
    def hears_extensions(self) -> bool:
        """Whether anybody listens."""
        return bool(lock_extended.receivers)

    def lost(self, redlock: Any, acquisition: Acquisition, reason: str) -> None:
        """Tell the bodies that run under it, and send lock_lost."""
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
