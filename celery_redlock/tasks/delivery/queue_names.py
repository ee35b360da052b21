"""The consumer step that records through which queue a delivery came."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from celery import bootsteps

from celery_redlock.tasks.delivery.route import QUEUE


class RecordQueueNames(bootsteps.StartStopStep):
    """Has each delivery to a worker say through which queue it came.

    Source: kombu.entity: Queue.consume calls its channel's `basic_consume`, of whatever transport,
    with a callback for this queue alone; what that gets has a `delivery_info`.
    """

    name = "celery_redlock queue names"
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """Take part in what the consumer is about to consume, also after a lost connection."""
        channel = parent.task_consumer.channel
        consume = channel.basic_consume
        if not hasattr(consume, QUEUE):
            channel.basic_consume = _naming(consume)


def _naming(consume: Callable[..., Any]) -> Callable[..., Any]:
    def basic_consume(queue: str, *args: Any, callback: Any = None, **options: Any) -> Any:
        def deliver(message: Any) -> Any:
            where = getattr(message, "delivery_info", None)
            if isinstance(where, dict):
                where[QUEUE] = queue
            return callback(message)

        return consume(queue, *args, callback=callback and deliver, **options)

    functools.update_wrapper(basic_consume, consume)
    setattr(basic_consume, QUEUE, True)
    return basic_consume
