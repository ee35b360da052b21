"""The table of a lock's options: `TaskLockOptions`, the only list of names, checks and defaults.

The checks of every level and the built-in values are made from it. The meaning of each option
stands in docs/reference/options.md; a test compares its names and defaults with the table. Another
test prints the lines that the types lack (`tasks/typed_options.py`, `LockedTask`). Not here: how
the levels of options become one (`levels.py`, `task_config.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.validation import (
    MAX_SECONDS,
    check_limit,
    check_rate,
    check_seconds,
    check_wait,
    is_number,
)
from celery_redlock.tasks.settings.app import (
    DEFAULT_TTL,
    OptionSource,
    Setting,
    seconds_or_none,
    true_or_false,
)
from celery_redlock.tasks.settings.templates import check_args, check_key

UNIQUE_BY = ("unique_for", "debounce")  # a send is claimed if one of these options is set
NEWEST = "newest"  # of `on_duplicate`: a send takes the place of the queued one
LONGEST_WAIT = 3600.0  # seconds in a worker slot; after that most brokers deliver a message again


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
        if not 0 < self.first <= self.cap <= MAX_SECONDS:
            hint = f"must be above 0 s and at most cap, and cap at most {MAX_SECONDS:.0f} s"
            raise SettingsError("Backoff", "first, cap", f"{self.first!r}, {self.cap!r}", hint)
        if self.factor < 1:
            raise SettingsError("Backoff", "factor", repr(self.factor), "must be 1 or more")

    def delay(self, attempt: int, uniform: Callable[[float, float], float]) -> float:
        """Return the seconds to wait before the next try.

        attempt: 0 for the first deferral. uniform: draws between two bounds.
        """
        try:
            # as floats: a power of large ints would keep the interpreter's lock for seconds
            bound = min(self.cap, self.first * float(self.factor) ** float(attempt))
        except OverflowError:
            bound = self.cap
        return uniform(0.0, bound)

    def to_message(self) -> dict[str, Any]:
        """Return the fields as a mapping that every serializer can carry."""
        return asdict(self)

    @classmethod
    def from_message(cls, fields: Mapping[str, Any]) -> Backoff:
        """Return the Backoff of such a mapping; raises SettingsError for an unknown field."""
        unknown = set(fields) - set(cls.__dataclass_fields__)
        if unknown:
            hint = f"is not a field: use {', '.join(cls.__dataclass_fields__)}"
            name = min(unknown, key=str)
            raise SettingsError("Backoff", str(name), repr(fields[name]), hint)
        return cls(**fields)


@dataclass(frozen=True)
class OptionValue:
    """One option in force: its value, and where that is set."""

    name: str
    value: Any
    source: OptionSource


@dataclass(frozen=True)
class EffectiveOptions:
    """The options in force for a task in a queue, each with its source; as text a table."""

    task: str
    queue: str
    options: tuple[OptionValue, ...]

    def __getitem__(self, name: str) -> OptionValue:
        """Return one option."""
        return next(option for option in self.options if option.name == name)

    def __str__(self) -> str:
        texts = {option.name: _shown(option.value) for option in self.options}
        if self["key"].value is None and self["args"].value is None:
            texts["key"] = "all arguments"
        rows = [(option.name, texts[option.name], str(option.source)) for option in self.options]
        name_width, value_width = (
            max(map(len, column)) for column in list(zip(*rows, strict=True))[:2]
        )
        lines = [
            f"{name:<{name_width}}  {value:<{value_width}}  {source}"
            for name, value, source in rows
        ]
        return "\n".join([f"{self.task} in queue {self.queue}", *lines])


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return repr(list(value))  # as people write it
    return str(getattr(value, "__qualname__", value)) if callable(value) else repr(value)


def _one_of(*choices: str, or_callable: bool = False) -> Callable[[str, str, Any], Any]:
    def check(level: str, name: str, value: Any) -> Any:
        if or_callable and callable(value):
            return value
        if not isinstance(value, str) or value not in choices:
            callable_hint = " or a callable that returns one of them" if or_callable else ""
            hint = f"must be one of {', '.join(map(repr, choices))}{callable_hint}"
            raise OptionSource(level, name).wrong(value, hint)
        return value

    return check


def _on_duplicate(level: str, name: str, value: Any) -> Any:
    if value == "replace":
        hint = (
            'was taken out: "newest", with unique_for and unique_until="started", lets a call take '
            "the place of the queued one; the option debounce, in seconds, takes the place of this "
            'one, of unique_for and of a countdown, as lock_debounce=30 or lock={"debounce": 30}'
        )
        raise OptionSource(level, name).wrong(value, hint)
    return _one_of("existing", "fail", NEWEST)(level, name, value)


def _limit(level: str, name: str, value: Any) -> Any:
    return value if callable(value) else check_limit(level, name, value)


def _rate(level: str, name: str, value: Any) -> str | dict[str, str] | None:
    """Return a rate as text, or a dict of texts: a message may carry it."""
    checked = check_rate(level, name, value)
    if isinstance(checked, dict):
        return {template: str(rate) for template, rate in checked.items()}
    return None if checked is None else str(checked)


def check_backoff(level: str, name: str, value: Any) -> Backoff:
    """Return the value of an option `backoff`, also from a message; raises SettingsError."""
    wrong = OptionSource(level, name).wrong
    if isinstance(value, Mapping):
        try:
            return Backoff.from_message(value)
        except SettingsError as error:
            hint = f"{error.level}: {error.name}={error.value}: {error.hint}"
            raise wrong(dict(value), hint) from None
    if not isinstance(value, Backoff):
        raise wrong(value, "must be a Backoff, as Backoff(first=0.25, cap=30)")
    return value


def option(default: Any, check: Callable[[str, str, Any], Any]) -> Any:
    """Return a field of the table. check: as of a `Setting`."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class TaskLockOptions:
    """The table of options: each with its default and its check. Times in seconds.

    An instance has the options in force for one run. The page of options has the meanings.
    """

    key: Any = option(None, check_key)
    args: tuple[str, ...] | None = option(None, check_args)
    # `check_options` compares it with the app's times
    ttl: float = option(DEFAULT_TTL, check_seconds)
    renew: bool = option(True, true_or_false)
    max_hold: float | None = option(None, seconds_or_none)
    wait: float = option(0.0, partial(check_wait, most=LONGEST_WAIT))
    on_conflict: Any = option("defer", _one_of("defer", "skip", "fail", or_callable=True))
    backoff: Backoff = option(Backoff(), check_backoff)
    max_wait: float | None = option(None, seconds_or_none)
    on_give_up: str = option("fail", _one_of("fail", "skip"))
    on_lost: str = option("abort", _one_of("abort", "warn"))
    on_unreachable: str = option("defer", _one_of("defer", "fail", "run"))
    limit: Any = option(1, _limit)
    rate: str | Mapping[str, str] | None = option(None, _rate)
    fencing: bool = option(False, true_or_false)
    unique_for: float | None = option(None, seconds_or_none)
    unique_until: str = option("finished", _one_of("started", "finished", "expired"))
    on_duplicate: str = option("existing", _on_duplicate)
    debounce: float | None = option(None, seconds_or_none)
    debounce_max: float | None = option(None, seconds_or_none)

    @property
    def is_unique(self) -> bool:
        """Whether a send is deduplicated, or debounced."""
        return any(getattr(self, name) is not None for name in UNIQUE_BY)


OPTION: Mapping[str, Setting] = {
    row.name: Setting(row.metadata["check"], row.default) for row in fields(TaskLockOptions)
}
BUILT_IN: Mapping[str, Any] = {name: setting.default for name, setting in OPTION.items()}
