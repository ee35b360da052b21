"""The task of a drill, which says what it is sure of, step by step, and what cuts connections.

Only the worker processes of a drill have it: an app of yours never knows the task.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.operate.drill.audit import BEGUN, DONE, KEPT, LOCK_GONE, JournalLine
from celery_redlock.tasks.settings.options import Backoff
from celery_redlock.tasks.task import LockedTask

TASK = "celery_redlock.drill"
STEP = 0.02  # seconds between two looks of a body at its lock
WATCH_EVERY = 0.1  # seconds between two looks at whether connections are to be cut
OPEN_FILES = Path("/dev/fd")

clock = SystemClock()


class Journal:
    """The file to which all processes of a drill append. worker: with the number of its life."""

    def __init__(self, path: Path, worker: str) -> None:
        self._path = path
        self._worker = worker

    def write(self, what: str, at: float, *of_run: str) -> None:
        """Append one line, by one write: lines of several processes do not mix."""
        line = JournalLine(what, self._worker, os.getpid(), at, *of_run)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)


def add_task(app: Any, journal: Journal, ttl: float) -> Any:
    """Add the task to an app; each option is its own, so that none of app or queue applies."""

    @app.task(
        name=TASK,
        bind=True,
        base=LockedTask,
        acks_late=True,
        reject_on_worker_lost=True,
        ignore_result=True,
        store_errors_even_if_ignored=False,
        send_events=False,
        max_retries=None,
        rate_limit=None,
        time_limit=None,
        soft_time_limit=None,
        lock_key="{resource}",
        lock_ttl=ttl,
        lock_renew=True,
        lock_max_hold=None,
        lock_wait=0.0,
        lock_on_conflict="defer",
        lock_backoff=Backoff(cap=1.0),
        lock_max_wait=None,
        lock_on_lost="warn",  # the body sees it by itself
        lock_on_unreachable="defer",
        lock_limit=1,
        lock_rate=None,
        lock_fencing=False,  # the counter of a node is not the drill's own key
        lock_unique_for=None,
        lock_debounce=None,
    )
    def drill(self: Any, resource: str, seconds: float) -> None:
        hold_for(self.lock, journal, (uuid4().hex, self.request.id, resource), seconds)

    return drill


def hold_for(lock: Any, journal: Journal, of_run: tuple[str, str, str], seconds: float) -> None:
    """Write for some seconds, step by step, that the lock is held; stop as soon as it is not."""
    what = BEGUN
    end = clock.now() + seconds
    while True:
        at = clock.now()  # before the question: see `audit.py`
        if not lock.held:
            journal.write(LOCK_GONE, at, *of_run)
            return
        if what == KEPT and at >= end:
            break
        journal.write(what, at, *of_run)
        what = KEPT
        clock.sleep(STEP)
    journal.write(DONE, at, *of_run)


def cut_connections() -> int:
    """Shut down each connection of this process to a server; return how many there were."""
    cut = 0
    for number in [int(entry.name) for entry in OPEN_FILES.iterdir()]:
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                # a duplicate, which closes; a shutdown is one of the connection, not of the number
                with socket.socket(fileno=os.dup(number)) as connection:
                    # "" of a pair within this machine, as a pool has it
                    if connection.getpeername():
                        connection.shutdown(socket.SHUT_RDWR)
                        cut += 1
    return cut


def watch_orders(order: Path) -> None:
    """Cut the connections of this process each time that a file grows. In a thread of its own."""

    def size() -> int:
        with contextlib.suppress(OSError):
            return order.stat().st_size
        return 0

    def watch() -> None:
        seen = size()
        while True:
            clock.sleep(WATCH_EVERY)
            now = size()
            if now != seen:
                cut_connections()
            seen = now

    threading.Thread(target=watch, daemon=True, name="drill").start()
