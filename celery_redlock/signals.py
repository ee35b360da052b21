"""The public signals: `from celery_redlock.signals import lock_acquired`."""

from celery_redlock.lock.engine.events import (
    LockAcquiredEvent,
    LockExtendedEvent,
    LockLostEvent,
    LockReleasedEvent,
    NodeFailedEvent,
    NodeRecoveredEvent,
)
from celery_redlock.tasks.signals import (
    LockDeferredEvent,
    LockHandedOffEvent,
    LockSkippedEvent,
    lock_acquired,
    lock_deferred,
    lock_extended,
    lock_handed_off,
    lock_lost,
    lock_released,
    lock_skipped,
    node_failed,
    node_recovered,
)

__all__ = [
    "LockAcquiredEvent",
    "LockDeferredEvent",
    "LockExtendedEvent",
    "LockHandedOffEvent",
    "LockLostEvent",
    "LockReleasedEvent",
    "LockSkippedEvent",
    "NodeFailedEvent",
    "NodeRecoveredEvent",
    "lock_acquired",
    "lock_deferred",
    "lock_extended",
    "lock_handed_off",
    "lock_lost",
    "lock_released",
    "lock_skipped",
    "node_failed",
    "node_recovered",
]
