"""Producers that know whether the broker has a message, and whether a queue took it."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from kombu.exceptions import OperationalError
from kombu.messaging import Producer
from kombu.pools import producers
from kombu.utils.json import dumps

from celery_redlock.tasks.delivery.route import driver_of

logger = logging.getLogger(__name__)


class QueueGoneError(OperationalError):
    """RabbitMQ has no queue of this name any more."""

    def __init__(self, queue: str) -> None:
        super().__init__(queue)
        self.queue = queue

    def __str__(self) -> str:
        return f"queue {self.queue!r} is gone, and this worker cannot declare it"


@contextlib.contextmanager
def without_soft_limit() -> Iterator[None]:
    """Let a soft time limit pass unheard: of a publish that it cuts nobody knows whether it left.

    Source: billiard.pool, which sends a signal to the child and installs this handler there.
    """
    heard = SIG_SOFT_TIMEOUT is not None and threading.current_thread() is threading.main_thread()
    if not heard or signal.getsignal(SIG_SOFT_TIMEOUT) is not soft_timeout_sighandler:
        yield
        return
    signal.signal(SIG_SOFT_TIMEOUT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(SIG_SOFT_TIMEOUT, soft_timeout_sighandler)


@contextlib.contextmanager
def confirming_producer(app: Any, *, anew: bool = False) -> Iterator[Any]:
    """Give a producer whose publish returns once the broker has the message.

    RabbitMQ says so only where it is asked to, and else a message that never left this machine's
    buffers counts as published. Source: kombu.transport.pyamqp, `confirm_publish`.
    anew: over a connection of its own, where nobody knows what is left of those that are kept.
    """
    confirms = driver_of(app) == "amqp"
    if not confirms and not anew:
        with app.producer_or_acquire() as producer:
            yield producer
        return
    options = {"transport_options": {"confirm_publish": True}} if confirms else {}
    connection = app.connection_for_write(**options)
    if anew:
        with connection:
            yield Producer(connection)
        return
    with producers[connection].acquire(block=True) as producer:
        yield producer


@contextlib.contextmanager
def noting_returns(producer: Any) -> Iterator[list[Exception]]:
    """Give a list of the messages that RabbitMQ returns because no queue takes them.

    It returns those that are published with `mandatory`, and confirms them all the same.
    Source: kombu.messaging: a channel that is made meanwhile calls `on_return`, too.
    """
    returned: list[Exception] = []

    def note(error: Exception, *_: Any) -> None:
        returned.append(error)

    producer.on_return = note
    producer.channel.events["basic_return"].add(note)
    try:
        yield returned
    finally:
        producer.on_return = None
        producer.channel.events["basic_return"].discard(note)


@contextlib.contextmanager
def head_of_queues(app: Any, producer: Any) -> Iterator[None]:
    """Have a producer's channel put messages at the head of their queues, if the broker is a Redis.

    Source: kombu.transport.redis: `Channel._put` pushes to the left, consumers pop from the right,
    and what a consumer gives back is pushed to the right. A queue that expires is left to `_put`.
    """
    channel = producer.channel
    if driver_of(app) != "redis" or not hasattr(channel, "_q_for_pri"):
        yield
        return
    put = channel._put

    def put_first(queue: str, message: Any, **how: Any) -> None:
        if queue in (getattr(channel, "_expires", None) or ()):
            put(queue, message, **how)
            return
        priority = channel._get_message_priority(message, reverse=False)
        with channel.conn_or_acquire() as client:
            client.rpush(channel._q_for_pri(queue, priority), dumps(message))

    channel._put = put_first
    try:
        yield
    finally:
        channel.__dict__.pop("_put", None)


def on_own_channel(app: Any, producer: Any, act: Callable[[Any], None]) -> bool:
    """Call a function with a channel that an error may close; return whether there was no error.

    Raises OperationalError if the broker is away.
    """

    def once() -> None:
        with producer.connection.channel() as channel:
            act(channel)

    ensured = producer.connection.ensure(producer, once, **app.conf.task_publish_retry_policy)
    try:
        ensured()
    except producer.connection.channel_errors as error:
        text = "RabbitMQ refuses what a deferral needs, which goes another way: %s"
        logger.warning(text, error, extra={"event": "republish_refused"})
        return False
    return True
