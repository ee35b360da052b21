"""The same message put back, whole: it keeps its id and everything else that it carries.

Source: Celery's own `Task.retry` and `send_task`, which make their message of the same parts; what
they leave out (`argsrepr`, `kwargsrepr`, `compression`, the delivery mode and other properties, and
on 5.5 and 5.6 `ignore_result`) is passed on here, and the message does not become its own parent.

RabbitMQ needs two things more. What dead-lettering wrote into the headers must not go out again,
or RabbitMQ takes the message for one that runs in a circle and drops it. And a publish is only
known to have arrived where the broker confirms it.

What `expires` says goes along as a header, which the worker heeds, and not as RabbitMQ's own
expiration: the broker would drop the message in silence, and nobody would write REVOKED.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.signals import task_prerun, task_received
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import OperationalError
from kombu.messaging import Producer
from kombu.pools import producers
from kombu.serialization import registry

from celery_redlock.errors import RedlockError
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.contention import Past
from celery_redlock.tasks.routes import CAME_BACK, QUEUE, Route, driver_of, send_options
from celery_redlock.tasks.states import fields, ignores_result, show_lost

logger = logging.getLogger(__name__)

HEADER = "redlock"
ARGUMENTS = "_redlock_arguments"  # the name on the request under which they stand as they came
NESTED = "redlock_nested"  # the property of a delivery that has a header called "headers"
RECEIVED = "redlock_received"  # the property of a delivery, never of a message, that says when
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # s: between tries to put a message back, broker away
CLOCKS_DIFFER = 1.0  # s: at the most, between the calendars of two workers
BEFORE_REQUEUE = 1.0  # s: else a broker that takes acknowledgements only would spin the message

_OF_A_COPY = re.compile(r"(.*:[0-9]+:[0-9]+)@[^@\s]+", re.DOTALL)
_ON_REQUEST = "_redlock_"  # what names of ours on a request begin with
# of a send that its message carries; the last one is SQS' own
_PROPERTIES = ("app_id", "cluster_id", "correlation_id", "message_id", "timestamp", "type",
               "user_id", "MessageGroupId")  # fmt: skip
_DEATHS = ("x-death", "x-first-death-", "x-last-death-")  # headers; Source: RabbitMQ, "DLX"


class Requeue(Reject, Ignore):
    """Hand the message back to the broker.

    A Reject for Celery's tracer; being an Ignore too, it passes through autoretry, which would
    take a Reject for an error to be retried.
    """


@dataclass(frozen=True)
class LockHeader:
    """What the message header `redlock` carries.

    options: those of the call. deferrals: so far. since: of the first try, ISO 8601 in UTC.
    delay: s, the last one. retries: the message's own count when it was put back.
    id: the task that this belongs to. redelivered: the broker has delivered it again. twin: how
    often it has waited since for its own first delivery. exchange, routing_key: those that the
    message was sent to. queue: the one that this copy came through and goes back to. waits_for: the
    resources whose lock it was refused; refused_by: the one of them that was taken; refused_at: s
    since 1970; limit: by which it was asked. unique: of a deduplicated send, what ends its window.
    patient: it has no budget, and nothing is to be asked at each try, so that it may wait for a
    release for longer than its countdown. revoked: a worker was told so of this delivery.
    reason: why no quorum voted; "" where the lock was taken.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    deferrals: int = 0
    since: str | None = None
    delay: float | None = None
    retries: int = 0
    id: str | None = None
    redelivered: bool = False
    twin: int = 0
    exchange: str | None = None
    routing_key: str = ""
    queue: str | None = None
    waits_for: Sequence[str] = ()
    refused_by: str | None = None
    refused_at: float = 0.0
    limit: int = 1
    unique: Mapping[str, Any] | None = None
    patient: bool = False
    revoked: bool = False
    reason: str = ""

    @classmethod
    def of(cls, request: Any) -> LockHeader:
        """Read it from a run's request; what a stranger wrote there counts as nothing."""
        carried = request.get(HEADER) or (request.headers or {}).get(HEADER)
        if not isinstance(carried, Mapping):
            return _BLANK
        known: dict[str, Any] = {
            name: carried[name]
            for name, kind in _KINDS.items()
            if isinstance(carried.get(name), kind)
        }
        known["waits_for"] = tuple(map(str, known.get("waits_for", ())))  # JSON makes it a list
        if not _is_moment(known.get("since")):
            known.pop("since", None)
        slip = cls(**known)
        if slip.id not in (None, request.id):
            return _BLANK  # of a parent, whose headers were passed on
        put_back_before = slip.since is not None or slip.twin > 0
        if put_back_before and slip.retries != request.retries:
            # a real retry takes the lock anew: what it waited before is not its own
            slip = cls(slip.options, id=slip.id, unique=slip.unique)
        return slip

    def past(self, now: datetime) -> Past:
        """Return what the message has been through by now."""
        if self.since is None:
            return Past()
        waited = (now - datetime.fromisoformat(self.since)).total_seconds()
        return Past(self.deferrals, max(0.0, waited), self.delay)

    def waited_since_refused(self, now: datetime) -> float:
        """Return the s since it was refused, by the calendars of two workers."""
        return max(0.0, now.timestamp() - self.refused_at)

    def next(
        self, now: datetime, delay: float, retries: int, task_id: str | None = None
    ) -> LockHeader:
        """Return the slip for one more deferral."""
        since = self.since or now.isoformat()
        count = self.deferrals + 1
        return replace(
            self,
            deferrals=count,
            since=since,
            delay=delay,
            retries=retries,
            id=task_id,
        )

    def next_redelivery(self, retries: int, task_id: str) -> LockHeader:
        """Return the slip of a message whose first delivery runs: its own wait begins anew."""
        return LockHeader(
            self.options,
            retries=retries,
            id=task_id,
            redelivered=self.redelivered,
            twin=self.twin + 1,
            exchange=self.exchange,
            routing_key=self.routing_key,
            queue=self.queue,
            unique=self.unique,
            revoked=self.revoked,
        )

    def received(self, delivery: Mapping[str, Any] | None) -> LockHeader:
        """Return the slip with what the broker says of this delivery."""
        if self.redelivered or not (delivery or {}).get("redelivered"):
            return self
        return replace(self, redelivered=True)

    def asks_since(self) -> float | None:
        """Return the s since 1970 after which a done mark is one of this message's own runs.

        -inf: each is. None: nobody else can have run it, and who uses a task id again may do so.
        """
        if self.is_redelivered:
            return -math.inf
        if self.since is None:
            return None
        return datetime.fromisoformat(self.since).timestamp() - CLOCKS_DIFFER

    @property
    def is_redelivered(self) -> bool:
        """Whether this is a second delivery of its message, as far as anybody has said."""
        return self.redelivered or self.twin > 0

    @property
    def may_have_run_elsewhere(self) -> bool:
        """Whether another delivery of this message may be running, or have run."""
        return self.asks_since() is not None

    def to_message(self) -> dict[str, Any]:
        """Return it as a mapping that any serializer takes."""
        return {**vars(self), "options": dict(self.options)}


