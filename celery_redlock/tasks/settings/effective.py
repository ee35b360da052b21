"""The options in force for a task in a queue, each with the level that set it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_redlock.tasks.settings.sources import OptionSource


@dataclass(frozen=True)
class OptionValue:
    """One option in force: its value, and where that stands."""

    name: str
    value: Any
    source: OptionSource


@dataclass(frozen=True)
class EffectiveOptions:
    """The options in force for a task in a queue, for people; as text a table."""

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
