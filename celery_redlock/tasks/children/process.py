"""Detects the exit of a child process."""

from __future__ import annotations

import os
from pathlib import Path


class ChildProcess:
    """A child process whose exit is to be detected.

    descriptor: a pidfd, readable once the process has exited, also before its parent has waited for
    it; -1 if the system has none, and `has_exited` must be polled. start_time: as of
    `start_time_of`, because pids are reused.
    """

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid, self._start_time = pid, start_time
        self.descriptor, self._exited = -1, False
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._exited = True
        except (AttributeError, OSError):  # not this system, an older kernel, or not allowed
            return
        self._exited = self._pid_is_reused()

    def has_exited(self, ready: set[int]) -> bool:
        """Return whether the process has exited. ready: the descriptors that are readable."""
        if self._exited or self.descriptor >= 0:
            return self._exited or self.descriptor in ready
        return pid_has_exited(self.pid) or self._pid_is_reused()

    def _pid_is_reused(self) -> bool:
        """Return whether the pid is another process's by now; False if a start time is unknown."""
        now = start_time_of(self.pid)  # 0 if this process may open no more files
        return now not in (0, self._start_time) and self._start_time != 0

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self.descriptor = self.descriptor, -1  # first: a fork may copy this moment
        if descriptor >= 0:
            os.close(descriptor)


def pid_has_exited(pid: int) -> bool:
    """Return whether a child has exited, and leave its exit status to the pool."""
    try:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            os.kill(pid, 0)  # the pid is there until the pool has waited for it
            return False
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except (ProcessLookupError, ChildProcessError):
        return True


def start_time_of(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it is unknown.

    Source: proc(5), /proc/<pid>/stat, field 22; the name before it may contain any character.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
