"""One contention test under each real fault: of nodes, of the network, of contenders, of clocks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from celery_redlock import Redlock
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.testing import EmbeddedNode
from tests.clocks import HOUR, WallClock
from tests.conftest import Nodes, eventually, see_renewal, trust_nodes
from tests.contract.conftest import MAJORITY, REDIS_SERVER, quorum_of
from tests.contract.contention import (
    MAX_TTL,
    NODE_TIMEOUT,
    RESOURCE,
    TTL,
    Contest,
    Record,
    Rules,
    check,
    contest,
    record_of,
)
from tests.contract.proxy import BOTH_WAYS, FAIR, Proxy, Way, Weather, proxies

STALL = 1.5 * NODE_TIMEOUT  # s: long enough for connections to be given up
KEY = f"{{redlock}}:lock:{RESOURCE}"

Begin = Callable[..., AbstractContextManager[Contest]]


@pytest.fixture
def contending(tmp_path: Path) -> Begin:
    """Give a function that lets contenders loose on nodes, and checks them at the end."""

    def begin(
        nodes: Nodes | list[Proxy], max_ttl: float = MAX_TTL
    ) -> AbstractContextManager[Contest]:
        return contest([node.url for node in nodes], tmp_path, max_ttl)

    return begin


@pytest.fixture
def network(nodes: Nodes) -> Iterator[list[Proxy]]:
    """Give a proxy for each node."""
    with proxies(nodes) as made:
        yield made


@contextlib.contextmanager
def three_with(**config: str) -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(EmbeddedNode(**config)) for _ in range(3)]
        trust_nodes(nodes)
        yield nodes


def see_voting(node: EmbeddedNode) -> None:
    """Return when a node that was restarted has been met again, and its silence is over."""
    client = node.client()
    run_id = client.info("server")["run_id"]
    eventually(lambda: client.get("{redlock}:run") == run_id)
    eventually(lambda: not client.exists("{redlock}:quiet"))


def shows_it(record: Record) -> bool:
    """Tell whether a record has what no lock allows."""
    return bool(record.overlaps and record.refused_in_vain)


def test_without_a_common_lock_the_record_shows_it(nodes: Nodes, tmp_path: Path) -> None:
    running = Contest(Rules(tuple(node.url for node in nodes), tmp_path, shared=False))
    try:
        running.see_progress(100)
        eventually(lambda: shows_it(record_of(tmp_path)))  # the first to start may be far ahead
        record = running.finish()
    finally:
        running.abandon()
    assert record.overlaps
    assert record.refused_in_vain
    with pytest.raises(AssertionError):
        check(record)


class TestNodes:
    def test_one_is_back_empty_and_another_restarts_empty_under_a_lock_that_stands_on_two(
        self, mortal_nodes: Nodes, contending: Begin
    ) -> None:
        first, second, _ = mortal_nodes
        with contending(mortal_nodes) as running:
            first.kill()
            running.see_progress()
            running.see_long_section()
            second.kill()
            second.start()
            first.start()
            running.endure(MAX_TTL)
            for node in (first, second):
                see_voting(node)

    @pytest.mark.slow
    def test_all_killed_and_restarted_empty_at_once(
        self, mortal_nodes: Nodes, contending: Begin
    ) -> None:
        with contending(mortal_nodes) as running:
            running.see_long_section()
            for node in mortal_nodes:
                node.kill()
            for node in mortal_nodes:
                node.start()
            running.endure(MAX_TTL)
            for node in mortal_nodes:
                see_voting(node)

    @pytest.mark.slow
    def test_killed_and_restarted_with_its_data(self, contending: Begin) -> None:
        with (
            three_with(appendonly="yes", appendfsync="always") as nodes,
            contending(nodes) as running,
        ):
            running.see_long_section()
            nodes[0].kill()
            running.endure(STALL)
            nodes[0].start()
            running.see_progress()
            see_voting(nodes[0])

    @pytest.mark.slow
    def test_frozen_one_after_the_other(self, mortal_nodes: Nodes, contending: Begin) -> None:
        with contending(mortal_nodes) as running:
            running.see_long_section()
            for node in 2 * mortal_nodes:
                node.pause()
                running.endure(STALL)
                node.resume()

    @pytest.mark.slow
    @REDIS_SERVER
    def test_busy_for_longer_than_a_node_may_take(self, nodes: Nodes, contending: Begin) -> None:
        # servers before Redis 7 allow DEBUG, and do not know the setting
        known = nodes[0].client().config_get("enable-debug-command")
        debug = {"enable_debug_command": "yes"} if known else {}
        with three_with(**debug) as nodes, contending(nodes) as running:
            running.see_long_section()
            for node in nodes:
                node.client().execute_command("DEBUG", "SLEEP", STALL)

    @pytest.mark.slow
    def test_without_their_scripts_again_and_again(
        self, mortal_nodes: Nodes, contending: Begin
    ) -> None:
        def flush() -> None:
            for node in mortal_nodes:
                node.client().script_flush()

        with contending(mortal_nodes) as running:
            running.see_long_section()
            running.endure_turns(3, 0.02, flush)

    @pytest.mark.parametrize("kind", ["normal", "pubsub"])
    @pytest.mark.slow
    def test_closing_every_connection_again_and_again(
        self, mortal_nodes: Nodes, contending: Begin, kind: str
    ) -> None:
        def hang_up() -> None:
            for node in mortal_nodes:
                node.client().client_kill_filter(_type=kind, skipme=True)

        with contending(mortal_nodes) as running:
            running.see_long_section()
            running.endure_turns(2, 0.1, hang_up)


class TestNetwork:
    @pytest.mark.parametrize(
        "weather",
        [
            pytest.param(Weather(delay=(0.03, 0.03)), id="slow"),
            pytest.param(Weather(delay=(0.0, 0.1)), id="uneven"),
            pytest.param(Weather(rate=40_000), id="narrow"),
            pytest.param(Weather(cuts=0.05), id="cut"),
        ],
    )
    @pytest.mark.slow
    def test_bad_everywhere(
        self, network: list[Proxy], contending: Begin, weather: Weather
    ) -> None:
        with contending(network) as running:
            running.see_long_section()
            for proxy in network:
                proxy.weather = weather
            running.endure(2.5)
            running.see_progress(1)
            for proxy in network:
                proxy.weather = FAIR

    @MAJORITY
    def test_slower_to_one_node_than_it_may_take_so_that_what_was_given_up_runs_later(
        self, network: list[Proxy], contending: Begin
    ) -> None:
        with contending(network) as running:
            network[0].weather = Weather(delay=(0.0, 3 * NODE_TIMEOUT))
            running.endure(3 * NODE_TIMEOUT)  # from then on what was given up may run
            running.see_progress()
            network[0].weather = FAIR

    @pytest.mark.parametrize("way", Way)
    @pytest.mark.slow
    def test_ending_one_direction_of_every_connection_again_and_again(
        self, network: list[Proxy], contending: Begin, way: Way
    ) -> None:
        with contending(network) as running:
            running.see_long_section()
            running.endure_turns(2, 0.2, lambda: random.choice(network).half_close(way))

    @pytest.mark.parametrize(
        "ways",
        [
            pytest.param(frozenset({Way.TO_NODE}), id="to the node"),
            pytest.param(frozenset({Way.TO_CLIENT}), id="to the client"),
            pytest.param(BOTH_WAYS, id="both ways"),
        ],
    )
    @pytest.mark.slow
    @MAJORITY
    def test_swallowing_all_for_one_node_and_delivering_it_late(
        self, network: list[Proxy], contending: Begin, ways: frozenset[Way]
    ) -> None:
        with contending(network) as running:
            running.see_long_section()
            network[0].weather = Weather(swallows=ways)
            running.endure(2)
            running.see_progress()
            network[0].weather = FAIR

    @pytest.mark.slow
    @MAJORITY
    def test_refused_by_one_node(self, network: list[Proxy], contending: Begin) -> None:
        with contending(network) as running:
            network[0].weather = Weather(refuses=True)
            network[0].cut()
            running.endure(2)
            running.see_progress()
            network[0].weather = FAIR

    @pytest.mark.slow
    def test_without_a_quorum_nobody_holds_for_longer_than_the_ttl(
        self, network: list[Proxy], contending: Begin
    ) -> None:
        now = SystemClock().now
        with contending(network) as running:
            running.see_long_section()
            for proxy in quorum_of(network):
                proxy.weather = Weather(swallows=BOTH_WAYS)
            cut_off = now()
            running.endure(TTL + 1.5)
            back = now()
            for proxy in quorum_of(network):
                proxy.weather = FAIR
        holds = running.record.holds
        assert [h for h in holds if h.begin < back and h.end > cut_off + TTL] == []
        assert [h for h in holds if h.begin > back]


class TestContenders:
    @pytest.mark.slow
    def test_a_holder_is_stopped_for_longer_than_its_lease(
        self, nodes: Nodes, contending: Begin
    ) -> None:
        with contending(nodes) as running:
            for _ in range(2):
                with running.paused(running.see_long_section()):
                    running.endure(TTL)
                    running.see_progress()

    @pytest.mark.slow
    def test_anybody_is_stopped_for_a_while(self, nodes: Nodes, contending: Begin) -> None:
        def stop() -> None:
            with running.paused(random.choice(running.names)):
                running.endure(random.uniform(0.01, NODE_TIMEOUT))

        with contending(nodes) as running:
            running.endure_turns(3, 0.05, stop)

    def test_one_is_killed_and_another_starts(self, nodes: Nodes, contending: Begin) -> None:
        with contending(nodes) as running:
            running.kill(running.see_long_section())
            running.see_progress()
            for _ in range(3):
                running.kill(random.choice(running.names))
                running.see_progress(1)


@pytest.fixture
def clocked_nodes(wall_clock: WallClock) -> Iterator[Nodes]:
    """Give three nodes, the first of which goes by `wall_clock`."""
    with (
        EmbeddedNode(binary=str(wall_clock.server())) as clocked,
        EmbeddedNode() as second,
        EmbeddedNode() as third,
    ):
        nodes = [clocked, second, third]
        trust_nodes(nodes)
        yield nodes


class TestWallClocks:
    @pytest.mark.slow
    def test_of_a_node_set_back(
        self, clocked_nodes: Nodes, wall_clock: WallClock, contending: Begin
    ) -> None:
        before = clocked_nodes[0].client().time()[0]
        with contending(clocked_nodes) as running:
            running.see_long_section()
            wall_clock.set(-HOUR)
            running.endure(2.5)
        assert clocked_nodes[0].client().time()[0] < before

    @pytest.mark.slow
    def test_of_one_node_set_forward_under_a_lock_that_stands_on_all(
        self, clocked_nodes: Nodes, wall_clock: WallClock, contending: Begin
    ) -> None:
        urls = [node.url for node in clocked_nodes]
        ttl = 9.0  # s: what a stall leaves of it is enough
        with (
            contending(clocked_nodes, ttl) as running,
            Redlock(urls, node_timeout=ttl / 4, max_ttl=ttl) as redlock,
            redlock.lock(RESOURCE, ttl=ttl, wait=60, fencing=True) as lock,
        ):
            values = [node.client() for node in clocked_nodes]
            eventually(lambda: len({value.get(KEY) for value in values}) == 1)
            for _ in range(2):  # one that a repair made ours counts after the next renewal
                see_renewal(lock)
            writes = running.writes
            wall_clock.set(HOUR)
            for _ in range(4):
                see_renewal(lock)
                running.endure(0.1)
                assert lock.held
            assert running.writes == writes
