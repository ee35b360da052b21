"""Messages that wait without a try: each runs once, whatever becomes of its worker or its broker.

In each test a first message is refused its lock and waits in a worker. The others are received
after that, and must wait at once, in the memory of the worker's main process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes, eventually
from tests.integration.conftest import (
    STANDING,
    MakeStage,
    Stage,
    Standing,
    overlaps,
    pools,
    set_stage,
    slow_but,
)
from tests.integration.deliveries import heard, messages_of, see_drained

WORKER = STANDING
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
    see_drained(stage, [result.id for result in results])  # a second delivery has run by then
    assert Counter(begun(stage, key)) == Counter(result.id for result in results)
    assert not overlaps(stage.intervals()[key])


def begun(stage: Stage, key: str) -> list[str]:
    return [line.more["id"] for line in stage.lines("begin", "step") if line.key == key]


def published(stage: Stage) -> int:
    stats = stage.broker.client().info("commandstats")
    pushes = [stats.get(f"cmdstat_{name}", {"calls": 0}) for name in ("lpush", "rpush")]
    return sum(int(push["calls"]) for push in pushes)


@pytest.mark.parametrize("pool", pools("prefork", "gevent"))
def test_one_message_tries_and_all_run_in_the_order_in_which_they_came(
    of_pool: Standing, key: str
) -> None:
    stage, (worker,) = of_pool.stage, of_pool.workers
    before = published(stage)
    with heard(stage, "task-deferred") as events:
        with stage.tasks.patient.lock_for(key, wait=60):  # longer than the test waits for anything
            results = wait_behind(stage, worker, stage.tasks.work, key, lock=LONG)
            ids = [result.id for result in results]
            assert [stage.deferrals(result) for result in results] == [1] * COUNT
            assert published(stage) == before + COUNT + 1
            eventually(lambda: {event["uuid"] for event in events} == set(ids))
            # of the lock, or of the first one's run if that has not left the main process yet
            assert all(event["holder"] for event in events)
            assert stage.tasks.work.delay(f"{key}-other").get(timeout=60) == 0  # none is kept out
        see_each_run_once(stage, key, results)
    assert begun(stage, key) == ids
    assert Counter(event["uuid"] for event in events) == Counter(ids)
    assert published(stage) == before + COUNT + 2


@ACKS
def test_a_broken_connection_to_the_broker_loses_no_message_that_waits(
    stage: Stage, worker: WorkerProcess, key: str, name: str
) -> None:
    task = getattr(stage.tasks, name)
    with task.lock_for(key, wait=60):
        results = wait_behind(stage, worker, task, key)
        connected = worker.output().count("Connected to ")
        stage.broker.client().client_kill_filter(_type="normal", skipme=True)
        eventually(lambda: worker.output().count("Connected to ") > connected)
    see_each_run_once(stage, key, results)


@contextmanager
def both_wait(stage: Stage, worker: WorkerProcess) -> Iterator[dict[str, list[Any]]]:
    """Have messages wait meanwhile; give those that acknowledge early and late, by their key."""
    early, late = stage.tasks.work, stage.tasks.late
    with early.lock_for("early", wait=60), late.lock_for("late", wait=60):
        yield {
            "early": wait_behind(stage, worker, early, "early"),
            "late": wait_behind(stage, worker, late, "late"),
        }


def follow(stage: Stage, waiting: dict[str, list[Any]]) -> None:
    """Start another worker, and return when it has all messages."""
    results = [result for some in waiting.values() for result in some]
    second = stage.worker("w2", concurrency=1)
    eventually(lambda: all(f"{result.id}] received" in second.output() for result in results))


def test_a_worker_that_stops_gives_back_all_messages_that_wait(own_stage: Stage) -> None:
    stage = own_stage
    worker = stage.worker("w1", concurrency=1)
    with both_wait(stage, worker) as waiting:
        worker.stop(60)
        assert set(messages_of(stage)) == {
            result.id for some in waiting.values() for result in some
        }
        follow(stage, waiting)
    for key, results in waiting.items():
        see_each_run_once(stage, key, results)


def test_a_worker_that_is_killed_loses_no_message_that_waits(own_stage: Stage) -> None:
    stage, broker = own_stage, own_stage.broker.client()
    worker = stage.worker("w1", concurrency=1)
    with both_wait(stage, worker) as waiting:
        worker.kill()
        assert not messages_of(stage)
        tags = broker.zrange("unacked_index", 0, -1)
        assert len(tags) == 2 * COUNT
        broker.zadd("unacked_index", dict.fromkeys(tags, 1))  # the visibility timeout has passed
        follow(stage, waiting)
    for key, results in waiting.items():
        see_each_run_once(stage, key, results)


@pytest.fixture
def set_rabbitmq_stage(
    rabbitmq: str, standing_broker: EmbeddedNode, nodes: Nodes, tmp_path: Path
) -> Iterator[Callable[[str], Stage]]:
    """Give what sets a stage over RabbitMQ; takes the kind of its queues."""
    with ExitStack() as stack:
        yield lambda kind: set_stage(stack, tmp_path, nodes, standing_broker, rabbitmq, kind)


@pytest.mark.parametrize("kind", slow_but(["classic"], ["classic", "quorum"]))
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


def test_a_message_behind_a_run_that_has_no_quorum_is_not_told_that_the_run_holds_its_lock(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    """The run that began before holds its lock, and is named as its holder."""
    stage = make_stage(mortal_nodes)
    worker, task = stage.worker(concurrency=3), stage.tasks.patient
    holding = task.delay("held", "until it may end")
    eventually(lambda: stage.lines("begin"))
    stage.see_deferred(task.delay("held"))  # since then the main process hears of the nodes
    for node in mortal_nodes[:2]:
        node.kill()
        missing = f"ERROR/MainProcess] node 127.0.0.1:{node.port} gives no vote"
        eventually(lambda missing=missing: missing in worker.output())
    behind = task.delay("held")
    line = f"{behind.id}] deferred: lock 'k:held' is held by {task.name}[{holding.id}] on "
    eventually(lambda: line in worker.output())

    def is_needed_first() -> bool:
        first, second = (task.delay("free") for _ in "12")
        stage.see_deferred(second)
        needed = f"deferred: lock 'k:free' is needed first by {task.name}[{first.id}] on "
        return needed in worker.output()

    eventually(is_needed_first)  # where the second one comes before the run of the first has tried
    assert "lock 'k:free' is held by" not in worker.output()
    stage.log.with_name("until it may end").touch()
