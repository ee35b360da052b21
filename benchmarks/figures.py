"""From the times of one interleaved run to ratios: no figure here means anything by itself."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

Kind = TypeVar("Kind", bound=Hashable)


def rotations(kinds: Iterable[Kind], count: int) -> Iterator[list[Kind]]:
    """Return so many orders of the same kinds, shuffled: none always runs after the same one."""
    order = list(kinds)
    chance = random.Random(1)
    for _ in range(count):
        chance.shuffle(order)
        yield list(order)


class Times(Generic[Kind]):
    """Seconds a kind, one for each rotation, in the order of the rotations."""

    def __init__(self) -> None:
        self._seconds: dict[Kind, list[float]] = {}

    def add(self, rotation: Mapping[Kind, float]) -> None:
        """Take the seconds of each kind in one rotation."""
        for kind, seconds in rotation.items():
            self._seconds.setdefault(kind, []).append(seconds)

    def p50(self, kind: Kind) -> float:
        """Return the median of a kind's seconds."""
        return median(self._seconds[kind])

    def ratio(self, kind: Kind, to: Kind) -> float:
        """Return the median of the ratios of two kinds, each ratio of one rotation.

        What slows the machine for a while slows both, and is in neither.
        """
        pairs = zip(self._seconds[kind], self._seconds[to], strict=True)
        return median(mine / theirs for mine, theirs in pairs)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0) -> str:
    """Return rows of text in columns, flush right but for so many on the left."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


@dataclass(frozen=True)
class Aim:
    """What a figure of one run is to stay under; name: what it is a figure of.

    is_least: it is to be the bound or more instead.
    """

    name: str
    figure: float
    bound: float
    is_least: bool = False

    def row(self) -> list[str]:
        """Return the figure beside its aim."""
        if self.is_least:
            is_met = self.figure >= self.bound
            sign = ">="
        else:
            is_met = self.figure <= self.bound
            sign = "<="
        verdict = "met" if is_met else "missed"
        return [self.name, f"{self.figure:.2f}", f"{sign} {self.bound:g}", verdict]


def against(aims: Iterable[Aim]) -> str:
    """Return the aims of a run as a table."""
    return table(["aims", "figure", "aim", ""], [aim.row() for aim in aims], left=1)
