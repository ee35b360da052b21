"""What docs/operations/sizing.md counts on: what locks and waiters cost each node."""

from __future__ import annotations

import contextlib
from typing import Any, cast

from celery_redlock import Redlock
from celery_redlock.lock.model.keys import inbox_channel, lock_key
from celery_redlock.lock.server.requests import Requests
from celery_redlock.testing import EmbeddedNode, hold
from tests.conftest import PATIENCE, Nodes, eventually, register, settle, write
from tests.contract.conftest import REDIS_SERVER

PREFIX, RESOURCE = "redlock", "stock:sku-7"
OF_A_TASK = "tasks.take[0d1f6c3e-7a7d-4f9d-b0a4-3a6c0e7f9b21]:0:0 celery@web-1"  # a holder's label


pytestmark = REDIS_SERVER  # counts commands and memory


def scripts(nodes: Nodes) -> list[int]:
    return calls(nodes, "evalsha")


def calls(nodes: Nodes, *names: str) -> list[int]:
    """Return how many of these commands each node has executed, also in its scripts."""
    stats = [cast("dict[str, Any]", node.client().info("commandstats")) for node in nodes]
    counts = [[stat.get(f"cmdstat_{name}", {}).get("calls", 0) for name in names] for stat in stats]
    return [sum(count) for count in counts]


def test_a_lock_costs_two_scripts_and_a_refused_try_two_on_each_node(
    nodes: Nodes, redlock: Redlock
) -> None:
    urls = [node.url for node in nodes]
    with Redlock(urls, node_timeout=PATIENCE) as other:
        for each in (redlock, other):  # the first lock teaches the nodes the scripts
            with each.lock("warm"):
                settle(each)
            settle(each)
        before = scripts(nodes)
        with redlock.lock("stock"):
            settle(redlock)
            assert [b - a for a, b in zip(before, scripts(nodes), strict=True)] == [1] * len(nodes)
            assert not other.lock("stock").try_acquire()
            settle(other)
            assert [b - a for a, b in zip(before, scripts(nodes), strict=True)] == [3] * len(nodes)
        settle(redlock)
        assert [b - a for a, b in zip(before, scripts(nodes), strict=True)] == [4] * len(nodes)


def test_nothing_is_written_for_waiters_if_nobody_waits(nodes: Nodes, redlock: Redlock) -> None:
    writes = ("zadd", "zrem", "pexpire")
    before = calls(nodes, *writes)
    with redlock.lock(RESOURCE):
        pass
    settle(redlock)
    assert calls(nodes, *writes) == before
    assert [node.client().keys(f"{{{PREFIX}}}:waiting:*") for node in nodes] == [[]] * len(nodes)


def test_a_registered_worker_whose_head_changes_costs_one_command_on_each_node(
    nodes: Nodes, redlock: Redlock
) -> None:
    requests, counted = Requests(PREFIX, 0.0), ("zadd", "zrem", "pexpire", "evalsha", "eval")
    register(redlock, "w1", RESOURCE, 1.0)
    settle(redlock)
    before = calls(nodes, *counted)
    write(redlock, requests.update("w1", RESOURCE, 2.0))
    settle(redlock)
    assert [b - a for a, b in zip(before, calls(nodes, *counted), strict=True)] == [1] * len(nodes)
    write(redlock, requests.unregister("w1", RESOURCE))
    settle(redlock)
    assert [b - a for a, b in zip(before, calls(nodes, *counted), strict=True)] == [2] * len(nodes)


def test_a_release_costs_each_node_three_messages_however_many_wait(
    nodes: Nodes, redlock: Redlock
) -> None:
    waiters = [f"w{number}" for number in range(8)]
    with contextlib.ExitStack() as stack:
        for node in nodes:
            subscriber = stack.enter_context(node.client().pubsub())
            channels = [inbox_channel(PREFIX, waiter) for waiter in waiters]
            subscriber.subscribe(*channels)
            eventually(lambda node=node, channels=channels: heard_on(node, channels))
        for number, waiter in enumerate(waiters):
            register(redlock, waiter, RESOURCE, float(number))
        settle(redlock)
        before = calls(nodes, "publish")
        with redlock.lock(RESOURCE):
            pass
        settle(redlock)
        assert [b - a for a, b in zip(before, calls(nodes, "publish"), strict=True)] == [3] * len(
            nodes
        )


def heard_on(node: EmbeddedNode, channels: list[str]) -> bool:
    counts = cast("list[tuple[str, int]]", node.client().pubsub_numsub(*channels))
    return all(count == 1 for _, count in counts)


def test_a_held_lock_takes_no_more_memory_of_a_node_than_the_page_says(
    nodes: Nodes, redlock: Redlock
) -> None:
    with redlock.lock(RESOURCE):
        assert max(memory_on(nodes)) <= 170
    settle(redlock)
    with hold(RESOURCE, on=redlock, by=OF_A_TASK):
        assert max(memory_on(nodes)) <= 220


def memory_on(nodes: Nodes) -> list[int]:
    """Return the bytes of a held lock on each node, once all nodes have it."""
    key = lock_key(PREFIX, RESOURCE)

    def seen() -> list[int]:
        sizes = [cast("int | None", node.client().memory_usage(key)) for node in nodes]
        return [size for size in sizes if size is not None]

    return eventually(lambda: sizes if len(sizes := seen()) == len(nodes) else [])
