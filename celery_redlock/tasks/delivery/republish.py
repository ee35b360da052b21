"""Publishes a run's message again, whole: it keeps its id and everything else that it carries.

Source: Celery's own `Task.retry` and `send_task`, which make their message of the same parts; what
they leave out (`argsrepr`, `kwargsrepr`, `compression`, the delivery mode and other properties, and
on 5.6 `ignore_result`) is passed on here, and the message does not become its own parent.
Options of a send that Celery does not know travel as properties: all that are not a transport's own
go out again, for they may name a user or a tenant.

RabbitMQ needs more. What dead-lettering wrote into the headers must not go out again: RabbitMQ
would take the message for one that runs in a circle, and drop it. It has to confirm a publish; and
it confirms what it drops, if no queue takes that. `expires` is a header, which the worker heeds,
and not RabbitMQ's own: the broker would drop the message, and nothing would store REVOKED.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from kombu.exceptions import OperationalError
from kombu.messaging import Producer
from kombu.pools import producers
from kombu.serialization import registry

from celery_redlock.compatibility import find
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.delivery.delivery import Delivery, own_headers
from celery_redlock.tasks.delivery.header import HEADER, LockHeader
from celery_redlock.tasks.delivery.route import (
    Route,
    bind_to_delay,
    delay_options,
    driver_of,
    is_kept_by_broker,
    send_options,
)

logger = logging.getLogger(__name__)

_POOL_MODULE = "billiard.pool:"  # without it, whatever handler the signal has counts
_SIGNAL = find(f"{_POOL_MODULE}SIG_SOFT_TIMEOUT", getattr(signal, "SIGUSR1", None))
_HANDLER = find(f"{_POOL_MODULE}soft_timeout_sighandler", None)
_dumps = find("kombu.utils.json:dumps", None)
_PRIORITY_METHOD = "_get_message_priority"

REQUEUE_PAUSE = 1.0  # s: else a broker that only takes acknowledgements would spin the message
# Properties that a transport writes (kombu.transport.virtual, amqp.basic_message), that the new
# message gets in another way, or that would drop or delay it (RabbitMQ, SQS).
_TRANSPORT_PROPERTIES = frozenset({
    "application_headers", "body_encoding", "content_encoding", "content_type", "delivery_info",
    "delivery_mode", "delivery_tag", "headers", "priority", "reply_to", "expiration",
    "MessageDeduplicationId", "DelaySeconds",
})  # fmt: skip
# A property with such a name would become an option of the publisher. No send makes one.
_PUBLISHER_OPTIONS = frozenset({
    *inspect.signature(Producer.publish).parameters, "event_dispatcher", "exchange_type", "message",
    "name", "producer", "queue",
})  # fmt: skip
MOVES = "redlock_moves"  # property of a message: how many workers in a row died with it
_OWN_PREFIX = "redlock_"  # what a worker notes of a delivery, for its own processes


def own_properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that the sender gave to a message: Celery passes on unknown options."""
    excluded = _TRANSPORT_PROPERTIES | _PUBLISHER_OPTIONS
    return {
        name: value
        for name, value in properties.items()
        if value is not None and name not in excluded and not name.startswith(_OWN_PREFIX)
    }


class Requeue(Reject, Ignore):
    """Hand the message back to the broker.

    It is a Reject for Celery's tracer. It is an Ignore, too, so that it passes through autoretry,
    which takes a Reject for an error to be retried.
    """


class QueueGoneError(OperationalError):
    """RabbitMQ has no queue of this name any more, and this process cannot declare it."""


class NotRepublishedError(Exception):
    """The broker does not take a message, and has no copy of it: only this process has it.

    header: what the message would have carried. reason: for people. is_gone: its queue is gone.
    """

    def __init__(self, header: LockHeader, cause: Exception) -> None:
        self.header = header
        self.reason = _reason(cause)
        self.is_gone = isinstance(cause, QueueGoneError)
        super().__init__(self.reason)


def republish(
    delivery: Delivery, header: LockHeader, countdown: float, *, at_head: bool = False
) -> None:
    """Publish the message again; return once the broker has it.

    header: what the new message carries. countdown: seconds until it is to run. at_head: a worker
    is to receive it next, to let it wait in its memory; of brokers, Redis can do that.
    If that fails and the task acknowledges late, nothing is lost: raises Requeue, which hands the
    unacknowledged message back. If the task acknowledges early, or its queue is gone and took the
    unacknowledged message along, only this process still has it: raises NotRepublishedError.
    """
    send = functools.partial(publish, delivery, header, countdown, at_head=at_head)
    if not delivery.task.acks_late:
        _republish_early(delivery, header, send)
        return
    try:
        send()
    except QueueGoneError as error:
        raise NotRepublishedError(header, error) from error
    except Exception as error:
        with contextlib.suppress(SoftTimeLimitExceeded):  # a limit on the body, which has not begun
            text = "cannot republish %s: %s; the message stays with the broker"
            extra = delivery.log_extra("republish_failed")
            logger.warning(text, delivery, _reason(error), extra=extra)
            SystemClock().sleep(REQUEUE_PAUSE)
        raise Requeue(error, requeue=True) from error


