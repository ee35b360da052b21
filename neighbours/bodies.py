"""What the bodies of a story note, and what follows from it; standard library only.

All processes of a run append to one file. Its times are of CLOCK_MONOTONIC, which all processes of
one machine share. So whether two bodies overlapped is seen from outside, by no lock and no server.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Note:
    """One line. event: "begin" or "end" of a body, or "kill" of a worker.

    task, key: the id of the message, and its key. at: seconds. group: the process group of the
    worker, whose number is the pid of its leader.
    """

    event: str
    task: str
    key: str
    at: float
    group: int


@dataclass(frozen=True)
class Span:
    """A body's time. whole: whether it reached its end."""

    task: str
    key: str
    begin: float
    end: float
    whole: bool


def note(file: Path, event: str, task: str = "-", key: str = "-", group: int | None = None) -> None:
    """Append a line; so short a line is written at once. group: None means this process's."""
    group = os.getpgid(0) if group is None else group
    line = f"{event} {task} {key} {time.monotonic()!r} {group}\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_notes(file: Path) -> list[Note]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        Note(event, task, key, float(at), int(group))
        for event, task, key, at, group in map(str.split, lines)
    ]


def spans(notes: Iterable[Note]) -> list[Span]:
    """Return the bodies, in the order of their begins. One that was killed ends with its worker."""
    begun: list[Note] = []
    ends: dict[Note, tuple[float, bool]] = {}
    for each in notes:
        if each.event == "begin":
            begun.append(each)
        for body in _ended_by(each, begun):
            ends.setdefault(body, (each.at, each.event == "end"))
    return [
        Span(body.task, body.key, body.at, *ends.get(body, (math.inf, False))) for body in begun
    ]


def _ended_by(line: Note, begun: Iterable[Note]) -> Iterator[Note]:
    """Yield the bodies that a line ends, or that have ended before."""
    for body in begun:
        if body.group == line.group and (
            line.event == "kill" or (line.event == "end" and body.task == line.task)
        ):
            yield body


def overlaps(bodies: Iterable[Span]) -> int:
    """Return how many bodies began before an earlier one of the same key had ended."""
    by_key: defaultdict[str, list[Span]] = defaultdict(list)
    for body in bodies:
        by_key[body.key].append(body)
    count = 0
    for of_key in by_key.values():
        latest = -math.inf
        for body in sorted(of_key, key=lambda each: each.begin):
            count += body.begin < latest
            latest = max(latest, body.end)
    return count


def whole_runs(bodies: Iterable[Span]) -> Counter[str]:
    """Return how many runs of each task id reached their end."""
    return Counter(body.task for body in bodies if body.whole)
