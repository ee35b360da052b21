"""How commands print: lines, tables, JSON, durations."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from typing import Any

import click

from celery_redlock.label import escaped
from celery_redlock.lock.platform.clock import SystemClock

WIDE = 10_000  # columns if stdout is no terminal, so that no line of a pipe is cut
GAP = "  "  # between two columns

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@dataclass(frozen=True)
class Table:
    """A table of text.

    none: the line that is printed if there are no rows. expanded: one cell a line in any case, as
    the expanded display of psql.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    none: str
    expanded: bool = False

    def lines(self, width: int) -> list[str]:
        """Return the table; if it is wider than this, one cell a line, so that no cell is cut."""
        if not self.rows:
            return [self.none]
        rows = [[escaped(cell) for cell in row] for row in self.rows]
        widths = self._widths(rows)
        if self.expanded or sum(widths) + len(GAP) * (len(widths) - 1) > width:
            return [*self._one_cell_a_line(rows)]
        return [_bold(_in_columns(self.heads, widths)), *(_in_columns(row, widths) for row in rows)]

    def cut_lines(self, width: int, height: int) -> list[str]:
        """Return the table in at most this many columns and lines; long cells are cut."""
        if not self.rows:
            return [self.none]
        shown = self.rows if len(self.rows) < height else self.rows[: height - 2]
        rows = [[escaped(cell) for cell in row] for row in shown]
        widths = self._widths(rows)
        while sum(widths) + len(GAP) * (len(widths) - 1) > width:
            widths[widths.index(max(widths))] -= 1
        lines = [_bold(_in_columns(self.heads, widths)), *(_in_columns(r, widths) for r in rows)]
        more = len(self.rows) - len(shown)
        return [*lines, f"... and {more} more"] if more else lines

    def _widths(self, rows: Sequence[Sequence[str]]) -> list[int]:
        columns = [[head] for head in self.heads]
        for row in rows:
            for column, cell in zip(columns, row, strict=False):
                column.append(cell)
        return [max(map(len, column)) for column in columns]

    def _one_cell_a_line(self, rows: Sequence[Sequence[str]]) -> Iterator[str]:
        width = max(map(len, self.heads))
        for number, row in enumerate(rows):
            if number:
                yield ""
            for head, cell in zip(self.heads, row, strict=False):
                if cell:
                    yield _bold(head) + " " * (width - len(head)) + GAP + cell


def _in_columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        f"{cell if len(cell) <= width else cell[: width - 1] + '~':<{width}}"
        for cell, width in zip(cells, widths, strict=False)
    )
    return GAP.join(padded).rstrip()


def _bold(text: str) -> str:
    return click.style(text, bold=True)


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


def print_line(line: str, *, err: bool = False) -> None:
    """Print one line. err: to stderr."""
    click.echo(escaped(line), err=err)


def print_all(*shown: str | Table) -> None:
    """Print lines and tables, one below the other."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    for one in shown:
        for line in [escaped(one)] if isinstance(one, str) else one.lines(width):
            click.echo(line)


def as_data(shown: Any) -> Any:
    """Return records for JSON: each field that their repr shows, and None for infinity."""
    if is_dataclass(shown):
        return {one.name: as_data(getattr(shown, one.name)) for one in fields(shown) if one.repr}
    if isinstance(shown, Mapping):
        return {key: as_data(one) for key, one in shown.items()}
    if isinstance(shown, (list, tuple)):
        return [as_data(one) for one in shown]
    return None if isinstance(shown, float) and math.isinf(shown) else shown


def print_json(data: Any) -> None:
    """Print JSON, for programs."""
    click.echo(json.dumps(data, indent=2, default=str))


def command_error(text: str) -> click.ClickException:
    """Return the error that ends a command with this line and exit status 1."""
    return click.ClickException(escaped(text))
