"""Kills servers and workers whose starter has died, so that an interrupted test run leaves none.

A process that starts servers or workers has one reaper process, and sends it their process groups
by a pipe. The system closes the pipe when the starter ends, also by SIGKILL. The reaper then kills
the remaining groups. Run as a program, this file is the reaper: it needs the standard library only.
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

_mutex = threading.Lock()
_reapers: dict[int, subprocess.Popen[bytes]] = {}  # by pid: a forked child starts its own


def watch_group(group: int) -> None:
    """Let a process group be killed when this process ends. group: the pid of its leader."""
    _send(b"+%d\n" % group)


def forget_group(group: int) -> None:
    """Do not kill a process group that has ended: the system may reuse its number."""
    _send(b"-%d\n" % group)


def _send(line: bytes) -> None:
    with _mutex:
        reaper = _reapers.get(os.getpid())
        if reaper is None:
            atexit.register(_stop)
            command = [sys.executable, "-I", "-S", __file__]
            reaper = _reapers[os.getpid()] = subprocess.Popen(  # noqa: S603 - our own command line
                command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
            )
        cast("IO[bytes]", reaper.stdin).write(line)


def _stop() -> None:
    """Let the reaper kill the remaining groups, and wait for its end."""
    reaper = _reapers.pop(os.getpid(), None)
    if reaper is not None:
        reaper.communicate()


def reap(lines: Iterable[str]) -> None:
    """Read the lines of both until the end, then kill the remaining groups."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    reap(sys.stdin)
