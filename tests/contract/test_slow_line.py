"""The first acquire of a process connects to its nodes: over a slow line, and with dead nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from celery_redlock import Lock, LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError
from celery_redlock.lock.model.keys import completion_key, lock_key
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.transport import connection
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.lock.transport.connection import CONNECT_BUDGET
from tests.conftest import NODE_TIMEOUT, PATIENCE, Nodes, eventually, settle
from tests.contract.conftest import MAJORITY, REDIS_SERVER, quorum_of
from tests.contract.proxy import BOTH_WAYS, FAIR, Proxy, Weather, proxies, slow_line

GUARDS = ("strict", "off")
FOREVER = 90.0  # s: longer than a test waits
LONG = 10 * FOREVER  # s: a ttl of which a part is as long: an acquire waits for no longer than that


def over(network: list[Proxy], guard: str = "auto", node_timeout: float = NODE_TIMEOUT) -> Redlock:
    """Return a Redlock that has no connection yet."""
    urls = [proxy.url for proxy in network]
    return Redlock(urls, restart_guard=guard, node_timeout=node_timeout, max_ttl=LONG)


def see_end(redlock: Redlock, expected: type[Exception] | None = None) -> None:
    """See that an acquire ends that does not wait for a holder.

    Fails where it waits for a connect, for which it has `FOREVER`.
    """

    def acquire() -> None:
        with contextlib.nullcontext() if expected is None else pytest.raises(expected):
            redlock.lock("stock", ttl=LONG).acquire().release()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(acquire).result(60)


@pytest.fixture
def endless_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a caller wait for first connects for longer than any test."""
    monkeypatch.setattr(connection, "CONNECT_BUDGET", FOREVER)


@pytest.fixture
def late(network: list[Proxy], pool: ThreadPoolExecutor) -> Callable[[Redlock], bool]:
    """Give a function that acquires over lines on which nothing passes for a node timeout."""

    def acquires(redlock: Redlock) -> bool:
        for proxy in network:
            proxy.weather = Weather(swallows=BOTH_WAYS)
        granted = pool.submit(redlock.lock("stock", ttl=LONG).try_acquire)
        try:
            time.sleep(1.1 * redlock.node_timeout)  # what passes then is late for who does not wait
        finally:
            for proxy in network:
                proxy.weather = FAIR
        return granted.result()

    return acquires


@pytest.mark.usefixtures("endless_connects")
@pytest.mark.parametrize("guard", GUARDS)
def test_the_first_acquire_waits_for_connects_that_take_longer_than_a_node_timeout(
    network: list[Proxy], late: Callable[[Redlock], bool], guard: str
) -> None:
    with over(network, guard) as redlock:
        assert late(redlock)


@pytest.mark.usefixtures("endless_connects")
def test_so_does_one_whose_connections_were_cut(
    network: list[Proxy], late: Callable[[Redlock], bool]
) -> None:
    with over(network) as redlock:
        settle(redlock)
        for proxy in network:
            proxy.cut()
        assert late(redlock)


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
@pytest.mark.usefixtures("endless_connects")
def test_two_nodes_that_answer_do_not_wait_for_the_third(network: list[Proxy]) -> None:
    network[2].weather = Weather(swallows=BOTH_WAYS)
    with over(network, node_timeout=PATIENCE) as redlock:
        see_end(redlock)


@MAJORITY
@pytest.mark.usefixtures("endless_connects")
def test_two_nodes_that_disagree_do_not_wait_for_the_third(
    network: list[Proxy], nodes: Nodes
) -> None:
    nodes[0].client().set(lock_key("redlock", "stock"), "another's", px=60_000)
    network[2].weather = Weather(swallows=BOTH_WAYS)
    with over(network) as redlock:
        see_end(redlock, LockTaken)


def test_dead_nodes_cost_a_node_timeout_once_a_connect_has_failed(
    network: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    for proxy in quorum_of(network):
        proxy.weather = Weather(swallows=BOTH_WAYS)
    with over(network, node_timeout=0.2) as redlock:
        began = time.monotonic()
        see_end(redlock, QuorumUnreachable)
        assert time.monotonic() - began > CONNECT_BUDGET / 2  # it waited for the connects
        monkeypatch.setattr(connection, "CONNECT_BUDGET", FOREVER)
        dead = quorum_of(redlock.session.nodes.all)
        for node in dead:
            node.connect_budget = FOREVER
        eventually(lambda: all(node.error for node in dead))

        def is_connecting() -> bool:
            see_end(redlock, QuorumUnreachable)
            return all(node.outstanding for node in dead)  # a command waits for the connect

        eventually(is_connecting)
        see_end(redlock, QuorumUnreachable)


@pytest.mark.usefixtures("endless_connects")
def test_nodes_that_stop_answering_cost_a_node_timeout(network: list[Proxy]) -> None:
    with over(network, node_timeout=0.2) as redlock:
        settle(redlock)
        for proxy in quorum_of(network):
            proxy.weather = Weather(swallows=BOTH_WAYS)
        for _ in range(4):
            see_end(redlock, QuorumUnreachable)


def test_a_refusal_over_a_slow_line_tells_the_time_of_the_nodes(
    network: list[Proxy], nodes: Nodes
) -> None:
    for proxy, node in zip(network, nodes, strict=True):
        node.client().set(lock_key("redlock", "stock"), "another's", px=60_000)
        proxy.weather = slow_line(0.15)
    with over(network, node_timeout=PATIENCE) as redlock:
        began = time.monotonic()
        see_end(redlock, LockTaken)
        took = time.monotonic() - began  # most of that time it connected
        wall = redlock.session.guard.wall
        assert min(abs(wall() - time.time()) for _ in range(10)) < took / 2


def test_a_grant_over_a_slow_line_heeds_a_run_that_has_just_ended(
    network: list[Proxy], nodes: Nodes
) -> None:
    for proxy, node in zip(network, nodes, strict=True):
        node.client().set(completion_key("redlock", "a run"), 60_000, px=60_000)  # ends now
        proxy.weather = slow_line(0.15)
    with over(network, node_timeout=PATIENCE) as redlock:
        marker = CompletionMarker("a run", 60.0, redlock.session.clock.now() - 0.2)
        options = LockOptions(("stock",), 30.0, 0.0, True, None, "a copy", marker=marker)
        with pytest.raises(AlreadyCompletedError):
            Lock(redlock, options).acquire()
