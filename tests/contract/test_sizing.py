"""What docs/sizing.md counts on: the scripts that a lock costs each node."""

from __future__ import annotations

from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode
from tests.conftest import PATIENCE, settle


def scripts(nodes: list[EmbeddedNode]) -> list[int]:
    stats = [node.client().info("commandstats") for node in nodes]
    return [stat.get("cmdstat_evalsha", {}).get("calls", 0) for stat in stats]


def test_a_lock_costs_two_scripts_and_a_refused_try_two_on_each_node(
    nodes: list[EmbeddedNode], redlock: Redlock
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
            assert [b - a for a, b in zip(before, scripts(nodes), strict=True)] == [1, 1, 1]
            assert not other.lock("stock").try_acquire()
            settle(other)
            assert [b - a for a, b in zip(before, scripts(nodes), strict=True)] == [3, 3, 3]
        settle(redlock)
        assert [b - a for a, b in zip(before, scripts(nodes), strict=True)] == [4, 4, 4]
