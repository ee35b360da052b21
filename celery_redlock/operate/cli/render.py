"""How answers are shown: tables, words, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from celery_redlock.lock.held_locks import Sight, Standing
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.operate.control import Holder, in_iso

WIDE = 10_000  # columns where nobody looks, so that no line of a pipe is cut

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def in_words(seconds: float) -> str:
    """Return a time in the two largest units that it has."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, size, lesser, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {lesser}"
    return f"{whole // 60} min {whole % 60} s"


def _ago(moment: str | None) -> float:
    """Return the s since a moment, ISO 8601."""
    if moment is None:
        return 0.0
    then = datetime.fromisoformat(moment)
    now = datetime.fromtimestamp(SystemClock().wall_us() / 1e6, then.tzinfo)
    return max(0.0, (now - then) / timedelta(seconds=1))


def _name_of(lock: Standing) -> str:
    return f"{lock.resource} (permit {lock.permit})" if lock.permit else lock.resource


def _who(lock: Standing) -> str:
    holder = Holder.of(lock.holder)
    return f"{holder.task}[{holder.task_id}] on {holder.worker}" if holder.task else holder.label


def _locks_as_rows(standing: Iterable[Standing]) -> Rows:
    rows = []
    for lock in standing:
        holder = Holder.of(lock.holder)
        held_for = "" if lock.since is None else in_words(_ago(in_iso(lock.since)))
        valid_for = in_words(lock.valid_for) if lock.held else "not held: no quorum"
        votes = f"{len(lock.votes)}, {lock.needed} needed"
        who = (holder.task or holder.label, holder.task_id, holder.worker)
        rows.append((_name_of(lock), *who, held_for, valid_for, votes))
    heads = ("RESOURCE", "HOLDER", "ID", "WORKER", "HELD FOR", "VALID FOR", "VOTES")
    return Rows(heads, rows, "No locks are held.")


def _votes_as_rows(lock: Standing, sight: Sight) -> Rows:
    rows = [(node, in_words(left)) for node, left in lock.votes.items()]
    return Rows(("NODE", "ITS KEY STAYS"), [*rows, *sight.failing.items()], "")


def _locks_as_data(standing: Iterable[Standing]) -> list[dict[str, Any]]:
    return [
        {
            "resource": lock.resource,
            "permit": lock.permit,
            "holder": asdict(Holder.of(lock.holder)),
            "since": in_iso(lock.since),
            "held_for": None if lock.since is None else _ago(in_iso(lock.since)),
            "held": lock.held,
            "valid_for": _finite(lock.valid_for),
            "votes": {node: _finite(left) for node, left in lock.votes.items()},
            "needed": lock.needed,
        }
        for lock in standing
    ]


def _finite(seconds: float) -> float | None:
    """Return s; None for those without an end, which JSON has no number for."""
    return None if math.isinf(seconds) else seconds


def _failing_as_text(sight: Sight) -> list[str]:
    return [f"{node} is not asked: {cause}" for node, cause in sight.failing.items()]


class Rows:
    """Rows under heads; one cell a line where the terminal is too narrow for whole names and ids.

    none: what is said where there are no rows. below: one cell a line in any case.
    """

    def __init__(
        self,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        none: str,
        *,
        below: bool = False,
    ) -> None:
        self._heads, self._rows, self._none, self._below = heads, rows, none, below

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._rows:
            yield _text(self._none)
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in self._heads:
            table.add_column(head, no_wrap=True)
        for row in self._rows:
            table.add_row(*map(_text, row))
        needed = Measurement.get(console, options.update(max_width=WIDE), table).maximum
        if needed <= options.max_width and not self._below:
            yield table
        else:
            yield from self._one_below_the_other()

    def _one_below_the_other(self) -> Iterator[Text]:
        width = max(map(len, self._heads))
        for number, row in enumerate(self._rows):
            if number:
                yield Text()
            for head, cell in zip(self._heads, row, strict=False):
                if cell:
                    yield Text(f"{head:<{width}}  ", style="bold", overflow="fold") + _text(cell)


def _text(cell: str) -> Text:
    return Text(_visible(cell))  # a str is markup, in which a name in brackets would be lost


def _visible(text: str) -> str:
    """Return a line with its control characters spelled out.

    Whoever names a resource, or answers as a node, is not to command the operator's terminal.
    """
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def _say(line: str, *, err: bool = False) -> None:
    click.echo(_visible(line), err=err)


def _refused(why: str) -> click.ClickException:
    return click.ClickException(_visible(why))


def _console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=WIDE)


def _print(*shown: Any) -> None:
    console = _console()
    for one in shown:
        line = isinstance(one, str)
        shown_as = _visible(one) if line else one
        console.print(shown_as, markup=False, highlight=False, soft_wrap=line)


def _print_json(shown: Any) -> None:
    click.echo(json.dumps(shown, indent=2, default=str))