def _reason(error: Exception) -> str:
    """Return an error's text; kombu's has none if RabbitMQ refuses, as for a full queue."""
    return str(error) or repr(error.__cause__ or error)


def _republish_early(delivery: Delivery, header: LockHeader, send: Callable[..., object]) -> None:
    """Publish once; again on a fresh connection after an error that is not `OperationalError`.

    kombu's transports raise anything if a connection breaks in the middle of a publish.
    """
    is_sent = False
    is_retry = False
    while not is_sent:
        with contextlib.suppress(SoftTimeLimitExceeded):  # a limit on the body, which has not begun
            try:
                with without_soft_limit():
                    send(on_fresh_connection=is_retry)
                    is_sent = True
            except OperationalError as error:  # what kombu makes of all errors of connections
                raise NotRepublishedError(header, error) from error
            except Exception as error:
                if is_retry:
                    raise
                is_retry = True
                text = "cannot republish %s: %r; trying once more on a fresh connection"
                extra = delivery.log_extra("republish_failed")
                logger.warning(text, delivery, error, extra=extra)


def publish(
    delivery: Delivery,
    header: LockHeader,
    countdown: float,
    *,
    at_head: bool = False,
    on_fresh_connection: bool = False,
) -> None:
    """Publish past a user's `apply_async`, the task's routes and `task_always_eager`.

    Those are for sends. at_head: as of `republish`. on_fresh_connection: not on one of
    the pool.
    Source: celery.app.base: Celery.send_task makes and sends a message by the same two calls.
    """
    task = delivery.task
    request = delivery.request
    route = delivery.route
    app = task.app
    args, kwargs = delivery.state.arguments or (request.args, request.kwargs)
    fields = _fields_of_message(delivery)
    message = app.amqp.create_task_message(
        request.id, task.name, args, kwargs, countdown=countdown, **fields
    )
    properties = request.get("properties") or {}
    lock_header = replace(header, origin=route).to_message()
    own_serializer = registry.type_to_name.get(properties.get("content_type"))
    user_properties = own_properties(properties)
    if header.waits and MOVES in properties:  # the run before may be what ended its worker
        user_properties[MOVES] = properties[MOVES]
    with confirming_producer(app, on_fresh_connection=on_fresh_connection) as producer:
        # RabbitMQ refuses the name of a user that is not its connection's
        user_id = driver_of(app) == "amqp" and (producer.connection.userid or "guest")
        if user_id and user_properties.get("user_id") != user_id:
            user_properties.pop("user_id", None)
        send = functools.partial(
            app.amqp.send_task_message,
            producer,
            task.name,
            message,
            headers={**own_headers(request), HEADER: lock_header},
            compression=request.get("compression"),
            delivery_mode=properties.get("delivery_mode"),
            priority=(request.delivery_info or {}).get("priority"),
            retry=True,  # else kombu raises errors of connections as the transport's own
            serializer=own_serializer or task.serializer,
            **user_properties,
        )
        if not _send_by_delay(app, route, producer, send, countdown):
            with head_of_queues(app, producer) if at_head else contextlib.nullcontext():
                _send_to_queue(app, route, producer, send)


def _send_by_delay(
    app: Any, route: Route, producer: Any, send: Callable[..., object], countdown: float
) -> bool:
    """Let RabbitMQ keep a message for its countdown; return whether RabbitMQ does so."""
    if not is_kept_by_broker(app, route):
        return False
    entities = producer.connection.declared_entities  # kombu empties it at each connect
    if (mark := ("redlock: no delay", route)) in entities:
        return False
    if on_own_channel(app, producer, functools.partial(bind_to_delay, app, route)):
        with contextlib.suppress(producer.connection.channel_errors):  # it may not write there
            send(**delay_options(route, countdown))
            return True
    entities.add(mark)
    return False


def _send_to_queue(app: Any, route: Route, producer: Any, send: Callable[..., object]) -> None:
    """Send a message to its queue, or raise QueueGoneError.

    A queue may go with its last consumer, expire, or be deleted by an operator; then it is declared
    again, for kombu does that only once over a connection.
    """
    options = send_options(app, route)
    if route.home_queue is None or driver_of(app) != "amqp":
        send(**options)
        return
    queue = app.amqp.queues.get(route.home_queue)
    for is_last in (False, True):
        with noting_returns(producer) as returned:
            send(**options, mandatory=True)
        if not returned:
            return
        if is_last or queue is None or queue.exclusive:
            raise QueueGoneError(
                f"queue {route.home_queue!r} is gone, and this worker cannot declare it"
            )
        on_own_channel(app, producer, lambda channel: queue(channel).declare())


