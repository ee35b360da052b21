"""What the admin page *Locks* shows: the tables of the commands, of what the nodes say.

It asks the nodes by the Python API, and the workers as `celery redlock waiters` does. Not here: the
requests and who may send them (`admin.py`), and how one lock or claim is ended (`ending.py`).
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.timezone import localtime

from celery_redlock.django.ending import PAGE_DEADLINE, mark_of, notes_of
from celery_redlock.label import escaped
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.reports import LockList
from celery_redlock.operate.cli import views
from celery_redlock.operate.cli.group import Table, within_deadline

MOST_ROWS = 200  # of a table; a search shows the others


@dataclass(frozen=True)
class Row:
    """A row of a table. mark: of the lock or claim that it shows, "" if it cannot be ended."""

    cells: Sequence[str]
    mark: str


@dataclass(frozen=True)
class Section:
    """A table with its title. empty_text: shown if there are no rows. more: how many are left out.

    can_break, can_end: whether each row has a lock, or a claim, that can be ended.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Row]
    empty_text: str
    more: int = 0
    can_break: bool = False
    can_end: bool = False

    @classmethod
    def of(cls, title: str, table: Table, marks: Sequence[str] = (), **can: bool) -> Section:
        """Show a table of the commands. marks: of its rows."""
        shown = table.rows[:MOST_ROWS]
        marked = marks or [""] * len(shown)
        rows = [
            Row([escaped(str(cell)) for cell in row], mark)
            for row, mark in zip(shown, marked, strict=False)
        ]
        return cls(title, table.heads, rows, table.empty_text, len(table.rows) - len(rows), **can)


def pattern_of_search(text: str) -> str:
    """Return the pattern of a search: it has a `*` or `?`, or is a part of the resource."""
    return text if "*" in text or "?" in text else f"*{glob.escape(text)}*"


@dataclass(frozen=True)
class LocksPage:
    """What the page shows. notes: what is not known, and why."""

    sections: Sequence[Section]
    notes: Sequence[str]

    @classmethod
    def read(cls, app: Any, search: str) -> LocksPage:
        """Ask the nodes, the workers and the broker of an app; it takes `PAGE_DEADLINE` at most."""
        pattern = pattern_of_search(search)
        asks: list[Callable[[], Any]] = [
            lambda: views.locks_like(pattern, Redlock.of(app).locks()),
            lambda: Redlock.of(app).claims(pattern),
            lambda: views.WaitersView.ask(app).like(pattern),
        ]
        with ThreadPoolExecutor(len(asks)) as pool:  # a silent node costs each of them a second
            answers = [*pool.map(lambda ask: within_deadline(ask, PAGE_DEADLINE), asks)]
        (locks, _), (claims, _), (waiting, _) = answers
        causes = zip(("locks", "claims", "waiting tasks"), answers, strict=True)
        notes = [f"the {what} cannot be read: {cause}" for what, (_, cause) in causes if cause]
        sections: list[Section] = []
        if locks is not None:
            sections += lock_sections(locks)
            notes += notes_of(locks)
        if waiting is not None:
            sections += waiting_sections(waiting)
            notes += [*notes_of(waiting.registered), *waiting.notes()]
        if claims is not None:
            marks = [mark_of(claim) for claim in claims.claims]
            sections.append(Section.of("Claims", views.claim_table(claims), marks, can_end=True))
            notes += notes_of(claims)
        return cls(sections, [*dict.fromkeys(map(escaped, notes))])


def lock_sections(lock_list: LockList) -> list[Section]:
    """Return the locks, each with the moment since which it is held, and the rates."""
    table, *rates = views.lock_tables(lock_list)
    before = table.heads.index("HELD FOR")
    rows = [
        (*row[:before], _moment(lock.since), *row[before:])
        for row, lock in zip(table.rows, lock_list.locks, strict=True)
    ]
    heads = (*table.heads[:before], "SINCE", *table.heads[before:])
    marks = [mark_of(lock) if lock.value else "" for lock in lock_list.locks]
    shown = Section.of("Locks", Table(heads, rows, table.empty_text), marks, can_break=True)
    return [shown, *(Section.of("Rates", rate_table) for rate_table in rates)]


def waiting_sections(waiting: views.WaitersView) -> list[Section]:
    """Return who waits and why, and the messages that lie with workers that are gone."""
    stranded = waiting.stranded.tables()
    tables = waiting.tables()
    waits = tables[: len(tables) - len(stranded)]
    titles = ("Waiting",) if len(waits) == 1 else ("Waiting processes", "Waiting tasks")
    found = [Section.of(title, table) for title, table in zip(titles, waits, strict=True)]
    return [*found, *(Section.of("Stranded messages", table) for table in stranded)]


def _moment(since: str | None) -> str:
    """Return a moment in the time zone of the project. since: in ISO 8601."""
    if since is None:
        return ""
    with suppress(OverflowError):  # at the end of the calendar: another program wrote it
        return f"{localtime(datetime.fromisoformat(since)):%Y-%m-%d %H:%M:%S}"
    return since
