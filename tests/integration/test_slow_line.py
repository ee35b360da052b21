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


def clients_of(node: EmbeddedNode) -> set[str]:
    """Return the ids of a node's clients, without those that have only asked this."""
    clients = node.client().client_list()
    return {str(client["id"]) for client in clients if client["cmd"] != "client|list"}


def test_the_first_task_of_each_child_gets_its_lock_over_a_slow_line(
    make_stage: MakeStage, nodes: Nodes, line: list[Proxy]
) -> None:
    for proxy in line:
        proxy.weather = slow_line(0.1)
    conf = {"redlock_node_timeout": NODE_TIMEOUT, "worker_max_tasks_per_child": 1}
    stage = make_stage(line, **conf)
    before = [clients_of(node) for node in nodes]  # some of them may end meanwhile
    worker = stage.worker(concurrency=CHILDREN)
    for node, earlier in zip(nodes, before, strict=True):  # of the children, and the main process
        eventually(lambda node=node, earlier=earlier: len(clients_of(node) - earlier) > CHILDREN)
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
