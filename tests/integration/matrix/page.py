"""The table as `docs/explanation/crashes-and-shutdown.md` shows it, made of what is expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.integration.matrix.ends import ENDS, POOLS, After, End, Pair

PAGE = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "crashes-and-shutdown.md"
BEGIN, END = "<!-- the table: python -m tests.integration.matrix --page -->", "<!-- its end -->"


def table() -> str:
    """Return the table in Markdown: a line for each end, and each group of pools that differs."""
    head = ["end of life", "pools", "acknowledged early", "acknowledged late", "freed by"]
    return "\n".join(map(_line, [head, ["---"] * len(head), *_rows()]))


def _rows() -> Iterator[list[str]]:
    for end in ENDS:
        now = [(pools, "", pair) for pair, pools in _groups(end, POOLS).items()]
        rabbits = _groups(end, [pool for pool in POOLS if pool in end.on_rabbitmq], "rabbitmq")
        now += [(pools, " on RabbitMQ", pair) for pair, pools in rabbits.items()]
        before = _groups(end, [pool for pool in POOLS if pool in end.before], newest=False)
        older = [(pools, " before Celery 5.7", pair) for pair, pools in before.items()]
        name = end.name
        # first what is so, then what was otherwise, then who cannot do it
        for pools, when, pair in sorted([*now, *older], key=lambda row: row[2] is None):
            yield [name, ", ".join(pools) + when, *_told(pair, end.why)]
            name = ""


def _groups(
    end: End, pools: Sequence[str], broker: str = "redis", *, newest: bool = True
) -> dict[Pair | None, list[str]]:
    groups: dict[Pair | None, list[str]] = {}
    for pool in pools:
        early, late = (end.after(pool, broker, late=late, newest=newest) for late in (False, True))
        pair = None if early is None or late is None else (early, late)
        groups.setdefault(pair, []).append(pool)
    return groups


def _told(pair: Pair | None, why: str) -> list[str]:
    """Return the last three cells of a row; pair: None where a pool cannot do it, and why."""
    if pair is None:
        return [why, "", ""]
    freed = " / ".join(dict.fromkeys(after.freed for after in pair))
    return [*map(_end, pair), freed]


def _end(after: After) -> str:
    heir = ", the last by the next worker" if after.heir else ""
    bodies = {0: "no body", 1: "1 body"}.get(after.bodies, f"{after.bodies} bodies")
    instead = "" if after.instead is None else f"; or {_end(after.instead)}"
    return f"{after.state}, {bodies}{heir}{instead}"


def _line(words: list[str]) -> str:
    return f"| {' | '.join(words)} |"


def with_table(text: str) -> str:
    """Return the page with its table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
