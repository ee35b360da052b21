"""The command group `celery redlock`, and what its commands share: the app, and how they print.

What they print is in `views.py`: its tables are a `Table` here, its records become JSON by
`as_data`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import click

from celery_redlock.errors import SettingsError
from celery_redlock.label import escaped
from celery_redlock.tasks.startup import load_app

T = TypeVar("T")
ANSWER_TIMEOUT = 5.0  # seconds in which the broker or the result backend must answer a command
WIDE = 10_000  # columns if stdout is no terminal, so that no line of a pipe is cut
GAP = "  "  # between two columns
SHORT_ID = 8  # first characters of a task id, by which tables and people name it
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def named(_: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise click.BadParameter("the name is empty.", param=param)
    return value


def finite(_: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Return an option's number; refuses NaN, which passes each range."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("give a finite number.", param=param)
    return value


class RedlockGroup(click.Group):
    """Commands that print a SettingsError as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            is_given = ctx.find_root().params.get("app") is not None
            use = f"no app is given. Use: celery -A shop redlock {ctx.invoked_subcommand}"
            text = str(error) if is_given else f"{use} (without an app: {error})"
            raise command_error(text) from None


@click.group(cls=RedlockGroup)
def redlock(**_: Any) -> None:
    """Show the locks of tasks, and repair what is wrong with them."""


def app_from(ctx: click.Context) -> Any:
    """Return the app of the command line with all its tasks."""
    return load_app(ctx.find_root().obj.app)


def within_deadline(ask: Callable[[], T]) -> tuple[T | None, str]:
    """Call the broker or the result backend; return its answer and "", else None and the cause."""
    # in a thread: a server that accepts a connection and stays silent would keep a command for ever
    answers: list[tuple[T | None, str]] = []

    def run() -> None:
        try:
            answers.append((ask(), ""))
        except Exception as error:  # each transport and backend has its own
            answers.append((None, str(error) or type(error).__name__))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT)
    return answers[0] if answers else (None, f"no answer within {ANSWER_TIMEOUT:g} s")


@dataclass(frozen=True)
class Table:
    """A table of text.

    none: printed if there are no rows. expanded: one cell a line, as psql's expanded display.
    spare: heads of the columns that a narrow screen does without, the first one first.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    none: str
    expanded: bool = False
    spare: Sequence[str] = ()

    def lines(self, width: int, height: int | None = None) -> list[str]:
        """Return the table in at most this many columns.

        A wider table has one cell a line, so that no cell is cut. With a height, the most lines of
        the table, it loses its spare columns instead, and then long cells are cut.
        """
        if not self.rows:
            return [self.none]
        shown = self.rows
        if height is not None and len(shown) >= height:
            shown = shown[: height - 2]
        rows = [self.heads, *([escaped(cell) for cell in row] for row in shown)]
        widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
        room = width - len(GAP) * (len(widths) - 1)
        if height is None and (self.expanded or sum(widths) > room):
            return [*self._one_cell_a_line(rows[1:])]
        if sum(widths) > room and self.spare:
            return self._without(self.spare[0]).lines(width, height)
        while sum(widths) > room:
            widths[widths.index(max(widths))] -= 1
        head, *lines = [
            GAP.join(
                f"{cell if len(cell) <= width else cell[: width - 1] + '~':<{width}}"
                for cell, width in zip(row, widths, strict=False)
            ).rstrip()
            for row in rows
        ]
        if len(shown) < len(self.rows):
            lines.append(f"... and {len(self.rows) - len(shown)} more")
        return [click.style(head, bold=True), *lines]

    def _without(self, head: str) -> Table:
        kept = [number for number, one in enumerate(self.heads) if one != head]
        rows = [[row[number] for number in kept if number < len(row)] for row in self.rows]
        heads = [self.heads[number] for number in kept]
        return replace(self, heads=heads, rows=rows, spare=self.spare[1:])

    def _one_cell_a_line(self, rows: Sequence[Sequence[str]]) -> Iterator[str]:
        width = max(map(len, self.heads))
        for number, row in enumerate(rows):
            if number:
                yield ""
            for head, cell in zip(self.heads, row, strict=False):
                if cell:
                    yield click.style(head, bold=True) + " " * (width - len(head)) + GAP + cell


def with_short_ids(tables: Sequence[Table]) -> list[Table]:
    """Return tables with the first characters of each task id, if no other id in them has these."""
    named = [[[*zip(one.heads, row, strict=False)] for row in one.rows] for one in tables]
    ids = {cell for rows in named for row in rows for head, cell in row if head == "ID"}
    uses = Counter(one[:SHORT_ID] for one in ids)
    short = {
        ("ID", one): f"{one[:SHORT_ID]}-..."
        for one in ids
        if uses[one[:SHORT_ID]] == 1 and _UUID.fullmatch(one)
    }
    return [
        replace(one, rows=[[short.get(pair, pair[1]) for pair in row] for row in rows])
        for one, rows in zip(tables, named, strict=True)
    ]


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if math.isinf(seconds):
        return "forever"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, size, lesser, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {lesser}"
    return f"{whole // 60} min {whole % 60} s"


def print_all(*shown: str | Table, err: bool = False) -> None:
    """Print lines and tables, one below the other. err: to stderr."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    tables = iter(with_short_ids([one for one in shown if isinstance(one, Table)]))
    for one in shown:
        is_table = isinstance(one, Table)
        lines = next(tables).lines(width) if is_table else _wrapped(escaped(str(one)), width)
        click.echo("\n".join(lines), err=err)


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines between whose words a terminal need not break."""
    return textwrap.wrap(  # an id stays whole, to be copied
        text, width, subsequent_indent=GAP, break_long_words=False, break_on_hyphens=False
    ) or [""]


def as_data(shown: Any) -> Any:
    """Return records for JSON: each field that their repr shows, and None for infinity."""
    if is_dataclass(shown):
        return {one.name: as_data(getattr(shown, one.name)) for one in fields(shown) if one.repr}
    if isinstance(shown, Mapping):
        return {key: as_data(one) for key, one in shown.items()}
    if isinstance(shown, (list, tuple)):
        return [as_data(one) for one in shown]
    return None if isinstance(shown, float) and math.isinf(shown) else shown


def print_result(as_json: bool, data: Any, *shown: str | Table) -> None:
    """Print data as JSON, for programs, or lines and tables, for people."""
    if as_json:
        click.echo(json.dumps(data, indent=2, default=str))
    else:
        print_all(*shown)


def command_error(text: str) -> click.ClickException:
    """Return the error that ends a command with this line and exit status 1."""
    return click.ClickException(escaped(text))
