"""Where each option is set: the level and the name as written there, for errors and for people."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import LONGEST_VALUE, SettingsError

# How each level is named, and how an option is written there: "queues" and "tasks" are entries of
# redlock_queues and redlock_tasks, and "task" is a task's own attributes.
_WRITTEN = {
    "built-in": ("built-in", "{name}"),
    "app": ("app", "redlock_{name}"),
    "queues": ("queue {of!r}", "redlock_queues[{of!r}][{name!r}]"),
    "tasks": ("task {of!r}", "redlock_tasks[{of!r}][{name!r}]"),
    "task": ("task {of!r}", "lock_{name}"),
    "call": ("call", "lock={{{name!r}}}"),
}


@dataclass(frozen=True)
class OptionSource:
    """Where an option is set. level: in words, as "app"; name: as written at that level."""

    level: str
    name: str

    @classmethod
    def at(cls, level: str, name: str, of: str = "") -> OptionSource:
        """Return the source of an option at a level.

        level: a key of `_WRITTEN`. of: the name of the task, or the name or glob of the entry.
        """
        words, written = _WRITTEN[level]
        return cls(words.format(of=of), written.format(name=name, of=of))

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
