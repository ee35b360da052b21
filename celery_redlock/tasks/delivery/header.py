"""`LockHeader`, the message header `redlock`: all that a message carries of its lock.

Each part is absent until it is needed, so that a plain send with `lock=` carries its options and
nothing else. A header that another program wrote, and a field with a wrong type or a number out of
range, count as absent.

Its format has a number, the field `format`; without that it is 1. A change that an older release
would misread raises it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from celery_redlock.lock.validation import MAX_PERMITS
from celery_redlock.signals import LockDeferredEvent
from celery_redlock.tasks.delivery.route import Route

HEADER = "redlock"
HEADER_FORMAT = 1  # of the header that this release reads, and writes
DEATHS = "x-death"  # RabbitMQ's header
DELAY_QUEUES = "celery_delayed_"  # Source: kombu.transport.native_delayed_delivery: level_name
CLOCK_TOLERANCE = 1.0  # s by which the estimates of two processes of the nodes' time may differ
MAX_MOMENT = 1e10  # s: in the year 2286; no number of a header is larger, so none overflows

P = TypeVar("P")


def hop_of(remaining: float, longest: float) -> float:
    """Return the next countdown, in seconds, of a message that waits in several hops.

    remaining: seconds until its run is due. longest: seconds of one hop at most. The last hop is
    never shorter than `CLOCK_TOLERANCE`: the run would start too early.
    """
    return (
        remaining / 2
        if longest < remaining <= longest + 3 * CLOCK_TOLERANCE
        else min(remaining, longest)
    )


def new_header(options: Mapping[str, Any], task_id: object) -> dict[str, Any]:
    """Return the least that a message carries under `HEADER`. options, id: as in `LockHeader`."""
    number = {} if HEADER_FORMAT == 1 else {"format": HEADER_FORMAT}
    return {"options": options, "id": task_id, **number}


def unknown_format(carried: object) -> int | None:
    """Return the number of a header's format if this release cannot read it, else None.

    carried: what a message has under `HEADER`.
    """
    if not isinstance(carried, Mapping):
        return None
    number = carried.get("format", 1)
    return number if type(number) is int and number != HEADER_FORMAT else None


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
        earlier_wait = self.had_waited or max(0.0, self.at - self.since)
        return earlier_wait + max(0.0, now - self.at) if self.since else 0.0

    def remaining(self, now: float) -> float:
        """Return the seconds until the next try, below 0 after it. now: as `since`.

        At most the countdown: a clock that says more was set back.
        """
        return min(self.countdown, self.at + self.countdown - now)

    def info(self, now: datetime) -> dict[str, Any]:
        """Return the fields stored and sent with DEFERRED. now: by this process's clock, in UTC."""
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
        refusal = self.resource, self.holder, self.count, waited, self.countdown
        return LockDeferredEvent(*refusal, self.rate)


NEVER_DEFERRED: Deferral = Deferral()


@dataclass(frozen=True)
class LockHeader:
    """What the message header `redlock` carries; immutable.

    options: of the call. id: of the task that the header belongs to, because subtasks inherit the
    headers of their parent. retries: the message's own count when it was republished. is_revoked:
    the worker's main process found this delivery revoked. is_flagged: the broker flagged it as a
    redelivery. waits: how often a redelivery was republished while its first delivery held
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
        """Return the header of a request, `NO_HEADER` if it has none of its own.

        A worker holds a message whose format it does not know. A run of one that came past that,
        as no room was there, is refused for an option that no call has.
        """
        if HEADER not in request.__dict__ and not request.headers:  # as most messages have none
            return NO_HEADER
        carried = request.__dict__.get(HEADER)
        if carried is None and isinstance(request.headers, Mapping):  # a sender may write any type
            carried = request.headers.get(HEADER)
        if (number := unknown_format(carried)) is not None:
            return cls(options={"format": number})
        header = _read(cls, carried) if isinstance(carried, Mapping) else NO_HEADER
        if header.id not in (None, request.id):
            header = NO_HEADER  # inherited from a parent
        new_deaths = _deaths(request)
        # `is_flagged` alone is no republication: `revoked` writes it, and no count of retries
        if header.was_republished and (header.retries != _retries_of(request) or new_deaths):
            # a real retry takes the lock anew: what the run before it waited is not its own
            header = LockHeader(header.options, header.id, unique=header.unique, life=header.life)
        return replace(header, life=header.life + new_deaths) if new_deaths else header

    @property
    def was_republished(self) -> bool:
        """Whether the `eta` of the message is ours; also that of a debounced send."""
        return self.deferral.at > 0 or self.waits > 0

    def revoked(self) -> LockHeader:
        """Return the header of a delivery that was revoked; the run acts on it."""
        return replace(self, is_revoked=True)

    def redelivered(self) -> LockHeader:
        """Return the header of a message that may be running by now, flagged as a redelivery."""
        return replace(self, is_flagged=True)

    def deferred(self, request: Any, deferral: Deferral) -> LockHeader:
        """Return the header of a message that is republished, or waits, for its lock."""
        eta = self.eta if self.was_republished else request.eta or ""
        fields = {"id": request.id, "retries": _retries_of(request), "eta": str(eta)}
        return replace(self, deferral=deferral, **fields)

    def waiting_for_first_delivery(self, request: Any, deferral: Deferral) -> LockHeader:
        """Return the header of a redelivery that is republished; its own deferrals begin anew."""
        return replace(self.deferred(request, deferral), waits=self.waits + 1)

    def to_message(self) -> dict[str, Any]:
        """Return a mapping that any serializer takes; parts that are absent are left out."""
        carried = {**new_header(dict(self.options), self.id), "retries": self.retries}
        for name in ("is_revoked", "is_flagged", "waits", "unique", "life", "eta"):
            if value := getattr(self, name):
                carried[name] = value
        for name in ("deferral", "origin"):
            part = getattr(self, name)
            if part is not None and part is not NEVER_DEFERRED:
                carried[name] = {field: getattr(part, field) for field in _KINDS[type(part)]}
        return carried


NO_HEADER = LockHeader()


def _retries_of(request: Any) -> int:
    """Return how often a message was retried; 0 if its sender wrote something else than a count.

    Else no header would be that of its own message, which would be tried again without a pause.
    """
    return request.retries if _is_of_kind(request.retries, _COUNT) else 0


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
            total += count if _is_of_kind(count, _COUNT) and count else 1
    return total


_COUNT = range(10**9)
_LIMIT = range(1, MAX_PERMITS + 1)
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
        elif _is_of_kind(value, field_kind):
            fields[name] = value
    return kind(**fields)


def _is_of_kind(value: object, kind: Any) -> bool:
    """Return whether a value is of a field's kind; a float stands for seconds, 0 or more."""
    if isinstance(kind, range):
        return type(value) is int and value in kind
    return is_moment(value) if kind is float else isinstance(value, kind)


def is_moment(value: object) -> bool:
    """Return whether a value is a number of seconds from 0 on, or such a second since 1970."""
    return type(value) in (int, float) and 0 <= value <= MAX_MOMENT  # type: ignore[operator]
