"""The message header `redlock`: all that a message carries of its lock.

Each part is absent until it is needed, so that a plain send with `lock=` carries its options and
nothing else. A header that another program wrote, and a part with a wrong type, count as absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

HEADER = "redlock"
CLOCKS_DIFFER = 1.0  # s: the largest difference between the clocks of two workers

P = TypeVar("P")


@dataclass(frozen=True)
class Deferral:
    """How often a message was deferred. `NEVER_DEFERRED` is that of a first try.

    count: deferrals so far. since: time of the first try, ISO 8601 with its zone. delay: seconds,
    the last one that the backoff gave, before it was cut; None before the first.
    """

    count: int = 0
    since: str | None = None
    delay: float | None = None

    def waited(self, now: datetime) -> float:
        """Return the seconds since the first try, 0.0 if there was none."""
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
    refused_at: seconds since 1970. limit: the `limit` by which it asked. waits_for_release: the
    message has no budget and no callable to ask, so it may wait for longer than its countdown.
    reason: why no quorum voted, "" if the lock was taken. countdown: seconds; a message that comes
    later than that begins it anew, as its queue is longer.
    """

    resources: tuple[str, ...] = ()
    refused_by: str | None = None
    refused_at: float = 0.0
    limit: int = 1
    waits_for_release: bool = False
    reason: str = ""
    countdown: float = 0.0

    def seconds_since_refusal(self, now: datetime) -> float:
        """Return the seconds since the refusal, by the clocks of two workers."""
        return max(0.0, now.timestamp() - self.refused_at)


@dataclass(frozen=True)
class Origin:
    """Where the message was sent to at first, and the queue that this copy of it goes back to."""

    exchange: str | None = None
    routing_key: str = ""
    queue: str | None = None


NEVER_DEFERRED = Deferral()


@dataclass(frozen=True)
class LockHeader:
    """What the message header `redlock` carries; immutable.

    options: those of the call. id: the task that the header belongs to, for subtasks inherit the
    headers of their parent. retries: the message's own count when it was republished. is_revoked: a
    worker's main process was told so of this delivery. unique: what ends the claim of a
    deduplicated send, as of `UniqueToken`.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    retries: int = 0
    is_revoked: bool = False
    deferral: Deferral = NEVER_DEFERRED
    redelivery: Redelivery | None = None
    wait: Wait | None = None
    origin: Origin | None = None
    unique: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, request: Any) -> LockHeader:
        """Return the header of a request, `NO_HEADER` if it has none of its own."""
        carried = request.__dict__.get(HEADER)
        if carried is None:
            carried = (request.headers or {}).get(HEADER)
        if not isinstance(carried, Mapping):
            return NO_HEADER
        header = _parse(carried)
        if header.id not in (None, request.id):
            return NO_HEADER  # inherited from a parent
        waits = 0 if header.redelivery is None else header.redelivery.waits
        # `by_broker` alone is no republication: `revoked` writes it, and no count of retries
        was_republished = header.deferral.since is not None or waits > 0
        if was_republished and header.retries != request.retries:
            # a real retry takes the lock anew: what the run before it waited is not its own
            return LockHeader(header.options, header.id, unique=header.unique)
        return header

    @property
    def is_redelivered(self) -> bool:
        """Whether this is not the first delivery of its message, as far as anybody has said."""
        return self.redelivery is not None

    @property
    def may_have_run_elsewhere(self) -> bool:
        """Whether another delivery of this message may be running, or have run."""
        return self.redelivery is not None or self.deferral.since is not None

    def ran_after(self) -> float | None:
        """Return the time after which a completion marker is one of this message's own runs.

        Seconds since 1970. -inf: any marker is. None: nobody else can have run it, and a task id
        that is used again is to run again.
        """
        if self.redelivery is not None:
            return -math.inf
        if self.deferral.since is None:
            return None
        return datetime.fromisoformat(self.deferral.since).timestamp() - CLOCKS_DIFFER

    def redelivered(self) -> LockHeader:
        """Return the header of a delivery of which the broker says that it is not the first."""
        known = self.redelivery or Redelivery()
        return self if known.by_broker else replace(self, redelivery=replace(known, by_broker=True))

    def revoked(self) -> LockHeader:
        """Return the header of a delivery that was revoked; the run acts on it."""
        return replace(self, is_revoked=True)

    def waiting_for_first_delivery(self, retries: int, task_id: str) -> LockHeader:
        """Return the header of a redelivery that is republished; its own deferrals begin anew."""
        known = self.redelivery or Redelivery()
        again = replace(known, waits=known.waits + 1)
        begun_anew = replace(self, deferral=NEVER_DEFERRED, wait=None)
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
        if self.is_revoked:
            carried["is_revoked"] = True
        return {"options": dict(self.options), "id": self.id, "retries": self.retries, **carried}


NO_HEADER = LockHeader()

_NUMBER = (int, float)
_KINDS: Mapping[type, Mapping[str, Any]] = {  # by part: its fields, and their types
    Deferral: {"count": int, "since": str, "delay": _NUMBER},
    Redelivery: {"by_broker": bool, "waits": int},
    Wait: {
        "resources": (list, tuple), "refused_by": str, "refused_at": _NUMBER,
        "limit": int, "waits_for_release": bool, "reason": str, "countdown": _NUMBER,
    },
    Origin: {"exchange": str, "routing_key": str, "queue": str},
    LockHeader: {
        "options": Mapping, "id": str, "retries": int, "is_revoked": bool, "unique": Mapping,
    },
}  # fmt: skip


def _parse(carried: Mapping[str, Any]) -> LockHeader:
    deferral = _part(Deferral, carried.get("deferral")) or NEVER_DEFERRED
    wait = _part(Wait, carried.get("wait"))
    if wait is not None:  # JSON makes a list of a tuple; no lock has a limit below 1
        resources = tuple(map(str, wait.resources))
        wait = replace(wait, resources=resources, limit=max(1, wait.limit))
    redelivery = _part(Redelivery, carried.get("redelivery"))
    return LockHeader(
        deferral=deferral if _is_time(deferral.since) else NEVER_DEFERRED,
        redelivery=None if redelivery == Redelivery() else redelivery,
        wait=wait,
        origin=_part(Origin, carried.get("origin")),
        **_known(LockHeader, carried),
    )


def _part(kind: type[P], carried: object) -> P | None:
    return kind(**_known(kind, carried)) if isinstance(carried, Mapping) else None


def _known(kind: type, carried: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a part carries with the right type."""
    types = _KINDS[kind]
    return {name: carried[name] for name in types if isinstance(carried.get(name), types[name])}


def _is_time(text: object) -> bool:
    """Return whether a text is a time in ISO 8601 with its zone."""
    try:
        return isinstance(text, str) and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