def _fields_of_message(delivery: Delivery) -> dict[str, Any]:
    """Return the fields that Celery writes into a message, with the values of this message."""
    request = delivery.request
    time_limit, soft_time_limit = request.timelimit or (None, None)
    stamp_values = request.stamps or {}
    stamp_names = [name for name in request.stamped_headers or () if name in stamp_values]
    return {
        **{name: stamp_values[name] for name in stamp_names},
        "stamped_headers": stamp_names or request.stamped_headers,
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "group_id": request.group,
        "group_index": request.group_index,
        "chord": request.chord,
        "chain": request.chain,
        "callbacks": request.callbacks,
        "errbacks": request.errbacks,
        "expires": _expires_of(delivery),
        "retries": request.retries,
        "time_limit": time_limit,
        "soft_time_limit": soft_time_limit,
        "reply_to": request.reply_to,
        "origin": request.origin,
        "shadow": request.shadow,
        "replaced_task_nesting": request.replaced_task_nesting,
        "ignore_result": delivery.reporter.ignores_result,
        "argsrepr": request.get("argsrepr"),
        "kwargsrepr": request.get("kwargsrepr"),
        "create_sent_event": delivery.task.app.conf.task_send_sent_event,
    }


def _expires_of(delivery: Delivery) -> Any:
    """Return the `expires` of a message, for a new one.

    Source: celery.app.amqp: before 5.7 `as_task_v1` takes no text, as a message has it.
    """
    expires = delivery.request.expires
    is_text = isinstance(expires, str) and delivery.task.app.conf.task_protocol == 1
    return datetime.fromisoformat(expires) if is_text else expires


@contextlib.contextmanager
def without_soft_limit() -> Iterator[None]:
    """Ignore a soft time limit: if it cut a publish, the message might be sent or not.

    Source: billiard.pool, which sends a signal to the child and installs this handler there.
    """
    is_signalled = _SIGNAL is not None and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(_SIGNAL) if is_signalled else None
    if not callable(handler) or handler is not (_HANDLER or handler):
        yield
        return
    signal.signal(_SIGNAL, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(_SIGNAL, handler)


@contextlib.contextmanager
def confirming_producer(app: Any, *, on_fresh_connection: bool = False) -> Iterator[Any]:
    """Give a producer whose publish returns once the broker has the message.

    RabbitMQ says so only where it is asked to: else a message that never left this machine's
    buffers counts as published. Source: kombu.transport.pyamqp, `confirm_publish`.
    on_fresh_connection: on a new connection, because those of the pool may be broken.
    """
    confirms = driver_of(app) == "amqp"
    options = {"transport_options": {"confirm_publish": True}} if confirms else {}
    if on_fresh_connection:
        with app.connection_for_write(**options) as connection:
            yield Producer(connection)
    elif confirms:
        with producers[app.connection_for_write(**options)].acquire(block=True) as producer:
            yield producer
    else:
        with app.producer_or_acquire() as producer:
            yield producer


@contextlib.contextmanager
def noting_returns(producer: Any) -> Iterator[list[Exception]]:
    """Give a list of the `mandatory` messages that RabbitMQ returns as no queue takes them.

    It confirms them all the same. Source: kombu.messaging: a new channel calls `on_return`, too.
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
    Without one of these names the message goes to the end of its queue.
    """
    channel = producer.channel
    methods: list[Any] = [
        getattr(channel, name, None) for name in ("_put", "_q_for_pri", _PRIORITY_METHOD)
    ]
    if driver_of(app) != "redis" or None in (_dumps, *methods):
        yield
        return
    put, key_of, priority_of = methods

    def put_first(queue: str, message: Any, **options: Any) -> None:
        if queue in (getattr(channel, "_expires", None) or ()):
            put(queue, message, **options)
            return
        priority = priority_of(message, reverse=False)
        with channel.conn_or_acquire() as client:
            client.rpush(key_of(queue, priority), _dumps(message))

    channel._put = put_first
    try:
        yield
    finally:
        channel.__dict__.pop("_put", None)


def on_own_channel(app: Any, producer: Any, action: Callable[[Any], None]) -> bool:
    """Call a function with a channel that an error may close; return whether there was no error.

    Raises OperationalError if the broker is away.
    """

    def call_once() -> None:
        with producer.connection.channel() as channel:
            action(channel)

    call_with_retries = producer.connection.ensure(
        producer, call_once, **app.conf.task_publish_retry_policy
    )
    try:
        call_with_retries()
    except producer.connection.channel_errors as error:
        text = "RabbitMQ refuses what a deferral needs, which goes another way: %s"
        logger.warning(text, error, extra={"event": "republish_refused"})
        return False
    return True
