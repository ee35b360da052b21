"""A message that is delivered twice: one body at a time, one end, and no word of the other."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from typing import Any

import pytest

from celery_redlock.testing import WorkerProcess
from tests.clocks import HOUR, WallClock
from tests.conftest import PATIENCE, TTL, Nodes, eventually
from tests.integration.conftest import MakeStage, Stage
from tests.integration.deliveries import QUEUE, deliver, heard, messages_of, see_drained
from tests.integration.test_loss import start_clocked

WAITS = "waits: another delivery of its message holds its lock (if that worker is dead, "
MAY_RUN = "cannot check whether another delivery"
DROPPED = "another delivery of its message has finished"
# task-retried: monitors leave DEFERRED, which the worker that was killed may have sent
HARMLESS = {"task-sent", "task-received", "task-retried", "task-started", "task-succeeded"}


def outputs(workers: list[WorkerProcess]) -> str:
    return "".join(worker.output() for worker in workers)


def see_older_than(moment: float, seconds: float) -> None:
    eventually(lambda: time.monotonic() - moment > seconds)


def begun(stage: Stage, key: str = "k") -> int:
    return len([line for line in stage.lines("begin") if line.key == key])


def give_back(stage: Stage) -> None:
    """End the visibility timeout of all that is not acknowledged, as if it were long ago.

    kombu gives it back when the next consumer starts.
    """
    client = stage.broker.client()
    for tag in eventually(lambda: client.zrange("unacked_index", 0, -1)):
        client.zadd("unacked_index", {tag: 1}, xx=True)


LIVES = pytest.param(False, id="first lives", marks=[pytest.mark.slow, pytest.mark.every_celery])


@pytest.mark.parametrize("killed", [LIVES, pytest.param(True, id="first is killed")])
def test_a_message_that_is_delivered_again_while_it_runs(
    make_stage: MakeStage, nodes: Nodes, killed: bool
) -> None:
    stage = make_stage(nodes, task_track_started=True)
    with heard(stage) as events:
        first = stage.worker("w1", concurrency=1, options=["-E"])
        result = stage.tasks.until.delay("k", "end")
        stage.wait_for("begin")
        others = []
        for name in ("w2", "w3"):  # which finds again what the one before it has
            give_back(stage)
            others.append(stage.worker(name, concurrency=1, options=["-E"]))
            eventually(lambda: WAITS in outputs(others))
        if killed:
            first.kill()
            for node in stage.nodes:
                node.client().delete("{redlock}:lock:k:k")
            stage.wait_for("begin", 2)
        else:
            waits = outputs(others).count(WAITS)
            eventually(lambda: outputs(others).count(WAITS) > waits)
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


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False], ids=["its state stands", "its state is gone"])
def test_a_run_that_was_stopped_is_dropped_where_another_delivery_has_come_to_its_end(
    stage: Stage, is_kept: bool
) -> None:
    result = stage.tasks.until.apply_async(("k", "end"), link_error=stage.tasks.work.si("errback"))
    [message] = messages_of(stage).values()
    first = stage.worker("w1", concurrency=1)
    [begin] = stage.wait_for("begin")
    stopped = [first.pid, begin.pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    deliver(stage, message)
    stage.worker("w2", concurrency=1)
    stage.wait_for("begin", 2)
    stage.log.with_name("end").touch()
    assert result.get(timeout=120).startswith("w2@")
    stage.see_freed("k:k")
    if not is_kept:  # as where the first one's body stores its progress once more
        result.forget()
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: DROPPED in first.output() or stage.info(result)["status"] == "FAILURE")
    see_drained(stage)
    assert stage.info(result)["status"] == ("SUCCESS" if is_kept else "FAILURE")
    assert begun(stage) == 2
    if is_kept:
        assert begun(stage, "errback") == 0
    else:
        stage.wait_for("begin", 3)  # the errback's


# how a late-acknowledging run may end: how often its body runs by then
ENDS = {"return": 1, "raise": 1, "retry": 2, "ignore": 1, "reject": 1, "replace": 1,
        "unpicklable result": 1}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("acks_on_failure", [True, False])
def test_a_duplicate_of_a_run_that_has_ended_is_dropped_whatever_the_end(
    make_stage: MakeStage, nodes: Nodes, acks_on_failure: bool
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
    assert results["replace"].get(timeout=120) == 0  # of what acknowledged before its end
    states = {how: stage.info(result)["status"] for how, result in results.items()}
    assert states["return"] == states["retry"] == states["replace"] == "SUCCESS"
    assert states["raise"] == "FAILURE"
    for message in messages.values():
        deliver(stage, message)
    eventually(lambda: worker.output().count(DROPPED) == len(ENDS))
    see_drained(stage)
    assert {how: begun(stage, how) for how in ENDS} == ENDS
    assert {how: stage.info(result)["status"] for how, result in results.items()} == states


@pytest.mark.slow
def test_a_duplicate_of_which_no_node_can_tell_waits_and_says_nothing(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes)
    result = stage.tasks.late.delay("k")
    [message] = messages_of(stage).values()
    worker = stage.worker(concurrency=1)
    assert result.get(timeout=120) == 0
    stage.see_freed("k:k")
    for node in mortal_nodes:
        node.pause()
    deliver(stage, message)
    eventually(lambda: MAY_RUN in worker.output())
    assert stage.info(result)["status"] == "SUCCESS"
    for node in mortal_nodes:
        node.resume()
    eventually(lambda: DROPPED in worker.output())
    see_drained(stage)
    assert (stage.info(result)["status"], begun(stage)) == ("SUCCESS", 1)


@pytest.mark.slow
def test_a_message_that_waited_in_a_busy_worker_is_dropped_where_its_copy_is_done(
    stage: Stage,
) -> None:
    """The broker flags the copy alone, and that was faster."""
    busy = stage.worker("w1", concurrency=1)
    stage.tasks.rebuild.delay("busy", "idle")  # acknowledged early: the worker takes one more
    stage.wait_for("begin")
    result = stage.tasks.late.delay("k")
    # its log says so before it notes when
    reserved = stage.app.control.inspect(stage.see_listening("w1"), timeout=60, limit=1).reserved
    eventually(lambda: result.id in str(reserved()))
    received = time.monotonic()
    [(_, kept)] = stage.broker.client().hgetall("unacked").items()
    see_older_than(received, 1.5)  # so much the calendars of two workers may differ
    other = stage.worker("w2", concurrency=1)
    deliver(stage, json.dumps(json.loads(kept)[0]))
    assert result.get(timeout=120) == 0
    eventually(lambda: stage.broker.client().hlen("unacked") == 1)
    stage.log.with_name("idle").touch()
    eventually(lambda: DROPPED in busy.output())
    see_drained(stage)
    assert begun(stage) == 1
    assert DROPPED not in other.output()


@pytest.mark.slow
def test_a_twin_of_a_dead_run_waits_for_its_lease_and_runs_once(stage: Stage) -> None:
    result = stage.tasks.late.delay("k")
    [message] = messages_of(stage).values()
    stage.broker.client().delete("celery")
    worker = stage.worker(concurrency=1)
    for node in stage.nodes:
        value = f"ff:{time.time_ns() // 1_000_000}:{result.id}:tests.late:0:0 w9@gone"
        node.client().set("{redlock}:lock:k:k", value, px=300_000)
    deliver(stage, message)
    eventually(lambda: WAITS in worker.output())
    assert begun(stage) == 0
    for node in stage.nodes:
        assert node.client().pexpire("{redlock}:lock:k:k", int(TTL * 1000))
    assert result.get(timeout=120) == 0
    see_drained(stage)
    assert begun(stage) == 1
    assert stage.info(result)["status"] == "SUCCESS"


OPTIONS = [
    {"on_conflict": "skip"}, {"on_conflict": "fail"}, {"max_wait": 0.001},
    {"limit": 3}, {"wait": 0.5},
]  # fmt: skip


def test_nothing_that_ends_a_wait_ends_that_of_a_twin(make_stage: MakeStage, nodes: Nodes) -> None:
    # each of the first ones is to get its lock at once, though all begin together
    stage = make_stage(nodes, redlock_node_timeout=PATIENCE)
    results = [
        stage.tasks.until.apply_async((f"k{number}", "end"), lock=options)
        for number, options in enumerate(OPTIONS)
    ]
    messages = messages_of(stage)
    worker = stage.worker(pool="threads", concurrency=2 * len(OPTIONS))

    def said(what: str, result: Any) -> int:
        return sum(what in line for line in worker.output().splitlines() if result.id in line)

    stage.wait_for("begin", len(OPTIONS))
    for message in messages.values():
        deliver(stage, message)
    for options, result in zip(OPTIONS, results, strict=True):
        eventually(lambda result=result: said(WAITS, result) >= 2)
        assert stage.info(result)["status"] == "PENDING", options
    stage.log.with_name("end").touch()
    for result in results:
        eventually(lambda result=result: said(DROPPED, result))
        assert result.get(timeout=120)
    see_drained(stage)
    assert [begun(stage, f"k{number}") for number in range(len(OPTIONS))] == [1] * len(OPTIONS)


def test_a_solo_worker_that_loses_its_connection_runs_no_locked_message_twice(stage: Stage) -> None:
    """kombu hands out one more message as it closes a channel, while Celery handles the loss."""
    worker = stage.worker(pool="solo", queues=[QUEUE])
    stage.see_listening()
    for turn, name in enumerate(("unlocked_late", "late", "once_late", "late", "once_late"), 1):
        key = f"{name}{turn}"
        getattr(stage.tasks, name).apply_async((key,), queue="held")
        message = str(stage.broker.client().rpop("held"))
        stage.broker.client().client_kill_filter(_type="pubsub")
        eventually(lambda turn=turn: worker.output().count("Connection to broker lost") == turn)
        deliver(stage, message.replace('"held"', f'"{QUEUE}"'), flagged=False)
        eventually(lambda key=key: key in {line.key for line in stage.lines("begin", "once")})
        see_drained(stage)
    runs = Counter(line.key for line in stage.lines("begin", "once"))
    plain = runs.pop("unlocked_late1")
    assert set(runs.values()) == {1}, f"plain Celery: {plain}"
    for node in stage.nodes:
        assert not node.client().keys("{redlock}:unique:*"), "a claim outlives its run"


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_a_run_is_known_as_done_by_its_age_whatever_its_workers_clock_says(
    stage: Stage, wall_clock: WallClock, ahead: int
) -> None:
    wall_clock.set(ahead)
    start_clocked(stage, wall_clock, "w1")
    right = stage.worker("w2", queues=[QUEUE], concurrency=1)
    stage.tasks.waits.delay("busy")
    stage.wait_for("begin")
    sent = stage.tasks.late.apply_async(("twin",), queue="nobody's", task_id="twice")
    message = str(stage.broker.client().rpop("nobody's"))
    deliver(stage, message.replace('"nobody\'s"', f'"{QUEUE}"'), flagged=False)
    eventually(lambda: "tests.late[twice] received" in right.output())
    see_older_than(time.monotonic(), 1.5)  # for less, it may be an id that is sent again
    stage.broker.client().lpush("held", message.replace('"nobody\'s"', '"held"'))
    assert sent.get(timeout=120) == 0
    stage.see_freed("k:twin")
    stage.log.with_name("go on").touch()
    eventually(lambda: DROPPED in right.output() or begun(stage, "twin") > 1)
    assert begun(stage, "twin") == 1, "a finished twin ran again"
    stage.tasks.late.apply_async(("sent again",), task_id="twice")
    eventually(lambda: begun(stage, "sent again") or right.output().count(DROPPED) > 1)
    assert begun(stage, "sent again") == 1
    first = stage.tasks.late.apply_async(("there",), queue="held", task_id="thrice")
    assert first.get(timeout=120) == 0
    stage.see_freed("k:there")
    see_older_than(time.monotonic(), 1.5)
    with stage.tasks.late.lock_for("deferred", wait=60):
        stage.tasks.late.apply_async(("deferred",), task_id="thrice")
        eventually(lambda: "tests.late[thrice] deferred" in right.output())
    eventually(lambda: begun(stage, "deferred") or right.output().count(DROPPED) > 1)
    assert begun(stage, "deferred") == 1
