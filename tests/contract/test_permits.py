"""A lock with several holders: what its script and its rounds promise, on real servers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from redis import Redis

from celery_redlock import Lock, LockTaken, Redlock
from celery_redlock.lock.model.keys import completion_key, guard_keys, lock_key
from celery_redlock.lock.server.requests import PERMIT, RELEASE
from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, settle, settled

BASE = lock_key("redlock", "r")
RUN, QUIET = guard_keys("redlock")
DONE = completion_key("redlock", "1:t:0:0")
FULL = 100


def key_of(permit: int) -> str:
    return lock_key("redlock", "r", permit)


@pytest.fixture
def client(nodes: Nodes) -> Redis:
    return nodes[0].client()


def ask(
    client: Redis,
    value: str = "mine",
    *,
    first: int = 0,
    asked: str = "",
    guard: tuple[str, str] = ("", ""),
    reads_marker: bool = False,
) -> Any:
    """Ask for one of three permits."""
    keys = [BASE, RUN, QUIET, *([DONE] if reads_marker else [])]
    words = value, "30000", "3", str(first), asked, *guard
    return client.eval(PERMIT.source.decode(), len(keys), *keys, *words)


def taken(client: Redis, *permits: int, px: int = 20_000) -> None:
    for permit in permits:
        client.set(key_of(permit), f"t{permit}:other", px=px)


class TestScript:
    @pytest.mark.parametrize(("first", "granted"), [(0, 0), (1, 2), (2, 2)])
    def test_the_first_free_permit_is_granted(
        self, client: Redis, first: int, granted: int
    ) -> None:
        taken(client, 1)
        assert ask(client, first=first) == [1, granted, "010"]
        assert client.get(key_of(granted)) == "mine"
        assert 10_000 < client.pttl(key_of(granted)) <= 30_000

    def test_the_search_goes_on_at_the_first_one(self, client: Redis) -> None:
        taken(client, 2)
        assert ask(client, first=2) == [1, 0, "001"]

    def test_a_request_sent_twice_keeps_its_permit_and_begins_its_ttl_anew(
        self, client: Redis
    ) -> None:
        client.set(key_of(2), "mine", px=9_000)
        assert ask(client, first=0) == [1, 2, "000"]
        assert client.pttl(key_of(2)) > 9_000
        assert not client.exists(key_of(0), key_of(1))

    def test_a_request_for_one_permit_moves_the_value(self, client: Redis) -> None:
        assert ask(client, first=1) == [1, 1, "000"]
        assert ask(client, asked="0") == [1, 0, "000"]
        assert [client.get(key_of(permit)) for permit in range(3)] == ["mine", None, None]

    def test_a_permit_that_others_have_is_refused_and_the_old_one_is_given_up(
        self, client: Redis
    ) -> None:
        taken(client, 2)
        assert ask(client, first=0) == [1, 0, "001"]
        zero, ms, value, wall, view = ask(client, asked="2")
        assert (zero, value, view, 0 < ms <= 20_000) == (0, "t2:other", "001", True)
        assert wall > 10**12
        assert not client.exists(key_of(0))

    def test_a_full_lock_tells_of_the_lease_that_ends_first(self, client: Redis) -> None:
        taken(client, 0, 2)
        taken(client, 1, px=5_000)
        zero, ms, value, _, view = ask(client, first=2)
        assert (zero, value, view, 0 < ms <= 5_000) == (0, "t1:other", "111", True)
        client.persist(key_of(1))
        assert ask(client)[2] == "t0:other"
        for permit in range(3):
            client.persist(key_of(permit))
        assert ask(client)[:2] == [0, -1]

    def test_a_node_without_memory_abstains_but_refuses_and_knows_its_own(
        self, client: Redis
    ) -> None:
        guard = "another", "60000"
        minus, ms = ask(client, guard=guard)
        assert (minus, 0 < ms <= 60_000) == (-1, True)
        assert client.get(RUN) == "another"
        client.set(key_of(1), "mine", px=9_000)
        assert ask(client, guard=guard) == [1, 1, "000"]
        taken(client, 0, 1, 2)
        assert ask(client, guard=guard)[0] == 0

    def test_each_reply_says_when_its_run_has_ended(self, client: Redis) -> None:
        assert ask(client, reads_marker=True)[-1] == 0
        client.set(DONE, "600000", px=500_000)
        assert ask(client, reads_marker=True)[-1] >= 100_000
        assert ask(client, "theirs", asked="0", reads_marker=True)[-1] >= 100_000

    def test_a_late_request_for_any_permit_leaves_the_one_that_is_held_by_now(
        self, client: Redis
    ) -> None:
        """A reclaim has set permit 1, while an older request left the value under permit 0."""
        for permit in range(2):
            client.set(key_of(permit), "mine", px=9_000)
        assert ask(client, first=0) == [1, 0, "000"]
        assert client.get(key_of(1)) == "mine"

    def test_a_key_of_another_type_counts_as_taken_and_stops_no_release(
        self, client: Redis
    ) -> None:
        client.rpush(key_of(0), "of another program")
        assert ask(client) == [1, 1, "100"]
        assert ask(client, "theirs", asked="0")[::2] == [0, "", "110"]
        words = "mine", "", "3"
        assert client.eval(RELEASE.source.decode(), 2, BASE, "waiting", *words) == 1
        assert not client.exists(key_of(1))
        assert client.llen(key_of(0)) == 1

    def test_a_release_deletes_whichever_permit_has_the_value(self, client: Redis) -> None:
        taken(client, 0)
        ask(client, first=2)
        words = "mine", "", "3"
        assert client.eval(RELEASE.source.decode(), 2, BASE, "waiting", *words) == 1
        assert client.eval(RELEASE.source.decode(), 2, BASE, "waiting", *words) == 0
        assert [client.exists(key_of(permit)) for permit in range(3)] == [1, 0, 0]


def run_of(node: EmbeddedNode) -> int:
    """Return how many scripts a node has run."""
    stats = node.client().info("commandstats")
    return sum(
        stats[name]["calls"] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats
    )


def in_threads(count: int, do: Callable[[int], object]) -> None:
    """Do something in so many threads at once: each is another owner."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> None:
        barrier.wait()
        do(number)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def rivals(nodes: Nodes) -> Iterator[list[Redlock]]:
    with ExitStack() as stack:
        yield [stack.enter_context(settled(nodes)) for _ in range(5)]


