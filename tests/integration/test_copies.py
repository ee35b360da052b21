"""One message that its exchange gives to two queues: two copies with one id, and two runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from celery_redlock import LockTaken
from celery_redlock.tasks.delivery.route import route_send
from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes, eventually, trust_nodes
from tests.integration.carried import BITS
from tests.integration.conftest import Line, Stage, set_stage, slow_but, virtual_host

pytestmark = pytest.mark.xdist_group("copies")
BROKERS = {"redis": "classic", "rabbitmq": "classic", "rabbitmq, quorum queues": "quorum"}


@pytest.fixture(scope="module", params=slow_but(["redis"], list(BROKERS)))
def placed(
    request: pytest.FixtureRequest,
    standing_broker: EmbeddedNode,
    standing_nodes: Nodes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Stage, WorkerProcess]]:
    """Give a stage with a worker that stays for all tests here; each has keys of its own."""
    for node in (*standing_nodes, standing_broker):
        node.client().flushall()
    trust_nodes(standing_nodes)
    kind = BROKERS[request.param]
    with ExitStack() as stack:
        amqp = None if request.param == "redis" else stack.enter_context(virtual_host())
        folder: Path = tmp_path_factory.mktemp("copies")
        conf = {"redlock_queues": {f"{kind}-two": {"on_conflict": "fail"}}}
        made = set_stage(stack, folder, standing_nodes, standing_broker, amqp, kind, **conf)
        yield made, made.worker(concurrency=2)


@pytest.fixture
def stage(placed: tuple[Stage, WorkerProcess]) -> Stage:
    return placed[0]


def to_both(kind: str, routing_key: str) -> dict[str, str]:
    """Return the options of a send to two queues; one is named, so that kombu declares it."""
    exchange, queue = {"news.b": ("news", "left"), "twice": ("twice", "one")}[routing_key]
    names = {"exchange": f"{kind}-{exchange}", "queue": f"{kind}-{queue}"}
    return {**names, "routing_key": routing_key}


def copies(stage: Stage, key: str) -> list[Line]:
    return [line for line in stage.lines("copy") if line.key == key]


def see_idle(stage: Stage) -> None:
    """Return when the worker has nothing, neither in its slots nor to be waited for."""
    inspect = stage.app.control.inspect(stage.see_listening(), timeout=60)

    def is_idle() -> bool:
        asked = (inspect.scheduled(), inspect.reserved(), inspect.active())  # as messages go on
        return all(said and not any(said.values()) for said in asked)

    eventually(is_idle)


@pytest.mark.parametrize("late", [True, False], ids=["acks late", "acks early"])
def test_each_copy_runs_once_however_often_it_is_put_back(
    placed: tuple[Stage, WorkerProcess], key: str, late: bool
) -> None:
    stage, worker = placed
    task, kind = stage.tasks.copied_late if late else stage.tasks.copied, stage.tasks.KIND
    with task.lock_for(key, wait=60):
        often = {"max_wait": 3600}  # so that none waits for a release alone
        result = task.apply_async((key,), **to_both(kind, "news.b"), lock=often)
        eventually(lambda: worker.output().count(f"{task.name}[{result.id}] deferred") >= 6)
    eventually(lambda: len(copies(stage, key)) >= 2)
    see_idle(stage)
    ran = copies(stage, key)
    assert len(ran) == 2
    dropped = [line for line in worker.output().splitlines() if "has finished" in line]
    assert not [line for line in dropped if result.id in line]  # there were no more of them
    for line in ran:
        assert BITS.sub("", line.more["routing_key"]) == "news.b"
        came_back = line.more["exchange"] == "celery_delayed_delivery"
        assert came_back if kind == "quorum" else line.more["exchange"] == f"{kind}-news"


def test_each_copy_goes_by_the_name_of_its_own_queue(stage: Stage, key: str) -> None:
    kind = stage.tasks.KIND
    lock = {"key": "{queue}:{key}"}
    stage.tasks.copied.apply_async((key,), **to_both(kind, "news.b"), lock=lock)
    eventually(lambda: len(copies(stage, key)) == 2)
    resources = {line.more["resource"] for line in copies(stage, key)}
    assert resources == {f"{kind}-left:{key}", f"{kind}-right:{key}"}


def test_each_copy_goes_by_the_options_of_its_own_queue(stage: Stage, key: str) -> None:
    task, kind = stage.tasks.work, stage.tasks.KIND
    with task.lock_for(key, wait=60):
        result = task.apply_async((key,), **to_both(kind, "twice"))
        with pytest.raises(LockTaken):  # in one queue, and in the other one it waits
            result.get(timeout=120)
    eventually(lambda: [line.key for line in stage.lines("end")].count(key) == 1)
    see_idle(stage)
    assert [line.key for line in stage.lines("begin")].count(key) == 1


def test_a_send_goes_by_the_first_queue_that_its_topic_reaches(stage: Stage) -> None:
    kind = stage.tasks.KIND
    send: dict[str, Any] = {"exchange": f"{kind}-wide", "routing_key": "wide.a.b"}
    task = stage.tasks.copied
    assert route_send(task, ("k",), {}, send, ())[0] == f"{kind}-wide"
