"""Refused messages that stay in their worker, unacknowledged: not published again, and never lost.

The lock is held by the test. A message of a task that acknowledges late is refused it, and waits in
the worker's main process.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes, eventually
from tests.integration.conftest import MakeStage, Stage, Standing, overlaps, set_stage, slow_but
from tests.integration.deliveries import heard, messages_of, own_addresses, see_drained

POOLS = ("prefork", "threads", "solo", "gevent")
FAST = ("prefork", "gevent")
# such a message tries again and again, at the end of its countdowns
BUDGET = {"max_wait": 1000.0, "backoff": {"first": 0.2, "cap": 0.2}}
VISIBILITY = 8.0  # s
LIMIT, CROWD = 8, 12  # messages that a worker may have, and that wait
CONF = {"worker_eta_task_limit": LIMIT}
WORKER = {"concurrency": 2}
BEHIND = 50


def in_queue(stage: Stage) -> list[dict[str, Any]]:
    return [json.loads(text) for text in stage.broker.client().lrange("celery", 0, -1)]


def received(worker: WorkerProcess, result: Any) -> int:
    return worker.output().count(f"{result.id}] received")


def see_unacknowledged(stage: Stage, count: int) -> None:
    eventually(lambda: stage.broker.client().hlen("unacked") == count)


def see_success(stage: Stage, *results: Any) -> None:
    eventually(lambda: {stage.info(result)["status"] for result in results} == {"SUCCESS"})


def begin_until(stage: Stage, key: str) -> Any:
    """Have a body run until `go` is called; return its result."""
    result = stage.tasks.until.delay(key, "go")
    eventually(lambda: stage.runs_of(key))
    return result


def go(stage: Stage) -> None:
    stage.log.with_name("go").touch()


def deferred_in(worker: WorkerProcess, stage: Stage, key: str) -> None:
    """Fail unless the messages of a key were deferred once, by the worker's main process."""
    (deferred,) = [line for line in stage.lines("lock_deferred") if line.key == f"k:{key}"]
    assert deferred.pid == worker.pid


@pytest.mark.parametrize("pool", slow_but(FAST, POOLS))
def test_it_is_received_once_and_keeps_its_count_and_the_time_of_its_first_try(
    of_pool: Standing, key: str
) -> None:
    stage, (worker,) = of_pool.stage, of_pool.workers
    with heard(stage, "task-deferred") as heard_of, stage.tasks.late.lock_for(key, wait=60):
        result = stage.tasks.late.apply_async((key,), lock=BUDGET)
        stage.see_deferred(result, 4)
        see_unacknowledged(stage, 1)
        assert not in_queue(stage)
        events = eventually(
            lambda: len(own := [e for e in heard_of if e["uuid"] == result.id]) >= 4 and own
        )
    assert [event["deferrals"] for event in events[:4]] == [1, 2, 3, 4]
    waited = [event["waited"] for event in events[:4]]
    assert waited == sorted(waited)
    assert waited[-1] > 0
    see_success(stage, result)
    see_drained(stage)
    assert (received(worker, result), stage.runs_of(key)) == (1, 1)


def test_a_worker_that_stops_publishes_it_with_its_count(own_stage: Stage) -> None:
    stage = own_stage
    worker = stage.worker(concurrency=1)
    with stage.tasks.late.lock_for("k", wait=60):
        first, second = (stage.tasks.late.apply_async(("k",), lock=BUDGET) for _ in range(2))
        for result in (first, second):
            stage.see_deferred(result, 3)
        worker.stop(120)
        messages = in_queue(stage)
        assert {one["headers"]["id"] for one in messages} == {first.id, second.id}
        assert len(messages) == 2
        see_unacknowledged(stage, 0)
        for one in messages:
            deferral = one["headers"]["redlock"]["deferral"]
            assert deferral["count"] >= 3
            assert deferral["since"] <= deferral["at"]
        stage.worker("w2", concurrency=1)
        stage.see_deferred(first, deferrals(messages, first) + 1)
    see_success(stage, first, second)
    see_drained(stage)
    assert stage.runs_of("k") == 2


def deferrals(messages: list[dict[str, Any]], result: Any) -> int:
    (of_it,) = [one for one in messages if one["headers"]["id"] == result.id]
    return int(of_it["headers"]["redlock"]["deferral"]["count"])


def see_it_listens_no_more(stage: Stage) -> None:
    """Return when no other process hears of commands at the broker."""
    client, own = stage.broker.client(), own_addresses()

    def listening() -> list[str]:
        others = [one for one in client.client_list() if one["addr"] not in own]
        return [one["addr"] for one in others if one["sub"] != "0" or one["psub"] != "0"]

    eventually(lambda: not listening())


def is_listed(stage: Stage, result: Any, what: str) -> bool:
    """Return whether the one worker lists a message as "reserved": for its pool, or "active"."""
    replies = eventually(getattr(stage.app.control.inspect(timeout=1), what))
    return result.id in [one["id"] for listed in replies.values() for one in listed]


