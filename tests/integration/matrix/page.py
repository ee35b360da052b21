"""The table as `docs/ends-of-life.md` shows it, made of what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.integration.matrix.ends import ENDS, POOLS, After, End, Pair

PAGE = Path(__file__).resolve().parents[3] / "docs" / "ends-of-life.md"
BEGIN, END = "<!-- the table: python -m tests.integration.matrix --page -->", "<!-- its end -->"


def table() -> str:
    """Return the table in Markdown: a line for each end, and each group of pools that differs."""
    head = ["end of life", "pools", "acknowledged early", "acknowledged late", "freed by"]
    return "\n".join(map(_line, [head, ["---"] * len(head), *_rows()]))


def _rows() -> Iterator[list[str]]:
    for end in ENDS:
        name = end.name
        for (early, late), pools in _groups(end).items():
            freed = " / ".join(dict.fromkeys((early.freed, late.freed)))
            yield [name, ", ".join(pools), _told(early), _told(late), freed]
            name = ""
        if others := [pool for pool in POOLS if pool not in end.pools]:
            yield [name, ", ".join(others), "not in this pool", "", ""]


def _groups(end: End) -> dict[Pair, list[str]]:
    groups: dict[Pair, list[str]] = {}
    for pool in POOLS:
        early, late = end.after(pool, late=False), end.after(pool, late=True)
        if early is not None and late is not None:
            groups.setdefault((early, late), []).append(pool)
    return groups


def _told(after: After) -> str:
    heir = ", the last by the next worker" if after.heir else ""
    bodies = {0: "no body", 1: "1 body"}.get(after.bodies, f"{after.bodies} bodies")
    return f"{after.state}, {bodies}{heir}"


def _line(words: list[str]) -> str:
    return f"| {' | '.join(words)} |"


def with_table(text: str) -> str:
    """Return the page with its table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
