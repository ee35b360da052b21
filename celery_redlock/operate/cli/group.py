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
MOST_UNANSWERED = 20  # questions of one process, after which it asks no more
PIPE_WIDTH = 10_000  # columns if stdout is no terminal: no line is cut
COLUMN_GAP = "  "  # between two columns
SHORT_ID_LENGTH = 8  # characters of a task id that tables show and commands accept
_unanswered: set[threading.Thread] = set()  # the threads of late questions; some have ended
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def non_empty(_: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise click.BadParameter("the name is empty.", param=param)
    return value


def finite(_: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Return an option's number. Raises BadParameter for NaN, which passes each range."""
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


def within_deadline(ask: Callable[[], T], timeout: float = ANSWER_TIMEOUT) -> tuple[T | None, str]:
    """Call the broker or the result backend for at most so many seconds.

    Return the answer and "", or None and the cause of the failure.
    """
    # in a thread, because a server that accepts a connection and stays silent would block for ever
    _unanswered.difference_update([thread for thread in list(_unanswered) if not thread.is_alive()])
    if len(_unanswered) >= MOST_UNANSWERED:
        return None, f"{len(_unanswered)} earlier questions have no answer yet"
    answers: list[tuple[T | None, str]] = []

    def run() -> None:
        try:
            answers.append((ask(), ""))
        except Exception as error:  # each transport and backend has its own
            answers.append((None, str(error) or type(error).__name__))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if answers:
        return answers[0]
    _unanswered.add(thread)
    return None, f"no answer within {timeout:g} s"


@dataclass(frozen=True)
class Table:
    """A table of text.

    empty_text: printed if there are no rows. expanded: one cell a line, as psql's expanded display.
    spare: the heads of the columns that are left out on a narrow screen, in this order.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty_text: str
    expanded: bool = False
    spare: Sequence[str] = ()

    def lines(self, width: int, height: int | None = None) -> list[str]:
        """Return the table in at most this many columns.

        A wider table is printed with one cell a line, so that no cell is cut. height: the most
        lines; a table with a height loses its spare columns instead, and then long cells are cut.
        """
        if not self.rows:
            return [self.empty_text]
        shown_rows = self.rows
        if height is not None and len(shown_rows) >= height:
            shown_rows = shown_rows[: height - 2]
        rows = [self.heads, *([escaped(cell) for cell in row] for row in shown_rows)]
        widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
        room = width - len(COLUMN_GAP) * (len(widths) - 1)
        if height is None and (self.expanded or sum(widths) > room):
            return [*self._one_cell_a_line(rows[1:])]
        if sum(widths) > room and self.spare:
            return self._without(self.spare[0]).lines(width, height)
        while sum(widths) > room:
            widths[widths.index(max(widths))] -= 1
        head, *lines = [
            COLUMN_GAP.join(
                f"{cell if len(cell) <= width else cell[: width - 1] + '~':<{width}}"
                for cell, width in zip(row, widths, strict=False)
            ).rstrip()
            for row in rows
        ]
        if len(shown_rows) < len(self.rows):
            lines.append(f"... and {len(self.rows) - len(shown_rows)} more")
        return [click.style(head, bold=True), *lines]

    def _without(self, head: str) -> Table:
        kept_columns = [number for number, column in enumerate(self.heads) if column != head]
        rows = [[row[number] for number in kept_columns if number < len(row)] for row in self.rows]
        heads = [self.heads[number] for number in kept_columns]
        return replace(self, heads=heads, rows=rows, spare=self.spare[1:])

    def _one_cell_a_line(self, rows: Sequence[Sequence[str]]) -> Iterator[str]:
        width = max(map(len, self.heads))
        for number, row in enumerate(rows):
            if number:
                yield ""
            for head, cell in zip(self.heads, row, strict=False):
                if cell:
                    yield (
                        click.style(head, bold=True) + " " * (width - len(head)) + COLUMN_GAP + cell
                    )


def with_short_ids(tables: Sequence[Table]) -> list[Table]:
    """Return tables with each task id shortened to its first characters, if those are unique."""
    ids = {
        cell
        for table in tables
        for row in table.rows
        for head, cell in zip(table.heads, row, strict=False)
        if head == "ID"
    }
    uses = Counter(task_id[:SHORT_ID_LENGTH] for task_id in ids)

    def shortened(head: str, cell: str) -> str:
        start = cell[:SHORT_ID_LENGTH]
        is_unique = uses[start] == 1 and _UUID.fullmatch(cell)
        return f"{start}-..." if head == "ID" and is_unique else cell

    return [
        replace(table, rows=[[*map(shortened, table.heads, row)] for row in table.rows])
        for table in tables
    ]


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if math.isinf(seconds):
        return "forever"
    if seconds < 60:
        return f"{seconds:.1f} s"
    total = int(seconds)
    for unit, size, lesser, lesser_size in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if total >= size:
            return f"{total // size} {unit} {total % size // lesser_size} {lesser}"
    return f"{total // 60} min {total % 60} s"


def print_all(*parts: str | Table, err: bool = False) -> None:
    """Print lines and tables, one below the other, and an empty line between two tables.

    err: print to stderr.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    tables = iter(with_short_ids([part for part in parts if isinstance(part, Table)]))
    is_below_table = False
    for part in parts:
        is_table = isinstance(part, Table)
        lines = next(tables).lines(width) if is_table else _wrapped(escaped(str(part)), width)
        has_rows = isinstance(part, Table) and bool(part.rows)
        if is_below_table and has_rows:
            click.echo(err=err)
        is_below_table = has_rows
        click.echo("\n".join(lines), err=err)


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines that a terminal does not break."""
    return textwrap.wrap(  # an id stays whole, to be copied
        text, width, subsequent_indent=COLUMN_GAP, break_long_words=False, break_on_hyphens=False
    ) or [""]


def as_data(value: Any) -> Any:
    """Return a value for JSON: of a record the fields that its repr shows; None for infinity."""
    if is_dataclass(value):
        return {
            item.name: as_data(getattr(value, item.name)) for item in fields(value) if item.repr
        }
    if isinstance(value, Mapping):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def print_result(as_json: bool, data: Any, *parts: str | Table) -> None:
    """Print data as JSON, for programs, or lines and tables, for people."""
    if as_json:
        click.echo(json.dumps(data, indent=2, default=str))
    else:
        print_all(*parts)


def command_error(text: str) -> click.ClickException:
    """Return the error that ends a command with this line and exit status 1."""
    return click.ClickException(escaped(text))
