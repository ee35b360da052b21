"""One delivery of a message, in any process: what is known of it, and the questions it answers.

First `LockHeader`, the message header `redlock`: all that a message carries of its lock. Each part
is absent until it is needed, so that a plain send with `lock=` carries its options and nothing
else. A header that another program wrote, and a field with a wrong type or a number out of range,
count as absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import quote

from celery.app.task import Context
from celery.worker import state

from celery_redlock.label import RunId
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.validation import MOST_PERMITS
from celery_redlock.signals import LockDeferredEvent
from celery_redlock.tasks.children.reaper import this_process
from celery_redlock.tasks.delivery.route import CAME_BACK, QUEUE, Route, has_way_back, queue_of
from celery_redlock.tasks.reporting import StateReporter

HEADER = "redlock"
DEATHS = "x-death"  # RabbitMQ's header
DELAY_QUEUES = "celery_delayed_"  # Source: kombu.transport.native_delayed_delivery: level_name
CLOCKS_DIFFER = 1.0  # s: by which two processes may differ in what they know of the nodes' time
LAST_MOMENT = 1e10  # s: in the year 2286; no number of a header is larger, so none overflows

P = TypeVar("P")


def hop_of(left: float, longest: float) -> float:
    """Return the next countdown of a message that waits for `left` s and goes in hops of `longest`.

    Too little is never left for the last hop: within `CLOCKS_DIFFER` a run would start early.
    """
    return left / 2 if longest < left <= longest + 3 * CLOCKS_DIFFER else min(left, longest)


@dataclass(frozen=True)
class Deferral:
    """The last deferral of a message. `NEVER_DEFERRED` is that of a first try.

    count: deferrals so far. since, at: seconds since 1970 at which its first and its last try were
    refused, by the clocks of the lock nodes: those of two workers may be an hour apart. countdown:
    seconds from `at` to its next try. resource: the one that refused, of all `resources` of its
    lock. holder: the holder's label, "" if unknown. expires_in: seconds from `at` to the end of the
    holder's lease, or to the next start, None if unknown; no message carries these two. had_waited:
    seconds up to `at`, as a sum, since a node's clock may be set in between. limit: that
    of `resource`. rate: that of `resource` if its starts are used up, else "". is_taken: False if
    no quorum voted. why: for people. waits_for_release: the message has no budget, and no callable
    `on_conflict` or `limit` to ask, so it may wait for longer than its countdown. A redelivery that
    waits for its first delivery has `at` and `countdown` alone, as has a debounced send; and
    `resources` without `is_taken`, if it waits for a quorum.
    """

    count: int = 0
    since: float = 0.0
    at: float = 0.0
    countdown: float = 0.0
    resource: str = ""
    resources: tuple[str, ...] = ()
    holder: str = ""
    expires_in: float | None = None
    limit: int = 1
    rate: str = ""
    is_taken: bool = True
    why: str = ""
    waits_for_release: bool = False
    had_waited: float = 0.0

    def waited(self, now: float) -> float:
        """Return the seconds since the first try, 0.0 if there was none. now: as `since`."""
        before = self.had_waited or max(0.0, self.at - self.since)
        return before + max(0.0, now - self.at) if self.since else 0.0

    def left(self, now: float) -> float:
        """Return the seconds until the next try, below 0 after it. now: as `since`.

        At most the countdown: a clock that says more was set back.
        """
        return min(self.countdown, self.at + self.countdown - now)

    def info(self, now: datetime) -> dict[str, Any]:
        """Return what is stored and sent with DEFERRED. now: by the own clock, in UTC."""
        info = {
            "resource": self.resource,
            "holder": self.holder,
            "deferrals": self.count,
            "waited": self.waited(self.at),
            "next_try": (now + timedelta(seconds=self.countdown)).isoformat(),
        }
        if self.rate:
            info["rate"] = self.rate
            if self.expires_in is not None:
                info["next_start"] = (now + timedelta(seconds=self.expires_in)).isoformat()
        return info

    def event(self) -> LockDeferredEvent:
        waited = self.waited(self.at)
        found = self.resource, self.holder, self.count, waited, self.countdown
        return LockDeferredEvent(*found, self.rate)


NEVER_DEFERRED: Deferral = Deferral()


@dataclass(frozen=True)
class LockHeader:
    """What the message header `redlock` carries; immutable.

    options: those of the call. id: the task that the header belongs to, for subtasks inherit the
    headers of their parent. retries: the message's own count when it was republished. is_revoked: a
    worker's main process was told so of this delivery. is_flagged: the broker has said that it is
    not the first one. waits: how often a redelivery was republished while its first delivery held
    the lock. origin: where the message was sent to first, and the queue that this copy of it goes
    back to. unique: of a deduplicated send, as of `ClaimToken`. life: how often RabbitMQ
    dead-lettered the message: each life is a run of its own. eta: of the send, in ISO 8601 or
    "", once the message's own `eta` is the time of a next try.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    retries: int = 0
    is_revoked: bool = False
    deferral: Deferral = NEVER_DEFERRED
    is_flagged: bool = False
    waits: int = 0
    origin: Route | None = None
    unique: Mapping[str, Any] | None = None
    life: int = 0
    eta: str = ""

    @classmethod
    def of(cls, request: Any) -> LockHeader:
        """Return the header of a request, `NO_HEADER` if it has none of its own."""
        if HEADER not in request.__dict__ and not request.headers:  # as most messages have none
            return NO_HEADER
        carried = request.__dict__.get(HEADER)
        if carried is None and isinstance(request.headers, Mapping):  # a sender may write any type
            carried = request.headers.get(HEADER)
        header = _read(cls, carried) if isinstance(carried, Mapping) else NO_HEADER
        if header.id not in (None, request.id):
            header = NO_HEADER  # inherited from a parent
        deaths = _deaths(request)
        # `is_flagged` alone is no republication: `revoked` writes it, and no count of retries
        if header.was_republished and (header.retries != request.retries or deaths):
            # a real retry takes the lock anew: what the run before it waited is not its own
            header = LockHeader(header.options, header.id, unique=header.unique, life=header.life)
        return replace(header, life=header.life + deaths) if deaths else header

    @property
    def was_republished(self) -> bool:
        """Whether the `eta` of the message is ours; also that of a debounced send."""
        return self.deferral.at > 0 or self.waits > 0

    def revoked(self) -> LockHeader:
        """Return the header of a delivery that was revoked; the run acts on it."""
        return replace(self, is_revoked=True)

    def redelivered(self) -> LockHeader:
        """Return the header of a message that a run may have by now, as a broker would flag it."""
        return replace(self, is_flagged=True)

    def deferred(self, request: Any, deferral: Deferral) -> LockHeader:
        """Return the header of a message that is republished, or waits, for its lock."""
        eta = self.eta if self.was_republished else request.eta or ""
        own = {"id": request.id, "retries": request.retries, "eta": str(eta)}
        return replace(self, deferral=deferral, **own)

    def waiting_for_first_delivery(self, request: Any, deferral: Deferral) -> LockHeader:
        """Return the header of a redelivery that is republished; its own deferrals begin anew."""
        return replace(self.deferred(request, deferral), waits=self.waits + 1)

    def to_message(self) -> dict[str, Any]:
        """Return a mapping that any serializer takes; parts that are absent are left out."""
        carried = {"options": dict(self.options), "id": self.id, "retries": self.retries}
        for name in ("is_revoked", "is_flagged", "waits", "unique", "life", "eta"):
            if value := getattr(self, name):
                carried[name] = value
        for name in ("deferral", "origin"):
            part = getattr(self, name)
            if part is not None and part is not NEVER_DEFERRED:
                carried[name] = {field: getattr(part, field) for field in _KINDS[type(part)]}
        return carried


