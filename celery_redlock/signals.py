"""The public signals: `from celery_redlock.signals import lock_acquired`."""

from celery_redlock.tasks.signals import (
    LockAcquiredEvent,
    LockDeferredEvent,
    LockExtendedEvent,
    LockLostEvent,
    LockReleasedEvent,
    LockSkippedEvent,
    NodeFailedEvent,
    NodeRecoveredEvent,
    lock_acquired,
    lock_deferred,
    lock_extended,
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
    "LockLostEvent",
    "LockReleasedEvent",
    "LockSkippedEvent",
    "NodeFailedEvent",
    "NodeRecoveredEvent",
    "lock_acquired",
    "lock_deferred",
    "lock_extended",
    "lock_lost",
    "lock_released",
    "lock_skipped",
    "node_failed",
    "node_recovered",
]