_KINDS: Mapping[str, Any] = {  # what its fields are; what is none counts as nothing
    "options": Mapping, "deferrals": int, "since": str, "delay": (int, float), "retries": int,
    "id": str, "redelivered": bool, "twin": int, "exchange": str, "routing_key": str, "queue": str,
    "waits_for": (list, tuple),
    "refused_by": str, "refused_at": (int, float), "limit": int, "unique": Mapping,
    "patient": bool, "revoked": bool, "reason": str,
}  # fmt: skip
_BLANK = LockHeader()


def _is_moment(text: object) -> bool:
    """Tell whether a text is a moment in ISO 8601, with its zone."""
    try:
        return isinstance(text, str) and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def name_of_run(task: Any, request: Any) -> str:
    """Return the name of a run: a retry is another one, and so is what a task is replaced by.

    And so is each copy of a message that an exchange may have given to several queues.
    """
    nesting = request.replaced_task_nesting or 0
    name = f"{request.id}:{task.name}:{request.retries}:{nesting}"
    if not (request.delivery_info or {}).get("exchange"):
        return name  # of a message to one queue
    queue = (request.get("properties") or {}).get(QUEUE)
    return name if queue is None else f"{name}@{quote(queue, safe='')}"


def name_of_all_copies(run: str) -> str:
    """Return the name of a run without its queue, as a sender knows it."""
    found = _OF_A_COPY.fullmatch(run)
    return run if found is None else found[1]


