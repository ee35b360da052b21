"""The worker processes of a drill: started, stopped, killed, each in a process group of its own.

No other process is ever signalled: a number is one of a group that this process has started and
not yet waited for, or one in that group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from celery_redlock.operate.drill import reaper
from celery_redlock.operate.drill.worker import WorkerOrder

SHOWN_LINES = 15  # of the log of a worker that has ended


class DrillWorker:
    """One worker through all its lives. order: makes what a life is told, of its name."""

    def __init__(
        self, number: int, folder: Path, order: Callable[[str, Path], WorkerOrder]
    ) -> None:
        self.number = number
        self.log = folder / f"worker-{number}.log"
        self._cut = folder / f"cut-{number}"
        self._order = order
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def life(self) -> str:
        """The name of this life, as its lines in the journal have it."""
        return f"{self.number}.{self._lives}"

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self._lives += 1
        command = self._order(self.life, self._cut).command
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        reaper.watch_group(self._process.pid)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the worker and the children of its pool, and wait for the end."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            reaper.forget_group(self._process.pid)
            self._process = None

    def kill_child(self, pid: int) -> bool:
        """Kill a child of its pool; return whether it was one."""
        process = self._process
        with contextlib.suppress(ProcessLookupError):
            if process is not None and pid != process.pid and os.getpgid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def cut(self) -> None:
        """Have each of its processes cut its connections: see `watch_orders`."""
        with self._cut.open("ab") as order:
            order.write(b".")

    def stop(self) -> None:
        """Ask it to end by a warm shutdown."""
        if self.runs and self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def last_lines(self) -> str:
        """Return the end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-SHOWN_LINES:])

    def _signal(self, number: int) -> None:
        """Send a signal to the whole group; its leader is not waited for yet, so it is ours."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