def test_one_that_waits_for_a_slot_as_its_worker_stops_is_published_with_its_count(
    own_stage: Stage,
) -> None:
    stage = own_stage
    worker = stage.worker(concurrency=1)
    with stage.tasks.late.lock_for("k", wait=60):
        result = stage.tasks.late.apply_async(("k",), lock=BUDGET)
        stage.see_deferred(result, 3)
        begin_until(stage, "other")  # has the slot
        eventually(lambda: is_listed(stage, result, "reserved"))
        stage.see_listening()
        worker.signal(signal.SIGTERM)
        see_it_listens_no_more(stage)
        go(stage)
        worker.wait(120)
        (message,) = in_queue(stage)
        assert deferrals([message], result) >= 3
        see_unacknowledged(stage, 0)


@pytest.mark.slow  # billiard's child waits for half a minute for its result to be read
def test_one_that_its_pool_has_not_accepted_as_its_worker_stops_keeps_its_count_and_runs_once(
    own_stage: Stage,
) -> None:
    stage = own_stage
    worker = stage.worker(concurrency=1)
    stage.tasks.work.delay("other").get(timeout=120)
    (child,) = {line.pid for line in stage.lines("begin")}

    def is_stopped_between_its_tries() -> bool:
        os.kill(child, signal.SIGSTOP)
        if is_listed(stage, result, "active"):
            os.kill(child, signal.SIGCONT)
            return False
        return True

    with stage.tasks.late.lock_for("k", wait=60):
        result = stage.tasks.late.apply_async(("k",), lock=BUDGET)
        stage.see_deferred(result, 3)
        eventually(is_stopped_between_its_tries)
        eventually(lambda: is_listed(stage, result, "reserved"))
        worker.signal(signal.SIGTERM)
        eventually(lambda: in_queue(stage))
        assert deferrals(in_queue(stage), result) >= 3
    os.kill(child, signal.SIGCONT)
    worker.wait(120)
    stage.worker("w2", concurrency=1)
    see_success(stage, result)
    see_drained(stage)
    assert stage.runs_of("k") == 1


@pytest.mark.parametrize("pool", slow_but(["prefork"], ["prefork", "threads", "gevent"]))
def test_one_that_is_refused_while_its_worker_stops_is_published(
    own_stage: Stage, pool: str
) -> None:
    stage = own_stage
    worker = stage.worker(pool=pool, concurrency=2)
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.decided_late.delay("k", "at last defer")
        stage.wait_for("asked")
        stage.see_listening()
        worker.signal(signal.SIGTERM)
        see_it_listens_no_more(stage)  # and so consumes no more
        stage.log.with_name("k decides").touch()
        worker.wait(120)
        (message,) = in_queue(stage)
        assert message["headers"]["id"] == result.id
        assert message["headers"]["redlock"]["deferral"]["count"] >= 1
        see_unacknowledged(stage, 0)


def test_a_worker_that_quits_leaves_it_to_the_broker(own_stage: Stage) -> None:
    stage = own_stage
    worker = stage.worker(concurrency=1)
    with stage.tasks.late.lock_for("k", wait=60):
        result = stage.tasks.late.delay("k")
        stage.see_deferred(result)
        worker.signal(signal.SIGQUIT)
        worker.wait(120)
        assert set(messages_of(stage)) == {result.id}
        stage.worker("w2", concurrency=1)
        stage.see_deferred(result)
    see_success(stage, result)
    see_drained(stage)
    assert stage.runs_of("k") == 1


def test_one_that_is_terminated_while_it_waits_ends_no_other_run(own_stage: Stage) -> None:
    """Its own run has ended; another message may be in the same child by now."""
    stage = own_stage
    worker = stage.worker(concurrency=1)
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = stage.tasks.late.delay("k")
        stage.see_deferred(waiting)
        running = begin_until(stage, "other")
        stage.app.control.revoke(waiting.id, terminate=True, signal="SIGKILL", reply=True)
        go(stage)
        see_success(stage, running)
        eventually(lambda: stage.info(waiting)["status"] == "REVOKED")
    see_drained(stage)
    assert "Worker exited prematurely" not in worker.output()
    assert stage.runs_of("k") == 0


