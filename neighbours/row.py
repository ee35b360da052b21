"""What is declared of a neighbour, what a run of it saw, and the row that is published of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neighbours.environment import distribution_of

if TYPE_CHECKING:
    from neighbours.run import Run

KINDS = (
    *("brokers", "backends", "schedulers", "agents", "task_classes", "applications"),
    *("web_servers", "lock_nodes"),
)
CONTROLS = "controls"  # have no row: they show that a run finds what it should
VERDICTS = WORKS, WITH_SETTING, REFUSED, DOES_NOT, NOT_RUN = (
    *("works", "works with this setting", "refused", "does not", "not run"),
)
ROWS = Path(__file__).parent.parent / "celery_redlock" / "operate" / "works_with.json"


@dataclass(frozen=True)
class Seen:
    """What one run saw.

    overlaps: how often a body began while another held its key. lost: messages that never ran to
    their end, and should have. run_twice: messages of which two runs reached their end.
    differences: other steps that went otherwise than the story says. refused: the error with which
    the neighbour was refused. states: how many messages have which state in the backend at the end.
    shows: what the neighbour itself shows, and other facts, by a name for the reader.
    """

    overlaps: int = 0
    lost: int = 0
    run_twice: int = 0
    differences: tuple[str, ...] = ()
    refused: str = ""
    states: Mapping[str, int] = field(default_factory=dict)
    shows: Mapping[str, Any] = field(default_factory=dict)

    def faults(self) -> set[str]:
        """Return the names of all that went otherwise than it should."""
        counted = {name for name in ("overlaps", "lost", "run_twice") if getattr(self, name)}
        return counted | set(self.differences) | ({REFUSED} if self.refused else set())


@dataclass(frozen=True)
class Neighbour:
    """Other software that runs beside the package, and what a run of it should see.

    name: as a reader looks for it, such as "RabbitMQ, quorum queues". kind: of `KINDS`, or
    CONTROLS. run: starts what it needs, and returns what it saw; None if it is not run.
    requirements: exact, such as "SQLAlchemy==2.1.9"; Celery, kombu and redis-py are always there.
    distributions: those of which the row gives the version; empty means all of the requirements.
    forced: they hold against what the package requires.
    python: the release that it needs, such as "3.13"; empty means that of the run.
    verdict: one of `VERDICTS`. sentence: what a reader has to know. setting: without which it does
    not work. error: a part of the error with which it is refused.
    faults: what a run sees that should not be, as `Seen.faults` names it: none if it works.
    reason, by_hand: of one that is not run: why, and how to run it.
    """

    name: str
    kind: str
    sentence: str
    run: Callable[[Run], Seen] | None = None
    requirements: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    forced: bool = False
    python: str = ""
    verdict: str = WORKS
    setting: str = ""
    error: str = ""
    faults: frozenset[str] = frozenset()
    reason: str = ""
    by_hand: str = ""

    def all_distributions(self) -> tuple[str, ...]:
        """Return the normalized names of those of which the row gives the version."""
        return self.distributions or tuple(map(distribution_of, self.requirements))

    def surprises(self, seen: Seen) -> list[str]:
        """Return what a run saw and the declaration does not say, or the other way round."""
        found = [f"not declared: {name}" for name in sorted(seen.faults() - self.faults)]
        found += [f"not seen: {name}" for name in sorted(self.faults - seen.faults())]
        if self.error and self.error not in seen.refused:
            found.append(f"the error does not say {self.error!r}: {seen.refused!r}")
        return found


@dataclass(frozen=True)
class Row:
    """What is published of a neighbour. date: "2026-11-30". commit: of the package that was run.

    versions: of the neighbour's distributions and servers, by their names. distributions: what an
    app's environment has if the row is about it. beside: the versions of what is in each run, such
    as Celery's.
    """

    name: str
    kind: str
    verdict: str
    sentence: str
    distributions: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    setting: str = ""
    error: str = ""
    date: str = ""
    commit: str = ""
    seen: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    by_hand: str = ""

    @classmethod
    def of(cls, neighbour: Neighbour, **facts: Any) -> Row:
        """Return the row of a neighbour. facts: what its run adds; none if it was not run."""
        shared = ("name", "kind", "verdict", "sentence", "setting", "error", "reason", "by_hand")
        told = {name: getattr(neighbour, name) for name in shared}
        return cls(**told, distributions=neighbour.all_distributions(), **facts)

    def as_json(self) -> dict[str, Any]:
        """Return the fields that say something."""
        return {name: value for name, value in asdict(self).items() if value}


def read_rows(path: Path = ROWS) -> list[Row]:
    """Return all published rows, in the order of their kinds and names."""
    if not path.exists():
        return []
    return [Row(**fields) for rows in json.loads(path.read_text()).values() for fields in rows]


def write_rows(new: Iterable[Row], known: Iterable[tuple[str, str]], path: Path = ROWS) -> None:
    """Put new rows in the place of earlier ones of the same kind and name.

    known: the kind and name of each neighbour that is declared; a row of another is dropped.
    """
    rows = {(row.kind, row.name): row for row in (*read_rows(path), *new)}
    kept = {place: rows[place] for place in known if place in rows}
    table = {kind: [row.as_json() for row in kept.values() if row.kind == kind] for kind in KINDS}
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
