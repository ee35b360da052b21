"""How long a worker waits for what, in one value."""

from __future__ import annotations

from dataclasses import dataclass

from celery_redlock.tasks.delivery.delivery import CLOCKS_DIFFER


@dataclass(frozen=True)
class WaitingTimes:
    """The times of a waiting room, in seconds.

    retry_next_after: the next waiter tries this long after the head was dispatched, if no release
    names this worker meanwhile; or after twice the time that the last head waited to be named,
    retry_next_at_most. sweep_interval: between two checks for expired and revoked messages.
    unsubscribe_after: a resource without waiters keeps the subscription this long. imminent: a
    waiter whose ETA is nearer than that is not dispatched only because a release may have been
    missed. eviction_interval: between two messages that leave for others of the queue to come in.
    clocks_differ: at the most, between the wall clocks of two workers. refresh_after: between two
    looks of all heads, which register them, too. longest_pause: between two looks of a head whether
    its lock is free. after_lease: over which heads spread their looks after the end of a lease.
    remember_refusal: for which messages that come after a refused one wait without a try.
    asks_within: a run asks for its lock within this time after its begin.
    """

    retry_next_after: float = 0.5
    retry_next_at_most: float = 5.0
    sweep_interval: float = 1.0
    unsubscribe_after: float = 30.0
    imminent: float = 1.0
    eviction_interval: float = 0.025
    clocks_differ: float = CLOCKS_DIFFER
    refresh_after: float = 10.0
    longest_pause: float = 30.0
    after_lease: float = 0.25
    remember_refusal: float = 1.0
    asks_within: float = 1.0
