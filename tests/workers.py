"""Celery workers that are forked: `celery_redlock.testing` starts each as a new process."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery_redlock.operate.drill import reaper
from celery_redlock.testing import WorkerProcess
from tests.fork_server import Process, can_fork


def spawn(command: Sequence[str], log: Path, **more: Any) -> Any:
    """Start a program in a process group of its own, which ends at the latest with this process."""
    if not can_fork(command, more.get("env")):
        return WorkerProcess.spawn(command, log, **more)
    with log.open("ab") as output:
        process = Process(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, group=True, **more
        )
    reaper.watch_group(process.pid)
    return process


class ForkedWorker(WorkerProcess):
    """A worker, or another Celery program, that is forked if its pool allows it."""

    spawn = staticmethod(spawn)
    _earlier = 0  # bytes of its output

    def begin_anew(self) -> None:
        """Let `lately` tell only what is written from now on."""
        self._earlier = self.log.stat().st_size

    def lately(self) -> str:
        """Return what it has written since it last began anew, for one test of several."""
        return self.log.read_bytes()[self._earlier :].decode(errors="replace")
