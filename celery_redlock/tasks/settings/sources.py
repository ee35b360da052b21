"""Where an option is set: the level and the name as written there, for errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_redlock.errors import SettingsError


@dataclass(frozen=True)
class OptionSource:
    """Where an option stands, for errors: the level in words, and the name as written there."""

    level: str
    name: str

    def __str__(self) -> str:
        return self.level if self.level == "built-in" else f"{self.level}: {self.name}"

    def wrong(self, value: object, hint: str) -> SettingsError:
        """Return the error for a value that stands here."""
        shown = "..." if "://" in repr(value) else repr(value)  # a URL may hold a password
        return SettingsError(self.level, self.name, shown, hint)


def pattern_source(kind: str, pattern: str) -> Callable[[str], OptionSource]:
    """Return where options of a queue's or task's name or glob stand. kind: "queue" or "task"."""
    return lambda name: OptionSource(
        f"{kind} {pattern!r}", f"redlock_{kind}s[{pattern!r}][{name!r}]"
    )


def tasks_source(pattern: str) -> OptionSource:
    """Return where what is said of tasks of others stands as a whole."""
    return OptionSource("app", f"redlock_tasks[{pattern!r}]")


def app_source(name: str) -> OptionSource:
    """Return where an option of the whole app stands."""
    return OptionSource("app", f"redlock_{name}")


def call_source(name: str) -> OptionSource:
    """Return where an option of a single call stands."""
    return OptionSource("call", f"lock={{{name!r}}}")
