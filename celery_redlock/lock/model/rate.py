"""A rate: at most so many starts in any period. Its text, its times, and one start.

A rate of N has N permits. A start takes one of them, and the permit is free again a period later:
nothing renews or releases it. Not here: how a start is taken (`lock/engine/starts.py`).
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from celery_redlock.lock.model.keys import name_of_lock, name_of_rate, rate_keys, waiting_key
from celery_redlock.lock.model.lease import HELD, Lease, LockKey
from celery_redlock.lock.transport.command import encode_bulk, encode_text

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}  # seconds; Celery's, and a day
MAX_STARTS = 1000  # a try looks at all of them
MIN_PERIOD = 1.0  # seconds
MAX_PERIOD = 86_400.0  # seconds
_RATE_TEXT = re.compile(r"([0-9]{1,9})/(?:([smhd])|([0-9]{1,6}(?:\.[0-9]{1,6})?) ?s)")
# of the period: by which a body may begin later than the first of its nodes has counted its start
_SLACK_FRACTION = 0.02
MIN_SLACK = 0.01
MAX_SLACK = 1.0
_ROUNDING = 0.004  # seconds: a node counts whole milliseconds, at both ends


class Rate(NamedTuple):
    """At most `starts` starts in any period of `period` seconds, over all clients."""

    starts: int
    period: float

    @classmethod
    def parse(cls, text: str) -> Rate | None:
        """Return the rate of a text as "100/h" or "10/2.5 s"; None if it is none."""
        match = _RATE_TEXT.fullmatch(text)
        if match is None:
            return None
        starts, unit, seconds = match.groups()
        return cls(int(starts), UNITS[unit] if unit else float(seconds))

    def __str__(self) -> str:
        units = [unit for unit, seconds in UNITS.items() if seconds == self.period]
        seconds = f"{self.period:.6f}".rstrip("0").rstrip(".")
        return f"{self.starts}/{units[0] if units else f'{seconds} s'}"

    @property
    def is_allowed(self) -> bool:
        """Whether it is within the bounds of an option; a message may carry any."""
        return 0 < self.starts <= MAX_STARTS and MIN_PERIOD <= self.period <= MAX_PERIOD

    @property
    def slack(self) -> float:
        """Seconds by which a body may begin after its start was counted."""
        return min(max(self.period * _SLACK_FRACTION, MIN_SLACK), MAX_SLACK)

    def kept_ms(self, drift: float) -> int:
        """Return the milliseconds for which a node counts a start, by its own clock.

        A body begins up to `slack` after its start is counted, so the next one of the same permit
        may begin that much later. drift: the fraction by which clocks may differ in speed.
        """
        return math.ceil(((self.period + self.slack) * (1 + drift) + _ROUNDING) * 1000)


def awaited(resource: str, limit: int, rate: str) -> tuple[str, int | Rate]:
    """Return the name under which a refused client waits, and the limit or rate of that.

    rate: as text, which a message may bring; "" if the lock was refused.
    """
    parsed_rate = Rate.parse(rate) if rate else None
    if parsed_rate is None or not parsed_rate.is_allowed:
        return name_of_lock(resource), limit
    return name_of_rate(resource), parsed_rate


class RateKey(LockKey):
    """The keys of a rate, for one start: `limit` is the number of starts, `ttl` the slack.

    A `Lease` on this is held for as long as a body may begin. Nothing renews or releases it.
    packed_kept: for how many ms a node counts the start.
    """

    __slots__ = ("packed_kept", "packed_rate", "packed_tokens", "rate")

    def __init__(self, prefix: str, resource: str, rate: Rate, drift: float) -> None:
        super().__init__(prefix, resource, rate.slack, rate.starts)
        taken, tokens = rate_keys(prefix, resource)
        self.rate = rate
        self.name = taken
        self.base = encode_text(taken)
        self.packed_tokens = encode_text(tokens)
        self.packed_rate = encode_text(str(rate))
        self.packed_kept = encode_bulk(b"%d" % rate.kept_ms(drift))
        self.waiting = encode_text(waiting_key(prefix, name_of_rate(resource)))

    def choose(self, permit: int) -> None:
        self.permit = permit


class Start(Lease):
    """One start: a permit of a rate, taken before the body begins.

    It is held for as long as the body may begin: until the rate's slack has passed since a quorum
    of nodes counted it. started_at: the monotonic second at which the body began, None before.
    From then on nothing gives it back.
    """

    __slots__ = ("started_at",)

    key: RateKey

    def __init__(self, key: RateKey, token: str, *terms: Any) -> None:
        super().__init__(key, token, *terms)
        self.started_at: float | None = None

    def begin(self, now: float) -> bool:
        """Turn a quorum of grants into a start; a late one is asked for again before the body."""
        self.state = HELD
        return True
