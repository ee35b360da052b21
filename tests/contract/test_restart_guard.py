"""Nodes that forget: silent until nobody can count on what they forgot, and repaired by holders."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from celery_redlock import LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock.keys import guard_keys
from celery_redlock.testing import EmbeddedNode, embedded_nodes
from tests.conftest import NODE_TIMEOUT, PATIENCE, TTL, eventually, see_renewal, settle, vouch_for

KEY = "{redlock}:lock:r"
RUN, QUIET = guard_keys("redlock")


def over(nodes: list[EmbeddedNode], **options: Any) -> Redlock:
    options = {"node_timeout": NODE_TIMEOUT, "max_ttl": TTL, **options}
    return Redlock([node.url for node in nodes], **options)


def restart_empty(node: EmbeddedNode) -> None:
    node.kill()
    node.start()


class TestSilence:
    def test_new_nodes_do_not_vote_and_say_for_how_long_and_the_way_out(self) -> None:
        with embedded_nodes(3) as nodes, over(nodes) as redlock:
            settle(redlock)
            with pytest.raises(QuorumUnreachable) as caught:
                redlock.lock("r", ttl=TTL).acquire()
            words = r"silent for \d+ s more: .*restarted.*Redlock\.trust\(\)"
            assert caught.match(words)
            assert str(nodes[0].port) in str(caught.value) or str(nodes[1].port) in str(
                caught.value
            )
            assert not any(node.client().exists(KEY) for node in nodes)

    def test_a_silence_ends_by_itself(self) -> None:
        with embedded_nodes(2) as nodes, over(nodes) as redlock:
            with pytest.raises(QuorumUnreachable):
                redlock.lock("r", ttl=TTL).acquire()
            with redlock.lock("r", ttl=TTL, wait=60):
                assert not any(node.client().exists(QUIET) for node in nodes)

    def test_trust_ends_it_at_once_for_everybody(self) -> None:
        with embedded_nodes(3) as nodes, over(nodes) as redlock, over(nodes) as other:
            with pytest.raises(QuorumUnreachable):
                redlock.lock("r", ttl=TTL).acquire()
            other.trust()
            settle(redlock)
            with redlock.lock("r", ttl=TTL) as lock:
                assert lock.held

    def test_a_node_that_restarted_empty_is_silent_and_the_others_decide(
        self, mortal_nodes: list[EmbeddedNode], caplog: pytest.LogCaptureFixture
    ) -> None:
        # its holder repairs it a node timeout after it is connected, or at a renewal
        with over(mortal_nodes, node_timeout=PATIENCE, max_ttl=30) as redlock:
            restart_empty(mortal_nodes[0])
            with redlock.lock("r", wait=30) as lock:
                assert lock.held
                settle(redlock)
                assert not mortal_nodes[0].client().exists(KEY)
                assert mortal_nodes[0].client().pttl(QUIET) > 0
            text = f"127.0.0.1:{mortal_nodes[0].port} gives no vote: silent for"
            eventually(lambda: text in caplog.text)

    def test_a_lock_on_a_bare_quorum_is_not_given_twice_when_one_of_its_nodes_forgets_it(
        self, mortal_nodes: list[EmbeddedNode]
    ) -> None:
        mortal_nodes[2].kill()
        redlock, rival = over(mortal_nodes), over(mortal_nodes)
        with redlock, rival, redlock.lock("r", ttl=TTL, wait=60) as lock:
            restart_empty(mortal_nodes[1])
            mortal_nodes[2].start()
            vouch_for(mortal_nodes[2:])
            with pytest.raises((QuorumUnreachable, LockTaken)):
                rival.lock("r", ttl=TTL).acquire()
            assert lock.held

    def test_a_restart_with_its_data_is_a_restart_too(self) -> None:
        with (
            embedded_nodes(2) as both,
            EmbeddedNode(appendonly="yes", appendfsync="always") as kept,
        ):
            nodes = [*both, kept]
            vouch_for(nodes)
            # long enough for its key, and then its silence, to be met whatever stalls meanwhile
            with over(nodes, max_ttl=30) as redlock, redlock.lock("r", wait=60) as lock:
                settle(redlock)
                restart_empty(kept)  # its file brings everything back
                eventually(lambda: kept.client().info("persistence")["loading"] == 0)
                assert kept.client().get(KEY)
                see_renewal(lock)
                eventually(lambda: kept.client().exists(QUIET))

    def test_flushed_nodes_are_silent_on_connections_that_stand(
        self, nodes: list[EmbeddedNode]
    ) -> None:
        with over(nodes) as redlock:
            settle(redlock)
            with redlock.lock("r", ttl=TTL):
                pass
            for node in nodes:
                node.client().flushall()
            with pytest.raises(QuorumUnreachable, match="silent for"):
                redlock.lock("r", ttl=TTL).acquire()

    def test_on_believes_a_node_that_has_been_up_for_longer(self) -> None:
        with embedded_nodes(2) as nodes:
            up = lambda: int(nodes[1].client().info("server")["uptime_in_seconds"])  # noqa: E731
            eventually(lambda: up() > TTL + 2)
            with over(nodes, restart_guard="on") as redlock:
                settle(redlock)
                with redlock.lock("r", ttl=TTL) as lock:
                    assert lock.held

    def test_one_node_alone_has_no_guard_unless_it_is_asked_for(self) -> None:
        with EmbeddedNode() as node:
            with over([node]) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
                assert lock.held
                assert not node.client().exists(RUN)
            with over([node], restart_guard="strict") as redlock:
                settle(redlock)
                with pytest.raises(QuorumUnreachable, match="silent for"):
                    redlock.lock("s", ttl=TTL).acquire()


class TestTrust:
    def test_it_says_which_node_holds_a_lock_all_the_same(
        self, nodes: list[EmbeddedNode], caplog: pytest.LogCaptureFixture
    ) -> None:
        with over(nodes, prefix="odd*[prefix]", node_timeout=PATIENCE, max_ttl=30) as redlock:
            redlock.trust()
            assert "stands there" not in caplog.text
            settle(redlock)
            with redlock.lock("r"):
                settle(redlock)
                redlock.trust()
        assert caplog.text.count("'{odd*[prefix]}:lock:r' stands there") == 3

    def test_it_says_which_node_could_not_be_told(
        self, mortal_nodes: list[EmbeddedNode], caplog: pytest.LogCaptureFixture
    ) -> None:
        mortal_nodes[0].kill()
        with over(mortal_nodes) as redlock:
            redlock.trust()
        assert f"127.0.0.1:{mortal_nodes[0].port} could not be vouched for" in caplog.text

    def test_where_no_node_can_be_told_it_raises(self, mortal_nodes: list[EmbeddedNode]) -> None:
        for node in mortal_nodes:
            node.kill()
        with over(mortal_nodes) as redlock, pytest.raises(QuorumUnreachable):
            redlock.trust()


class TestRepair:
    def test_a_node_that_restarted_empty_gets_the_lock_back_from_its_holder(
        self, mortal_nodes: list[EmbeddedNode]
    ) -> None:
        with over(mortal_nodes) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
            settle(redlock)
            value = mortal_nodes[0].client().get(KEY)
            restart_empty(mortal_nodes[0])
            eventually(lambda: mortal_nodes[0].client().get(KEY) == value)
            assert lock.held

    def test_a_lock_outlives_the_restart_of_all_its_nodes_one_after_the_other(
        self, mortal_nodes: list[EmbeddedNode]
    ) -> None:
        with over(mortal_nodes) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
            settle(redlock)
            for node in mortal_nodes:
                restart_empty(node)
                eventually(lambda node=node: node.client().exists(KEY))
                see_renewal(lock)
            assert lock.held
            with over(mortal_nodes) as rival, pytest.raises((LockTaken, QuorumUnreachable)):
                rival.lock("r", ttl=TTL).acquire()

    def test_a_node_that_was_away_when_it_was_acquired_gets_the_lock_too(
        self, mortal_nodes: list[EmbeddedNode]
    ) -> None:
        mortal_nodes[2].kill()
        with over(mortal_nodes) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
            mortal_nodes[2].start()
            eventually(lambda: mortal_nodes[2].client().exists(KEY))
            assert lock.held

    def test_a_key_that_was_deleted_is_not_set_again_at_once(
        self, brisk_redlock: Redlock, nodes: list[EmbeddedNode]
    ) -> None:
        with brisk_redlock.lock("r", ttl=TTL) as lock:
            settle(brisk_redlock)
            nodes[0].client().delete(KEY)
            see_renewal(lock)
            assert not nodes[0].client().exists(KEY)
            assert lock.held


class TestEviction:
    def test_a_node_that_may_evict_locks_is_told_of(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        evicting = EmbeddedNode(maxmemory="100mb", maxmemory_policy="volatile-lru")
        with evicting as node, over([node]) as redlock, redlock.lock("r", ttl=TTL, wait=60):
            eventually(lambda: "has maxmemory-policy volatile-lru" in caplog.text)
            assert "set it to noeviction" in caplog.text

    def test_one_that_has_no_limit_is_not(self, caplog: pytest.LogCaptureFixture) -> None:
        roomy = EmbeddedNode(maxmemory_policy="volatile-lru")
        with roomy as node, over([node]) as redlock, redlock.lock("r", ttl=TTL, wait=60):
            settle(redlock)
        assert "maxmemory" not in caplog.text
