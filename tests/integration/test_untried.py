"""Messages that wait without a try: each runs once, whatever becomes of its worker or its broker.

In each test a first message is refused its lock and waits in a worker. The others are received
after that, and must wait at once, in the memory of the worker's main process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes, eventually
from tests.integration.conftest import Stage, overlaps, set_stage, slow_but
from tests.integration.deliveries import heard, messages_of, see_drained

POOLS = ("prefork", "threads", "solo", "gevent")
FAST = ("prefork", "gevent")
COUNT = 6  # messages that wait for one lock
LONG = {"backoff": {"first": 1e7, "cap": 1e7}}  # s: longer than any test
ACKS = pytest.mark.parametrize("name", ["work", "late"], ids=["acks early", "acks late"])


def wait_behind(
    stage: Stage, worker: WorkerProcess, task: Any, key: str, count: int = COUNT, **how: Any
) -> list[Any]:
    """Have messages wait for a lock that is held, of which only the first has tried.

    The first one stays in the worker if the task acknowledges late; else it comes back. how: as of
    `apply_async`, for all.
    """
    first = task.apply_async((key,), **how)
    stage.see_deferred(first)
    times = 1 if task.acks_late else 2
    eventually(lambda: worker.output().count(f"{first.id}] received") == times)
    results = [first, *(task.apply_async((key,), **how) for _ in range(count - 1))]
    for result in results:
        stage.see_deferred(result)
    return results


def see_each_run_once(stage: Stage, key: str, results: list[Any]) -> None:
    for result in results:
        eventually(lambda result=result: stage.info(result)["status"] == "SUCCESS")
    see_drained(stage)  # a second delivery of one has run by then
    assert Counter(begun(stage, key)) == Counter(result.id for result in results)
    assert not overlaps(stage.intervals()[key])


def begun(stage: Stage, key: str) -> list[str]:
    return [line.more["id"] for line in stage.lines("begin", "step") if line.key == key]


def published(stage: Stage) -> int:
    stats = stage.broker.client().info("commandstats")
    pushes = [stats.get(f"cmdstat_{name}", {"calls": 0}) for name in ("lpush", "rpush")]
    return sum(int(push["calls"]) for push in pushes)


@pytest.mark.parametrize("pool", slow_but(FAST, POOLS))
def test_one_message_tries_and_all_run_in_the_order_in_which_they_came(
    stage: Stage, pool: str
) -> None:
    concurrency = 1 if pool == "solo" else 2
    worker = stage.worker(pool=pool, concurrency=concurrency, options=["-E"])
    before = published(stage)
    with heard(stage, "task-deferred") as events:
        with stage.tasks.work.lock_for("k", wait=60):
            results = wait_behind(stage, worker, stage.tasks.work, "k")
            ids = [result.id for result in results]
            assert [stage.deferrals(result) for result in results] == [1] * COUNT
            assert published(stage) == before + COUNT + 1
            eventually(lambda: {event["uuid"] for event in events} == set(ids))
            assert stage.tasks.work.delay("other").get(timeout=60) == 0  # they keep nobody out
        see_each_run_once(stage, "k", results)
    assert begun(stage, "k") == ids
    assert Counter(event["uuid"] for event in events) == Counter(ids)
    assert published(stage) == before + COUNT + 2


@ACKS
def test_a_broken_connection_to_the_broker_loses_no_message_that_waits(
    stage: Stage, name: str
) -> None:
    worker, task = stage.worker(concurrency=2), getattr(stage.tasks, name)
    with task.lock_for("k", wait=60):
        results = wait_behind(stage, worker, task, "k")
        connected = worker.output().count("Connected to ")
        stage.broker.client().client_kill_filter(_type="normal", skipme=True)
        eventually(lambda: worker.output().count("Connected to ") > connected)
    see_each_run_once(stage, "k", results)


@ACKS
def test_a_worker_that_stops_gives_back_all_messages_that_wait(stage: Stage, name: str) -> None:
    worker, task = stage.worker("w1"), getattr(stage.tasks, name)
    with task.lock_for("k", wait=60):
        results = wait_behind(stage, worker, task, "k")
        worker.stop(60)
        assert set(messages_of(stage)) == {result.id for result in results}
        second = stage.worker("w2")
        eventually(lambda: all(f"{result.id}] received" in second.output() for result in results))
    see_each_run_once(stage, "k", results)


@ACKS
def test_a_worker_that_is_killed_loses_no_message_that_waits(stage: Stage, name: str) -> None:
    worker, task, broker = stage.worker("w1"), getattr(stage.tasks, name), stage.broker.client()
    with task.lock_for("k", wait=60):
        results = wait_behind(stage, worker, task, "k")
        worker.kill()
        assert not messages_of(stage)
        tags = broker.zrange("unacked_index", 0, -1)
        assert len(tags) == COUNT
        broker.zadd("unacked_index", dict.fromkeys(tags, 1))  # the visibility timeout has passed
        second = stage.worker("w2")
        eventually(lambda: all(f"{result.id}] received" in second.output() for result in results))
    see_each_run_once(stage, "k", results)


@pytest.fixture
def set_rabbitmq_stage(
    rabbitmq: str, standing_broker: EmbeddedNode, nodes: Nodes, tmp_path: Path
) -> Iterator[Callable[[str], Stage]]:
    """Give what sets a stage over RabbitMQ; takes the kind of its queues."""
    with ExitStack() as stack:
        yield lambda kind: set_stage(stack, tmp_path, nodes, standing_broker, rabbitmq, kind)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_messages_that_wait_in_a_worker_of_rabbitmq_keep_no_other_out(
    set_rabbitmq_stage: Callable[[str], Stage], kind: str
) -> None:
    """Of quorum queues a worker takes no more messages for those that wait."""
    stage = set_rabbitmq_stage(kind)
    stage.worker(concurrency=2)
    task = stage.tasks.work
    with task.lock_for("k", wait=60):
        results = [task.delay("k")]
        stage.see_deferred(results[0])
        results += [task.delay("k") for _ in range(COUNT)]
        for result in results:
            stage.see_deferred(result)
        assert task.delay("other").get(timeout=60) == 0
    see_each_run_once(stage, "k", results)


@ACKS
def test_a_worker_of_rabbitmq_that_is_killed_loses_no_message_that_waits(
    set_rabbitmq_stage: Callable[[str], Stage], name: str
) -> None:
    stage = set_rabbitmq_stage("classic")
    worker, task = stage.worker("w1"), getattr(stage.tasks, name)
    with task.lock_for("k", wait=60):
        results = wait_behind(stage, worker, task, "k")
        worker.kill()
        second = stage.worker("w2")
        eventually(lambda: all(f"{result.id}] received" in second.output() for result in results))
    see_each_run_once(stage, "k", results)
