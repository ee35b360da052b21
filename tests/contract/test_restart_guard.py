"""Nodes that forget: silent until nobody can count on what they forgot, and repaired by holders."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from redis import Redis

from celery_redlock import Lock, LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock.model.keys import fence_key, guard_keys
from celery_redlock.testing import EmbeddedNode, FakeNode, embedded_nodes, fake_nodes
from tests.conftest import (
    NODE_TIMEOUT,
    PATIENCE,
    TTL,
    Nodes,
    eventually,
    see_quorum,
    see_renewal,
    settle,
    trust_nodes,
)
from tests.contract.conftest import MAJORITY
from tests.contract.proxy import Proxy, proxies
from tests.contract.renewals import hurry, renew_now

KEY = "{redlock}:lock:r"
# an address, the two servers that it leads to in turn, and all URLs
Servers = tuple[Proxy, EmbeddedNode, EmbeddedNode, list[str]]
RUN, QUIET = guard_keys("redlock")
FENCE = fence_key("redlock")


def over(nodes: Sequence[EmbeddedNode | FakeNode | Proxy], **options: Any) -> Redlock:
    options = {"node_timeout": NODE_TIMEOUT, "max_ttl": TTL, **options}
    return Redlock([node.url for node in nodes], **options)


def restart_empty(node: EmbeddedNode) -> None:
    node.kill()
    node.start()


class TestSilence:
    def test_new_nodes_do_not_vote_and_say_for_how_long_and_the_hint(self) -> None:
        with embedded_nodes(3) as nodes, over(nodes) as redlock:
            settle(redlock)
            with pytest.raises(QuorumUnreachable) as caught:
                redlock.lock("r", ttl=TTL).acquire()
            words = r"New or restarted nodes wait: .* for \d+ s more .*Redlock\.trust\(\)"
            assert caught.match(words)
            assert str(nodes[0].port) in str(caught.value) or str(nodes[1].port) in str(
                caught.value
            )
            assert not any(node.client().exists(KEY) for node in nodes)

    def test_a_silence_ends_by_itself(self) -> None:
        with fake_nodes(2) as nodes, over(nodes) as redlock:
            settle(redlock)
            with pytest.raises(QuorumUnreachable, match="grants no lock for"):
                redlock.lock("r", ttl=TTL).acquire()
            nodes[0].advance(2 * TTL)
            with redlock.lock("r", ttl=TTL, wait=60):
                pass

    def test_trust_ends_it_at_once_for_everybody(self) -> None:
        terms = {"node_timeout": PATIENCE, "max_ttl": 30}
        with fake_nodes(3) as nodes, over(nodes, **terms) as redlock, over(nodes, **terms) as other:
            with pytest.raises(QuorumUnreachable):
                redlock.lock("r").acquire()
            other.trust()
            settle(redlock)
            with redlock.lock("r") as lock:
                assert lock.held

    def test_a_node_that_restarted_empty_is_silent_and_the_others_decide(
        self, mortal_nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        # its holder repairs it a node timeout after it is connected, or at a renewal
        with over(mortal_nodes, node_timeout=PATIENCE, max_ttl=30) as redlock:
            restart_empty(mortal_nodes[0])
            with redlock.lock("r", wait=25) as lock:  # less than its silence
                assert lock.held
                settle(redlock)
                assert not mortal_nodes[0].client().exists(KEY)
                assert mortal_nodes[0].client().pttl(QUIET) > 0
            text = f"127.0.0.1:{mortal_nodes[0].port} grants no lock for"
            eventually(lambda: text in caplog.text)

    def test_a_lock_on_a_bare_quorum_is_not_given_twice_when_one_of_its_nodes_forgets_it(
        self, mortal_nodes: Nodes
    ) -> None:
        mortal_nodes[2].kill()
        redlock, rival = over(mortal_nodes), over(mortal_nodes)
        with redlock, rival, redlock.lock("r", ttl=TTL, wait=60) as lock:
            restart_empty(mortal_nodes[1])
            mortal_nodes[2].start()
            trust_nodes(mortal_nodes[2:])
            with pytest.raises((QuorumUnreachable, LockTaken)):
                rival.lock("r", ttl=TTL).acquire()
            assert lock.held

    @pytest.mark.slow
    def test_a_restart_with_its_data_is_a_restart_too(self) -> None:
        with (
            embedded_nodes(2) as both,
            EmbeddedNode(appendonly="yes", appendfsync="always") as kept,
        ):
            nodes = [*both, kept]
            trust_nodes(nodes)
            # long enough for its key, and then its silence, to be met whatever stalls meanwhile
            with over(nodes, max_ttl=30) as redlock, redlock.lock("r", wait=60) as lock:
                settle(redlock)
                restart_empty(kept)  # its file brings everything back
                eventually(lambda: kept.client().info("persistence")["loading"] == 0)
                assert kept.client().get(KEY)
                see_renewal(lock)
                eventually(lambda: kept.client().exists(QUIET))

    def test_flushed_nodes_are_silent_on_connections_that_stand(self, nodes: Nodes) -> None:
        with over(nodes) as redlock:
            settle(redlock)
            with redlock.lock("r", ttl=TTL):
                pass
            for node in nodes:
                node.client().flushall()
            with pytest.raises(QuorumUnreachable, match="grants no lock for"):
                redlock.lock("r", ttl=TTL).acquire()

    def test_one_node_alone_has_no_guard_unless_it_is_asked_for(self) -> None:
        with EmbeddedNode() as node:
            with over([node]) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
                assert lock.held
                assert not node.client().exists(RUN)
            with over([node], restart_guard="strict") as redlock:
                settle(redlock)
                with pytest.raises(QuorumUnreachable, match="grants no lock for"):
                    redlock.lock("s", ttl=TTL).acquire()


class TestAnotherServerUnderTheAddress:
    """A node's address leads to another server for a while, and then back to the first one."""

    TTL = 6.0  # of all locks here: nothing renews them

    @pytest.fixture
    def servers(self) -> Iterator[Servers]:
        """Give the address of node 0, its server, another server, and the URLs of three nodes."""
        with embedded_nodes(4) as (old, new, *others), proxies([old]) as (address,):
            urls = [address.url, *(node.url for node in others)]
            with self.over(urls) as made:
                made.trust()
            yield address, old, new, urls

    def over(self, urls: list[str], **options: Any) -> Redlock:
        return Redlock(urls, node_timeout=1.0, max_ttl=self.TTL, **options)

    def lock(self, redlock: Redlock, **terms: Any) -> Lock:
        return redlock.lock("r", ttl=self.TTL, renew=False, **terms)

    def acquire_from_the_new_server(self, redlock: Redlock, last: str) -> Lock:
        """Acquire it on nodes 0 and 1 alone: on node 2 a stranger's key stands in the way."""
        stranger = Redis.from_url(last)
        stranger.set(KEY, "stranger")
        lock = self.lock(redlock, wait=60)
        assert lock.acquire()
        settle(redlock)
        stranger.delete(KEY)
        return lock

    def assert_second_fails(self, first: Lock, redlock: Redlock) -> None:
        """Fail if a second client gets the lock while the first one holds it."""
        with pytest.raises((QuorumUnreachable, LockTaken)):
            self.lock(redlock).acquire()
        assert first.held

    @pytest.mark.slow
    def test_a_client_that_saw_neither_server_does_not_believe_the_first_one(
        self, servers: Servers
    ) -> None:
        address, old, new, urls = servers
        with self.over(urls) as earlier, self.lock(earlier):
            settle(earlier)  # the nodes know who served under the address
        address.lead_to(new)
        with self.over(urls) as redlock, self.over(urls) as late:
            lock = self.acquire_from_the_new_server(redlock, urls[2])
            address.lead_to(old)
            self.assert_second_fails(lock, late)

    @pytest.mark.slow
    def test_a_client_that_saw_both_servers_does_not_believe_the_first_one(
        self, servers: Servers
    ) -> None:
        address, old, new, urls = servers
        with self.over(urls) as redlock:
            settle(redlock)
            address.lead_to(new)
            lock = self.acquire_from_the_new_server(redlock, urls[2])
            address.lead_to(old)
            settle(redlock)
            with self.over(urls) as late:
                self.assert_second_fails(lock, late)

    @pytest.mark.slow
    def test_a_client_that_stayed_connected_to_the_first_server_leaves_it(
        self, servers: Servers
    ) -> None:
        address, _, new, urls = servers
        with self.over(urls) as late, self.over(urls) as redlock:
            with self.lock(late):
                settle(late)
            address.lead_to(new, cut=False)
            lock = self.acquire_from_the_new_server(redlock, urls[2])
            self.assert_second_fails(lock, late)

    @pytest.mark.slow
    def test_a_server_that_could_note_nothing_when_it_was_connected_is_noted_later(
        self, servers: Servers
    ) -> None:
        address, old, new, urls = servers
        with self.over(urls) as earlier, self.lock(earlier):
            settle(earlier)
        new.client().slaveof("127.0.0.1", old.port)
        eventually(lambda: new.client().info("replication")["master_link_status"] == "up")
        new.client().slaveof()  # with the notes of the first server
        new.client().config_set("maxmemory", 1)
        address.lead_to(new)
        with self.over(urls) as redlock, self.over(urls) as late:
            settle(redlock)
            new.client().config_set("maxmemory", 0)
            lock = self.acquire_from_the_new_server(redlock, urls[2])
            address.lead_to(old)
            self.assert_second_fails(lock, late)

    @pytest.mark.slow
    def test_the_first_server_votes_again_after_its_silence(self, servers: Servers) -> None:
        address, old, new, urls = servers
        for server in (new, old):
            address.lead_to(server)
            with self.over(urls) as redlock:
                settle(redlock)
        Redis.from_url(urls[2]).set(KEY, "stranger")
        with self.over(urls) as redlock, self.lock(redlock, wait=60) as lock:
            assert lock.held
            assert not old.client().exists(QUIET)

    def test_trust_lets_the_first_server_vote_at_once(self, servers: Servers) -> None:
        address, old, new, urls = servers
        address.lead_to(new)
        with self.over(urls) as redlock:
            settle(redlock)
        address.lead_to(old)
        with self.over(urls) as redlock:
            settle(redlock)
            eventually(
                lambda: old.client().exists(QUIET)
            )  # once other nodes have told of the new one
        with self.over(urls) as redlock:
            redlock.trust()
        assert not old.client().exists(QUIET)
        Redis.from_url(urls[2]).set(KEY, "stranger")
        with self.over(urls) as redlock:
            settle(redlock)
            with self.lock(redlock, wait=60) as lock:
                assert lock.held

    def test_further_clients_and_their_restarts_silence_nobody(self, servers: Servers) -> None:
        *_, urls = servers
        nodes = [Redis.from_url(url) for url in urls]
        for order in itertools.permutations(urls):
            with self.over(list(order)) as redlock, self.over(list(order)) as another:
                for made in (redlock, another):
                    settle(made)
                assert not any(node.exists(QUIET) for node in nodes)


