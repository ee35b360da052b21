"""Randomized delays that grow from one attempt to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.validation import LONGEST, is_number
from celery_redlock.tasks.settings.sources import OptionSource


@dataclass(frozen=True)
class Backoff:
    """Delays between deferrals, each drawn from 0 to a bound that grows.

    first, cap: the first and the longest bound, in seconds. factor: growth of the bound from one
    deferral to the next. Raises SettingsError for a value out of range.
    """

    # Source of the draw: AWS Architecture Blog, "Exponential Backoff And Jitter", full jitter.

    first: float = 0.25
    cap: float = 30.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        for name in ("first", "cap", "factor"):
            value = getattr(self, name)
            if not is_number(value):
                raise SettingsError("Backoff", name, repr(value), "must be a finite number")
        if not 0 < self.first <= self.cap <= LONGEST:
            hint = f"must be above 0 s and at most cap, and cap at most {LONGEST:.0f} s"
            raise SettingsError("Backoff", "first, cap", f"{self.first!r}, {self.cap!r}", hint)
        if self.factor < 1:
            raise SettingsError("Backoff", "factor", repr(self.factor), "must be 1 or more")

    def delay(self, attempt: int, uniform: Callable[[float, float], float]) -> float:
        """Return the seconds to wait before the next try.

        attempt: 0 for the first deferral. uniform: draws between two bounds.
        """
        try:
            # as floats: a power of large ints would keep the interpreter's lock for seconds
            grown = min(self.cap, self.first * float(self.factor) ** float(attempt))
        except OverflowError:
            grown = self.cap
        return uniform(0.0, grown)

    def to_message(self) -> dict[str, Any]:
        """Return the fields as a mapping that every serializer can carry."""
        return asdict(self)

    @classmethod
    def from_message(cls, fields: Mapping[str, Any]) -> Backoff:
        """Return the Backoff of such a mapping; raises SettingsError for an unknown field."""
        unknown = set(fields) - set(cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            hint = f"is no field: take {known}"
            name = min(unknown, key=str)
            raise SettingsError("Backoff", str(name), repr(fields[name]), hint)
        return cls(**fields)


def check_backoff(source: OptionSource, value: Any, app: object) -> Backoff:
    """Return the value of an option `backoff`, also from a message; raises SettingsError."""
    if isinstance(value, Mapping):
        try:
            return Backoff.from_message(value)
        except SettingsError as error:
            hint = f"{error.level}: {error.name}={error.value}: {error.hint}"
            raise source.wrong(dict(value), hint) from None
    if not isinstance(value, Backoff):
        raise source.wrong(value, "must be a Backoff, as Backoff(first=0.25, cap=30)")
    return value
