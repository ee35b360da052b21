"""How commands print: lines, tables, JSON, durations."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from celery_redlock.errors import escaped
from celery_redlock.lock.platform.clock import SystemClock

WIDE = 10_000  # columns if stdout is no terminal, so that no line of a pipe is cut

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


class AdaptiveTable:
    """A table; on a terminal too narrow for whole names and ids, it is printed one cell a line.

    none: the text that is printed if there are no rows. expanded: one cell a line in any case, as
    the expanded display of psql.
    """

    def __init__(
        self,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        none: str,
        *,
        expanded: bool = False,
    ) -> None:
        self._heads, self._rows, self._none, self._expanded = heads, rows, none, expanded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._rows:
            yield plain_text(self._none)
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in self._heads:
            table.add_column(head, no_wrap=True)
        for row in self._rows:
            table.add_row(*map(plain_text, row))
        needed = Measurement.get(console, options.update(max_width=WIDE), table).maximum
        if needed <= options.max_width and not self._expanded:
            yield table
        else:
            yield from self._one_cell_a_line()

    def _one_cell_a_line(self) -> Iterator[Text]:
        width = max(map(len, self._heads))
        for number, row in enumerate(self._rows):
            if number:
                yield Text()
            for head, cell in zip(self._heads, row, strict=False):
                if cell:
                    label = Text(f"{head:<{width}}  ", style="bold", overflow="fold")
                    yield label + plain_text(cell)


def plain_text(cell: str) -> Text:
    """Return a text without markup: in a str, rich reads a name in brackets as a style."""
    return Text(escaped(cell))


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, size, lesser, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {lesser}"
    return f"{whole // 60} min {whole % 60} s"


def seconds_since(moment: str | None) -> float:
    """Return the seconds since a moment in ISO 8601; 0.0 for None, and for one in the future."""
    if moment is None:
        return 0.0
    then = datetime.fromisoformat(moment)
    now = datetime.fromtimestamp(SystemClock().wall_us() / 1e6, then.tzinfo)
    return max(0.0, (now - then) / timedelta(seconds=1))


def new_console() -> Console:
    """Return a console on stdout that cuts no line if stdout is no terminal."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=WIDE)


def print_line(line: str, *, err: bool = False) -> None:
    """Print one line. err: to stderr."""
    click.echo(escaped(line), err=err)


def print_all(*shown: Any) -> None:
    """Print lines and tables, one below the other."""
    console = new_console()
    for one in shown:
        line = isinstance(one, str)
        text = escaped(one) if line else one
        console.print(text, markup=False, highlight=False, soft_wrap=line)


def print_json(data: Any) -> None:
    """Print JSON, for programs."""
    click.echo(json.dumps(data, indent=2, default=str))


def command_error(text: str) -> click.ClickException:
    """Return the error that ends a command with this line and exit status 1."""
    return click.ClickException(escaped(text))
