"""A finalizer or a signal handler that uses locks in the middle of its own thread's use of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import Nodes
from tests.contract.reentry import DEADLINE


def start(how: str, nodes: Nodes) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.contract.reentry", how, *(node.url for node in nodes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> int:
    """Return what it counted; raises where it stands still, or did not see every lock go."""
    try:
        said, _ = process.communicate(timeout=DEADLINE + 30)
    finally:
        process.kill()
    assert process.returncode == 0
    return int(said)


@pytest.mark.slow
def test_a_release_that_interrupts_a_command_at_any_point_arrives(nodes: Nodes) -> None:
    assert end(start("release", nodes)) > 100


@pytest.mark.slow
def test_a_release_of_its_own_lock_that_interrupts_a_refused_acquire_is_no_error(
    nodes: Nodes,
) -> None:
    assert end(start("itself", nodes)) > 100


@pytest.mark.slow
def test_an_acquire_that_interrupts_a_command_at_any_point_ends(nodes: Nodes) -> None:
    assert end(start("acquire", nodes)) > 50


@pytest.mark.slow
def test_one_node_is_not_waited_for_without_end_either(nodes: Nodes) -> None:
    assert end(start("acquire", nodes[:1])) > 50


@pytest.mark.slow
def test_a_barrage_of_them_stops_nobody_and_leaves_no_lock(nodes: Nodes) -> None:
    both = [start("random", nodes) for _ in range(2)]
    assert all(turns > 20 for turns in map(end, both))