NO_HEADER = LockHeader()


def _deaths(request: Any) -> int:
    """Return how often a message was dead-lettered since it was sent or republished.

    Source: RabbitMQ, "Dead Letter Exchanges": `x-death` has an entry for each queue, also of its
    delay. A republication leaves it out.
    """
    deaths = request.__dict__.get(DEATHS)
    if not isinstance(deaths, (list, tuple)):
        return 0
    total = 0
    for death in deaths:
        if isinstance(death, Mapping) and not str(death.get("queue")).startswith(DELAY_QUEUES):
            count = death.get("count")
            total += count if _fits(count, _COUNT) and count else 1
    return total


_COUNT, _LIMIT = range(10**9), range(1, MOST_PERMITS + 1)
# by part: the fields that a message carries, and their types, ranges or parts
_KINDS: Mapping[type, Mapping[str, Any]] = {
    Deferral: {
        "count": _COUNT, "since": float, "at": float, "countdown": float, "had_waited": float,
        "resource": str, "resources": tuple, "limit": _LIMIT, "rate": str, "is_taken": bool,
        "why": str, "waits_for_release": bool,
    },
    Route: {"exchange": str, "routing_key": str, "queue": str},
    LockHeader: {
        "options": Mapping, "id": str, "retries": _COUNT, "is_revoked": bool, "is_flagged": bool,
        "waits": _COUNT, "unique": Mapping, "life": _COUNT, "deferral": Deferral, "origin": Route,
        "eta": str,
    },
}  # fmt: skip


