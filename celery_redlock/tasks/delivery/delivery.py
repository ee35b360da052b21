"""One delivery of a message, in any process: what is known of it, and the questions it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypedDict, cast
from urllib.parse import quote

from celery.app.task import Context
from celery.worker import state

from celery_redlock.label import RunId
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.children.reaper import this_process
from celery_redlock.tasks.delivery.header import DEATHS, LockHeader
from celery_redlock.tasks.delivery.route import CAME_BACK, Route, has_way_back, queue_of
from celery_redlock.tasks.reporting import StateReporter

RUN_STATE = "_redlock_state"  # the name on a request, never of a header, that has its `RunState`
SEEN = "redlock_seen"  # the property of a delivery, never of a message, that has its `Seen`

clock = SystemClock()  # of `Delivery.received_at`
_ON_REQUEST = "_redlock_"  # what our names on a request begin with
_OF_DEATHS = (DEATHS, "x-first-death-", "x-last-death-")  # headers; Source: RabbitMQ, "DLX"


class Seen(TypedDict, total=False):
    """What a worker's main process has seen of a delivery; pickled to the child that runs it.

    queue: the name of the one that it came through. received: monotonic seconds at which the run
    could have begun. named_at: seconds since 1970 at which a release was announced that dispatched
    the message. has_room: its worker has a waiting room for it. nested: the message has a header
    called "headers".
    """

    queue: str | None
    received: float
    named_at: float | None
    has_room: bool
    nested: bool


def seen_of(properties: Mapping[str, Any] | None) -> Seen:
    """Return what is noted in a delivery's properties; nothing outside a locked task's request."""
    seen = (properties or {}).get(SEEN)
    return cast("Seen", seen) if isinstance(seen, dict) else {}


@dataclass(slots=True, eq=False, repr=False)
class RunState:
    """What is kept of a run on its request, for those who find no other way to it.

    header: what the message carries; the main process makes a new request if it changes that.
    arguments: as they came. locked_run: the one that is to release its lock. lock: what it has
    asked for; it stays here after the release. goes_on: in another delivery of the message, so that
    the claim of its send stays. outer_error: was handled when the run began, so it is none of it.
    Celery copies a request by its names, so the copies of a run share one state.
    """

    header: LockHeader
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = None
    locked_run: Any = None
    lock: Lock | None = None
    goes_on: bool = False
    outer_error: BaseException | None = None

    @classmethod
    def of(cls, request: Any) -> RunState:
        """Return that of a message's request, which has one from now on."""
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
    is_redelivered: this is not the first delivery, as far as anybody has said.
    may_have_run_elsewhere: another delivery of this message may be running, or have run.
    received_at: monotonic seconds at which the run could have begun here, None if nobody noted it.
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
        at = self._seen.get("received")
        self.received_at: float | None = at if isinstance(at, float) else None
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
        """What tells the run of this delivery from all others, but from redeliveries."""
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

    def queue(self, known: dict[tuple[str | None, str], str]) -> str:
        """Return the name of the queue that the message came through; known: as of `queue_of`."""
        return self._seen.get("queue") or queue_of(self.task.app, self.route, known)

    @property
    def is_for_another_queue(self) -> bool:
        """Whether RabbitMQ brought a copy of a deferral to a queue that it was not meant for.

        It goes by the topic, to each queue that is bound to it; each of them has its own copy.
        """
        origin = self.header.origin
        if origin is None or origin.queue is None:
            return False
        if (self.request.delivery_info or {}).get("exchange") != CAME_BACK:
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
            stamped = (request.stamps or {}).get(name)
            revoked = state.revoked_stamps.get(name, ())
            stamps = stamped if isinstance(stamped, (list, tuple)) else [stamped]
            if any(stamp in revoked for stamp in stamps):
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


def moment_of(said: str | datetime) -> datetime:
    """Return a moment that a send or a message names; one without a time zone is in UTC."""
    at = datetime.fromisoformat(said) if isinstance(said, str) else said
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def own_headers(request: Any) -> dict[str, Any]:
    """Return the headers of a user's own that a message came with.

    Source: celery.app.task.Context takes a header called "headers" for all of them.
    """
    headers = request.headers
    if not isinstance(headers, Mapping):  # a sender may write any type
        headers = {}
    if seen_of(request.get("properties")).get("nested"):
        rest = {name: value for name, value in request.__dict__.items() if name != "headers"}
        headers = {**(Context(rest).headers or {}), "headers": headers}
    return {
        name: value
        for name, value in headers.items()
        if not name.startswith((*_OF_DEATHS, _ON_REQUEST))
    }


def received_at(eta: datetime | None) -> float:
    """Return when a run of a message that comes now can begin, in monotonic seconds."""
    left = 0.0 if eta is None else max(0.0, (eta - utc_now()).total_seconds())
    return clock.now() + left
