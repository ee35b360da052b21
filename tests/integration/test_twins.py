"""A message that is delivered twice: one body at a time, one end, and no word of the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import TTL, eventually
from tests.integration.conftest import Stage
from tests.integration.deliveries import deliver, heard, messages_of, see_drained

VISIBILITY = 2  # s
BODY = 8  # s
WAITS, DROPPED = "runs already, by another delivery", "another delivery of its message is done"
HARMLESS = {"task-sent", "task-received", "task-started", "task-succeeded"}


def outputs(workers: list[WorkerProcess]) -> str:
    return "".join(worker.output() for worker in workers)


def see_older_than(moment: float, seconds: float) -> None:
    """Return when so many s have passed since a monotonic s."""
    eventually(lambda: time.monotonic() - moment > seconds)


def begun(stage: Stage, key: str = "k") -> int:
    return len([line for line in stage.lines("begin") if line.key == key])


@pytest.fixture
def hasty(make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]) -> Stage:
    """Give a stage whose broker takes a message for lost that runs for longer than 2 s."""
    options = {"visibility_timeout": VISIBILITY}
    return make_stage(nodes, broker_transport_options=options, task_track_started=True)


@pytest.mark.parametrize("killed", [False, True], ids=["first lives", "first is killed"])
def test_a_message_that_is_delivered_again_while_it_runs(hasty: Stage, killed: bool) -> None:
    stage = hasty
    with heard(stage) as events:
        first = stage.worker("w1", concurrency=1, options=["-E"])
        result = stage.tasks.until.delay("k", "end")
        begin = stage.wait_for("begin")[0]
        see_older_than(begin.at, 1.5 * VISIBILITY)
        # kombu gives back what is not acknowledged when a consumer starts
        others = [stage.worker(name, concurrency=1, options=["-E"]) for name in ("w2", "w3")]
        eventually(lambda: WAITS in outputs(others))
        if killed:
            first.kill()
            stage.wait_for("begin", 2)
        see_older_than(begin.at, BODY)
        assert stage.info(result)["status"] == "STARTED"
        stage.log.with_name("end").touch()
        by = result.get(timeout=120)
        see_drained(stage)
        eventually(lambda: DROPPED in outputs([first, *others]) or killed)
        eventually(lambda: any(e["type"] == "task-succeeded" for e in events))
    assert by.startswith("w1@") != killed
    assert begun(stage) == (2 if killed else 1)
    assert stage.info(result)["status"] == "SUCCESS"
    assert {e["type"] for e in events if e.get("uuid") == result.id} <= HARMLESS
    stage.see_freed("k:k")


# how a late-acknowledging run may end: how often its body runs by then
ENDS = {"return": 1, "raise": 1, "retry": 2, "ignore": 1, "reject": 1, "replace": 1,
        "unpicklable result": 1}  # fmt: skip


@pytest.mark.parametrize("acks_on_failure", [True, False])
def test_a_duplicate_of_a_run_that_has_ended_is_dropped_whatever_the_end(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode], acks_on_failure: bool
) -> None:
    stage = make_stage(nodes, task_acks_on_failure_or_timeout=acks_on_failure)
    results = {how: stage.tasks.late_end.delay(how, how) for how in ENDS}
    messages = messages_of(stage)
    worker = stage.worker(concurrency=2)
    for how, runs in ENDS.items():
        eventually(lambda how=how, runs=runs: begun(stage, how) == runs)
    stage.wait_for("end")  # of what it is replaced by
    see_drained(stage)
    stage.see_freed(*(f"k:{how}" for how in ENDS))
    states = {how: stage.info(result)["status"] for how, result in results.items()}
    assert states["return"] == states["retry"] == states["replace"] == "SUCCESS"
    assert states["raise"] == "FAILURE"
    for message in messages.values():
        deliver(stage, message)
    eventually(lambda: worker.output().count(DROPPED) == len(ENDS))
    see_drained(stage)
    assert {how: begun(stage, how) for how in ENDS} == ENDS
    assert {how: stage.info(result)["status"] for how, result in results.items()} == states


def test_a_message_that_its_body_hands_back_is_not_done(stage: Stage) -> None:
    worker = stage.worker(concurrency=1)
    stage.tasks.late_end.delay("requeue", "requeue")
    eventually(lambda: begun(stage, "requeue") == 2)
    see_drained(stage)
    assert DROPPED not in worker.output()


def test_where_the_message_acknowledges_early_no_mark_is_made(stage: Stage) -> None:
    stage.tasks.work.delay("k")
    [message] = messages_of(stage).values()
    stage.worker(concurrency=1)
    stage.wait_for("end")
    deliver(stage, message)
    stage.wait_for("end", 2)
    assert not [name for node in stage.nodes for name in node.client().keys("*:done:*")]


def test_a_task_id_may_be_used_again(stage: Stage) -> None:
    worker, task = stage.worker(concurrency=1), stage.tasks.late
    for count in (1, 2):
        task.apply_async(("k",), task_id="again")
        [*_, last] = stage.wait_for("end", count)
        see_drained(stage)
    see_older_than(last.at, 2.0)  # the calendars of two workers may differ by a second
    with task.lock_for("k", wait=60):
        task.apply_async(("k",), task_id="again")
        eventually(lambda: "deferred tests.late[again]" in worker.output())
    stage.wait_for("end", 3)


def test_a_twin_of_a_dead_run_waits_for_its_lease_and_runs_once(stage: Stage) -> None:
    result = stage.tasks.late.delay("k")
    [message] = messages_of(stage).values()
    stage.broker.client().delete("celery")
    for node in stage.nodes:
        value = f"ff:{result.id}:tests.late:0:0 w9@gone"
        node.client().set("{redlock}:lock:k:k", value, px=int(TTL * 1000))
    began = time.monotonic()
    worker = stage.worker(concurrency=1)
    deliver(stage, message)
    assert result.get(timeout=120) == 0
    see_drained(stage)
    [line] = stage.lines("begin")
    assert WAITS in worker.output() or line.at - began > TTL
    assert stage.info(result)["status"] == "SUCCESS"


@pytest.mark.parametrize("options", [
    {"conflict": "skip"}, {"conflict": "fail"}, {"max_deferrals": 0}, {"max_wait": 0.001},
    {"limit": 3}, {"wait": 0.5},
], ids=str)  # fmt: skip
def test_nothing_that_ends_a_wait_ends_that_of_a_twin(stage: Stage, options: Any) -> None:
    result = stage.tasks.until.apply_async(("k", "end"), lock=options)
    [message] = messages_of(stage).values()
    worker = stage.worker(concurrency=2)
    stage.wait_for("begin")
    deliver(stage, message)
    eventually(lambda: worker.output().count(WAITS) >= 2)
    assert stage.info(result)["status"] == "PENDING"
    stage.log.with_name("end").touch()
    eventually(lambda: DROPPED in worker.output())
    assert result.get(timeout=120)
    see_drained(stage)
    assert begun(stage) == 1
