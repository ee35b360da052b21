"""A child's process, and how its end is learned."""

from __future__ import annotations

import os
from pathlib import Path


class ChildProcess:
    """A child's process, of which the system tells the end where it can.

    descriptor: readable once it is gone, also while nobody has waited for it; -1 where there is
    none, and one has to look. started: as of `started_at`, for pids are used again.
    """

    def __init__(self, pid: int, started: int) -> None:
        self.pid, self._started = pid, started
        self.descriptor, self._gone = -1, False
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone = True
        except (AttributeError, OSError):  # not this system, an older kernel, or not allowed
            return
        self._gone = self._is_anothers()

    def is_gone(self, ready: set[int]) -> bool:
        """Tell whether it runs no more. ready: the descriptors that are readable."""
        if self._gone or self.descriptor >= 0:
            return self._gone or self.descriptor in ready
        return has_ended(self.pid) or self._is_anothers()

    def _is_anothers(self) -> bool:
        """Tell whether the pid is another process's by now; no, where nobody can say."""
        now = started_at(self.pid)  # not with all descriptors in use
        return now not in (0, self._started) and self._started != 0

    def close(self) -> None:
        """Watch it no more."""
        descriptor, self.descriptor = self.descriptor, -1  # first: a fork may copy this moment
        if descriptor >= 0:
            os.close(descriptor)


def has_ended(pid: int) -> bool:
    """Tell whether a child is gone, and leave it to its pool to wait for it."""
    try:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13; gone once the pool has waited
            os.kill(pid, 0)
            return False
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except (ProcessLookupError, ChildProcessError):
        return True


def started_at(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot; 0 where nobody says.

    Source: proc(5), /proc/<pid>/stat, field 22; the name before it may hold anything.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
