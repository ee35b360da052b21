"""Which run of a task is the one that waits: a majority of nodes decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_redlock import LockedTask, QuorumUnreachable
from celery_redlock.lock.keys import waiting_key
from celery_redlock.lock.nodes import ENTER
from celery_redlock.tasks.runtime import redlock_of
from celery_redlock.tasks.waiting import enter, leave
from celery_redlock.testing import EmbeddedNode
from tests.conftest import NODE_TIMEOUT, eventually, settle

KEY = waiting_key("redlock", "r")


def nothing() -> None: ...


def task_over(nodes: list[EmbeddedNode]) -> Any:
    app = Celery(set_as_current=False, broker="memory://")
    urls = [node.url for node in nodes]
    app.conf.update(redlock_nodes=urls, redlock_node_timeout=NODE_TIMEOUT)
    task = app.task(base=LockedTask, name="t", shared=False)(nothing)
    settle(redlock_of(app))
    return task


@pytest.fixture
def task(nodes: list[EmbeddedNode]) -> Iterator[Any]:
    made = task_over(nodes)
    yield made
    redlock_of(made.app).close()


def put(node: EmbeddedNode, run: str) -> None:
    node.client().eval(ENTER.source.decode(), 1, KEY, "t", run, "60000")


def entered(nodes: list[EmbeddedNode]) -> list[str]:
    """Return which run each node knows, "" for none."""
    known = [node.client().hget(KEY, "t") or "" for node in nodes]
    return [entry.partition(" ")[2] for entry in known]


def test_the_first_is_entered_everywhere_and_the_second_is_told(
    task: Any, nodes: list[EmbeddedNode]
) -> None:
    assert enter(task, ["r"], "1", 1.0) == ""
    assert enter(task, ["r"], "2", 1.0) == "1"
    assert entered(nodes) == ["1", "1", "1"]
    assert enter(task, ["r"], "1", 1.0) == ""  # put back once more


def test_who_is_told_by_a_majority_leaves_no_trace_on_the_others(
    task: Any, nodes: list[EmbeddedNode]
) -> None:
    for node in nodes[:2]:
        put(node, "1")
    assert enter(task, ["r"], "2", 1.0) == "1"
    settle(redlock_of(task.app))
    assert entered(nodes) == ["1", "1", ""]


def test_for_one_that_has_expired_nobody_is_skipped(task: Any, nodes: list[EmbeddedNode]) -> None:
    assert enter(task, ["r"], "1", 60.0, 5.0) == ""
    assert enter(task, ["r"], "2", 60.0) == "1"
    eventually(lambda: not any(node.client().exists(KEY) for node in nodes))
    assert enter(task, ["r"], "2", 60.0, -1.0) == ""


def test_one_node_that_knows_another_skips_nobody(task: Any, nodes: list[EmbeddedNode]) -> None:
    put(nodes[0], "1")
    assert enter(task, ["r"], "2", 1.0) == ""
    assert entered(nodes) == ["1", "2", "2"]


def test_where_no_majority_agrees_one_waits(task: Any, nodes: list[EmbeddedNode]) -> None:
    for node, run in zip(nodes, "135", strict=True):
        put(node, run)
    assert enter(task, ["r"], "2", 1.0) == ""


def test_without_a_majority_one_waits_and_cannot_be_sure_to_have_left(
    mortal_nodes: list[EmbeddedNode],
) -> None:
    task = task_over(mortal_nodes)
    try:
        put(mortal_nodes[2], "1")
        for node in mortal_nodes[:2]:
            node.kill()
        assert enter(task, ["r"], "2", 1.0) == ""
        mortal_nodes[2].kill()
        assert enter(task, ["r"], "2", 1.0) == ""
        leave(task, ["r"], "2")
        with pytest.raises(QuorumUnreachable, match=r"127\.0\.0\.1"):
            leave(task, ["r"], "2", surely=True)
    finally:
        redlock_of(task.app).close()


def test_who_has_left_surely_is_gone_from_a_majority(task: Any, nodes: list[EmbeddedNode]) -> None:
    enter(task, ["r"], "1", 1.0)
    leave(task, ["r"], "1", surely=True)
    assert entered(nodes).count("") >= 2
    assert enter(task, ["r"], "2", 1.0) == ""
