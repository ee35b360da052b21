"""A lock is handed on whatever becomes of the worker that is named.

Two workers wait for one lock, each with a message whose countdown is far longer than the test: what
runs was named by the release, or took the turn of a worker that did not act.
"""

from __future__ import annotations

import signal
from typing import Any

from celery_redlock.lock.model.keys import inbox_channel, waiting_key
from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually
from tests.integration.conftest import MakeStage, Stage, overlaps

FIRST, SECOND = "other", "celery"  # queues, each of one worker
LIVELY = 60.0  # s: well before the end of `patient`'s countdown of 100 s
WAITING = waiting_key("redlock", "k:k")


def see_waiting(stage: Stage) -> list[Any]:
    """Send a message to each worker, and return once a release would name both."""

    def listening(node: EmbeddedNode) -> int:
        channels = [inbox_channel("redlock", name) for name in node.client().zrange(WAITING, 0, -1)]
        return sum(count for _, count in node.client().pubsub_numsub(*channels))

    results: list[Any] = []
    for queue in (FIRST, SECOND):
        results.append(stage.tasks.patient.apply_async(("k", queue), queue=queue))
        stage.see_deferred(results[-1])
        eventually(lambda: all(listening(node) == len(results) for node in stage.nodes))
    return results


def test_a_named_worker_that_is_stopped_is_passed_by_and_one_that_is_killed_costs_nobody_the_lock(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    stage = make_stage(nodes, redlock_max_ttl=200)  # leases are longer than any test
    named = stage.worker("w1", concurrency=1, queues=[FIRST])
    stage.worker("w2", concurrency=1, queues=[SECOND])
    try:
        with stage.tasks.patient.lock_for("k", wait=60):
            first, second = see_waiting(stage)
            named.signal(signal.SIGSTOP)
        assert second.get(timeout=LIVELY) == SECOND
        assert not first.ready()
    finally:
        named.signal(signal.SIGCONT)
    assert first.get(timeout=LIVELY) == FIRST  # once it goes on
    assert [line.more["name"] for line in stage.lines("begin")] == [SECOND, FIRST]
    with stage.tasks.patient.lock_for("k", wait=60):
        _, second = see_waiting(stage)
        named.kill()
    assert second.get(timeout=LIVELY) == SECOND
    assert not overlaps(stage.intervals()["k"])
    eventually(lambda: not any(node.client().zcard(WAITING) for node in nodes))