def expires_in(task: Any, request: Any) -> float:
    """Return the s until a message's `expires`, below 0 after it; inf where it has none.

    Source: celery.worker.request.Request.
    """
    if not request.expires:
        return math.inf
    at: datetime = maybe_make_aware(maybe_iso8601(request.expires), task.app.conf.timezone)
    return (at - utc_now()).total_seconds()


def utc_now() -> datetime:
    """Return the wall clock's time in UTC."""
    return datetime.now(timezone.utc)


def republish(task: Any, request: Any, slip: LockHeader, countdown: float) -> None:
    """Publish the message again, to run after so many s; returns once the broker has it.

    With late acknowledgement nothing is lost where that fails, for the message was never let go:
    Requeue hands it back. With early acknowledgement nobody but this slot still knows of it.
    """
    if task.acks_late:
        _put_back_or_keep(task, request, slip, countdown)
    else:
        _put_back_at_last(task, request, slip, countdown)


def _put_back_or_keep(task: Any, request: Any, slip: LockHeader, countdown: float) -> None:
    try:
        _publish(task, request, slip, countdown)
    except Exception as error:
        with contextlib.suppress(SoftTimeLimitExceeded):  # a limit on the body, which has not begun
            text = "cannot put back %s: %s; it stays with the broker"
            told = fields("republish_failed", task, request)
            logger.warning(text, request.id, error, extra=told)
            SystemClock().sleep(BEFORE_REQUEUE)
        raise Requeue(error, requeue=True) from error


def _put_back_at_last(task: Any, request: Any, slip: LockHeader, countdown: float) -> None:
    """Try until the broker is back; what is not a matter of the connection is raised.

    From a connection that broke in the middle of something kombu's transports raise anything: so,
    whatever it is, it is tried once more over a new one. A soft time limit is one on the body,
    which has not begun: only the hard one ends this, or the worker, and that as FAILURE, so that
    whoever waits learns of it.
    """
    clock, pause, is_sent, anew = SystemClock(), FIRST_PAUSE, False, False
    away: Exception | None = None
    try:
        while not is_sent:
            with contextlib.suppress(SoftTimeLimitExceeded):
                try:
                    with without_soft_limit():
                        _publish(task, request, slip, countdown, anew=anew)
                        is_sent = True
                except OperationalError as error:  # what kombu makes of all errors of connections
                    away = error
                    told = fields("republish_failed", task, request)
                    logger.warning(
                        "cannot put back %s: %s; again soon", request.id, error, extra=told
                    )
                    clock.sleep(pause)
                    pause = min(LONGEST_PAUSE, 2 * pause)
                except Exception as error:
                    if anew:
                        raise
                    anew = True
                    text = "cannot put back %s: %r; once more, over a new connection"
                    told = fields("republish_failed", task, request)
                    logger.warning(text, request.id, error, extra=told)
    except Exception:
        raise
    except BaseException as end:  # the worker stops, or this greenlet is killed
        if away is not None and not is_sent:
            lost = RedlockError(f"put back nowhere: {type(end).__name__}, and {away}")
            show_lost(task, request, lost)
        raise


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


def route_of(request: Any, slip: LockHeader) -> Route:
    """Return where a run's message came from."""
    queue = (request.get("properties") or {}).get(QUEUE)
    return Route.of(request.delivery_info, slip.exchange, queue)


def is_for_another_queue(request: Any, slip: LockHeader) -> bool:
    """Tell whether RabbitMQ brought a copy of a deferral to another queue than it was meant for.

    It goes by the topic, for whatever is bound to it; each queue that has a run of this message
    puts its own copy back.
    """
    if (request.delivery_info or {}).get("exchange") != CAME_BACK or slip.queue is None:
        return False
    return bool((request.get("properties") or {}).get(QUEUE, slip.queue) != slip.queue)


def _publish(
    task: Any, request: Any, slip: LockHeader, countdown: float, *, anew: bool = False
) -> None:
    """Publish it past a user's `apply_async`, the task's routes and `task_always_eager`.

    Those are for sends. Receivers of `before_task_publish` hear of it, as of a retry.
    Source: celery.app.base: Celery.send_task makes and sends a message by the same two calls.
    """
    app, address = task.app, route_of(request, slip)
    slip = replace(
        slip, exchange=address.exchange, routing_key=address.routing_key, queue=address.queue
    )
    args, kwargs = request.__dict__.get(ARGUMENTS) or (request.args, request.kwargs)
    fields = _fields_of_message(task, request)
    message = app.amqp.create_task_message(
        request.id, task.name, args, kwargs, countdown=countdown, **fields
    )
    properties = request.get("properties") or {}
    with confirming_producer(app, anew=anew) as producer:
        app.amqp.send_task_message(
            producer,
            task.name,
            message,
            headers={**own_headers(request), HEADER: slip.to_message()},
            compression=request.get("compression"),
            delivery_mode=properties.get("delivery_mode"),
            priority=(request.delivery_info or {}).get("priority"),
            retry=True,  # else kombu raises errors of connections as the transport's own
            **{"serializer": task.serializer, **own_serializer(properties)},
            **own_properties(properties, app, producer),
            **send_options(app, address, countdown),
        )