class TestRounds:
    def test_a_full_lock_refuses_with_few_commands(
        self, nodes: Nodes, redlock: Redlock, client: Redis
    ) -> None:
        for node in nodes:
            for permit in range(FULL):
                node.client().set(key_of(permit), f"t{permit}:other", px=600_000)
        before = [run_of(node) for node in nodes]
        with pytest.raises(LockTaken):
            redlock.lock("r", limit=FULL).acquire()
        settle(redlock)
        assert all(run_of(node) - count <= 4 for node, count in zip(nodes, before, strict=True))

    def test_all_free_permits_are_taken_by_rivals_at_once_and_no_more(
        self, nodes: Nodes, rivals: list[Redlock]
    ) -> None:
        locks: list[Lock] = []
        before = [run_of(node) for node in nodes]

        def take(number: int) -> None:
            locks.append(rivals[number % 5].lock("r", limit=FULL, wait=60, ttl=60).acquire())

        in_threads(50, take)
        for rival in rivals:
            settle(rival)
        scripts = [run_of(node) - count for node, count in zip(nodes, before, strict=True)]
        standing = Counter(
            (permit, value)
            for node in nodes
            for permit in range(FULL)
            if (value := node.client().get(key_of(permit)))
        )
        held = [permit for (permit, _), count in standing.items() if count >= 2]
        assert len(held) == len(set(held)) == len(locks) == 50
        assert sum(scripts) / 3 / 50 < 9  # blind tries took 20

    def test_nodes_that_agree_on_no_permit_are_asked_for_one_that_is_free_on_a_quorum(
        self, nodes: Nodes, redlock: Redlock
    ) -> None:
        """Each node has one of three permits free for itself, and one that two have."""
        for node, permits in zip(nodes, ((0, 1), (1, 2), (0, 1)), strict=True):
            taken(node.client(), *permits)
        lock = redlock.lock("r", limit=3).acquire()
        settle(redlock)
        values = {nodes[0].client().get(key_of(2)), nodes[2].client().get(key_of(2))}
        assert len(values - {None}) == 1
        assert lock.held
        assert not nodes[1].client().exists(key_of(0))  # the one node that had it free gave it
        lock.release()
        settle(redlock)
        assert not nodes[0].client().exists(key_of(2))

    def test_free_permits_of_single_nodes_are_no_permit(
        self, nodes: Nodes, redlock: Redlock
    ) -> None:
        """What each node counts by itself would grant a permit to nobody and refuse nobody."""
        for node, permits in zip(nodes, ((0, 1), (1, 2), (0, 2)), strict=True):
            taken(node.client(), *permits)
        with pytest.raises(LockTaken) as caught:
            redlock.lock("r", limit=3).acquire()
        assert caught.value.limit == 3
        settle(redlock)
        for node in nodes:
            assert len([permit for permit in range(3) if node.client().exists(key_of(permit))]) == 2

    def test_a_node_that_granted_another_permit_is_moved_to_that_of_the_quorum(
        self, nodes: Nodes, redlock: Redlock
    ) -> None:
        """Else it would keep one permit for nobody, up to the end of its ttl."""
        for permit in range(2):
            taken(nodes[0].client(), permit)
            taken(nodes[1].client(), permit)
            taken(nodes[2].client(), permit + 1)
        lock = redlock.lock("r", limit=3).acquire()
        settle(redlock)
        value = nodes[0].client().get(key_of(2))
        assert value == nodes[1].client().get(key_of(2))
        assert nodes[2].client().get(key_of(0)) is None
        lock.release()
