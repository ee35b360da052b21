"""A producer whose publish returns once the broker has the message."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from kombu.messaging import Producer
from kombu.pools import producers

from celery_redlock.tasks.delivery.route import driver_of


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
