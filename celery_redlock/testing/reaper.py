"""Ends servers and workers whose starter has died, so that an interrupted test run leaves none.

Each process that starts some has one reaper beside it, and tells it the process groups by a pipe.
The system closes the pipe when that process ends, also by SIGKILL. The reaper then kills the
groups that are left. Run as a program, this file is the reaper: standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import IO, cast

__all__ = ["forget", "watch"]

_mutex = threading.Lock()
_reapers: dict[int, subprocess.Popen[bytes]] = {}  # by pid: a fork of this process has its own


def watch(group: int) -> None:
    """Have a process group killed when this process ends. group: the pid of its leader."""
    _tell(b"+%d\n" % group)


def forget(group: int) -> None:
    """Leave a process group alone from now on: it has ended, and its number is used again."""
    _tell(b"-%d\n" % group)


def _tell(line: bytes) -> None:
    with _mutex:
        reaper = _reapers.get(os.getpid())
        if reaper is None:
            reaper = _reapers[os.getpid()] = _start()
        cast("IO[bytes]", reaper.stdin).write(line)


def _start() -> subprocess.Popen[bytes]:
    atexit.register(_stop)
    command = [sys.executable, "-I", "-S", __file__]
    return subprocess.Popen(  # noqa: S603 - our own command line
        command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
    )


def _stop() -> None:
    """Let the reaper kill what is left, and end."""
    reaper = _reapers.pop(os.getpid(), None)
    if reaper is not None:
        reaper.communicate()


def reap(lines: Iterable[str]) -> None:
    """Read lines of `watch` and `forget` until there are no more, then kill what is left."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    reap(sys.stdin)
