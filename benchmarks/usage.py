"""What servers and workers have used so far: commands and processor time. A run is a difference."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from celery_redlock.testing import EmbeddedNode, WorkerProcess

LOOK = 0.1  # s: between looks at what the workers have said
LAST_OUTPUT = 2000  # characters of each worker's log in an error
TICKS = os.sysconf("SC_CLK_TCK")


def calls(node: EmbeddedNode, *names: str) -> int:
    """Return how many commands a server has run; of these names, or all."""
    with node.client() as client:
        stats = cast("dict[str, dict[str, int]]", client.info("commandstats"))
    asked = [f"cmdstat_{name}" for name in names] or list(stats)
    return sum(stats[name]["calls"] for name in asked if name in stats)


def processor_time(workers: Iterable[WorkerProcess]) -> float:
    """Return the s that the workers' main processes and children have used. Linux only."""
    groups = {worker.pid for worker in workers}
    used = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[2]) in groups:  # its process group
                used += int(words[11]) + int(words[12])
    return used / TICKS


def log_lines(workers: Iterable[WorkerProcess], task: str, end: str) -> int:
    """Return how many log lines say that a message of a task came to this end."""
    ended = re.compile(rf"Task {re.escape(task)}\[[^]]*\] {end}\b")
    return sum(len(ended.findall(worker.output())) for worker in workers)


def await_workers(
    workers: Iterable[WorkerProcess], done: Callable[[], bool], patience: float
) -> None:
    """Return when a condition is true. Raises RuntimeError with the workers' last log lines.

    patience: seconds before that.
    """
    end = time.monotonic() + patience
    while not done():
        if time.monotonic() > end:
            said = "\n".join(worker.output()[-LAST_OUTPUT:] for worker in workers)
            raise RuntimeError(f"the workers do not finish:\n{said}")
        time.sleep(LOOK)
