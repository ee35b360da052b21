"""The example shop and the worked example of fencing, run as a person runs them."""

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

from tests.postgres import PostgresNode

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 240.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program with these arguments; whatever is left of it is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(DEADLINE)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
def test_the_lock_keeps_the_ledger_exact_over_the_death_of_a_node(start: Start) -> None:
    shop = start("example_worker", "--plain", "--orders", "600")
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
    shop = start("example_worker", "--plain")
    seen = _read_until(shop, "worker threads runs")
    children = _descendants(shop.pid)
    shop.send_signal(number)
    output, _ = shop.communicate(timeout=DEADLINE)
    assert shop.returncode == status, seen + output
    assert "Traceback" not in output
    assert len(children) >= 6
    _wait_for_end(children)


@pytest.mark.slow
def test_the_late_write_wins_without_a_fence_and_is_refused_with_one(
    start: Start,
) -> None:
    show = start("example_worker.late_write")
    output, _ = show.communicate(timeout=DEADLINE)
    assert show.returncode == 0, output
    parts = re.split(r"^(?:with a fence|by fenced_update): ", output, flags=re.MULTILINE)
    without, with_one, fenced = parts
    for part in parts:
        assert re.search(r"^  first  clerk has the lock: token \d+, held is True", part, re.M)
        first, second = map(int, re.findall(r"token (\d+)", part))
        assert first < second
        assert "second clerk writes 25: 1 row\n" in part
        assert "now it looks: held False" in part
    assert "first  clerk goes on, writes 20: 1 row;" in without
    assert "  the price is 20\n" in without
    assert "first  clerk goes on, writes 20: 0 rows, refused;" in with_one
    late = r"first  clerk goes on, writes 20: a later holder has written: its token is \d+, and"
    assert re.search(late, fenced)
    assert all("  the price is 25\n" in part for part in (with_one, fenced))
    assert output.endswith("PASSED: without the fence the late write won; with it the database "
                           "refused it\n")  # fmt: skip


@pytest.mark.slow
def test_a_lock_in_postgresql_that_is_confirmed_stays_until_the_commit(
    start: Start, postgres_template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PostgresNode(postgres_template, fsync=False) as node:
        monkeypatch.setenv("REDLOCK_SHOP_POSTGRESQL", node.url)
        show = start("example_worker.late_write")
        output, _ = show.communicate(timeout=DEADLINE)
        assert show.returncode == 0, output
        assert node.query("SELECT to_regnamespace('redlock')") == [(None,)]
    *_, part = re.split(r"^with a confirmed lock: ", output, flags=re.MULTILINE)
    told = re.findall(
        r"^  (first |second) clerk (gets|does not get|has confirmed|writes .*)", part, re.M
    )
    assert told == [
        ("first ", "has confirmed"), ("second", "does not get"), ("first ", "writes 20: 1 row"),
        ("second", "gets"), ("second", "writes 25: 1 row"),
    ]  # fmt: skip
    assert "  the price is 25\n" in part
    assert output.endswith("stayed until the commit, so no write was late\n")


@pytest.mark.slow
def test_an_interruption_while_a_clerk_is_stopped_leaves_no_traceback_and_nobody_stopped(
    start: Start,
) -> None:
    show = start("example_worker.late_write")
    seen = _read_until(show, "stopped before its write")
    show.send_signal(signal.SIGINT)
    # its end of the pipe is closed only when the clerk is gone, too
    output, _ = show.communicate(timeout=DEADLINE)
    assert show.returncode == 130, seen + output
    assert "Traceback" not in output


def _read_until(process: subprocess.Popen[str], text: str) -> str:
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
