"""Where each option is set: the level and the name as written there, for errors and for people."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import LONGEST_VALUE, SettingsError


@dataclass(frozen=True)
class OptionSource:
    """Where an option is set. level: in words, as "app"; name: as written at that level."""

    level: str
    name: str

    def __str__(self) -> str:
        return self.level if self.level == "built-in" else f"{self.level}: {self.name}"

    def wrong(self, value: object, hint: str) -> SettingsError:
        """Return the error for a wrong value that is set here."""
        shown = "..." if "://" in repr(value) else repr(value)  # a URL may hold a password
        return SettingsError(self.level, self.name, shown, hint)


SourceOf = Callable[[str], OptionSource]  # from an option's name to its source at one level
# options that were taken out, and what to take instead
TAKEN_OUT = {
    "max_deferrals": (
        "max_wait ends a wait by its time, and a callable on_conflict by the number of deferrals"
    )
}


def built_in_source(name: str) -> OptionSource:
    """Return the source of an option that no level sets."""
    return OptionSource("built-in", name)


def app_source(name: str) -> OptionSource:
    """Return the source of an option that is set for the whole app."""
    return OptionSource("app", f"redlock_{name}")


def pattern_source(kind: str, pattern: str) -> SourceOf:
    """Return the sources of a queue's or task's name or glob. kind: "queue" or "task"."""
    return lambda name: OptionSource(
        f"{kind} {pattern!r}", f"redlock_{kind}s[{pattern!r}][{name!r}]"
    )


def tasks_source(pattern: str) -> OptionSource:
    """Return the source of an entry of `redlock_tasks` as a whole."""
    return OptionSource("app", f"redlock_tasks[{pattern!r}]")


def task_source(task_name: str) -> SourceOf:
    """Return the sources of a task's own `lock_*` attributes."""
    return lambda name: OptionSource(f"task {task_name!r}", f"lock_{name}")


def call_source(name: str) -> OptionSource:
    """Return the source of an option that is set for a single call."""
    return OptionSource("call", f"lock={{{name!r}}}")


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
        shown = {option.name: _shown(option.value) for option in self.options}
        if self["key"].value is None and self["args"].value is None:
            shown["key"] = "all arguments"
        rows = [(option.name, shown[option.name], str(option.source)) for option in self.options]
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c}" for a, b, c in rows]
        return "\n".join([f"{self.task} in queue {self.queue}", *lines])


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return repr(list(value))  # as people write it
    return str(getattr(value, "__qualname__", value)) if callable(value) else repr(value)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a name close to a known one, else all known names.

    For the name of an option that was taken out: what to take instead.
    """
    for option, instead in TAKEN_OUT.items():
        if str(name).lower().endswith(option):
            return f"; {instead}"
    known = list(known)
    close = difflib.get_close_matches(str(name)[:LONGEST_VALUE], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"
