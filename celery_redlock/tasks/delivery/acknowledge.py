"""A gevent worker's acknowledgements, no more at once than kombu has connections for them.

From Celery 5.7 on, each greenlet acknowledges by itself as its run ends. kombu's Redis channel has
a pool of 10 connections, in which nobody waits: redis-py refuses the eleventh, and kombu only logs
that. The message stays with the broker, and its body runs again: after the visibility timeout,
when its completion marker may have expired. The hand-off has many runs end together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

from celery import bootsteps

# connections that stay free: the consumer needs them for new messages, and for a command that lets
# it consume from another queue
SPARE_CONNECTIONS = 2


class AcknowledgeInTurn(bootsteps.Step):
    """Has greenlets wait until they can acknowledge or reject; of plain tasks, too.

    Those of plain tasks take connections of the same pool.
    Source: celery.worker.consumer.consumer: Consumer.create_task_handler asks for `call_soon_ack`
    after the consumer's steps are made. Before 5.7 the consumer's own greenlet does it, one by one.
    """

    name = "celery_redlock acknowledgements"

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        acknowledge = getattr(parent, "call_soon_ack", None)
        if acknowledge is not None and getattr(parent.pool, "is_green", False):
            parent.call_soon_ack = in_turn(acknowledge, import_module("gevent.lock").Semaphore)


def in_turn(acknowledge: Callable[..., Any], new_semaphore: Callable[[int], Any]) -> Any:
    """Return a function that calls `acknowledge` if the message's channel has a free connection.

    Otherwise it waits for one. It gets a message's `ack_log_error` or `reject_log_error`. Each
    channel has a pool and a semaphore of its own, so a lost connection delays no other channel.
    """
    semaphores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by channel

    def wait_and_acknowledge(respond: Callable[..., Any], *args: Any, **options: Any) -> Any:
        channel = getattr(getattr(respond, "__self__", None), "channel", None)
        # of kombu's Redis transports alone. Source: kombu.transport.redis: Channel
        max_connections = getattr(channel, "max_connections", None)
        if not isinstance(max_connections, int):
            return acknowledge(respond, *args, **options)
        semaphore = semaphores.get(channel)
        if semaphore is None:
            semaphore = new_semaphore(max(1, max_connections - SPARE_CONNECTIONS))
            semaphores[channel] = semaphore
        with semaphore:
            return acknowledge(respond, *args, **options)

    return wait_and_acknowledge
