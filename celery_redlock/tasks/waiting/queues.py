"""Deferred messages in the order in which they try, and what a worker remembers for them. No I/O.

The broker's own order of priorities goes first, then the first deferral.

Each resource and limit has a queue: what is taken to a lock of one limit may be free to another.
So has each task with a `rate_limit`, whose head may wait for its rate while others run.
Only the head of a queue tries again by itself. The waiters behind it cost memory and no commands
until they are the head, or until their deadline, before the broker takes them for lost.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_redlock.errors import LockTaken
from celery_redlock.lock.model.keys import waiting_for
from celery_redlock.lock.model.rate import Rate, awaited
from celery_redlock.tasks.delivery.header import NEVER_DEFERRED, Deferral

WITHOUT_QUORUM = ""  # instead of a resource: of messages for which no quorum voted
# the sign of a priority in the order of a broker; others have no priorities
# Source: kombu.transport.redis reads its lists from the lowest number on; RabbitMQ, and the
# transports that call `_get_message_priority(reverse=True)`, deliver the highest number first
PRIORITY_SIGNS = {"redis": 1, "amqp": -1, "mongodb": -1, "zookeeper": -1}
NO_REFUSAL = -math.inf, -math.inf, NEVER_DEFERRED
FIRST_PAUSE = 1.0  # seconds between the first two checks of a head's lock; doubled each time


def priority_order(priority: object, driver: str) -> int:
    """Return a number that sorts priorities as a broker does, the first one lowest.

    priority: as the message says, which may be nonsense. driver: kombu's word for the broker.
    """
    return PRIORITY_SIGNS.get(driver, 0) * priority if isinstance(priority, int) else 0


@dataclass(frozen=True)
class WaitingTimes:
    """The times of a waiting room, in seconds."""

    # the next waiter tries so long after the head was dispatched, if no release names this worker
    # meanwhile; or after twice the time that the last head waited to be named
    retry_next_after: float = 0.5
    retry_next_at_most: float = 5.0
    ask_next_after: float = 0.02  # the same for a lock with several permits, and for a rate
    after_start: float = 0.005  # over which heads spread their looks for the next start of a rate
    sweep_interval: float = 1.0  # between two checks for expired and revoked messages
    unsubscribe_after: float = 30.0  # that a resource without waiters keeps the subscription
    imminent: float = 1.0  # before its ETA no waiter is dispatched for what it may have missed
    eviction_interval: float = 0.025  # between two messages that leave for others of the queue
    refresh_after: float = 10.0  # between two looks of all heads, which register them, too
    longest_pause: float = 30.0  # between two looks of a head whether its lock is free
    after_lease: float = 0.25  # over which heads spread their looks after the end of a lease
    remember_refusal: float = 1.0  # for which those after a refused message wait without a try
    hold_unknown: float = 30.0  # a message whose format is unknown, until it goes back
    asks_within: float = 1.0  # from its begin, until a run has asked for its lock


class QueueKey(NamedTuple):
    """A queue: what its messages wait for, and the limit of the lock refused, or the rate."""

    name: str  # of `keys.name_of_lock` or `keys.name_of_rate`
    limit: int | Rate
    task: str = ""  # the name of a task with a rate limit of Celery

    @classmethod
    def of(cls, resource: str, limit: int, rate: str) -> QueueKey:
        """Return the queue of a refusal. rate: as text; "" if the lock was refused."""
        return cls(*awaited(resource, limit, rate))


@dataclass(eq=False, slots=True)
class WaitingMessage:
    """One message that waits in a worker's memory. Times are in monotonic seconds."""

    request: Any  # Celery's
    since: float  # of its first deferral, in seconds since 1970; 0 if the message does not say
    queue: QueueKey
    eta: float  # the end of its countdown
    deadline: float  # when it tries at the latest
    waits_for_release: bool  # it may wait for a release past its ETA
    pause: float = FIRST_PAUSE  # after which it looks again, in seconds, if nothing was announced
    is_postponed: bool = False  # its ETA is a later one than Celery has set a timer for
    timer_entry: Any = None  # the room's own, in the worker's timer; else Celery's is there
    came_at: float = -math.inf
    priority: int = 0  # of `priority_order`

    def __lt__(self, other: WaitingMessage) -> bool:
        own_order, other_order = (
            (waiter.priority, waiter.since, id(waiter.request)) for waiter in (self, other)
        )
        return own_order < other_order


