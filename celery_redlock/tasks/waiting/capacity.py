"""How many messages may wait in a worker's memory, and what that means for its prefetch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

CAPACITY = 1000  # messages that wait in one worker's memory, some 10 KB each; the rest in its queue


def capacity(conf: Mapping[str, Any], prefetch: int) -> int:
    """Return how many messages may wait in a worker at once.

    prefetch: how many messages the worker takes otherwise. 0: all that come; a message that left
    would then make room for none, and would come straight back. Else the capacity stays below
    `worker_eta_task_limit`: at that limit Celery takes no message at all, and past it Celery loses
    count of its prefetch.
    Source: kombu.common.QoS, which adds up to a limit and takes away without one.
    """
    if prefetch == 0:
        return sys.maxsize
    limit = conf.get("worker_eta_task_limit")
    return CAPACITY if limit is None else max(1, min(CAPACITY, limit - prefetch))


class Overflow:
    """How many more messages wait than the capacity allows.

    Celery raises its prefetch by one for each message with an ETA, without a bound. For those above
    the capacity the raise is taken back, so that the worker takes no further message for them.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self.count = capacity, 0

    def update(self, waiting: int) -> int:
        """Note how many messages wait; return by how much the prefetch is to change."""
        before, self.count = self.count, max(0, waiting - self._capacity)
        return before - self.count

    @property
    def evicts(self) -> bool:
        """Whether a waiting message is to leave, so that another one of its queue comes in.

        Messages that have nothing to do with a crowd get past it that way.
        """
        return self.count > 0
