"""How long a worker waits for what, in one value."""

from __future__ import annotations

from dataclasses import dataclass

from celery_redlock.tasks.delivery.header import CLOCKS_DIFFER


@dataclass(frozen=True)
class WaitingTimes:
    """The times of a waiting room, in seconds.

    retry_next_after: the next waiter tries this long after the head was dispatched, if no release
    was announced meanwhile. sweep_interval: between two checks for expired and revoked messages.
    unsubscribe_after: a channel without waiters keeps its subscription this long. imminent: a
    waiter whose ETA is nearer than that is not dispatched only because a release may have been
    missed. eviction_interval: between two messages that leave for others of the queue to come in.
    clocks_differ: at the most, between the wall clocks of two workers.
    """

    retry_next_after: float = 1.0
    sweep_interval: float = 1.0
    unsubscribe_after: float = 30.0
    imminent: float = 1.0
    eviction_interval: float = 0.025
    clocks_differ: float = CLOCKS_DIFFER
