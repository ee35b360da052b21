"""Real workers whose lock nodes are far away: a new child connects before its first task."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually
from tests.contract.proxy import BOTH_WAYS, Proxy, Weather, proxies, slow_line
from tests.integration.conftest import MakeStage

NODE_TIMEOUT = 0.2  # s, the default
CHILDREN = 2


@pytest.fixture
def line(nodes: Nodes) -> Iterator[list[Proxy]]:
    with proxies(nodes) as made:
        yield made


def connected_to(node: EmbeddedNode) -> int:
    return len(node.client().client_list())


def test_the_first_task_of_each_child_gets_its_lock_over_a_slow_line(
    make_stage: MakeStage, nodes: Nodes, line: list[Proxy]
) -> None:
    for proxy in line:
        proxy.weather = slow_line(0.1)
    conf = {"redlock_node_timeout": NODE_TIMEOUT, "worker_max_tasks_per_child": 1}
    stage = make_stage(line, **conf)
    before = [connected_to(node) for node in nodes]
    worker = stage.worker(concurrency=CHILDREN)
    for node, count in zip(nodes, before, strict=True):  # of the children, and the main process
        eventually(lambda node=node, count=count: connected_to(node) > count + CHILDREN)
    deferring = [stage.tasks.work.delay(f"defers{number}") for number in range(3)]
    option = {"on_unreachable": "run"}
    running = [stage.tasks.work.apply_async((f"r{number}",), lock=option) for number in range(3)]
    # each body checks that its lock is held
    assert [result.get(timeout=120) for result in (*deferring, *running)] == [0] * 6
    assert len({begun.pid for begun in stage.lines("begin")}) == 6
    assert "deferred" not in worker.output()


def test_a_child_starts_in_time_while_no_node_answers(
    make_stage: MakeStage, line: list[Proxy]
) -> None:
    for proxy in line:
        proxy.weather = Weather(swallows=BOTH_WAYS)
    stage = make_stage(line, redlock_node_timeout=NODE_TIMEOUT, worker_max_tasks_per_child=1)
    worker = stage.worker(concurrency=1)
    assert [stage.tasks.add.delay(*range(size)).get(timeout=120) for size in range(3)] == [0, 1, 2]
    assert "UP message" not in worker.output()  # billiard's, of a child that is not up within 4 s
