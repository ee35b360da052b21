"""A lock is handed on whatever becomes of the worker that is named, of a name, or of a node.

Two workers wait for one lock, each with a message whose countdown is far longer than the test: what
runs was named by the release, or took the turn of a worker that did not act.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from celery_redlock.lock.model.keys import waiting_key
from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes, eventually
from tests.integration.conftest import MakeStage, Stage, overlaps

FIRST, SECOND = "other", "celery"  # queues, each of one worker
LIVELY = 60.0  # s: well before the end of `patient`'s countdown of 100 s


@pytest.fixture
def handoff_stage(make_stage: MakeStage, nodes: Nodes) -> Stage:
    """Give a stage whose leases are longer than any test."""
    return make_stage(nodes, redlock_max_ttl=200)


def start(stage: Stage, **options: Any) -> tuple[WorkerProcess, WorkerProcess]:
    first = stage.worker("w1", concurrency=1, queues=[FIRST], **options)
    return first, stage.worker("w2", concurrency=1, queues=[SECOND])


def see_waiting(stage: Stage, nodes: Nodes | None = None) -> tuple[Any, Any]:
    results = []
    for queue in (FIRST, SECOND):
        results.append(stage.tasks.patient.apply_async(("k", queue), queue=queue))
        stage.see_deferred(results[-1])
        see_registered(nodes or stage.nodes, len(results))
    return results[0], results[1]


def see_registered(nodes: Nodes, count: int) -> None:
    def listening(node: EmbeddedNode) -> int:
        names = node.client().zrange(waiting_key("redlock", "k:k"), 0, -1)
        channels = [f"{{redlock}}:handoff:{name}" for name in names]
        counts = node.client().pubsub_numsub(*channels) if channels else []
        return sum(number for _, number in counts)

    eventually(lambda: [listening(node) for node in nodes] == [count] * len(nodes))


def see_end(stage: Stage, *results: Any) -> None:
    for result in results:
        assert result.get(timeout=LIVELY) in (FIRST, SECOND)
    assert not overlaps(stage.intervals()["k"])


def begun(stage: Stage) -> list[str]:
    return [line.more["name"] for line in stage.lines("begin")]


def test_a_named_worker_that_is_stopped_is_passed_by_and_runs_once_it_goes_on(
    handoff_stage: Stage,
) -> None:
    stopped, _ = start(handoff_stage)
    try:
        with handoff_stage.tasks.patient.lock_for("k", wait=60):
            first, second = see_waiting(handoff_stage)
            stopped.signal(signal.SIGSTOP)
        assert second.get(timeout=LIVELY) == SECOND
        assert not first.ready()
    finally:
        stopped.signal(signal.SIGCONT)
    see_end(handoff_stage, first)
    assert begun(handoff_stage) == [SECOND, FIRST]


def test_a_named_worker_that_is_killed_costs_nobody_the_lock(handoff_stage: Stage) -> None:
    killed, _ = start(handoff_stage)
    with handoff_stage.tasks.patient.lock_for("k", wait=60):
        _, second = see_waiting(handoff_stage)
        killed.kill()
    see_end(handoff_stage, second)
    key = waiting_key("redlock", "k:k")
    eventually(lambda: not any(node.client().zcard(key) for node in handoff_stage.nodes))


def test_a_node_that_nobody_reaches_costs_nobody_the_lock(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes, redlock_max_ttl=200)
    start(stage)
    with stage.tasks.patient.lock_for("k", wait=60):
        results = see_waiting(stage)
        mortal_nodes[0].pause()
    see_end(stage, *results)