@dataclass(eq=False, slots=True)
class MessageQueue:
    """The waiters of one resource and limit, in order of priority, then of first deferral."""

    waiters: list[WaitingMessage] = field(default_factory=list)
    interval: float = 0.0  # seconds that the last head waited to be named; 0: unknown
    # when the last head was dispatched to try, and its first deferral
    head_left_at: float = -math.inf
    head_left_since: float = -math.inf


class MessageQueues:
    """All messages that wait in one worker.

    A resource is remembered for a while without waiters: how often its releases name this worker,
    and that the worker listens. mutex: held by a thread that changes the queues, or that is to see
    several things as they are at one moment; a greenlet that has it may give way to others.
    """

    def __init__(
        self, times: WaitingTimes, mutex: AbstractContextManager[Any] | None = None
    ) -> None:
        self._times = times
        self.mutex = nullcontext() if mutex is None else mutex
        self.forget()

    def forget(self) -> None:
        """Forget all waiters and resources."""
        self._queues: dict[str, dict[QueueKey, MessageQueue]] = {}  # by resource
        self._emptied_at: dict[str, float] = {}  # monotonic seconds, of resources without waiters
        self._by_request: dict[Any, WaitingMessage] = {}
        self.waiting_for_release = 0  # how many waiters may wait past their ETA

    def resources(self) -> set[str]:
        """Return the resources that are waited for; called by any thread."""
        return set(self._queues)

    def of(self, request: Any) -> WaitingMessage | None:
        return self._by_request.get(request)

    def all(self) -> list[WaitingMessage]:
        return list(self._by_request.values())

    def heads(self, resource: str) -> list[WaitingMessage]:
        """Return the head of each queue of a resource."""
        queues = list(self._queues.get(resource, {}).values())
        return [queue.waiters[0] for queue in queues if queue.waiters]

    def on(self, resource: str) -> list[WaitingMessage]:
        """Return all waiters of a resource."""
        queues = list(self._queues.get(resource, {}).values())
        return [waiter for queue in queues for waiter in queue.waiters]

    def add(self, waiter: WaitingMessage) -> WaitingMessage | None:
        """Queue a waiter; return the head that it displaced, if any."""
        self._by_request[waiter.request] = waiter
        self.waiting_for_release += waiter.waits_for_release
        resource = waiter.queue.name
        self._emptied_at.pop(resource, None)
        queue = self._queues.setdefault(resource, {}).setdefault(waiter.queue, MessageQueue())
        bisect.insort(queue.waiters, waiter)
        if queue.waiters[0] is not waiter:
            return None
        if waiter.since == queue.head_left_since:  # the dispatched head is back: it was refused
            queue.head_left_at = queue.head_left_since = -math.inf
        return queue.waiters[1] if len(queue.waiters) > 1 else None

    def remove(
        self, waiter: WaitingMessage, now: float, *, is_named: bool = False
    ) -> WaitingMessage | None:
        """Remove a waiter; return the next head if the waiter was the head.

        is_named: a release named this worker, so the next one will as well.
        """
        del self._by_request[waiter.request]
        self.waiting_for_release -= waiter.waits_for_release
        resource = waiter.queue.name
        queue = self._queues[resource][waiter.queue]
        index = bisect.bisect_left(queue.waiters, waiter)
        del queue.waiters[index]
        if not self.heads(resource):
            self._emptied_at[resource] = now
        if index > 0:
            return None
        interval = now - max(queue.head_left_at, waiter.came_at)
        queue.interval = interval if is_named and math.isfinite(interval) else 0.0
        queue.head_left_at = now
        queue.head_left_since = waiter.since
        return queue.waiters[0] if queue.waiters else None

    def retry_in(self, waiter: WaitingMessage, now: float) -> float | None:
        """Return the seconds after which a waiter is to try without a release; 0: now.

        None: at its ETA, for which Celery has set a timer. A waiter behind the head tries at its
        deadline: the broker would deliver its message anew soon after. If a head before it has just
        been dispatched, the head tries only after `retry_next_after` without its return; later, if
        the releases that name this worker come less often: with many workers each head would look
        in vain otherwise.
        """
        if not waiter.waits_for_release or (waiter.eta > now and not waiter.is_postponed):
            return None
        queue = self._queues[waiter.queue.name][waiter.queue]
        turn_at = math.inf
        if queue.waiters[0] is waiter and waiter.queue.limit != 1:
            turn_at = queue.head_left_at + self._times.ask_next_after
        elif queue.waiters[0] is waiter:
            adaptive_pause = min(2 * queue.interval, self._times.retry_next_at_most)
            turn_at = queue.head_left_at + max(self._times.retry_next_after, adaptive_pause)
        return max(0.0, min(max(turn_at, waiter.eta), waiter.deadline) - now)

    def head(self, key: QueueKey) -> WaitingMessage | None:
        """Return the head of a queue; None if no message waits in it."""
        queue = self._queues.get(key.name, {}).get(key)
        return queue.waiters[0] if queue is not None and queue.waiters else None

    def last_of_longest(self) -> WaitingMessage | None:
        """Return the last waiter of the longest queue that may be evicted, None without one."""
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
    """The last moment at which a quorum may have come back, for messages that arrive later."""

    def __init__(self) -> None:
        self._recorded_at = -math.inf
        self._receivers = set[Hashable]()

    def record(self, at: float, receivers: set[Hashable]) -> None:
        """Remember a moment, in monotonic seconds, and the messages dispatched for it."""
        self._recorded_at = at
        self._receivers = receivers

    def claim(self, receiver: Hashable, refused_at: float) -> bool:
        """Return whether a message missed that moment on its way here, and note that."""
        is_missed = receiver not in self._receivers and self._recorded_at >= refused_at
        if is_missed:
            self._receivers.add(receiver)
        return is_missed


