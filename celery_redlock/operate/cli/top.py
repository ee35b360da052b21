"""The command `top`: a live screen of nodes, locks and waiting tasks.

The screen is drawn again and again until `q` is pressed. Its tables are those of the other commands
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
    non_empty,
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

REDRAW_INTERVAL = 0.5  # seconds between two screens, for the clock and the age of the figures
_TOP_LEFT = "\x1b[H"
_TO_END_OF_LINE = "\x1b[K"
_TO_END_OF_SCREEN = "\x1b[J"


@dataclass(frozen=True)
class Snapshot:
    """The state of nodes, locks and waiting tasks at one moment. at: monotonic seconds."""

    nodes: NodeList
    lock_list: LockList
    waiting: WaitersView
    at: float

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables, made once, so that all their times are of the snapshot's moment."""
        return node_table(self.nodes), *lock_tables(self.lock_list), *self.waiting.tables()

    def notes(self) -> list[str]:
        return [*unknown_lines(self.lock_list), *self.waiting.notes()]

    def data(self) -> dict[str, Any]:
        lock_data = as_data(self.lock_list)
        lists = {"locks": lock_data["locks"], "rates": lock_data["rates"]}
        return {**as_data(self.nodes), **lists, "waiters": self.waiting.data()}

    def screen(self, width: int, height: int) -> list[str]:
        """Return what fits a terminal: each table gets its share of the lines, long cells are cut.

        A table that needs less than its share leaves the rest to the others.
        """
        notes = self.notes()[:3]
        tables = with_short_ids(self.tables)
        free_lines = height - len(notes)
        shares = [1 + len(table.rows) for table in tables]
        for number, place in enumerate(sorted(range(len(tables)), key=shares.__getitem__)):
            shares[place] = min(shares[place], max(3, free_lines // (len(tables) - number)))
            free_lines -= shares[place]
        cut = (table.lines(width, share) for table, share in zip(tables, shares, strict=True))
        lines = itertools.chain.from_iterable(cut)
        return [*lines, *(escaped(note)[:width] for note in notes)][:height]


def take_snapshots(
    app: Any, pattern: str, interval: float, count: int | None
) -> Iterator[Snapshot]:
    """Yield snapshots of the resources that a pattern selects.

    interval: seconds between two snapshots. count: their number; None for no end.
    """
    client = redlock_of(app)
    clock = SystemClock()
    for number in itertools.count(1):
        lock_list = locks_like(pattern, client.locks())
        yield Snapshot(client.status(), lock_list, WaitersView.ask(app).like(pattern), clock.now())
        if number == count:
            return
        clock.sleep(interval)


def show_live(snapshots: Iterator[Snapshot]) -> None:
    """Draw the newest snapshot until there are no more, or `q` is pressed."""
    # a thread takes the snapshots, so that a silent node or broker delays neither clock nor key
    results: queue.SimpleQueue[Snapshot | Exception | None] = queue.SimpleQueue()

    def take() -> None:
        try:
            for snapshot in snapshots:
                results.put(snapshot)
            results.put(None)
        except Exception as error:  # raised in the main thread
            results.put(error)

    threading.Thread(target=take, daemon=True).start()
    clock = SystemClock()
    newest = None
    terminal_settings = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)  # the terminal hands over each key as it is pressed, and shows none
    try:
        click.echo("\x1b[2J", nl=False)
        while True:
            while not results.empty():
                result = results.get()
                if isinstance(result, Exception):
                    raise result
                if result is None:
                    return
                newest = result
                _draw(newest, clock.now())
            _draw(newest, clock.now())
            is_pressed = select.select([sys.stdin], [], [], REDRAW_INTERVAL)[0]
            if is_pressed and os.read(sys.stdin.fileno(), 1) in (b"q", b""):
                return
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, terminal_settings)
        click.echo()


def _draw(snapshot: Snapshot | None, now: float) -> None:
    width, height = shutil.get_terminal_size()
    lines = ["asking nodes and workers ..."]
    if snapshot is not None:
        moment = datetime.now().astimezone().strftime("%H:%M:%S")
        age = max(0.0, now - snapshot.at)
        head = f"{moment}  figures {age:.0f} s old  {quorum_line(snapshot.nodes)}  q: quit"
        lines = [head[:width], *snapshot.screen(width, height - 1)]
    text = f"{_TO_END_OF_LINE}\n".join(lines)
    click.echo(f"{_TOP_LEFT}{text}{_TO_END_OF_LINE}{_TO_END_OF_SCREEN}", nl=False)


@redlock.command()
@click.argument("pattern", default="*", callback=non_empty)
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
    snapshots = take_snapshots(app_from(ctx), pattern, interval, count)
    with suppress(KeyboardInterrupt):  # Ctrl-C ends it as `q` does
        if as_json:
            for snapshot in snapshots:
                click.echo(json.dumps(snapshot.data(), default=str))
        elif sys.stdin.isatty() and sys.stdout.isatty():
            show_live(snapshots)
        else:
            for snapshot in snapshots:
                print_all(*snapshot.tables, *snapshot.notes())
