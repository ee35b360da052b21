"""The example shop, run as a person runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 240.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the shop with these arguments; whatever is left of it is ended."""
    started: list[subprocess.Popen[str]] = []

    def start_shop(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "example_worker", "--plain", *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start_shop
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(DEADLINE)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
def test_the_lock_keeps_the_ledger_exact_over_the_death_of_a_node(start: Start) -> None:
    shop = start("--orders", "600")
    output, _ = shop.communicate(timeout=DEADLINE)
    assert shop.returncode == 0, output
    assert re.search(r"^orders executed +600 +600$", output, re.MULTILINE)
    assert re.search(r"^lost updates +[1-9]\d* +0$", output, re.MULTILINE)
    assert re.search(r"^executed twice +0 +0$", output, re.MULTILINE)
    assert re.search(r"^lock node .*: killed after \d+ orders, back, empty", output, re.MULTILINE)
    assert "PASSED: " in output


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_no_process_and_no_traceback(
    start: Start, number: signal.Signals, status: int
) -> None:
    shop = start()
    seen = _read_until(shop, "worker threads runs")
    children = _descendants(shop.pid)
    shop.send_signal(number)
    output, _ = shop.communicate(timeout=DEADLINE)
    assert shop.returncode == status, seen + output
    assert "Traceback" not in output
    assert len(children) >= 6
    _wait_for_end(children)


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return what the process has printed up to the line with this text."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}:\n{seen}")


def _descendants(pid: int) -> set[int]:
    """Return the process ids of everything that the process has started, and they in turn."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True
    ).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = {pid}
    while grown := {child for child, parent in pairs if parent in found} - found:
        found |= grown
    return found - {pid}


def _wait_for_end(pids: set[int]) -> None:
    """Return when none of the processes runs; a child of a killed one takes a moment."""
    end = time.monotonic() + 60.0
    while left := {pid for pid in pids if _runs(pid)}:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    # A zombie has ended; in a container nobody may be there to bury it.
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
