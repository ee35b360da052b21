"""Servers and workers end with the process that started them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.integration.conftest import ROOT

STARTS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell left behind
from celery_redlock.testing import EmbeddedNode, WorkerProcess

node = EmbeddedNode().start()
over = EmbeddedNode().start()
over.kill()
worker = WorkerProcess("none", command=[sys.executable, "-c", "import time; time.sleep(600)"])
worker.launch()
print(node.pid, worker.pid, flush=True)
time.sleep(600)
"""


def runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks in /proc")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_run_that_is_interrupted_leaves_no_server_and_no_worker(name: str) -> None:
    command = [sys.executable, "-c", STARTS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = [int(pid) for pid in process.stdout.readline().split()]
        assert [runs(pid) for pid in started] == [True, True]
        os.kill(process.pid, signal.Signals[name])
        try:
            process.wait(60)
        finally:
            process.kill()
    eventually(lambda: not any(map(runs, started)))
