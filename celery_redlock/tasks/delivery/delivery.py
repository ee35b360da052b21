"""One delivery of a message, in any process: what is known of it, and the questions it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypedDict
from urllib.parse import quote

from celery.app.task import Context
from celery.worker import state

from celery_redlock.label import RunId
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.children.reaper import this_process
from celery_redlock.tasks.delivery.header import DEATHS, LockHeader
from celery_redlock.tasks.delivery.route import DELAYED_EXCHANGE, Route, has_way_back, queue_of
from celery_redlock.tasks.reporting import StateReporter

RUN_STATE = "_redlock_state"  # an attribute of a request, never a header: its `RunState`
SEEN = "redlock_seen"  # a property of a delivery, never of a message: its `Seen`

clock = SystemClock()  # of `Delivery.received_at`
_REQUEST_PREFIX = "_redlock_"  # of the names that this package sets on a request
# prefixes of headers. Source: RabbitMQ, "DLX"
_DEATH_HEADERS = (DEATHS, "x-first-death-", "x-last-death-")


class Seen(TypedDict, total=False):
    """What a worker's main process has seen of a delivery; pickled to the child that runs it.

    queue: the name of the queue that the delivery came through. received: monotonic seconds at
    which the run could have begun. named_at: seconds since 1970 at which the release was announced
    that dispatched the message. has_room: its worker has a waiting room for it. nested: the message
    has a header called "headers".
    """

    queue: str | None
    received: float
    named_at: float | None
    has_room: bool
    nested: bool


def seen_of(properties: Mapping[str, Any] | None) -> Seen:
    """Return what is noted in a delivery's properties; nothing outside a locked task's request."""
    seen = (properties or {}).get(SEEN)
    return seen if isinstance(seen, dict) else {}  # type: ignore[return-value]


@dataclass(slots=True, eq=False, repr=False)
class RunState:
    """The state of a run, kept on its request, where hooks and signal receivers find it.

    header: what the message carries; the main process makes a new request if it changes that.
    arguments: args and kwargs as they came. locked_run: the run that has to release its lock. lock:
    the lock of the run, also after its release. continues_elsewhere: another delivery of the
    message follows, so the claim of its send stays. outer_error: the exception that was being
    handled when the run began; it is not the run's own.
    Celery copies a request by its names, so the copies of a request share one state.
    """

    header: LockHeader
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = None
    locked_run: Any = None
    lock: Lock | None = None
    continues_elsewhere: bool = False
    outer_error: BaseException | None = None

    @classmethod
    def of(cls, request: Any) -> RunState:
        """Return the state on a request; makes one if the request has none."""
        state = request.__dict__.get(RUN_STATE)
        if not isinstance(state, RunState):  # a header may have that name
            state = cls(LockHeader.of(request))
            request.__dict__[RUN_STATE] = state
        return state


def header_of(request: Any) -> LockHeader:
    """Return what a message carries of its lock; a request that has a state was read before."""
    state = request.__dict__.get(RUN_STATE)
    return state.header if isinstance(state, RunState) else LockHeader.of(request)


class Delivery:
    """One delivery of a message: facts and questions; immutable, and without I/O.

    task, request: Celery's, the request as `Context`. header: what the message carries, with what
    the broker says of this delivery. acks_late: the message is acknowledged after the run.
    is_redelivered: the broker or the message says that this is not the first delivery.
    may_have_run_elsewhere: another delivery of this message may be running, or have run.
    received_at: monotonic seconds at which the run could have begun here, None if unknown.
    has_room: it may wait in its worker's memory if refused; an evicted message may not.
    state: what is kept of its run.
    In a worker's main process make a new one each time: Celery rewrites the request there.
    """

    __slots__ = (
        "_seen", "acks_late", "has_room", "header", "is_redelivered", "may_have_run_elsewhere",
        "received_at", "request", "state", "task",
    )  # fmt: skip

    def __init__(self, task: Any, request: Any, header: LockHeader | None = None) -> None:
        self.task = task
        self.request = request
        self.state = RunState.of(request)
        self._seen = seen_of(request.properties)
        received = self._seen.get("received")
        self.received_at: float | None = received if isinstance(received, float) else None
        self.has_room = self._seen.get("has_room") is True
        self.acks_late = bool(task.acks_late) and not request.is_eager
        header = self.state.header if header is None else header
        is_flagged = self.acks_late and (request.delivery_info or {}).get("redelivered")
        if is_flagged and not header.is_flagged:
            header = replace(header, is_flagged=True)
        self.header = header
        self.is_redelivered = header.is_flagged or header.waits > 0
        self.may_have_run_elsewhere = self.is_redelivered or header.deferral.since > 0

    @property
    def run_id(self) -> RunId:
        """The id of the run that this delivery leads to; a redelivery has the same one."""
        request = self.request
        queue = ""
        if (request.delivery_info or {}).get("exchange"):
            queue = quote(self._seen.get("queue") or "", safe="")
        nesting = request.replaced_task_nesting or 0
        life = self.header.life
        return RunId(request.id, self.task.name, request.retries, nesting, queue, life)

    @property
    def reporter(self) -> StateReporter:
        return StateReporter(self.task, self.request)

    @property
    def route(self) -> Route:
        origin = self.header.origin
        exchange = None if origin is None else origin.exchange
        return Route.of(self.request.delivery_info, exchange, self._seen.get("queue"))

    @property
    def delivery_tag(self) -> str:
        """What the worker's channel knows this delivery by."""
        return str((self.request.properties or {}).get("delivery_tag"))

    def queue(self, cache: dict[tuple[str | None, str], str]) -> str:
        """Return the name of the queue that the message came through; cache: as of `queue_of`."""
        return self._seen.get("queue") or queue_of(self.task.app, self.route, cache)

    @property
    def is_for_another_queue(self) -> bool:
        """Whether RabbitMQ brought a copy of a deferral to a queue that it was not meant for.

        It goes by the topic, to each queue that is bound to it; each of them has its own copy.
        """
        origin = self.header.origin
        if origin is None or origin.queue is None:
            return False
        if (self.request.delivery_info or {}).get("exchange") != DELAYED_EXCHANGE:
            return False
        return (self._seen.get("queue") or origin.queue) != origin.queue

    @property
    def was_deferred(self) -> bool:
        """Whether DEFERRED may be what is stored and shown of the message.

        One that comes back may have been deferred in the memory of a worker that has died since.
        """
        is_flagged = bool((self.request.delivery_info or {}).get("redelivered"))
        return self.header.deferral.count > 0 or self.is_redelivered or is_flagged

    @property
    def cancelled(self) -> str | None:
        """Why the message is not to run: "expired" or "revoked"; asked anew each time.

        The main process has asked before it gave the message to its pool. Here it has waited since:
        for a free thread or greenlet, or for its lock. A pool's child hears of no revocation.
        """
        if self.request.is_eager:
            return None
        if self.header.is_revoked or (this_process.slot is None and self._is_revoked_here):
            return "revoked"
        return "expired" if self.request.expires and self.expires_in < 0 else None

    @property
    def _is_revoked_here(self) -> bool:
        """Whether this worker was told to revoke the message, by its id or by a stamp.

        Source: celery.worker.request: Request.revoked.
        """
        request = self.request
        if request.id in state.revoked:
            return True
        for name in (request.stamped_headers or ()) if state.revoked_stamps else ():
            value = (request.stamps or {}).get(name)
            revoked_values = state.revoked_stamps.get(name, ())
            values = value if isinstance(value, (list, tuple)) else [value]
            if any(stamp in revoked_values for stamp in values):
                return True
        return False

    @property
    def expires_in(self) -> float:
        """Seconds until the message's `expires`, below 0 after it; inf if it has none."""
        expires = self.request.expires
        if not expires:
            return math.inf
        return (moment_of(expires) - utc_now()).total_seconds()

    @property
    def can_republish(self) -> bool:
        """Whether there is a message, and it would not go to every queue of its exchange again."""
        request = self.request
        if request.is_eager:
            return False
        if not (request.delivery_info or {}).get("exchange"):
            return True  # of the default exchange, which has one queue for each routing key
        return has_way_back(self.task.app, self.route)

    def log_extra(self, event: str, **more: Any) -> dict[str, Any]:
        """Return the fields of a log line of this run, for handlers that write them."""
        return {"event": event, "task": self.task.name, "task_id": self.request.id, **more}

    def __str__(self) -> str:
        return f"{self.task.name}[{self.request.id}]"

    __repr__ = __str__  # for log handlers that show the arguments of a record


def utc_now() -> datetime:
    return datetime.now(UTC)


def moment_of(moment: str | datetime) -> datetime:
    """Return a datetime that a send or a message names; without a time zone it is in UTC."""
    parsed = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def own_headers(request: Any) -> dict[str, Any]:
    """Return the headers that the sender of a message added to Celery's own.

    Source: celery.app.task.Context takes a header called "headers" for all of them.
    """
    headers = request.headers
    if not isinstance(headers, Mapping):  # a sender may write any type
        headers = {}
    if seen_of(request.get("properties")).get("nested"):
        fields = {name: value for name, value in request.__dict__.items() if name != "headers"}
        headers = {**(Context(fields).headers or {}), "headers": headers}
    return {
        name: value
        for name, value in headers.items()
        if not name.startswith((*_DEATH_HEADERS, _REQUEST_PREFIX))
    }


def received_at(eta: datetime | None) -> float:
    """Return when a run of a message that comes now can begin, in monotonic seconds."""
    countdown = 0.0 if eta is None else max(0.0, (eta - utc_now()).total_seconds())
    return clock.now() + countdown
