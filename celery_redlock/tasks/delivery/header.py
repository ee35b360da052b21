"""The message header `redlock`: all that a message carries of its lock.

Each part is absent until it is needed, so that a plain send with `lock=` carries its options and
nothing else. A header that another program wrote, and a field with a wrong type or a number out of
range, count as absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from celery_redlock.lock.validation import MOST_PERMITS
from celery_redlock.tasks.delivery.route import Route

HEADER = "redlock"
DEATHS = "x-death"  # RabbitMQ's header
DELAY_QUEUES = "celery_delayed_"  # Source: kombu.transport.native_delayed_delivery: level_name
CLOCKS_DIFFER = 1.0  # s: by which two processes may differ in what they know of the nodes' time
LAST_MOMENT = 1e10  # s: in the year 2286; no number of a header is larger, so none overflows

P = TypeVar("P")


@dataclass(frozen=True)
class Deferral:
    """How often a message was deferred. `NEVER_DEFERRED` is that of a first try.

    count: deferrals so far. since: time of the first try by the clocks of the lock nodes, ISO 8601
    with its zone: the clocks of two workers may be an hour apart. delay: seconds,
    the last one that the backoff gave, before it was cut; None before the first.
    """

    count: int = 0
    since: str | None = None
    delay: float | None = None

    def waited(self, now: datetime) -> float:
        """Return the seconds since the first try, 0.0 if there was none. now: as `since`."""
        if self.since is None:
            return 0.0
        return max(0.0, (now - datetime.fromisoformat(self.since)).total_seconds())

    def next(self, now: datetime, delay: float) -> Deferral:
        """Return the same after one more deferral."""
        return Deferral(self.count + 1, self.since or now.isoformat(), delay)


@dataclass(frozen=True)
class Redelivery:
    """What is known of another delivery of the same message.

    by_broker: the broker has said so. waits: how often this one was republished while its first
    delivery held the lock.
    """

    by_broker: bool = False
    waits: int = 0


@dataclass(frozen=True)
class Wait:
    """For what a deferred message waits.

    resources: those of its lock. refused_by: the one that was taken, None if no quorum voted.
    refused_at: seconds since 1970, by the clocks of the nodes. limit: the `limit` by which it
    asked. waits_for_release: the message has no budget and no callable to ask, so it may wait for
    longer than its countdown. reason: why no quorum voted, "" if the lock was taken. countdown:
    seconds from the refusal on. A redelivery that waits for its first delivery has only the times.
    """

    resources: tuple[str, ...] = ()
    refused_by: str | None = None
    refused_at: float = 0.0
    limit: int = 1
    waits_for_release: bool = False
    reason: str = ""
    countdown: float = 0.0

    def seconds_since_refusal(self, now: datetime) -> float:
        """Return the seconds since the refusal. now: by the clocks of the nodes."""
        return max(0.0, now.timestamp() - self.refused_at)

    def countdown_left(self, now: datetime) -> float:
        """Return the seconds that are left of the countdown. now: by the clocks of the nodes."""
        return max(0.0, self.countdown - self.seconds_since_refusal(now))


NEVER_DEFERRED = Deferral()


@dataclass(frozen=True)
class LockHeader:
    """What the message header `redlock` carries; immutable.

    options: those of the call. id: the task that the header belongs to, for subtasks inherit the
    headers of their parent. retries: the message's own count when it was republished. is_revoked: a
    worker's main process was told so of this delivery. origin: where the message was sent to first,
    and the queue that this copy of it goes back to. unique: what ends the claim of a deduplicated
    send, as of `UniqueToken`. life: how often RabbitMQ dead-lettered the message. Each life is a
    run of its own: a marker of the one before, just ended, must not end it.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    retries: int = 0
    is_revoked: bool = False
    deferral: Deferral = NEVER_DEFERRED
    redelivery: Redelivery | None = None
    wait: Wait | None = None
    origin: Route | None = None
    unique: Mapping[str, Any] | None = None
    life: int = 0

    @classmethod
    def of(cls, request: Any) -> LockHeader:
        """Return the header of a request, `NO_HEADER` if it has none of its own."""
        header, deaths = cls._carried(request), _deaths(request)
        return replace(header, life=header.life + deaths) if deaths else header

    @classmethod
    def _carried(cls, request: Any) -> LockHeader:
        carried = request.__dict__.get(HEADER)
        if carried is None and isinstance(request.headers, Mapping):  # a sender may write any type
            carried = request.headers.get(HEADER)
        if not isinstance(carried, Mapping):
            return NO_HEADER
        header = _parse(carried)
        if header.id not in (None, request.id):
            return NO_HEADER  # inherited from a parent
        waits = 0 if header.redelivery is None else header.redelivery.waits
        # `by_broker` alone is no republication: `revoked` writes it, and no count of retries
        was_republished = header.deferral.since is not None or waits > 0
        if was_republished and (header.retries != request.retries or _deaths(request)):
            # a real retry takes the lock anew: what the run before it waited is not its own
            return LockHeader(header.options, header.id, unique=header.unique, life=header.life)
        return header

    @property
    def may_have_run_elsewhere(self) -> bool:
        """Whether another delivery of this message may be running, or have run."""
        return self.redelivery is not None or self.deferral.since is not None

    def ran_within(self, now: datetime) -> float:
        """Return the age up to which a completion marker is one of this message's own runs.

        Seconds; inf: any marker is. An older one is that of an earlier message with the same task
        id. now: by the clocks of the nodes.
        """
        return (
            math.inf if self.redelivery is not None else self.deferral.waited(now) + CLOCKS_DIFFER
        )

    def redelivered(self) -> LockHeader:
        """Return the header of a delivery of which the broker says that it is not the first."""
        known = self.redelivery or Redelivery()
        return self if known.by_broker else replace(self, redelivery=replace(known, by_broker=True))

    def revoked(self) -> LockHeader:
        """Return the header of a delivery that was revoked; the run acts on it."""
        return replace(self, is_revoked=True)

    def waiting_for_first_delivery(self, retries: int, task_id: str, wait: Wait) -> LockHeader:
        """Return the header of a redelivery that is republished; its own deferrals begin anew."""
        known = self.redelivery or Redelivery()
        again = replace(known, waits=known.waits + 1)
        begun_anew = replace(self, deferral=NEVER_DEFERRED, wait=wait)
        return replace(begun_anew, id=task_id, retries=retries, redelivery=again)

    def to_message(self) -> dict[str, Any]:
        """Return a mapping that any serializer takes; parts that are absent are left out."""
        parts = ("redelivery", "wait", "origin")
        found = {name: part for name in parts if (part := getattr(self, name)) is not None}
        carried: dict[str, Any] = {name: dict(vars(part)) for name, part in found.items()}
        if self.deferral.since is not None:
            carried["deferral"] = dict(vars(self.deferral))
        if self.unique is not None:
            carried["unique"] = self.unique
        if self.life:
            carried["life"] = self.life
        if self.is_revoked:
            carried["is_revoked"] = True
        return {"options": dict(self.options), "id": self.id, "retries": self.retries, **carried}


