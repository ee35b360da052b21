"""The command `top`: looks at nodes, locks and waiting tasks again and again, and its screen.

The screen is drawn anew until `q` is pressed. Its tables are those of the other commands
(`views.py`).
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import select
import shutil
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import click

from celery_redlock.label import escaped
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.reports import LockList, NodeList
from celery_redlock.operate.cli.group import (
    Table,
    app_from,
    as_data,
    as_json,
    finite,
    named,
    print_all,
    redlock,
    with_short_ids,
)
from celery_redlock.operate.cli.listing import unknown_lines
from celery_redlock.operate.cli.views import (
    WaitersView,
    lock_tables,
    locks_like,
    node_table,
    quorum_line,
)
from celery_redlock.tasks.per_app import redlock_of

REDRAW = 0.5  # seconds between two screens, for the clock and the age of the figures
_TOP_LEFT = "\x1b[H"
_TO_END_OF_LINE = "\x1b[K"
_TO_END_OF_SCREEN = "\x1b[J"


@dataclass(frozen=True)
class Look:
    """The state of nodes, locks and waiting tasks at one moment. at: monotonic seconds."""

    nodes: NodeList
    sight: LockList
    waiting: WaitersView
    at: float

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables, made once: all their times are of the moment of the look."""
        return node_table(self.nodes), *lock_tables(self.sight), *self.waiting.tables()

    def notes(self) -> list[str]:
        return [*unknown_lines(self.sight), *self.waiting.notes()]

    def data(self) -> dict[str, Any]:
        found = as_data(self.sight)
        seen = {"locks": found["locks"], "rates": found["rates"]}
        return {**as_data(self.nodes), **seen, "waiters": self.waiting.data()}

    def screen(self, width: int, height: int) -> list[str]:
        """Return what fits a terminal: each table gets its share of the lines, long cells are cut.

        A table that needs less than its share leaves the rest to the others.
        """
        notes = self.notes()[:3]
        tables = with_short_ids(self.tables)
        left = height - len(notes)
        shares = [1 + len(table.rows) for table in tables]
        for number, place in enumerate(sorted(range(len(tables)), key=shares.__getitem__)):
            shares[place] = min(shares[place], max(3, left // (len(tables) - number)))
            left -= shares[place]
        cut = (table.lines(width, share) for table, share in zip(tables, shares, strict=True))
        lines = itertools.chain.from_iterable(cut)
        return [*lines, *(escaped(note)[:width] for note in notes)][:height]


def look_repeatedly(app: Any, pattern: str, interval: float, count: int | None) -> Iterator[Look]:
    """Yield one look after the other, at the resources that a pattern selects.

    interval: seconds between two. count: None for no end.
    """
    made = redlock_of(app)
    clock = SystemClock()
    for number in itertools.count(1):
        sight = locks_like(pattern, made.locks())
        yield Look(made.status(), sight, WaitersView.ask(app).like(pattern), clock.now())
        if number == count:
            return
        clock.sleep(interval)


def show_live(looks: Iterator[Look]) -> None:
    """Draw the newest look until there are no more, or `q` is pressed."""
    # the looks are taken in a thread: a silent node or broker delays neither clock nor key
    taken: queue.SimpleQueue[Look | Exception | None] = queue.SimpleQueue()

    def take() -> None:
        try:
            for look in looks:
                taken.put(look)
            taken.put(None)
        except Exception as error:  # raised in the main thread
            taken.put(error)

    threading.Thread(target=take, daemon=True).start()
    clock = SystemClock()
    newest = None
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)  # the terminal hands over each key as it is pressed, and shows none
    try:
        click.echo("\x1b[2J", nl=False)
        while True:
            while not taken.empty():
                found = taken.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    return
                newest = found
                _draw(newest, clock.now())
            _draw(newest, clock.now())
            is_pressed = select.select([sys.stdin], [], [], REDRAW)[0]
            if is_pressed and os.read(sys.stdin.fileno(), 1) in (b"q", b""):
                return
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        click.echo()


def _draw(look: Look | None, now: float) -> None:
    width, height = shutil.get_terminal_size()
    lines = ["asking nodes and workers ..."]
    if look is not None:
        moment = datetime.now().astimezone().strftime("%H:%M:%S")
        age = max(0.0, now - look.at)
        head = f"{moment}  figures {age:.0f} s old  {quorum_line(look.nodes)}  q: quit"
        lines = [head[:width], *look.screen(width, height - 1)]
    text = f"{_TO_END_OF_LINE}\n".join(lines)
    click.echo(f"{_TOP_LEFT}{text}{_TO_END_OF_LINE}{_TO_END_OF_SCREEN}", nl=False)


@redlock.command()
@click.argument("pattern", default="*", callback=named)
@click.option(
    "--interval", type=click.FloatRange(0.0, 3600.0, min_open=True), callback=finite, default=2.0,
    show_default=True, help="Seconds between two refreshes.",
)  # fmt: skip
@click.option(
    "--count", type=click.IntRange(1), help="Number of refreshes; until `q` if not given."
)
@as_json
@click.pass_context
def top(
    ctx: click.Context, pattern: str, interval: float, count: int | None, as_json: bool
) -> None:
    """Show nodes, locks and waiting tasks live; `q` ends it.

    PATTERN, such as "stock:*", selects resources. With --json each refresh is one line.
    """
    looks = look_repeatedly(app_from(ctx), pattern, interval, count)
    with suppress(KeyboardInterrupt):  # Ctrl-C ends it as `q` does
        if as_json:
            for look in looks:
                click.echo(json.dumps(look.data(), default=str))
        elif sys.stdin.isatty() and sys.stdout.isatty():
            show_live(looks)
        else:
            for look in looks:
                print_all(*look.tables, *look.notes())
