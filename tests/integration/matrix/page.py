"""The tables as `docs/reference/how-runs-end.md` shows them, made of what is expected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.integration.matrix.ends import ENDS, NOBODY, POOLS, RUN, After, End, Pair

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "how-runs-end.md"
BEGIN = "<!-- the tables: python -m tests.integration.matrix --page -->"
END = "<!-- their end -->"
# each heading of the page, and the beginnings of the names of its ends
CAUSES = {
    "The body ends": (
        "success", "on_success", "after_return", "exception", "unpicklable", "on_failure",
        "MemoryError", "SystemExit", "KeyboardInterrupt", "GreenletExit", "Ignore", "Reject",
        "the result backend", "self.", "autoretry",
    ),
    "A time limit, revoke or expires": ("soft limit", "hard limit", "revoked", "expired"),
    "A process is killed or replaced": ("kill", "max_"),
    "The worker shuts down": ("warm", "soft shutdown", "cold"),
}  # fmt: skip


def tables() -> str:
    return "\n\n".join(f"## {cause}\n\n{_table(ends_of(cause))}" for cause in CAUSES)


def ends_of(cause: str) -> list[End]:
    """Return the ends with this cause, in the order in which they are measured."""
    return [end for end in ENDS if end.name.startswith(CAUSES[cause])]


def _table(ends: Sequence[End]) -> str:
    """Return a table: a line for each end, and each group of pools that differs."""
    head = ["end", "early ack", "late ack"]
    separator = "|" + "---|" * len(head)
    return "\n".join([_line(head), separator, *map(_line, _rows(ends))])


def _rows(ends: Sequence[End]) -> Iterator[list[str]]:
    """Give a row for each group of pools and what is true after an end in them.

    Ends that differ in nothing but their names share a row.
    """
    names: dict[tuple[str, Pair | None, str], list[str]] = {}
    for end in ends:
        # a pool that cannot end a run like this has no row
        groups = [(pools, "", pair) for pair, pools in _groups(end, end.pools).items()]
        rabbits = _groups(end, [pool for pool in POOLS if pool in end.on_rabbitmq], "rabbitmq")
        groups += [(pools, "on RabbitMQ", pair) for pair, pools in rabbits.items()]
        before = _groups(end, [pool for pool in POOLS if pool in end.before], newest=False)
        groups += [(pools, "before Celery 5.7", pair) for pair, pools in before.items()]
        for pools, when, pair in groups:
            row = _place(pools, when), pair, end.why if pair is None else ""
            names.setdefault(row, []).append(end.name.replace(" of the user's", ""))
    for (place, pair, why), alike in names.items():
        yield [_named(alike) + place, *([why, ""] if pair is None else map(_end, pair))]


def _place(pools: Sequence[str], when: str) -> str:
    """Return the end of a row's first cell: the pools if they are not all, and when."""
    told = [] if len(pools) == len(POOLS) else [", ".join(pools)]
    where = ", ".join([*told, *([when] if when else [])])
    return f" ({where})" if where else ""


def _named(names: Sequence[str]) -> str:
    """Return the names of ends in one text; what the last one begins with is not repeated."""
    told = [names[0]]
    for before, name in itertools.pairwise(names):
        begin, comma, detail = name.rpartition(", ")
        is_alike = bool(comma) and before.startswith(f"{begin}, ")
        told.append(f", {detail}" if is_alike else f"; {name}")
    return "".join(told)


def _groups(
    end: End, pools: Sequence[str], broker: str = "redis", *, newest: bool = True
) -> dict[Pair | None, list[str]]:
    groups: dict[Pair | None, list[str]] = {}
    for pool in pools:
        early, late = (end.after(pool, broker, late=late, newest=newest) for late in (False, True))
        pair = None if early is None or late is None else (early, late)
        groups.setdefault(pair, []).append(pool)
    return groups


def _end(after: After) -> str:
    bodies = {0: ", no body", 1: ""}.get(after.bodies, f", {after.bodies} bodies")
    ran = ", next worker" if after.heir and after.bodies == 2 else bodies
    freed = "" if after.freed in (RUN, NOBODY) else f"; lock: {after.freed}"
    instead = "" if after.instead is None else f"; or {_end(after.instead)}"
    return f"{after.state}{ran}{freed}{instead}"


def _line(words: list[str]) -> str:
    return f"| {' | '.join(words)} |"


def with_tables(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"