NO_HEADER = LockHeader()


def _deaths(request: Any) -> int:
    """Return how often a message was dead-lettered since it was sent or republished.

    Source: RabbitMQ, "Dead Letter Exchanges": `x-death` has an entry for each queue. It is younger
    than the last republication, which leaves it out. RabbitMQ's delay adds entries of its own.
    """
    deaths = request.__dict__.get(DEATHS)
    if not isinstance(deaths, (list, tuple)):
        return 0
    own = [death for death in deaths if isinstance(death, Mapping)
           and not str(death.get("queue")).startswith(DELAY_QUEUES)]  # fmt: skip
    counts = [death.get("count") for death in own]
    return sum(count if _fits(count, _COUNT) and count else 1 for count in counts)


_COUNT, _LIMIT = range(10**9), range(1, MOST_PERMITS + 1)
_KINDS: Mapping[type, Mapping[str, Any]] = {  # by part: its fields, and their types or ranges
    Deferral: {"count": _COUNT, "since": str, "delay": float},
    Redelivery: {"by_broker": bool, "waits": _COUNT},
    Wait: {
        "resources": (list, tuple), "refused_by": str, "refused_at": float,
        "limit": _LIMIT, "waits_for_release": bool, "reason": str, "countdown": float,
    },
    Route: {"exchange": str, "routing_key": str, "queue": str},
    LockHeader: {
        "options": Mapping, "id": str, "retries": _COUNT, "is_revoked": bool, "unique": Mapping,
        "life": _COUNT,
    },
}  # fmt: skip


def _parse(carried: Mapping[str, Any]) -> LockHeader:
    deferral = _part(Deferral, carried.get("deferral")) or NEVER_DEFERRED
    wait = _part(Wait, carried.get("wait"))
    if wait is not None:  # JSON makes a list of a tuple
        wait = replace(wait, resources=tuple(map(str, wait.resources)))
    redelivery = _part(Redelivery, carried.get("redelivery"))
    return LockHeader(
        deferral=deferral if _is_time(deferral.since) else NEVER_DEFERRED,
        redelivery=None if redelivery == Redelivery() else redelivery,
        wait=wait,
        origin=_part(Route, carried.get("origin")),
        **_known(LockHeader, carried),
    )


def _part(kind: type[P], carried: object) -> P | None:
    return kind(**_known(kind, carried)) if isinstance(carried, Mapping) else None


def _known(kind: type, carried: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a part carries with the right type, and in their range."""
    types = _KINDS[kind]
    return {name: carried[name] for name in types if _fits(carried.get(name), types[name])}


def _fits(value: object, kind: Any) -> bool:
    """Return whether a value is of a field's kind; a float stands for seconds, 0 or more."""
    if isinstance(kind, range):
        return type(value) is int and value in kind
    return is_moment(value) if kind is float else isinstance(value, kind)


def is_moment(value: object) -> bool:
    """Return whether a value is a number of seconds from 0 on, or such a second since 1970."""
    return type(value) in (int, float) and 0 <= value <= LAST_MOMENT  # type: ignore[operator]


def _is_time(text: object) -> bool:
    """Return whether a text is a time in ISO 8601 with its zone."""
    try:
        return isinstance(text, str) and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
