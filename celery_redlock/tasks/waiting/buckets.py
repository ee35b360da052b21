"""Celery's rate limits: which messages wait in a token bucket, and the locks that they need.

The consumer has a token bucket for each task with a `rate_limit`. A message that leaves the waiting
room goes there first, and to the pool as soon as the bucket has a token for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery_redlock.tasks.waiting.queues import QueueKey


class Buckets:
    """The token buckets of one consumer, with the messages that wait in them.

    Of each lock one message waits for its rate, and the others wait for that one: a try that is
    refused would use up a token.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        # if one of them is missing, messages that waited here heed no rate limit
        self._leave_bucket: Any = getattr(consumer, "_limit_move_to_pool", None)
        enter = getattr(consumer, "_limit_task", None)
        self._enter_bucket: Any = enter if self._leave_bucket else None
        self.forget()

    def forget(self) -> None:
        """Forget all messages: the broker is lost, and Celery has emptied its buckets."""
        self._queues_by_request: dict[Any, list[QueueKey]] = {}  # by request
        self._first_by_queue: dict[QueueKey, Any] = {}  # by queue: the first of these requests

    def bucket_of(self, task_name: str) -> Any:
        """Return Celery's token bucket of a task with a rate limit, None without one."""
        consumer = self._consumer
        if consumer.disable_rate_limits or self._enter_bucket is None:
            return None
        return consumer.task_buckets[task_name]

    def note_waiting(self, request: Any, queues: Iterable[QueueKey]) -> None:
        """Record the locks that a message needs as soon as its rate allows it to run."""
        self._queues_by_request[request] = list(queues)
        for queue in self._queues_by_request[request]:
            self._first_by_queue.setdefault(queue, request)

    def enter(self, request: Any, bucket: Any) -> None:
        """Let a message wait in a bucket for its token."""
        self._enter_bucket(request, bucket, 1)

    def awaits_rate(self, queue: QueueKey) -> bool:
        """Return whether a message of a queue waits for its rate: the next one would be refused."""
        return queue in self._first_by_queue

    def waiting(self) -> list[Any]:
        """Return the requests that wait for their rates."""
        return list(self._queues_by_request)

    def on_token(self, request: Any) -> None:
        """Let a message run as its rate allows it."""
        self.note_left(request)
        self._leave_bucket(request)

    def note_left(self, request: Any) -> None:
        """Record that a message does not wait for its rate, or no longer."""
        for queue in self._queues_by_request.pop(request, ()):
            if (
                self._first_by_queue.get(queue) is request
            ):  # a cancelled message may leave before the first one
                self._first_by_queue.pop(queue, None)
