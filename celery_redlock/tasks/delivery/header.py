"""What the message header `redlock` carries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Past:
    """What the message has been through. waited: s since its first try; delay: s, the last one."""

    deferrals: int = 0
    waited: float = 0.0
    delay: float | None = None


HEADER = "redlock"
CLOCKS_DIFFER = 1.0  # s: at the most, between the calendars of two workers


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
