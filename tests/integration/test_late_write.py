"""The worked example of fencing, run as a person runs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 240.0


@pytest.fixture
def show() -> Iterator[subprocess.Popen[str]]:
    """Give the example, started; it is ended where it runs still."""
    command = [sys.executable, "-m", "example_worker.late_write"]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    yield process
    if process.poll() is None:
        process.terminate()
        process.wait(DEADLINE)
    if process.stdout is not None:
        process.stdout.close()


@pytest.mark.slow
def test_the_late_write_wins_without_a_fence_and_is_refused_with_one(
    show: subprocess.Popen[str],
) -> None:
    output, _ = show.communicate(timeout=DEADLINE)
    assert show.returncode == 0, output
    without, with_one = re.split(r"^with a fence: ", output, flags=re.MULTILINE)
    for part in (without, with_one):
        assert re.search(r"^  first  clerk has the lock: token \d+, held is True", part, re.M)
        first, second = map(int, re.findall(r"token (\d+)", part))
        assert first < second
        assert "second clerk writes 25: 1 row\n" in part
        assert "now it looks: held False" in part
    assert "first  clerk goes on, writes 20: 1 row;" in without
    assert "  the price is 20\n" in without
    assert "first  clerk goes on, writes 20: 0 rows, refused;" in with_one
    assert "  the price is 25\n" in with_one
    assert output.endswith("PASSED: without the fence the late write won; with it the database "
                           "refused it\n")  # fmt: skip


@pytest.mark.slow
def test_an_interruption_while_a_clerk_is_stopped_leaves_no_traceback_and_nobody_stopped(
    show: subprocess.Popen[str],
) -> None:
    assert show.stdout is not None
    seen = next(line for line in show.stdout if "stopped before its write" in line)
    show.send_signal(signal.SIGINT)
    # its end of the pipe is closed only when the clerk is gone, too
    output, _ = show.communicate(timeout=DEADLINE)
    assert show.returncode == 130, seen + output
    assert "Traceback" not in output