class TestTrust:
    def test_it_says_which_node_holds_a_lock_all_the_same(
        self, nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        with over(nodes, prefix="odd*[prefix]", node_timeout=PATIENCE, max_ttl=30) as redlock:
            redlock.trust()
            assert "but holds" not in caplog.text
            settle(redlock)
            with redlock.lock("r"):
                settle(redlock)
                redlock.trust()
        told = caplog.text.count("is trusted, but holds the lock 'r': if its owner still runs, ")
        assert told == len(nodes)

    def test_it_says_which_node_could_not_be_told(
        self, mortal_nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        mortal_nodes[0].kill()
        with over(mortal_nodes) as redlock:
            redlock.trust()
        assert f"127.0.0.1:{mortal_nodes[0].port} could not be trusted" in caplog.text

    def test_where_no_node_can_be_told_it_raises(self, mortal_nodes: Nodes) -> None:
        for node in mortal_nodes:
            node.kill()
        with over(mortal_nodes) as redlock, pytest.raises(QuorumUnreachable):
            redlock.trust()


# what a node may have noted of the others; called with ms since 1970
FORGED: dict[str, Callable[[int], str | bytes | None]] = {
    "the last number of Lua": lambda now: f"{2**53} forged",
    "this moment": lambda now: f"{now} forged",
    "an hour ahead": lambda now: f"{now + 3_600_000} forged",
    "400 digits": lambda now: f"{'9' * 400} forged",
    "5000 digits": lambda now: f"{'9' * 5000} forged",
    "a MB": lambda now: f"{now} {'x' * 1_000_000}",
    "bytes": lambda now: b"\xff\x00 \xfe",
    "another type": lambda now: None,
}


def rotations(nodes: Nodes) -> list[Nodes]:
    """Return the nodes with each of them as the first one."""
    return [nodes[first:] + nodes[:first] for first in range(len(nodes))]


MAY_BE_TRUE = "this moment", "an hour ahead", "a MB"


def ms_of(node: EmbeddedNode) -> int:
    """Return a node's clock in ms, as tenures have it: in whole s it may be before they began."""
    seconds, us = node.client().time()
    return int(seconds) * 1000 + int(us) // 1000


@MAJORITY
class TestForgedTenures:
    """What one node of three says of the others' servers: neither they nor their servers say so."""

    def over(self, nodes: Nodes) -> Redlock:
        return over(nodes, max_ttl=30, node_timeout=PATIENCE)

    def forge(self, teller: EmbeddedNode, value: str | bytes | None) -> list[str]:
        """Overwrite what a node has noted of the others; return the keys."""
        client = teller.client()
        keys = list(map(str, client.keys("{redlock}:tenure:*")))
        assert len(keys) == 2
        for key in keys:
            client.delete(key)
            if value is None:
                client.rpush(key, "forged")
            else:
                client.set(key, value)
        return keys

    @pytest.mark.parametrize("value", FORGED.values(), ids=FORGED.keys())
    def test_they_stop_no_lock_and_end_none_and_trust_forgets_them(
        self, nodes: Nodes, value: Callable[[int], str | bytes | None]
    ) -> None:
        with self.over(nodes) as holder:
            settle(holder)  # each node knows the tenures of the others
            holder.session.guard.keep_alive(0.0)
            settle(holder)
            with holder.lock("held") as held:
                now = ms_of(nodes[0])
                keys = self.forge(nodes[0], value(now))
                holder.session.guard.keep_alive(0.0)  # as every third of the grace period
                settle(holder)
                for order in rotations(nodes):
                    with self.over(order) as late, late.lock("r"):
                        settle(late)
                assert held.held
            assert not any(node.client().exists(QUIET) for node in nodes)
            assert not any(
                "forged" in str(node.client().get(key))
                for node in nodes[1:]
                for key in node.client().keys("{redlock}:tenure*")
            )
            holder.trust()
            notes = [note for key in keys if (note := nodes[0].client().get(key))]
            assert all(int(note.split()[0]) < now + 60_000 for note in notes)
        with self.over(nodes) as late, late.lock("r"):
            settle(late)
            assert [node.client().exists(KEY) for node in nodes] == [1] * len(nodes)

    @pytest.mark.parametrize("value", [FORGED[name] for name in MAY_BE_TRUE], ids=MAY_BE_TRUE)
    def test_of_one_other_node_they_cost_its_vote_for_one_grace_period(
        self, nodes: Nodes, value: Callable[[int], str | bytes | None]
    ) -> None:
        """It may be true: then that server has forgotten what another one granted."""
        with over(nodes, max_ttl=TTL) as redlock:
            settle(redlock)
            spared, *_ = self.forge(nodes[0], value(ms_of(nodes[0])))
            nodes[0].client().delete(spared)
            redlock.session.guard.keep_alive(0.0)
            with redlock.lock("r", ttl=TTL, wait=60):
                # what is noted is read by then, and whoever it is about has been told by the next
                settle(redlock)
                settle(redlock)
                assert sum(bool(node.client().exists(QUIET)) for node in nodes) <= 1
            for node in nodes:
                node.client().delete(QUIET)  # its grace period is over
            redlock.session.guard.keep_alive(0.0)
            settle(redlock)
            assert not any(node.client().exists(QUIET) for node in nodes)

    def test_a_nodes_own_forged_tenure_costs_its_vote_alone(self, nodes: Nodes) -> None:
        for value in (f"{2**53} forged", f"{'9' * 400} x", "\n", None):
            client = nodes[0].client()
            client.delete(*client.keys("{redlock}:tenure*"))
            if value is None:
                client.rpush("{redlock}:tenure", "forged")
            else:
                client.set("{redlock}:tenure", value)
            with self.over(nodes) as late, late.lock("r"):
                settle(late)
            assert not any(node.client().exists(QUIET) for node in nodes[1:])
            nodes[0].client().delete("{redlock}:tenure")
            with self.over(nodes) as late:
                late.trust()


@MAJORITY
class TestForgedFencingCounters:
    """What one node of three has as its fencing counter: no client has raised it so far."""

    DAY_US = 86_400_000_000

    def over(self, nodes: Nodes) -> Redlock:
        return over(nodes, max_ttl=30, node_timeout=PATIENCE)

    def counters(self, nodes: Nodes) -> list[int]:
        return [int(str(node.client().get(FENCE))) for node in nodes]

    def forge(self, node: EmbeddedNode, value: int | str | None) -> None:
        node.client().delete(FENCE)
        if value is None:
            node.client().rpush(FENCE, "forged")
        else:
            node.client().set(FENCE, value)

    @pytest.mark.parametrize("value", [2**53 - 9, 2**52 - 1, 10**16, "1e308", "nan", "x", None])
    def test_they_cost_its_vote_for_fencing_and_no_token_and_trust_mends_it(
        self, nodes: Nodes, value: int | str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        tokens = []
        with self.over(nodes) as first, first.lock("r", fencing=True) as lock:
            settle(first)
            tokens.append(lock.fencing_token)
            self.forge(nodes[0], value)
            lock.extend()
            settle(first)
        for order in rotations(nodes):
            for several in (False, True):
                with self.over(order) as late:
                    made = late.lock(["a", "r"] if several else "r", fencing=True)
                    with made as lock:
                        settle(late)
                        tokens.append(lock.fencing_token)
        assert tokens == sorted(set(tokens))
        assert tokens[-1] < tokens[0] + self.DAY_US
        assert max(self.counters(nodes[1:])) < tokens[0] + self.DAY_US

        def is_warned() -> bool:
            texts = [record.getMessage() for record in caplog.records]
            told = [text for text in texts if "fence" in text.lower() and "trust --all" in text]
            return any(str(nodes[0].port) in text for text in told)

        with self.over(nodes) as last, last.lock("r", fencing=True):
            eventually(is_warned)  # a thread of the client says so, as long as it is open
        with self.over(nodes) as late:
            late.trust()
            assert tokens[-1] <= self.counters(nodes[:1])[0] < tokens[0] + self.DAY_US
            for down in nodes[1:]:
                alive = [node.url for node in nodes if node is not down]
                urls = [*alive, "redis://127.0.0.1:1"]
                two = Redlock(urls, node_timeout=PATIENCE, max_ttl=30)
                with two, two.lock("r", fencing=True) as lock:
                    tokens.append(lock.fencing_token)
        assert tokens == sorted(set(tokens))

    def test_however_often_they_do_not_pull_the_others_on(self, nodes: Nodes) -> None:
        most = 0
        for _ in range(10):
            self.forge(nodes[0], (most or time.time_ns() // 1000) + self.DAY_US - 10**6)
            with self.over(nodes) as redlock, redlock.lock("r", fencing=True):
                settle(redlock)
            most = max(self.counters(nodes[1:]))
        assert most < time.time_ns() // 1000 + 2 * self.DAY_US

    def test_counters_that_a_quorum_has_go_on_however_great(self, nodes: Nodes) -> None:
        """A client's clock was wrong for once."""
        for node, more in zip(nodes, (5, 0, 3), strict=True):
            self.forge(node, 2**52 + more)
        tokens = []
        for order in itertools.permutations(nodes):
            with self.over(list(order)) as redlock, redlock.lock("r", fencing=True) as lock:
                settle(redlock)
                tokens.append(lock.fencing_token)
        assert tokens == sorted(set(tokens))
        assert tokens[0] > 2**52


class TestRepair:
    def brisk(self, nodes: Nodes) -> Redlock:
        """Return a client that repairs a node soon after it is connected: a node timeout later."""
        return over(nodes, node_timeout=0.5, max_ttl=30)

    def see_repaired(self, redlock: Redlock, node: EmbeddedNode, value: object) -> None:
        """Return when a node has a key; a renewal looks for what a node lacks."""

        def has_it() -> bool:
            hurry(redlock)
            return bool(node.client().get(KEY) == value)

        eventually(has_it)

    def test_a_node_that_restarted_empty_gets_the_lock_back_from_its_holder(
        self, mortal_nodes: Nodes
    ) -> None:
        with self.brisk(mortal_nodes) as redlock, redlock.lock("r", wait=60) as lock:
            settle(redlock)
            value = mortal_nodes[0].client().get(KEY)
            restart_empty(mortal_nodes[0])
            self.see_repaired(redlock, mortal_nodes[0], value)
            assert lock.held

    @pytest.mark.slow
    def test_a_lock_outlives_the_restart_of_all_its_nodes_one_after_the_other(
        self, mortal_nodes: Nodes
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
        self, mortal_nodes: Nodes
    ) -> None:
        mortal_nodes[2].kill()
        with self.brisk(mortal_nodes) as redlock, redlock.lock("r", wait=60) as lock:
            mortal_nodes[2].start()
            self.see_repaired(redlock, mortal_nodes[2], mortal_nodes[0].client().get(KEY))
            assert lock.held

    @pytest.mark.slow
    def test_a_key_deleted_on_a_bare_quorum_is_told_of_at_the_release(
        self, mortal_nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        mortal_nodes[2].kill()
        with over(mortal_nodes, node_timeout=PATIENCE, max_ttl=30) as redlock:
            with redlock.lock("r", renew=False, wait=60):
                mortal_nodes[2].start()
                settle(redlock)
                mortal_nodes[0].client().delete(KEY)
            eventually(lambda: "lost 'r': at its release its key was no longer ours" in caplog.text)

    @MAJORITY
    def test_a_key_that_was_deleted_is_not_set_again_at_once(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock("r") as lock:
            settle(redlock)
            nodes[0].client().delete(KEY)
            renew_now(redlock, lock)
            settle(redlock)
            assert not nodes[0].client().exists(KEY)
            assert lock.held


@MAJORITY
def test_a_nodes_time_is_learnt_anew_though_a_user_may_not_ask_for_it_somewhere(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    first = nodes[0].client()
    first.execute_command(
        "ACL", "SETUSER", "timeless", "on", ">secret", "~*", "&*", "+@all", "-time"
    )
    urls = [nodes[0].url.replace("://", "://timeless:secret@"), *(node.url for node in nodes[1:])]
    try:
        with Redlock(urls, node_timeout=PATIENCE, restart_guard="off") as made:
            see_quorum(made)
            settle(made)
            guard, clock = made.session.guard, made.session.clock
            for node in guard.nodes.all[1:]:
                guard.learn_time(node.index, clock.wall_us() / 1e6 + 3600, clock.now())
            assert guard.wall() > clock.wall_us() / 1e6 + 3000
            guard.keep_alive(0.0)
            eventually(lambda: guard.nodes.drain() or guard.wall() < clock.wall_us() / 1e6 + 60)
            settle(made)
    finally:
        first.execute_command("ACL", "DELUSER", "timeless")
    assert "gives no vote" not in caplog.text


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
