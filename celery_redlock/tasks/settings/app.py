"""Where each option is set, and the settings of a whole app: their table, checked and frozen.

`OptionSource` names a level and an option as written there, for errors and for people. The meaning
of each setting stands in docs/reference/settings.md; a test compares names and defaults. Not here:
the options of a task (`options.py`), and how an app's configuration is read (`levels.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_redlock.errors import SettingsError, closest_or_all
from celery_redlock.lock.validation import check_drift, check_guard, check_prefix, check_seconds

DEFAULT_TTL = 30.0  # seconds
DEFAULT_MAX_TTL = 60.0  # seconds
DEFAULT_PREFIX = "redlock"
CELERY_PREFIX = "celery."  # the start of the names of Celery's own tasks
BEAT = "celery_redlock.beat:LockedScheduler"
WRAPS_ITSELF = (
    "is the scheduler that takes the lock: name the scheduler that it is to wrap, or None"
)
LOOPBACK = "127.0.0.1"  # metrics have no password: others see them only if a host is named
# How each level is named, and how an option is written there: "queues" and "tasks" are entries of
# redlock_queues and redlock_tasks, and "task" is a task's own attributes.
_LEVELS = {
    "built-in": ("built-in", "{name}"),
    "app": ("app", "redlock_{name}"),
    "queues": ("queue {of!r}", "redlock_queues[{of!r}][{name!r}]"),
    "tasks": ("task {of!r}", "redlock_tasks[{of!r}][{name!r}]"),
    "task": ("task {of!r}", "lock_{name}"),
    "call": ("call", "lock={{{name!r}: ...}}"),
}


class OptionSource(NamedTuple):
    """Where an option is set. level: in words, as "app"; name: as written at that level."""

    level: str
    name: str

    @classmethod
    def at(cls, level: str, name: str, of: str = "") -> OptionSource:
        """Return the source at a level of `_LEVELS`. of: the task, or the entry, of that level."""
        level_text, name_text = _LEVELS[level]
        return cls(level_text.format(of=of), name_text.format(name=name, of=of))

    def __str__(self) -> str:
        return self.level if self.level == "built-in" else f"{self.level}: {self.name}"

    def wrong(self, value: object, hint: str) -> SettingsError:
        shown = "..." if "://" in repr(value) else repr(value)  # a URL may hold a password
        return SettingsError(self.level, self.name, shown, hint)


SourceOf = Callable[[str], OptionSource]  # from an option's name to its source at one level
REMOVED_OPTION = "max_deferrals"  # an option of earlier versions
REMOVED_OPTION_HINT = (
    "max_wait ends a wait by its time, and a callable on_conflict by the number of deferrals"
)


def leave_out(task_name: str) -> str:
    """Return how a glob in `redlock_tasks` leaves a task out, as a sentence of an error."""
    return f"To leave it out, set {{{task_name!r}: {{'key': False}}}} first"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a name close to a known one, else all known names."""
    if str(name).lower().endswith(REMOVED_OPTION):
        return f"; {REMOVED_OPTION_HINT}"
    return f"; {closest_or_all(str(name), sorted(known))}"


class Setting(NamedTuple):
    """A setting or option.

    check: takes level, name and value; returns the value to use, or raises SettingsError. default:
    the built-in value.
    """

    check: Callable[[str, str, Any], Any]
    default: Any


@dataclass(frozen=True)
class AppSettings:
    """The settings of a whole app. Times in seconds.

    nodes: empty if no setting names one. options: for all tasks; queues, tasks: options by name or
    glob. countdown_cap: the longest delay of a deferral. metrics: host and port at which a worker
    serves them. call_options: those that a message may carry, None for all. nodes_from: the setting
    that names the nodes, as "broker_url". store_deferred: DEFERRED goes into the result backend.
    beat_scheduler: what celery_redlock.beat wraps; None for the one that Celery would take.
    recovery: the messages of a dead worker are moved back to their queues.
    """

    nodes: tuple[Any, ...] = field(repr=False)  # URLs may hold passwords
    prefix: str
    node_timeout: float
    clock_drift: float
    max_ttl: float
    restart_guard: str
    done_ttl: float
    options: Mapping[str, Any]
    queues: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[str, Mapping[str, Any]]
    countdown_cap: float
    metrics: tuple[str, int] | None = None
    call_options: frozenset[str] | None = None
    nodes_from: str = "redlock_nodes"
    store_deferred: bool = True
    beat_scheduler: Any = None
    recovery: bool = True

    @property
    def built_in_ttl(self) -> float:
        """The ttl that holds if no level sets one: a small max_ttl lowers it."""
        return min(DEFAULT_TTL, self.max_ttl)

    @property
    def ttl(self) -> float:
        """The ttl of a lock that no task takes."""
        return float(self.options.get("ttl", self.built_in_ttl))

    def may_carry(self, option: str) -> bool:
        return self.call_options is None or option in self.call_options


def pattern_for(name: str, patterns: Iterable[str]) -> str | None:
    """Return the pattern that applies to a name: the name itself, else the first matching glob."""
    patterns = list(patterns)
    if name in patterns:
        return name
    return next((glob for glob in patterns if fnmatch.fnmatchcase(name, glob)), None)


def is_glob(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")


def seconds_or_none(level: str, name: str, value: Any) -> float | None:
    """Check an option or setting that is a time above 0, or None."""
    return None if value is None else check_seconds(level, name, value)


def true_or_false(level: str, name: str, value: Any) -> bool:
    """Check an option or setting that is True or False."""
    if not isinstance(value, bool):
        raise OptionSource(level, name).wrong(value, "must be True or False")
    return value


def _listen_address(level: str, name: str, value: Any) -> tuple[str, int] | None:
    """Return the host and port to listen on: a port alone means this machine alone."""
    if value is None:
        return None
    host, _, port = str(value).rpartition(":")
    if isinstance(value, bool) or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        hint = 'must be a port, or "host:port", 0 for any that is free; None for no metrics'
        raise OptionSource(level, name).wrong(value, hint)
    return host.strip("[]") or LOOPBACK, int(port)


def _scheduler(level: str, name: str, value: Any) -> Any:
    """Check what a beat imports at its start: its module may need more than an app has by then."""
    if value is None or isinstance(value, type):
        return value
    if not isinstance(value, str) or not value.strip():
        hint = 'must be a scheduler, as "django_celery_beat.schedulers:DatabaseScheduler", or None'
        raise OptionSource(level, name).wrong(value, hint)
    if value.replace(":", ".") == BEAT.replace(":", "."):
        raise OptionSource(level, name).wrong(value, WRAPS_ITSELF)
    return value


def _checked_elsewhere(level: str, name: str, value: Any) -> Any:
    """Return a value that `levels.py` checks together with others."""
    return value


APP_SETTING: Mapping[str, Setting] = {
    "nodes": Setting(_checked_elsewhere, None),
    "prefix": Setting(check_prefix, DEFAULT_PREFIX),
    "node_timeout": Setting(check_seconds, 0.2),
    "clock_drift": Setting(check_drift, 0.01),
    "max_ttl": Setting(check_seconds, DEFAULT_MAX_TTL),
    "restart_guard": Setting(check_guard, "auto"),
    "done_ttl": Setting(seconds_or_none, None),
    "metrics": Setting(_listen_address, None),
    "call_options": Setting(_checked_elsewhere, None),
    "store_deferred": Setting(true_or_false, True),
    "beat_scheduler": Setting(_scheduler, None),
    "recovery": Setting(true_or_false, True),
    "queues": Setting(_checked_elsewhere, None),
    "tasks": Setting(_checked_elsewhere, None),
}
