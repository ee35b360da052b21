"""A finalizer or a signal handler that uses locks in the middle of its own thread's use of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import fork_server
from tests.conftest import Nodes
from tests.contract.reentry import DEADLINE


def start(how: str, nodes: Nodes) -> fork_server.Process:
    command = [sys.executable, "-m", "tests.contract.reentry", how, *(node.url for node in nodes)]
    return fork_server.Process(command, stdout=subprocess.PIPE, text=True)


def end(process: fork_server.Process) -> int:
    """Return what it counted; raises where it stands still, or did not see every lock go."""
    with process:
        try:
            said, _ = process.communicate(timeout=DEADLINE + 30)
        finally:
            process.kill()
    assert process.returncode == 0
    return int(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "count", "points"),
    [("release", 3, 100), ("itself", 3, 100), ("acquire", 3, 50), ("acquire", 1, 50)],
)
def test_a_command_that_is_interrupted_by_another_at_any_point_ends_and_so_does_the_other(
    nodes: Nodes, how: str, count: int, points: int
) -> None:
    assert end(start(how, nodes[:count])) > points


@pytest.mark.slow
def test_a_barrage_of_them_stops_nobody_and_leaves_no_lock(nodes: Nodes) -> None:
    both = [start("random", nodes) for _ in range(2)]
    assert all(struck > 20 for struck in map(end, both))
