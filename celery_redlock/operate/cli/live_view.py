"""What `top` shows on a terminal: one screen that is drawn anew, until `q`."""

from __future__ import annotations

import itertools
import os
import queue
import select
import shutil
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from celery_redlock.label import escaped
from celery_redlock.lock.held_locks import Sight, look_at_locks
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.operate.cli.node_views import NodesView, lock_table, unknown_lines
from celery_redlock.operate.cli.render import Table, as_data
from celery_redlock.operate.cli.task_views import WaitersView
from celery_redlock.tasks.per_app import redlock_of

REDRAW = 0.5  # seconds between two screens, for the clock and the age of the figures
_TOP_LEFT, _TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True)
class Look:
    """The state of nodes, locks and waiting tasks at one moment. at: monotonic seconds."""

    nodes: NodesView
    sight: Sight
    waiting: WaitersView
    at: float

    def tables(self) -> tuple[Table, Table, Table, Table]:
        """Return the tables of nodes, locks, waiting processes and waiting tasks."""
        waiting = self.waiting
        return self.nodes.table(), lock_table(self.sight), waiting.process_table(), waiting.table()

    def notes(self) -> list[str]:
        """Return a line for whatever is not known."""
        return [*unknown_lines(self.sight), *self.waiting.note()]

    def data(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        locks = as_data(self.sight)["locks"]
        return {**as_data(self.nodes), "locks": locks, "waiters": self.waiting.data()}

    def screen(self, width: int, height: int) -> list[str]:
        """Return what fits a terminal: each table gets its share of the lines, long cells are cut.

        A table that needs less than its share leaves the rest to those below it.
        """
        lines: list[str] = []
        notes, tables = self.notes(), self.tables()
        for number, table in enumerate(tables):
            share = (height - len(notes[:3]) - len(lines)) // (len(tables) - number)
            lines += table.cut_lines(width, max(3, share))
        return [*lines, *(escaped(note)[:width] for note in notes[:3])][:height]


def look_repeatedly(app: Any, interval: float, count: int | None) -> Iterator[Look]:
    """Yield one look after the other. interval: seconds between two. count: None for no end."""
    made, clock = redlock_of(app), SystemClock()
    for number in itertools.count(1):
        sight = look_at_locks(made)
        yield Look(NodesView.of(made), sight, WaitersView.ask(app), clock.now())
        if number == count:
            return
        clock.sleep(interval)


def is_terminal() -> bool:
    """Return whether a person can see the screen and press a key."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def show_live(looks: Iterator[Look]) -> None:
    """Draw the newest look until there are no more, or `q` is pressed.

    The looks are taken in a thread: a node or broker that is silent delays neither clock nor key.
    """
    taken: queue.SimpleQueue[Look | Exception | None] = queue.SimpleQueue()

    def take() -> None:
        try:
            for look in looks:
                taken.put(look)
            taken.put(None)
        except Exception as error:  # raised in the main thread
            taken.put(error)

    threading.Thread(target=take, daemon=True).start()
    clock, newest = SystemClock(), None
    with _keys_at_once():
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
            if newest is None:
                click.echo(f"{_TOP_LEFT}asking nodes and workers ...{_TO_END_OF_LINE}", nl=False)
            else:
                _draw(newest, clock.now())
            if select.select([sys.stdin], [], [], REDRAW)[0] and os.read(sys.stdin.fileno(), 1) in (
                b"q",
                b"",
            ):
                return


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Let the terminal hand over each key as it is pressed, and not show it."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        click.echo()


def _draw(look: Look, now: float) -> None:
    width, height = shutil.get_terminal_size()
    moment = datetime.now().astimezone().strftime("%H:%M:%S")
    age = max(0.0, now - look.at)
    head = f"{moment}  figures {age:.0f} s old  {look.nodes.quorum_line()}  q: quit"
    lines = [head[:width], *look.screen(width, height - 1)]
    text = f"{_TO_END_OF_LINE}\n".join(lines)
    click.echo(f"{_TOP_LEFT}{text}{_TO_END_OF_LINE}{_TO_END_OF_SCREEN}", nl=False)
