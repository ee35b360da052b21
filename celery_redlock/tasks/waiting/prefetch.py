"""How many messages may wait in a worker's memory, and what that means for its prefetch count."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from celery_redlock.tasks.delivery.delivery import SEEN, seen_of
from celery_redlock.tasks.waiting.loop import EventLoop
from celery_redlock.tasks.waiting.queues import MessageQueues, WaitingMessage

CAPACITY = 1000  # messages that wait in one worker's memory, some 10 KB each; the rest in its queue


class Prefetch:
    """The prefetch count of one consumer, which follows how many messages wait here.

    Celery adds to it for each message that waits, without a bound. Above the capacity that is taken
    back, and messages leave one by one. capacity: how many may wait. held: how many wait whose
    format is unknown. on_evict: gives such a message to Celery; the owner sets it before the first
    message comes.
    """

    def __init__(
        self,
        consumer: Any,
        loop: EventLoop,
        queues: MessageQueues,
        eviction_interval: float,
    ) -> None:
        self._consumer = consumer
        self._loop = loop
        self._queues = queues
        self._eviction_interval = eviction_interval
        self.on_evict: Callable[[WaitingMessage], object] = lambda waiter: None
        self._eviction: Any = None  # the timer's entry, while one is due
        self.capacity = CAPACITY
        self.forget()

    def forget(self) -> None:
        """Forget the messages above the capacity: none waits. Called with the queues' mutex."""
        self._loop.cancel(self._eviction)
        self._eviction = None
        self._excess = 0  # how many messages wait above the capacity
        self.held = 0

    def update(self) -> None:
        """Take back what Celery adds for the messages above the capacity, and let those leave.

        Called with the queues' mutex.
        """
        old_excess = self._excess
        qos = self._consumer.qos
        waiting = self._queues.waiting_for_release + self.held
        self._excess = max(0, waiting - self.capacity)
        for _ in range(self._excess - old_excess):
            qos.decrement_eventually()
        for _ in range(old_excess - self._excess):
            qos.increment_eventually()
        if self._excess and self._eviction is None:
            self._eviction = self._loop.call_after(self._eviction_interval, self._evict_last)

    def _evict_last(self) -> None:
        """Dispatch the message that is needed last: if refused, it goes to its queue's end.

        So messages that have nothing to do with a crowd get past it.
        """
        with self._queues.mutex:
            self._eviction = None
            evicted = self._queues.last_of_longest() if self._excess else None
        if evicted is not None:  # outside: a solo pool runs its body here
            properties = evicted.request.request_dict["properties"]
            properties[SEEN] = {**seen_of(properties), "has_room": False}
            self.on_evict(evicted)


def capacity(conf: Mapping[str, Any], prefetch: int) -> int:
    """Return how many messages may wait in a worker at once.

    prefetch: how many messages the worker takes otherwise. 0: all that come; a message that left
    would come straight back. Else the capacity stays below `worker_eta_task_limit`: at that limit
    Celery takes no message, and past it Celery loses count of its prefetch.
    Source: kombu.common.QoS, which adds up to a limit and takes away without one.
    """
    if prefetch == 0:
        return sys.maxsize
    limit = conf.get("worker_eta_task_limit")
    return CAPACITY if limit is None else max(1, min(CAPACITY, limit - prefetch))
