"""What the how-to guides get instead of `time`, `Path` and `sqlite3`: slower storage.

Without a lock, another run comes between a read and the write after it. A test holds a run back by
a file `hold-<name>` in the folder, and reads in `runs` what the tasks did.
"""

from __future__ import annotations

import json
import os
import pathlib
import sqlite3 as real_sqlite3
import time as real_time
from functools import partial
from types import SimpleNamespace
from typing import Any

from celery import current_task

FOLDER = pathlib.Path(os.environ["TEST_FOLDER"])
SLOW = 0.05  # seconds, of each write and of each query
LONGEST = 120  # seconds for which a test may hold a run back


def _wait_while_held(name: str) -> None:
    end = real_time.monotonic() + LONGEST
    while (FOLDER / f"hold-{name}").exists() and real_time.monotonic() < end:
        real_time.sleep(0.02)


def _note(what: str, name: str) -> None:
    line = json.dumps([name, what, *current_task.request.args])
    with (FOLDER / "runs").open("a") as runs:
        runs.write(line + "\n")


def runs_of(name: str) -> list[Any]:
    path = FOLDER / "runs"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line[1:] for line in lines if line[0] == name]


def work(_: float) -> None:
    """Do a task's own work, which the guides write as `time.sleep(seconds)`."""
    name = current_task.name.rpartition(".")[2]
    _note("begin", name)
    real_time.sleep(SLOW)
    _wait_while_held(name)
    _note("end", name)


class Path(type(pathlib.Path())):  # type: ignore[misc]
    """A path whose writes are slow."""

    def write_text(self, text: str, *args: Any, **options: Any) -> int:
        real_time.sleep(SLOW)
        _wait_while_held(self.name)
        return int(super().write_text(text, *args, **options))


class _SlowConnection(real_sqlite3.Connection):
    def execute(self, statement: str, *args: Any) -> real_sqlite3.Cursor:
        found = super().execute(statement, *args)
        real_time.sleep(SLOW)
        return found


time = SimpleNamespace(sleep=work)
sqlite3 = SimpleNamespace(connect=partial(real_sqlite3.connect, factory=_SlowConnection))
