"""Deferred messages in the order in which they try: one queue for each resource and limit. Pure.

The broker's own order of priorities goes first, then the first deferral.

A resource that is taken to a lock of one limit may be free to another, so each limit has a queue.
So has each task with a `rate_limit`, whose head may wait for its rate while others run.
Only the head of a queue tries again by itself. The waiters behind it cost memory and no commands
until they are the head, or until their deadline, before the broker takes them for lost.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_redlock.tasks.waiting.times import WaitingTimes

WITHOUT_QUORUM = ""  # instead of a resource: of messages for which no quorum voted
# the sign of a priority in the order of a broker; others have no priorities
# Source: kombu.transport.redis reads its lists from the lowest number on; RabbitMQ, and the
# transports that call `_get_message_priority(reverse=True)`, deliver the highest number first
PRIORITY_SIGNS = {"redis": 1, "amqp": -1, "mongodb": -1, "zookeeper": -1}
FIRST_PAUSE = 1.0  # seconds between two looks of a head whether its lock is free; then twice that


def priority_order(priority: object, driver: str) -> int:
    """Return a number that sorts priorities as a broker does, the first one lowest.

    priority: as the message says, which may be nonsense. driver: kombu's word for the broker.
    """
    return PRIORITY_SIGNS.get(driver, 0) * priority if isinstance(priority, int) else 0


class QueueKey(NamedTuple):
    """A queue: the resource that messages wait for, and the limit of the lock refused.

    task: the name of a task with a rate limit, "" for all other tasks.
    """

    resource: str
    limit: int
    task: str = ""


@dataclass(eq=False, slots=True)
class Waiter:
    """One message that waits in a worker's memory.

    request: Celery's, of the message. since: of its first deferral, in seconds since 1970; 0 if the
    message does not say. eta: monotonic seconds, the end of its countdown. deadline: monotonic
    seconds, when it tries at the latest. waits_for_release: it may wait for a release past its ETA.
    pause: seconds after which it looks again whether its lock is free, if nothing was announced.
    is_postponed: its ETA is a later one than Celery has set a timer for. timer_entry: the room's
    own entry in the worker's timer; None while there is none but Celery's. came_at: monotonic
    seconds. priority: of `priority_order`.
    """

    request: Any
    since: float
    queue: QueueKey
    eta: float
    deadline: float
    waits_for_release: bool
    pause: float = FIRST_PAUSE
    is_postponed: bool = False
    timer_entry: Any = None
    came_at: float = -math.inf
    priority: int = 0

    def __lt__(self, other: Waiter) -> bool:
        mine, its = ((w.priority, w.since, id(w.request)) for w in (self, other))
        return mine < its


class WaitQueue:
    """The waiters of one resource and limit, in order of priority, then of first deferral."""

    __slots__ = ("_head_left_at", "_head_left_since", "_interval", "waiters")

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self._interval = 0.0  # seconds that the last head waited to be named; 0: unknown
        # when the head was dispatched to try, and its first deferral
        self._head_left_at, self._head_left_since = -math.inf, -math.inf

    def add(self, waiter: Waiter) -> Waiter | None:
        """Queue a waiter; return the head that it displaced, if any."""
        bisect.insort(self.waiters, waiter)
        if self.waiters[0] is not waiter:
            return None
        if waiter.since == self._head_left_since:  # the dispatched head is back: it was refused
            self._head_left_at, self._head_left_since = -math.inf, -math.inf
        return self.waiters[1] if len(self.waiters) > 1 else None

    def remove(self, waiter: Waiter, now: float, *, is_named: bool) -> Waiter | None:
        """Remove a waiter; return the next head if the waiter was the head.

        is_named: a release named this worker, so the next one will as well.
        """
        place = bisect.bisect_left(self.waiters, waiter)
        del self.waiters[place]
        if place > 0:
            return None
        interval = now - max(self._head_left_at, waiter.came_at)
        self._interval = interval if is_named and math.isfinite(interval) else 0.0
        self._head_left_at, self._head_left_since = now, waiter.since
        return self.waiters[0] if self.waiters else None

    def turn_of(self, waiter: Waiter, times: WaitingTimes) -> float:
        """Return the monotonic second from which a waiter may try by itself; inf: not the head.

        The head may try at once. If a head before it has just been dispatched, it may try only
        after `retry_next_after` without its return; later, if the releases that name this worker
        come less often. With many workers each head would look in vain otherwise.
        """
        if self.waiters[0] is not waiter:
            return math.inf
        usual = min(2 * self._interval, times.retry_next_at_most)
        return self._head_left_at + max(times.retry_next_after, usual)


class WaitQueues:
    """All messages that wait in one worker.

    A resource is remembered for a while without waiters: how often its releases name this worker,
    and that the worker listens.
    """

    def __init__(self, times: WaitingTimes) -> None:
        self._times = times
        self._queues: dict[str, dict[QueueKey, WaitQueue]] = {}  # by resource
        self._emptied_at: dict[str, float] = {}  # monotonic seconds, of resources without waiters
        self._by_request: dict[Any, Waiter] = {}
        self.waiting_for_release = 0  # how many waiters may wait past their ETA

    def resources(self) -> set[str]:
        """Return the resources that are waited for; called by any thread."""
        return set(self._queues)

    def of(self, request: Any) -> Waiter | None:
        """Return the waiter of a request."""
        return self._by_request.get(request)

    def all(self) -> list[Waiter]:
        """Return all waiters."""
        return list(self._by_request.values())

    def heads(self, resource: str) -> list[Waiter]:
        """Return the head of each queue of a resource."""
        return [queue.waiters[0] for queue in self._of_resource(resource) if queue.waiters]

    def on(self, resource: str) -> list[Waiter]:
        """Return all waiters of a resource."""
        return [waiter for queue in self._of_resource(resource) for waiter in queue.waiters]

    def _of_resource(self, resource: str) -> list[WaitQueue]:
        return list(self._queues.get(resource, {}).values())

    def add(self, waiter: Waiter) -> Waiter | None:
        """Queue a waiter; return the head that it displaced, if any."""
        self._by_request[waiter.request] = waiter
        self.waiting_for_release += waiter.waits_for_release
        resource = waiter.queue.resource
        self._emptied_at.pop(resource, None)
        queue = self._queues.setdefault(resource, {}).setdefault(waiter.queue, WaitQueue())
        return queue.add(waiter)

    def remove(self, waiter: Waiter, now: float, *, is_named: bool = False) -> Waiter | None:
        """Remove a waiter; return the next head if the waiter was the head.

        is_named: a release named this worker, so the next one will as well.
        """
        del self._by_request[waiter.request]
        self.waiting_for_release -= waiter.waits_for_release
        resource = waiter.queue.resource
        following = self._queues[resource][waiter.queue].remove(waiter, now, is_named=is_named)
        if not any(queue.waiters for queue in self._of_resource(resource)):
            self._emptied_at[resource] = now
        return following

    def retry_in(self, waiter: Waiter, now: float) -> float | None:
        """Return the seconds after which a waiter is to try without a release; 0: now.

        None if that is at its ETA, for which Celery has set a timer. A waiter behind the head tries
        at its deadline: the broker would deliver its message anew soon after.
        """
        if not waiter.waits_for_release or (waiter.eta > now and not waiter.is_postponed):
            return None
        turn = self._queues[waiter.queue.resource][waiter.queue].turn_of(waiter, self._times)
        return max(0.0, min(max(turn, waiter.eta), waiter.deadline) - now)

    def has(self, key: QueueKey) -> bool:
        """Return whether a message waits in this queue."""
        queue = self._queues.get(key.resource, {}).get(key)
        return queue is not None and bool(queue.waiters)

    def is_head(self, waiter: Waiter) -> bool:
        """Return whether a waiter is still here, and the head of its queue."""
        return self.of(waiter.request) is waiter and waiter in self.heads(waiter.queue.resource)

    def head_of(self, waiter: Waiter) -> Waiter | None:
        """Return the head of a waiter's queue; None if the waiter is not here any more."""
        if self.of(waiter.request) is not waiter:
            return None
        return self._queues[waiter.queue.resource][waiter.queue].waiters[0]

    def last_of_longest(self) -> Waiter | None:
        """Return the waiter that is dispatched last: of the longest queue, if it may be evicted."""
        queues = [queue for by_key in self._queues.values() for queue in by_key.values()]
        for queue in sorted(queues, key=lambda queue: len(queue.waiters), reverse=True):
            for waiter in reversed(queue.waiters):
                if waiter.waits_for_release:
                    return waiter
        return None

    def forget_empty(self, before: float) -> None:
        """Forget the resources that have had no waiters since then, in monotonic seconds."""
        for resource in [name for name, at in self._emptied_at.items() if at < before]:
            del self._emptied_at[resource]
            del self._queues[resource]


class QuorumHistory:
    """The last moment at which a quorum may have come back, for messages on their way here."""

    def __init__(self) -> None:
        self._at, self._receivers = -math.inf, set[Hashable]()

    def record(self, at: float, receivers: set[Hashable]) -> None:
        """Remember a moment, in monotonic seconds, and the messages dispatched for it."""
        self._at, self._receivers = at, receivers

    def claim(self, receiver: Hashable, refused_at: float) -> bool:
        """Return whether a message missed that moment on its way here, and note that.

        refused_at: monotonic seconds.
        """
        is_missed = receiver not in self._receivers and self._at >= refused_at
        if is_missed:
            self._receivers.add(receiver)
        return is_missed