def _fields_of_message(task: Any, request: Any) -> dict[str, Any]:
    """Return what Celery writes into a message, beside its arguments, as it was in this one."""
    hard, soft = request.timelimit or (None, None)
    stamps = request.stamps or {}
    stamped = [name for name in request.stamped_headers or () if name in stamps]
    return {
        **{name: stamps[name] for name in stamped},
        "stamped_headers": stamped or request.stamped_headers,
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "group_id": request.group,
        "group_index": request.group_index,
        "chord": request.chord,
        "chain": request.chain,
        "callbacks": request.callbacks,
        "errbacks": request.errbacks,
        "expires": request.expires,
        "retries": request.retries,
        "time_limit": hard,
        "soft_time_limit": soft,
        "reply_to": request.reply_to,
        "origin": request.origin,
        "shadow": request.shadow,
        "replaced_task_nesting": request.replaced_task_nesting,
        "ignore_result": ignores_result(task, request),
        "argsrepr": request.get("argsrepr"),
        "kwargsrepr": request.get("kwargsrepr"),
        "create_sent_event": task.app.conf.task_send_sent_event,
    }


def own_headers(request: Any) -> dict[str, Any]:
    """Return the headers of a user's own that a message came with.

    Source: celery.app.task.Context takes a header called "headers" for all of them.
    """
    headers = request.headers or {}
    if (request.get("properties") or {}).get(NESTED):
        rest = {name: value for name, value in request.__dict__.items() if name != "headers"}
        headers = {**(Context(rest).headers or {}), "headers": headers}
    return {
        name: value
        for name, value in headers.items()
        if not name.startswith((*_DEATHS, _ON_REQUEST))
    }


def own_properties(properties: Mapping[str, Any], app: Any, producer: Any) -> dict[str, Any]:
    """Return what a send gave to its publisher and the message carries.

    RabbitMQ refuses the name of a user that is not its connection's: that one is left out.
    """
    own = {name: properties[name] for name in _PROPERTIES if properties.get(name) is not None}
    if driver_of(app) == "amqp" and own.get("user_id") != (producer.connection.userid or "guest"):
        own.pop("user_id", None)
    return own


def own_serializer(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option of a send that makes a message's body as it was made before."""
    name = registry.type_to_name.get(properties.get("content_type"))
    return {} if name is None else {"serializer": name}


@task_received.connect(weak=False)
def note_on_message(request: Any = None, **_: Any) -> None:
    """Hand on to the run what only the main process knows: when it came, and its content type.

    Most brokers' properties leave that out.
    Source: celery.worker.strategy sends this in the worker's main process, before the pool has it.
    """
    came = {RECEIVED: max(utc_now(), request.eta or utc_now()).timestamp()}
    if request.content_type is not None:
        came["content_type"] = request.content_type
    properties = request.request_dict["properties"]
    request.request_dict["properties"] = {**properties, **came}


@task_prerun.connect(weak=False)
def _keep_arguments(task: Any = None, args: Any = None, kwargs: Any = None, **_: Any) -> None:
    """Keep a run's arguments as they came, for a deferral.

    Source: celery.app.trace hands the very same mapping to receivers, to `before_start` and to the
    body, and the usual idiom is to take from it what is not the body's.
    """
    task.request.__dict__[ARGUMENTS] = tuple(args), dict(kwargs)


# before every other receiver: it may change what it is given
task_prerun.receivers.insert(0, task_prerun.receivers.pop())


def received_at(request: Any) -> float | None:
    """Return the s since 1970 at which a run's message could have begun here; None: nobody knows.

    That is when the worker got it, or its countdown was over.
    """
    at = (request.get("properties") or {}).get(RECEIVED)
    return at if isinstance(at, float) else None


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
