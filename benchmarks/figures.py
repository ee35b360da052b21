"""Ratios of times that were measured in one interleaved run, and the tables that show them.

A table is text for the terminal, or stands on a page below the mark that names its place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

Kind = TypeVar("Kind", bound=Hashable)
T = TypeVar("T")


def rotations(kinds: Iterable[Kind], count: int) -> Iterator[list[Kind]]:
    """Yield shuffled orders of the kinds, so that no kind always runs after the same one.

    count: the number of orders.
    """
    order = list(kinds)
    random_source = random.Random(1)
    for _ in range(count):
        random_source.shuffle(order)
        yield list(order)


class Times(Generic[Kind]):
    """The seconds of each kind in each rotation, in the order of the rotations."""

    def __init__(self) -> None:
        self._seconds: dict[Kind, list[float]] = {}

    def add(self, rotation: Mapping[Kind, float]) -> None:
        """Add the seconds of each kind in one rotation."""
        for kind, seconds in rotation.items():
            self._seconds.setdefault(kind, []).append(seconds)

    def p50(self, kind: Kind) -> float:
        """Return the median of a kind's seconds."""
        return median(self._seconds[kind])

    def ratio(self, kind: Kind, reference: Kind) -> float:
        """Return the median over the rotations of the ratio of two kinds.

        Load on the machine slows both kinds of a rotation, so it cancels out.
        """
        pairs = zip(self._seconds[kind], self._seconds[reference], strict=True)
        return median(seconds / reference_seconds for seconds, reference_seconds in pairs)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0) -> str:
    """Return rows of text in columns. left: the number of first columns that are flush left."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of a page."""
    first, *others = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([first, "|" + "---|" * len(head), *others])


def filled(page: str, name: str, texts: Mapping[str, str]) -> str:
    """Return a page with these texts below the lines `<!-- mark -->`, each up to an empty line.

    texts: by mark. name: of the page, for the ValueError if it has no such line.
    """
    for mark, text in texts.items():
        before, begin, remainder = page.partition(f"<!-- {mark} -->\n")
        if not begin:
            raise ValueError(f"{name} has no place for {mark}")
        _, gap, after = remainder.partition("\n\n")
        page = before + begin + text + (gap + after if gap else "\n")
    return page


def percentile(ranked: Sequence[T], share: float) -> T:
    """Return the value below which this share of the sorted ones lies."""
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


@dataclass(frozen=True)
class Aim:
    """The bound that a figure of one run must not exceed. name: describes the figure.

    is_least: the figure must not fall below the bound instead.
    """

    name: str
    figure: float
    bound: float
    is_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the figure is within the bound."""
        return self.figure >= self.bound if self.is_least else self.figure <= self.bound

    def row(self) -> list[str]:
        """Return the figure beside its aim."""
        sign = ">=" if self.is_least else "<="
        verdict = "met" if self.is_met else "missed"
        return [self.name, f"{self.figure:.2f}", f"{sign} {self.bound:g}", verdict]


def against(aims: Iterable[Aim]) -> str:
    """Return the aims of a run as a table."""
    return table(["aims", "figure", "aim", ""], [aim.row() for aim in aims], left=1)
