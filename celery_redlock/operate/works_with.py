"""What was run beside the package, and what of it holds for the versions that are installed here.

The rows are in `works_with.json`, which `python3 -m neighbours` of the repository writes, and
docs/reference/works-with.md shows. Not here: `doctor --neighbours`, which prints them (`cli/`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeAlias

ROWS_FILE = Path(__file__).with_name("works_with.json")
IN_EACH_RUN = ("celery", "kombu", "redis", "psycopg")  # distributions; the last one in some runs
RUN = "run"  # the verdict of what is in each run
UNTRIED = "not run"
Versions: TypeAlias = Mapping[str, str]  # by the names of distributions or servers


@dataclass(frozen=True)
class InstalledNeighbour:
    """Distributions that are installed here, and what a published row says of them.

    installed: their versions here. verdict: of the row; RUN or UNTRIED if no row is about them.
    others: the versions with which it was run, if other ones are installed here. name, kind: of the
    row, or "". run_with: all versions of its run, also of servers. sentence: what to know.
    """

    installed: Versions
    verdict: str
    others: Versions = field(default_factory=dict)
    name: str = ""
    kind: str = ""
    run_with: Versions = field(default_factory=dict)
    sentence: str = ""
    setting: str = ""
    error: str = ""
    date: str = ""
    commit: str = ""

    @property
    def title(self) -> str:
        """The name and the kind, as "RabbitMQ (brokers)"; "" if no row is about it."""
        return f"{self.name} ({self.kind.replace('_', ' ')})" if self.name else ""

    @property
    def verdict_here(self) -> str:
        """The verdict, with the versions for which it was found if they are others."""
        return f"{self.verdict}, with {named(self.others)}" if self.others else self.verdict

    @property
    def advice(self) -> str:
        """What to know, with the setting or the error."""
        setting = f"Set {self.setting}." if self.setting else ""
        error = f"The error: {self.error}" if self.error else ""
        return " ".join(filter(None, (self.sentence, setting, error)))


def named(versions: Versions) -> str:
    """Return versions for people, as "celery 5.7.0, kombu 5.7.0"."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def read_works_with() -> list[Mapping[str, Any]]:
    """Return all published rows."""
    by_kind = json.loads(ROWS_FILE.read_text(encoding="utf-8"))
    return [row for rows in by_kind.values() for row in rows]


def installed_distributions() -> Versions:
    """Return the version of each distribution of this environment, by its normalized name."""
    found: dict[str, str] = {}
    for one in distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        found.setdefault(name, one.version)  # the first one is what an import finds
    return found


def neighbours_among(
    installed: Versions, rows: Sequence[Mapping[str, Any]]
) -> list[InstalledNeighbour]:
    """Return what the rows say of what is installed: Celery and its own first, then row by row.

    A row is about an environment that has all its distributions. A distribution of which only rows
    of other environments tell is not run, and comes last.
    """
    first = [*_in_each_run(installed, rows)]
    about = [row for row in rows if row.get("distributions")]
    found = [_beside(installed, row) for row in about if {*row["distributions"]} <= {*installed}]
    told = {name for one in (*first, *found) for name in one.installed}
    return [*first, *found, *_without_row(installed, about, told)]


def _in_each_run(
    installed: Versions, rows: Sequence[Mapping[str, Any]]
) -> Iterator[InstalledNeighbour]:
    runs = [row for row in rows if "beside" in row]
    for name in IN_EACH_RUN:
        if name not in installed:
            continue
        own = {name: installed[name]}
        run_with = [row["beside"][name] for row in runs if name in row["beside"]]
        count = run_with.count(installed[name])
        sentence = f"{count} of {len(runs)} runs had this version."
        if count or not run_with:
            yield InstalledNeighbour(own, RUN if count else UNTRIED, sentence=sentence)
        else:
            others = {name: ", ".join(sorted(set(run_with)))}
            yield InstalledNeighbour(own, RUN, others, sentence=sentence)


def _beside(installed: Versions, row: Mapping[str, Any]) -> InstalledNeighbour:
    run_with: Versions = row.get("versions", {})
    own = {name: installed[name] for name in row["distributions"]}
    return InstalledNeighbour(
        own,
        row["verdict"],
        {name: run_with[name] for name in own if run_with.get(name, own[name]) != own[name]},
        name=row["name"],
        kind=row["kind"],
        run_with=run_with,
        sentence=row["sentence"] if row["verdict"] != UNTRIED else _sentence(row["reason"]),
        **{name: row.get(name, "") for name in ("setting", "error", "date", "commit")},
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _without_row(
    installed: Versions, rows: Sequence[Mapping[str, Any]], told: Collection[str]
) -> Iterator[InstalledNeighbour]:
    missing: dict[str, set[str]] = {}
    for row in rows:
        for name in row["distributions"]:
            if name in installed and name not in told:
                missing.setdefault(name, set()).update(row["distributions"])
    for name, together in sorted(missing.items()):
        others = ", ".join(sorted(together - installed.keys()))
        sentence = f"It was only run together with distributions that are not here: {others}."
        yield InstalledNeighbour({name: installed[name]}, UNTRIED, sentence=sentence)
