"""A lock with several holders: what its script and its rounds promise, on real servers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import pytest
from redis import Redis

from celery_redlock import Lock, LockTaken, Redlock, SettingsError
from celery_redlock.lock.model.keys import completion_key, guard_keys, lock_key
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.server.requests import PERMIT, RELEASE
from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually, is_free, keys_on, settle, settled
from tests.contract.conftest import MAJORITY, REDIS_SERVER, at_once

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
        assert ask(client, first=first) == [1, granted, "0t0"]
        assert client.get(key_of(granted)) == "mine"
        assert 10_000 < client.pttl(key_of(granted)) <= 30_000

    def test_the_search_goes_on_at_the_first_one(self, client: Redis) -> None:
        taken(client, 2)
        assert ask(client, first=2) == [1, 0, "00t"]

    def test_a_view_names_a_holder_by_the_start_of_its_token(self, client: Redis) -> None:
        for permit, value in enumerate(("0ab:1:x", "!7cd:1:x", "\u00e9")):
            client.set(key_of(permit), value, px=20_000)
        assert ask(client, "!mine")[-1] == "171"

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
        assert ask(client, first=0) == [1, 0, "00t"]
        zero, ms, value, wall, view = ask(client, asked="2")
        assert (zero, value, view, 0 < ms <= 20_000) == (0, "t2:other", "00t", True)
        assert wall > 10**12
        assert not client.exists(key_of(0))

    def test_a_full_lock_tells_of_the_lease_that_ends_first(self, client: Redis) -> None:
        taken(client, 0, 2)
        taken(client, 1, px=5_000)
        zero, ms, value, _, view = ask(client, first=2)
        assert (zero, value, view, 0 < ms <= 5_000) == (0, "t1:other", "ttt", True)
        client.persist(key_of(1))
        assert ask(client)[2] == "t0:other"
        for permit in range(3):
            client.persist(key_of(permit))
        assert ask(client)[:2] == [0, -1]

    def test_a_node_without_memory_abstains_but_refuses_and_knows_its_own(
        self, client: Redis
    ) -> None:
        guard = client.info("server")["run_id"], "60000"
        client.set(RUN, "another")
        minus, ms = ask(client, guard=guard)
        assert (minus, 0 < ms <= 60_000) == (-1, True)
        assert client.get(RUN) == guard[0]
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

    @REDIS_SERVER
    def test_a_key_of_another_type_counts_as_taken_and_stops_no_release(
        self, client: Redis
    ) -> None:
        client.rpush(key_of(0), "of another program")
        assert ask(client) == [1, 1, "100"]
        assert ask(client, "theirs", asked="0")[::2] == [0, "", "1m0"]
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
    """Return how many scripts a Redis node has run; 0 of PostgreSQL."""
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
    @REDIS_SERVER  # it counts its scripts
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

    @MAJORITY
    @REDIS_SERVER  # it counts its scripts
    def test_holders_of_a_bare_majority_are_refused_with_one_round(
        self, nodes: Nodes, redlock: Redlock
    ) -> None:
        """Holders that raced have their permits on two nodes; the third one grants its own."""
        redlock.lock("another", limit=2).acquire().release()  # the nodes know the scripts then
        settle(redlock)
        for permit in range(FULL):
            for node in (nodes[permit % 3], nodes[(permit + 1) % 3]):
                node.client().set(key_of(permit), f"{permit:032x}:1:other", px=600_000)
        before = [run_of(node) for node in nodes]
        with pytest.raises(LockTaken):
            redlock.lock("r", limit=FULL).acquire()
        settle(redlock)
        assert [run_of(node) - count for node, count in zip(nodes, before, strict=True)] == [2] * 3

    def test_all_free_permits_are_taken_by_rivals_at_once_and_no_more(
        self, nodes: Nodes, rivals: list[Redlock]
    ) -> None:
        locks: list[Lock] = []
        before = [run_of(node) for node in nodes]

        def take(number: int) -> None:
            locks.append(rivals[number % 5].lock("r", limit=FULL, wait=60, ttl=60).acquire())

        in_threads(30, take)
        for rival in rivals:
            settle(rival)
        scripts = [run_of(node) - count for node, count in zip(nodes, before, strict=True)]
        standing = Counter(
            (permit, value)
            for node in nodes
            for permit in range(FULL)
            if (value := node.client().get(key_of(permit)))
        )
        held = [permit for (permit, _), count in standing.items() if count > len(nodes) / 2]
        assert len(held) == len(set(held)) == len(locks) == 30
        assert sum(scripts) / len(nodes) / 30 < 9  # blind tries took 20

    @MAJORITY
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

    @MAJORITY
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

    @MAJORITY
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


DOCTOR, CLINIC = "doctor:7", "clinic:x"
LIMITS = {CLINIC: 2}


def standing_on(nodes: Nodes) -> list[set[str]]:
    """Return the locks that stand on each node, without their prefix."""
    return [{name.partition("}:lock:")[2] for name in names} for names in keys_on(nodes)]


def scripts_for(node: EmbeddedNode, name: str, during: Callable[[], object]) -> int:
    """Return how many commands name a key while something is done."""
    with node.client().monitor() as monitor:
        during()
        node.client().echo("the end")
        said = iter(monitor.listen())
        lines = [one["command"] for one in takewhile(lambda one: "the end" not in str(one), said)]
    return sum(f"lock:{name}" in line for line in lines)


class TestLimitsPerKey:
    def visit(self, client: Redlock, doctor: str, **options: Any) -> Lock:
        """Return the lock on a doctor of the clinic, named in the order that is not the lock's."""
        return client.lock([CLINIC, doctor], limit=LIMITS, **options)

    def test_each_key_has_its_own_limit(self, nodes: Nodes, rivals: list[Redlock]) -> None:
        first, second, third, *_ = rivals
        with self.visit(first, "doctor:1", wait=60), self.visit(second, "doctor:2", wait=60):
            with pytest.raises(LockTaken) as refused:
                self.visit(third, "doctor:3").acquire()
            assert (refused.value.resource, refused.value.limit) == (CLINIC, 2)
            settle(third)
            assert all("doctor:3" not in standing for standing in standing_on(nodes))
        with pytest.raises(LockTaken) as refused, first.lock("doctor:1", wait=60):
            self.visit(second, "doctor:1").acquire()
        assert (refused.value.resource, refused.value.limit) == ("doctor:1", 1)
        for rival in rivals:
            settle(rival)
        assert standing_on(nodes) == [set()] * len(nodes)

    @REDIS_SERVER  # it monitors its commands
    def test_whom_the_doctor_refuses_never_asks_for_a_permit_of_the_clinic(
        self, nodes: Nodes, redlock: Redlock, rival: Redlock
    ) -> None:
        with rival.lock(DOCTOR, wait=60):
            settle(rival)
            refused = self.visit(redlock, DOCTOR)
            assert scripts_for(nodes[0], CLINIC, refused.try_acquire) == 0
        assert refused.resource == f"{DOCTOR}, {CLINIC}"  # "clinic" sorts before "doctor"

    def test_keys_with_one_holder_go_first_in_their_order_and_then_permits_in_theirs(
        self, redlock: Redlock
    ) -> None:
        limit = {"a": 2, "c": 3}
        lock = redlock.lock(["d", "c", "b", "a"], limit=limit)
        assert lock.resource == "b, d, a, c"
        with lock:
            keys = [lease.key for lease in lock.ownership.acquisitions[0].leases]
            assert [(key.resource, key.limit) for key in keys] == [
                ("b", 1), ("d", 1), ("a", 2), ("c", 3),
            ]  # fmt: skip

    def test_who_waits_has_no_key_and_waits_for_the_one_that_refused(
        self, nodes: Nodes, redlock: Redlock, rival: Redlock
    ) -> None:
        """First for the clinic, and when that has a permit free, for the doctor."""
        taken: list[Lock] = []
        waiting = self.visit(redlock, DOCTOR, wait=60)
        with ExitStack() as full:
            for _ in range(2):
                lock = rival.lock(CLINIC, limit=2, wait=60)
                at_once(lambda lock=lock: taken.append(lock.acquire()))
            thread = threading.Thread(target=waiting.acquire)
            thread.start()
            full.callback(thread.join)
            callers = redlock.session.callers
            eventually(lambda: callers.resources() == [CLINIC])
            assert callers.line(CLINIC)[0].limit == 2
            eventually(lambda: is_free(nodes, DOCTOR))
            doctor = rival.lock(DOCTOR, wait=60).acquire()
            for lock in taken:
                releaser = rival.session.releaser
                releaser.release(lock.ownership.acquisitions[0])
            eventually(lambda: callers.resources() == [DOCTOR])
            assert callers.line(DOCTOR)[0].limit == 1
            eventually(lambda: is_free(nodes, CLINIC) and is_free(nodes, f"{CLINIC}#1"))
            doctor.release()
        eventually(lambda: waiting.held)

    def test_an_outer_lock_covers_an_inner_one_key_by_key(self, redlock: Redlock) -> None:
        with self.visit(redlock, DOCTOR, wait=60):
            with redlock.lock(DOCTOR) as inner, redlock.lock(CLINIC, limit=3) as another:
                assert inner.held
                assert another.held
            with pytest.raises(SettingsError, match=r"limit=1: .*clinic:x.*one of 2 permits"):
                redlock.lock([CLINIC, DOCTOR]).acquire()

    def test_a_run_whose_keys_are_all_permits_locks_its_own_name_first(
        self, redlock: Redlock, rival: Redlock
    ) -> None:
        mark = CompletionMarker("1:t:0:0", 60.0, None)
        terms = {"ttl": 30.0, "wait": 0.0, "renew": True, "max_hold": None, "marker": mark}

        def run(client: Redlock, **limits: int) -> Lock:
            label = f"{mark.run} w1@here"
            return Lock(client, LockOptions(("p", "q"), label=label, limits=limits, **terms))

        with run(redlock, p=2, q=3) as lock:
            (held,) = lock.ownership.acquisitions
            assert [one.key.resource for one in held.leases] == ["run:1:t:0:0", "p", "q"]
            with pytest.raises(LockTaken) as refused:
                run(rival, p=2, q=3).acquire()
            assert (refused.value.resource, refused.value.limit) == ("run:1:t:0:0", 1)
        with run(redlock, q=3) as lock:
            (held,) = lock.ownership.acquisitions
            assert [one.key.resource for one in held.leases] == ["p", "q"]

    def test_of_two_limits_for_one_key_the_larger_counts(self, rivals: list[Redlock]) -> None:
        two, three = {CLINIC: 2}, {CLINIC: 3}
        with ExitStack() as stack:
            for number, limit in enumerate((two, two, three)):
                lock = rivals[number].lock([CLINIC, f"doctor:{number}"], limit=limit, wait=60)
                stack.enter_context(lock)
            for limit in (two, three):
                assert not rivals[3].lock([CLINIC, "doctor:4"], limit=limit).try_acquire()

    @pytest.mark.parametrize(
        ("limit", "fencing", "words"),
        [
            (2, False, "to one resource"), ({"b": 0}, False, "from 1 to 1000"),
            ({"c": 2}, False, "'c' is not in the key"), ({"b": 2}, True, "no fencing tokens"),
        ],
    )  # fmt: skip
    def test_wrong_ones_are_refused(
        self, redlock: Redlock, limit: Any, fencing: bool, words: str
    ) -> None:
        with pytest.raises(SettingsError, match=words):
            redlock.lock(["a", "b"], limit=limit, fencing=fencing)