class BehindRun(LockTaken):
    """Another run of this worker is before a message, and has no lock: no quorum votes.

    holder: the label of that run, for which the message waits all the same.
    """


class RefusalHistory:
    """The last refusal of each lock or rate to a run of this worker; for any thread.

    For a while new messages take it for theirs. Times are in monotonic seconds.
    """

    def __init__(self, times: WaitingTimes) -> None:
        self._times = times
        # its time, the end of the time in which it is recent, and the deferral of the run
        self._last_refusals: dict[QueueKey, tuple[float, float, Deferral]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._last_refusals

    def record(self, queue: QueueKey, deferral: Deferral, now: float) -> None:
        """Record the refusal of a run. queue: without a task."""
        seconds = self._times.remember_refusal
        if deferral.rate and deferral.expires_in is not None:
            seconds = min(deferral.expires_in, self._times.longest_pause)
        self._last_refusals[queue] = now, now + seconds, deferral

    def refusal(self, queue: QueueKey, now: float, *, is_awaited: bool) -> LockTaken | None:
        """Return the refusal that a new message of a queue would get; None: it has to try.

        is_awaited: others wait before it, so it would be refused whenever the last one was.
        """
        refused_at, recent_until, deferral = self._last_refusals.get(
            queue._replace(task=""), NO_REFUSAL
        )
        is_recent = now < recent_until
        if not is_recent and not is_awaited:
            return None
        expires_in = deferral.expires_in if is_recent else None  # by now another may hold it
        if expires_in is not None:
            expires_in = max(0.0, refused_at + expires_in - now)
        resource, _ = waiting_for(queue.name)
        if isinstance(queue.limit, Rate):
            return LockTaken(resource, "", expires_in, rate=str(queue.limit))
        return LockTaken(resource, deferral.holder, expires_in, limit=queue.limit)

    def forget_old(self, now: float, queues: MessageQueues) -> None:
        """Forget refusals that are not recent any more, but those that a message waits for."""
        for queue, (_, recent_until, _) in list(
            self._last_refusals.items()
        ):  # another thread may add one
            if recent_until < now and queues.head(queue) is None:
                self._last_refusals.pop(queue, None)