def test_it_leaves_before_its_visibility_timeout(make_stage: MakeStage, nodes: Nodes) -> None:
    stage = make_stage(nodes, broker_transport_options={"visibility_timeout": VISIBILITY})
    worker = stage.worker(concurrency=1)
    with stage.tasks.late.lock_for("k", wait=60):
        result = stage.tasks.late.delay("k")
        eventually(lambda: received(worker, result) == 3)
        assert stage.deferrals(result) >= 2
    see_success(stage, result)
    see_drained(stage)
    assert stage.runs_of("k") == 1


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("name", ["work", "late"], ids=["acks early", "acks late"])
def test_those_above_the_workers_capacity_leave_and_others_get_past_them(
    stage: Stage, key: str, name: str
) -> None:
    task = getattr(stage.tasks, name)
    with task.lock_for(key, wait=60):
        results = [task.delay(key) for _ in range(CROWD)]
        for number in range(3):
            assert stage.tasks.work.delay(f"{key} other{number}").get(timeout=120) == 0
            assert stage.broker.client().hlen("unacked") <= LIMIT
        for result in results:
            stage.see_deferred(result)
    see_success(stage, *results)
    see_drained(stage)
    assert stage.runs_of(key) == CROWD
    assert not overlaps(stage.intervals()[key])


@pytest.mark.parametrize("name", ["work", "late"], ids=["acks early", "acks late"])
def test_a_second_message_of_a_key_that_runs_here_does_not_reach_the_pool(
    stage: Stage, worker: WorkerProcess, key: str, name: str
) -> None:
    """Nor does it keep the last slot from a message of another key."""
    stage.log.with_name("signals").touch()
    running = begin_until(stage, key)
    result = getattr(stage.tasks, name).delay(key)
    stage.see_deferred(result)
    deferred_in(worker, stage, key)
    assert received(worker, result) == 1
    assert stage.info(result)["result"]["holder"].startswith(running.id)
    assert stage.tasks.work.delay(f"{key} other").get(timeout=120) == 0
    go(stage)
    see_success(stage, result)
    see_drained(stage)
    assert not overlaps(stage.intervals()[key])


def test_a_message_waits_for_a_run_of_its_worker_that_has_not_begun(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    """Its lock is free until then, and both would begin at once."""
    stage = make_stage(nodes, worker_prefetch_multiplier=4)
    stage.log.with_name("signals").touch()
    worker = stage.worker(concurrency=2)
    busy = [stage.tasks.until.delay(key, "go") for key in ("a", "b")]
    stage.wait_for("begin", 2)
    first, second = (stage.tasks.late.delay("k", 0.5) for _ in range(2))
    stage.see_deferred(second)
    eventually(lambda: f"{first.id}] received" in worker.output())
    go(stage)
    see_success(stage, *busy, first, second)
    deferred_in(worker, stage, "k")
    assert not overlaps(stage.intervals()["k"])


@pytest.mark.usefixtures("worker")
def test_a_run_without_its_lock_holds_back_no_message_of_its_worker(stage: Stage, key: str) -> None:
    running = stage.tasks.releases_early.delay(key, "go")
    stage.wait_for("released")
    assert stage.tasks.work.delay(key).get(timeout=120) == 0
    assert not running.ready()
    go(stage)
    running.get(timeout=120, propagate=False)


def test_one_that_was_acknowledged_comes_back_before_all_that_wait_in_its_queue(
    own_stage: Stage,
) -> None:
    stage = own_stage
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.delay("k")
        others = [stage.tasks.add.delay(n, n) for n in range(BEHIND)]
        worker = stage.worker(concurrency=2)
        eventually(lambda: received(worker, result) == 2)
        eventually(lambda: received(worker, others[-1]) == 1)
        said = worker.output()
        assert said.rindex(f"{result.id}] received") < said.index(f"{others[-1].id}] received")
    assert result.get(timeout=120) == 0


def test_over_rabbitmq_it_is_published_again_if_the_prefetch_cannot_grow(
    nodes: Nodes, standing_broker: EmbeddedNode, rabbitmq: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        stage = set_stage(stack, tmp_path, nodes, standing_broker, rabbitmq, "quorum")
        worker = stage.worker(concurrency=1)
        with stage.tasks.late.lock_for("k", wait=60):
            result = stage.tasks.late.delay("k")
            stage.see_deferred(result, 2)
            eventually(lambda: received(worker, result) == 2)
        see_success(stage, result)
        assert stage.runs_of("k") == 1


def test_a_worker_of_rabbitmq_that_stops_publishes_it_with_its_count(
    nodes: Nodes, standing_broker: EmbeddedNode, rabbitmq: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        stage = set_stage(stack, tmp_path, nodes, standing_broker, rabbitmq, "classic")
        stage.log.with_name("signals").touch()
        worker = stage.worker(concurrency=1)
        with stage.tasks.late.lock_for("k", wait=60):
            result = stage.tasks.late.apply_async(("k",), lock=BUDGET)
            stage.see_deferred(result, 3)
            assert received(worker, result) == 1  # the prefetch of a classic queue can grow
            worker.stop(120)
            last = stage.deferrals(result)
            second = stage.worker("w2", concurrency=1)
            stage.see_deferred(result, last + 1)
        see_success(stage, result)
        counts = [line.more["deferrals"] for line in stage.lines("lock_deferred")]
        assert counts == list(range(1, len(counts) + 1))
        assert (received(second, result), stage.runs_of("k")) == (1, 1)
