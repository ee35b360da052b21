"""The commands and the processor time that servers and workers have used so far.

A benchmark reads both before and after a run, and subtracts.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from celery_redlock.testing import EmbeddedNode, WorkerProcess

CHECK_INTERVAL = 0.1  # s between two checks of the workers' logs
LAST_OUTPUT = 2000  # characters of each worker's log in an error
TICKS = os.sysconf("SC_CLK_TCK")


def calls(node: EmbeddedNode, *names: str) -> int:
    """Return how many commands a server has run. names: only these commands; none means all."""
    with node.client() as client:
        stats = cast("dict[str, dict[str, int]]", client.info("commandstats"))
    keys = [f"cmdstat_{name}" for name in names] or list(stats)
    return sum(stats[name]["calls"] for name in keys if name in stats)


def processor_time(workers: Iterable[WorkerProcess]) -> float:
    """Return the seconds of CPU of the workers' main processes and children. Linux only."""
    groups = {worker.pid for worker in workers}
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[2]) in groups:  # its process group
                ticks += int(words[11]) + int(words[12])
    return ticks / TICKS


def log_lines(workers: Iterable[WorkerProcess], task: str, end: str) -> int:
    """Return the number of log lines "Task NAME[ID] END" of a task. end: such as "deferred"."""
    ended = re.compile(rf"Task {re.escape(task)}\[[^]]*\] {end}\b")
    return sum(len(ended.findall(worker.output())) for worker in workers)


def await_workers(
    workers: Iterable[WorkerProcess], done: Callable[[], bool], timeout: float
) -> None:
    """Return when a condition is true. timeout: seconds.

    Raises RuntimeError with the workers' last log lines if it is not true by then.
    """
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            logs = "\n".join(worker.output()[-LAST_OUTPUT:] for worker in workers)
            raise RuntimeError(f"the workers do not finish:\n{logs}")
        time.sleep(CHECK_INTERVAL)