def _read(kind: type[P], carried: Mapping[str, Any]) -> P:
    fields: dict[str, Any] = {}
    for name, field_kind in _KINDS[kind].items():
        value = carried.get(name)
        if field_kind in (Deferral, Route) and isinstance(value, Mapping):
            fields[name] = _read(field_kind, value)
        elif field_kind is tuple and isinstance(value, (list, tuple)):  # JSON makes lists of tuples
            fields[name] = tuple(map(str, value))
        elif _fits(value, field_kind):
            fields[name] = value
    return kind(**fields)


def _fits(value: object, kind: Any) -> bool:
    """Return whether a value is of a field's kind; a float stands for seconds, 0 or more."""
    if isinstance(kind, range):
        return type(value) is int and value in kind
    return is_moment(value) if kind is float else isinstance(value, kind)


def is_moment(value: object) -> bool:
    """Return whether a value is a number of seconds from 0 on, or such a second since 1970."""
    return type(value) in (int, float) and 0 <= value <= LAST_MOMENT  # type: ignore[operator]


ARGUMENTS = "_redlock_arguments"  # the name on the request of the arguments as they came
# the name on the request of a run that goes on in another delivery, so that its claim stays
CONTINUES = "_redlock_continues"
# properties of a delivery, never of a message: it has a header called "headers"; when it came; when
# a release was announced that dispatched it; and whether its worker has a waiting room for it
NESTED, RECEIVED = "redlock_nested", "redlock_received"
NAMED_AT, HAS_ROOM = "redlock_named_at", "redlock_has_room"

clock = SystemClock()  # of `Delivery.received_at`
_ON_REQUEST = "_redlock_"  # what our names on a request begin with
_OF_DEATHS = (DEATHS, "x-first-death-", "x-last-death-")  # headers; Source: RabbitMQ, "DLX"


class Delivery:
    """One delivery of a message: facts and questions; immutable, and without I/O.

    task, request: Celery's, the request as `Context`. header: what the message carries, with what
    the broker says of this delivery. acks_late: the message is acknowledged after the run.
    is_redelivered: this is not the first delivery, as far as anybody has said.
    may_have_run_elsewhere: another delivery of this message may be running, or have run.
    received_at: monotonic seconds at which the run could have begun here, None if nobody noted it.
    has_room: it may wait in its worker's memory if refused; an evicted message may not.
    In a worker's main process make a new one each time: Celery rewrites the request there.
    """

    __slots__ = (
        "_properties", "acks_late", "has_room", "header", "is_redelivered",
        "may_have_run_elsewhere", "received_at", "request", "task",
    )  # fmt: skip

    def __init__(self, task: Any, request: Any, header: LockHeader | None = None) -> None:
        self.task, self.request = task, request
        self._properties: Mapping[str, Any] = request.properties or {}
        at = self._properties.get(RECEIVED)
        self.received_at: float | None = at if isinstance(at, float) else None
        self.has_room = self._properties.get(HAS_ROOM) is True
        self.acks_late = bool(task.acks_late) and not request.is_eager
        header = LockHeader.of(request) if header is None else header
        is_flagged = self.acks_late and (request.delivery_info or {}).get("redelivered")
        if is_flagged and not header.is_flagged:
            header = replace(header, is_flagged=True)
        self.header = header
        self.is_redelivered = header.is_flagged or header.waits > 0
        self.may_have_run_elsewhere = self.is_redelivered or header.deferral.since > 0

    @property
    def run_id(self) -> RunId:
        """What tells the run of this delivery from all others, but from redeliveries."""
        request, queue = self.request, ""
        if (request.delivery_info or {}).get("exchange"):
            queue = quote(self._properties.get(QUEUE) or "", safe="")
        nesting, life = request.replaced_task_nesting or 0, self.header.life
        return RunId(request.id, self.task.name, request.retries, nesting, queue, life)

    @property
    def reporter(self) -> StateReporter:
        return StateReporter(self.task, self.request)

    @property
    def route(self) -> Route:
        origin = self.header.origin
        exchange = None if origin is None else origin.exchange
        return Route.of(self.request.delivery_info, exchange, self._properties.get(QUEUE))

    @property
    def delivery_tag(self) -> str:
        """What the worker's channel knows this delivery by."""
        return str(self._properties.get("delivery_tag"))

    def queue(self, known: dict[tuple[str | None, str], str]) -> str:
        """Return the name of the queue that the message came through; known: as of `queue_of`."""
        return self._properties.get(QUEUE) or queue_of(self.task.app, self.route, known)

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
        return (self._properties.get(QUEUE) or origin.queue) != origin.queue

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
            stamped, revoked = (request.stamps or {}).get(name), state.revoked_stamps.get(name, ())
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

    @property
    def named_at(self) -> float | None:
        """When a release was announced that dispatched this message, in seconds since 1970."""
        at = self._properties.get(NAMED_AT)
        return at if isinstance(at, float) else None

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
    if (request.get("properties") or {}).get(NESTED):
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
