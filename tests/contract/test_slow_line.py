"""The first acquire of a process connects to its nodes: over a slow line, and with dead nodes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from celery_redlock import Lock, LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError
from celery_redlock.lock.model.keys import completion_key, lock_key
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.lock.transport.connection import CONNECT_BUDGET
from tests.conftest import PATIENCE, Nodes, settle
from tests.contract.conftest import MAJORITY, REDIS_SERVER, quorum_of
from tests.contract.proxy import BOTH_WAYS, Proxy, Weather, proxies, slow_line

GUARDS = ("strict", "off")


def over(network: list[Proxy], guard: str = "auto") -> Redlock:
    """Return a Redlock with the default node timeout that has no connection yet."""
    return Redlock([proxy.url for proxy in network], restart_guard=guard)


def seconds_of(redlock: Redlock, expected: type[Exception] | None = None) -> float:
    """Return how long an acquire takes that does not wait for a holder."""
    began = time.monotonic()
    if expected is None:
        with redlock.lock("stock"):
            return time.monotonic() - began
    with pytest.raises(expected):
        redlock.lock("stock").acquire()
    return time.monotonic() - began


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("ms", [10, 30, 100])
def test_the_first_acquire_gets_the_lock_over_a_slow_line(
    network: list[Proxy], ms: int, guard: str
) -> None:
    for proxy in network:
        proxy.weather = slow_line(ms / 1000)
    with over(network, guard) as redlock, redlock.lock("stock", wait=0) as lock:
        assert lock.held


def test_the_page_on_sizing_says_how_long_a_first_acquire_may_take() -> None:
    page = Path(__file__).parents[2] / "docs" / "operations" / "sizing.md"
    assert f"has up to {CONNECT_BUDGET:g} s" in page.read_text()


@REDIS_SERVER
@pytest.mark.parametrize(("guard", "of_handshake"), [("strict", 2), ("off", 1)])
@pytest.mark.parametrize("database", [0, 1])
def test_a_handshake_takes_two_round_trips_with_the_guard_and_one_without(
    nodes: Nodes, guard: str, of_handshake: int, database: int
) -> None:
    with proxies(nodes[:1]) as [proxy]:
        proxy.weather = Weather(delay=(0.01, 0.01))  # else two answers might seem to be one
        url = proxy.url.removesuffix("0") + str(database)
        parse_address(url, "test", "nodes").dial(PATIENCE).disconnect()
        of_redis_py = proxy.round_trips
        assert of_redis_py == bool(database)  # SELECT
        with Redlock([url], restart_guard=guard, node_timeout=PATIENCE) as redlock:
            redlock.trust()
            proxy.round_trips = 0
            redlock.lock("stock").acquire()
            assert proxy.round_trips == of_redis_py + of_handshake + 1


@MAJORITY
def test_two_nodes_that_answer_do_not_wait_for_the_third(network: list[Proxy]) -> None:
    network[2].weather = Weather(swallows=BOTH_WAYS)
    with over(network) as redlock:
        assert seconds_of(redlock) < CONNECT_BUDGET / 2


@MAJORITY
def test_two_nodes_that_disagree_do_not_wait_for_the_third(
    network: list[Proxy], nodes: Nodes
) -> None:
    nodes[0].client().set(lock_key("redlock", "stock"), "another's", px=60_000)
    network[2].weather = Weather(swallows=BOTH_WAYS)
    with over(network) as redlock:
        assert seconds_of(redlock, LockTaken) < CONNECT_BUDGET / 2


def test_dead_nodes_cost_a_node_timeout_once_a_connect_has_failed(network: list[Proxy]) -> None:
    for proxy in quorum_of(network):
        proxy.weather = Weather(swallows=BOTH_WAYS)
    with over(network) as redlock:
        first = seconds_of(redlock, QuorumUnreachable)
        end, later = time.monotonic() + first / 2, [0.0]
        while time.monotonic() < end:  # some of them while the nodes are connected to again
            later.append(seconds_of(redlock, QuorumUnreachable))
    assert first > CONNECT_BUDGET / 2  # it waited for the connects
    assert max(later) < first / 2


def test_nodes_that_stop_answering_cost_a_node_timeout(network: list[Proxy]) -> None:
    with over(network) as redlock:
        settle(redlock)
        for proxy in quorum_of(network):
            proxy.weather = Weather(swallows=BOTH_WAYS)
        assert max(seconds_of(redlock, QuorumUnreachable) for _ in range(4)) < CONNECT_BUDGET / 2


def test_a_connection_that_was_cut_is_made_anew_over_a_slow_line(network: list[Proxy]) -> None:
    for proxy in network:
        proxy.weather = slow_line(0.1)
    with over(network) as redlock:
        with redlock.lock("stock"):
            pass
        for proxy in network:
            proxy.cut()
        with redlock.lock("another", wait=0) as lock:  # a release may be lost with its connection
            assert lock.held


def test_a_refusal_over_a_slow_line_tells_the_time_of_the_nodes(
    network: list[Proxy], nodes: Nodes
) -> None:
    for proxy, node in zip(network, nodes, strict=True):
        node.client().set(lock_key("redlock", "stock"), "another's", px=60_000)
        proxy.weather = slow_line(0.15)
    with over(network) as redlock:
        took = seconds_of(redlock, LockTaken)  # most of that time it connected
        assert abs(redlock.session.guard.wall() - time.time()) < took / 2


def test_a_grant_over_a_slow_line_heeds_a_run_that_has_just_ended(
    network: list[Proxy], nodes: Nodes
) -> None:
    for proxy, node in zip(network, nodes, strict=True):
        node.client().set(completion_key("redlock", "a run"), 60_000, px=60_000)  # ends now
        proxy.weather = slow_line(0.15)
    with over(network) as redlock:
        marker = CompletionMarker("a run", 60.0, redlock.session.clock.now() - 0.2)
        options = LockOptions(("stock",), 30.0, 0.0, True, None, "a copy", marker=marker)
        with pytest.raises(AlreadyCompletedError):
            Lock(redlock, options).acquire()
