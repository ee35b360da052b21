"""Nodes that may have forgotten a lock do not vote, and a worker says so and for how long."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from celery_redlock.testing import EmbeddedNode, embedded_nodes
from tests.conftest import PATIENCE, eventually, vouch_for
from tests.integration.conftest import Stage

MAX_TTL = 16.0  # s: of silence, too, in which a worker must have begun and met it
SILENCE = MAX_TTL + 1  # s
NOT_YET = re.compile(r"(\d) of 3 lock nodes do not vote yet, for (\d+) s more")


@pytest.fixture
def new_nodes() -> Iterator[list[EmbeddedNode]]:
    """Give three nodes that nobody has vouched for."""
    with embedded_nodes(3) as servers:
        yield servers


def said(output: str) -> tuple[int, int]:
    """Return how many nodes a worker says are silent, and for how many s."""
    found = NOT_YET.search(output)
    assert found, output
    return int(found[1]), int(found[2])


def test_on_new_nodes_runs_wait_for_the_silence_to_end_and_are_told_of_it(
    make_stage: Callable[..., Stage], new_nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(new_nodes, redlock_max_ttl=MAX_TTL, redlock_node_timeout=MAX_TTL / 4)
    worker = stage.worker(concurrency=1)
    eventually(lambda: NOT_YET.search(worker.output()))
    silent, seconds = said(worker.output())
    assert silent == 3
    assert 0 < seconds <= SILENCE
    assert "no lock can be taken before enough of them do" in worker.output()
    assert "Redlock.trust()" in worker.output()
    result = stage.tasks.work.delay("k")
    reason = re.compile(r"deferred .*no quorum of 2 nodes .*silent for \d+ s more.*restart guard")
    eventually(lambda: reason.search(worker.output()))
    assert result.get(timeout=120) == 0  # by itself, once the silence is over


def test_an_operators_word_ends_the_silence(
    make_stage: Callable[..., Stage], new_nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(new_nodes, redlock_max_ttl=600)
    worker = stage.worker(concurrency=1)
    result = stage.tasks.work.delay("k")
    eventually(lambda: stage.deferrals(result) >= 2)
    assert stage.lines("begin") == []
    vouch_for(new_nodes)
    assert result.get(timeout=120) == 0  # long before the 601 s are over
    assert said(worker.output())[1] > 60


def test_a_node_that_came_back_empty_is_told_of_and_the_others_decide(
    make_stage: Callable[..., Stage], mortal_nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(mortal_nodes, redlock_node_timeout=PATIENCE)
    mortal_nodes[0].kill()
    mortal_nodes[0].start()
    worker = stage.worker(concurrency=1)
    eventually(lambda: NOT_YET.search(worker.output()))
    assert said(worker.output())[0] == 1
    assert "3 of 3 lock nodes answer, 2 needed" in worker.output()
    assert "(restart guard); the others decide" in worker.output()
    assert stage.tasks.work.delay("k").get(timeout=120) == 0


def test_a_worker_whose_nodes_all_vote_says_nothing_of_silence(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(nodes, redlock_node_timeout=PATIENCE)
    worker = stage.worker(concurrency=1)
    eventually(lambda: "3 of 3 lock nodes answer, 2 needed" in worker.output())
    assert stage.tasks.work.delay("k").get(timeout=120) == 0
    assert "do not vote" not in worker.output()
    assert "ERROR" not in worker.output()
