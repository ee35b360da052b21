"""Several holds at once: nested, as permits, on several resources; and the numbers they get."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from celery_redlock import Lock, LockLost, LockTaken, Redlock, RedlockError, SettingsError
from celery_redlock.signals import lock_lost, lock_released
from celery_redlock.testing import FakeNode, fake_nodes
from tests.conftest import (
    NODE_TIMEOUT,
    Nodes,
    eventually,
    is_free,
    keys_on,
    paused,
    receiving,
    see_freed,
    settle,
    settled,
    trust_nodes,
)
from tests.contract.conftest import MAJORITY, at_once
from tests.contract.contention import PROCESSES

FENCE = "{redlock}:fence"


@pytest.fixture
def rivals(nodes: Nodes) -> Iterator[list[Redlock]]:
    """Give four clients, each as of a process of its own."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(settled(nodes)) for _ in range(4)]


@pytest.fixture
def fakes() -> Iterator[list[FakeNode]]:
    """Give three fake nodes with one clock, for what becomes of leases in time."""
    with fake_nodes(3) as made:
        trust_nodes(made)
        yield made


def locks_on(nodes: Nodes) -> list[list[str]]:
    """Return the names of the locks that stand on each node, without their prefix."""
    mark = "}:lock:"
    return [[k.partition(mark)[2] for k in keys if mark in k] for keys in keys_on(nodes)]


def lose(lock: Lock, redlock: Redlock, nodes: Nodes) -> None:
    """Take a held lock away on a quorum of nodes, and let it be noticed."""
    settle(redlock)  # a grant still on its way would bring the key back
    for node in nodes[:2]:
        node.client().delete(f"{{redlock}}:lock:{lock.resource}")
    with pytest.raises(LockLost):
        lock.extend()


class TestNested:
    def test_what_is_held_here_is_taken_again_and_free_after_the_last_release(
        self, redlock: Redlock, rival: Redlock, nodes: Nodes
    ) -> None:
        outer = redlock.lock("r", wait=60)
        with outer:
            settle(redlock)
            values = [node.client().get("{redlock}:lock:r") for node in nodes]
            with redlock.lock("r") as inner, outer:
                settle(redlock)
                assert inner.held
                assert outer.held
                assert [node.client().get("{redlock}:lock:r") for node in nodes] == values
            settle(redlock)
            assert not inner.held
            assert outer.held
            assert not rival.lock("r").try_acquire()
        see_freed(nodes, "r")

    def test_its_release_is_told_once_as_the_outer_one_is_released(self, redlock: Redlock) -> None:
        told: list[str] = []
        with receiving(lock_released, lambda sender, event: told.append(event.resource)):
            with redlock.lock("r"):
                with redlock.lock("r"):
                    pass
                assert told == []
            assert told == ["r"]

    def test_another_thread_does_not_share_it(self, redlock: Redlock) -> None:
        with redlock.lock("r", wait=60):
            assert at_once(redlock.lock("r").try_acquire) == [False]

    def test_an_asyncio_task_does_not_share_it_with_another(self, redlock: Redlock) -> None:
        async def hold(held: asyncio.Event, done: asyncio.Event) -> bool:
            with redlock.lock("r", wait=60):
                held.set()
                await done.wait()
                return redlock.lock("r").try_acquire()  # its own

        async def both() -> tuple[bool, bool]:
            held, done = asyncio.Event(), asyncio.Event()
            holder = asyncio.create_task(hold(held, done))
            await held.wait()
            others = redlock.lock("r").try_acquire()
            done.set()
            return others, await holder

        assert asyncio.run(both()) == (False, True)

    def test_inside_of_one_that_is_lost_it_is_lost_too(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock("r", wait=60) as outer:
            lose(outer, redlock, nodes)
            with pytest.raises(LockLost):
                redlock.lock("r").acquire()

    def test_it_is_lost_with_the_one_around_it(self, redlock: Redlock, nodes: Nodes) -> None:
        with redlock.lock("r", wait=60) as outer, redlock.lock("r") as inner:
            lose(outer, redlock, nodes)
            assert not inner.held
            with pytest.raises(LockLost):
                inner.ensure()

    def test_inside_of_one_of_several_permits_none_of_fewer_is_given(
        self, redlock: Redlock
    ) -> None:
        with redlock.lock("r", wait=60, limit=3), redlock.lock("r", limit=4) as inner:
            assert inner.held
            with pytest.raises(SettingsError, match=r"limit=2: .*one of 3 permits"):
                redlock.lock("r", limit=2).acquire()

    def test_inside_of_one_without_a_fencing_token_none_with_one_is_given(
        self, redlock: Redlock
    ) -> None:
        with (
            redlock.lock("r", wait=60),
            pytest.raises(SettingsError, match=r"fencing=True: .*without"),
        ):
            redlock.lock("r", fencing=True).acquire()

    def test_inside_of_one_with_a_fencing_token_it_has_the_same(self, redlock: Redlock) -> None:
        with (
            redlock.lock("r", wait=60, fencing=True) as outer,
            redlock.lock("r", fencing=True) as inner,
        ):
            assert inner.fencing_token == outer.fencing_token

    def test_one_on_several_takes_what_is_not_held_and_gives_back_no_more(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock("b", wait=60) as outer:
            with redlock.lock(["a", "b", "c"], wait=60) as inner:
                settle(redlock)
                assert inner.held
                assert locks_on(nodes) == [["a", "b", "c"]] * len(nodes)
            see_freed(nodes, "a")
            see_freed(nodes, "c")
            assert outer.held
            assert locks_on(nodes) == [["b"]] * len(nodes)

    @pytest.mark.parametrize("options", [{"renew": False}, {"max_hold": 0.1}])
    def test_after_one_that_has_run_out_as_planned_it_is_taken_anew(
        self, fakes: list[FakeNode], options: dict[str, Any]
    ) -> None:
        with settled(fakes) as made, settled(fakes) as rival:
            old = made.lock("r", wait=60, **options).acquire()
            fakes[0].advance(31)
            assert not old.held
            with made.lock("r") as new:  # at once, although a node may still keep the old key
                old.release()
                settle(made)
                assert new.held
                assert not rival.lock("r").try_acquire()
            settle(made)
            assert rival.lock("r").try_acquire()

    def test_one_that_has_run_out_as_planned_says_so_and_its_loss_is_told_once(
        self, fakes: list[FakeNode]
    ) -> None:
        told: list[str] = []
        with (
            settled(fakes) as made,
            receiving(lock_lost, lambda _, event: told.append(event.reason)),
        ):
            old = made.lock("r", wait=60, renew=False).acquire()
            fakes[0].advance(31)
            with made.lock("r"), pytest.raises(LockLost, match=r"lost .its ttl of 30 s is over"):
                old.ensure()
            old.release()
            eventually(lambda: told)
        assert told == ["its ttl of 30 s is over, and renew=False"]

    def test_one_that_is_lost_before_its_max_hold_is_lost_for_those_inside(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock("r", wait=60, max_hold=60) as outer:
            lose(outer, redlock, nodes)
            with pytest.raises(LockLost, match="its key is gone"):
                redlock.lock("r").acquire()


class TestNotReentrant:
    def test_it_is_refused_in_the_thread_that_holds_it_as_by_another_client(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        lock = redlock.lock("r", wait=60, reentrant=False)
        with lock:
            for again in (lock, redlock.lock("r", reentrant=False)):
                with pytest.raises(LockTaken) as caught:
                    again.acquire(wait=0)
                assert caught.value.holder.startswith("pid ")
            assert lock.held
            with redlock.lock("r") as inner:
                assert inner.held  # the option is that of the lock that is acquired
        see_freed(nodes, "r")

    def test_it_is_refused_in_the_asyncio_task_that_holds_it(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        async def body() -> None:
            async with redlock.lock("r", wait=60) as outer:
                with pytest.raises(LockTaken):
                    await redlock.lock("r", reentrant=False).acquire_async()
                assert outer.held

        asyncio.run(body())
        see_freed(nodes, "r")

    def test_it_waits_as_others_do(self, fakes: list[FakeNode]) -> None:
        with settled(fakes) as made:
            old = made.lock("r", wait=60, renew=False).acquire()
            threading.Timer(0.1, fakes[0].advance, (31,)).start()  # it waits by then, or not yet
            with made.lock("r", wait=600, reentrant=False) as new:
                assert not old.held
                assert new.held

    def test_it_takes_another_permit(self, redlock: Redlock) -> None:
        options = {"limit": 2, "reentrant": False}
        with redlock.lock("p", wait=60, **options), redlock.lock("p", **options):
            assert not redlock.lock("p", **options).try_acquire()


class TestPermits:
    def test_so_many_hold_at_once_and_no_more(self, rivals: list[Redlock], nodes: Nodes) -> None:
        *three, fourth = rivals
        locks = []
        for made in three:
            locks.append(made.lock("r", wait=60, limit=3).acquire())
            settle(made)  # a node that is late would give its permit to the next one
        with pytest.raises(LockTaken) as caught:
            fourth.lock("r", limit=3).acquire()
        assert caught.value.expires_in is not None
        assert all(lock.held for lock in locks)
        settle(fourth)
        assert locks_on(nodes) == [["r", "r#1", "r#2"]] * len(nodes)
        locks.pop().release()
        locks.append(fourth.lock("r", wait=60, limit=3).acquire())
        for lock in locks:
            lock.release()

    def test_one_that_wants_to_be_alone_counts_beside_others_and_they_beside_it(
        self, rivals: list[Redlock]
    ) -> None:
        alone, *three = rivals
        with alone.lock("r", wait=60):
            settle(alone)
            locks = []
            for made in three[:2]:
                locks.append(made.lock("r", wait=60, limit=3).acquire())
                settle(made)
            assert not three[2].lock("r", limit=3).try_acquire()
        locks.append(three[2].lock("r", wait=60, limit=3).acquire())  # where the one alone was
        assert not alone.lock("r").try_acquire()
        for lock in locks:
            lock.release()


def take_turns(urls: list[str], names: list[str]) -> None:
    """Take several locks again and again, in a process of its own."""
    with Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock:
        for _ in range(10):
            with redlock.lock(names, wait=100) as lock:
                lock.ensure()


class TestResources:
    def test_all_or_none_are_taken_whatever_the_order(
        self, redlock: Redlock, rival: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock("b", wait=60):
            settle(redlock)
            for names in (["a", "b", "c"], ["c", "b", "a"]):
                with pytest.raises(LockTaken, match="'b'"):
                    rival.lock(names).acquire()
                settle(rival)
                assert locks_on(nodes) == [["b"]] * len(nodes)
        with rival.lock(["c", "a", "b", "a"], wait=60) as lock:
            settle(rival)
            assert lock.resource == "a, b, c"
            assert locks_on(nodes) == [["a", "b", "c"]] * len(nodes)
        for name in ("a", "b", "c"):
            see_freed(nodes, name)

    def test_one_of_them_lost_is_all_lost(
        self, redlock: Redlock, rival: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock(["a", "b"], wait=60) as lock:
            settle(redlock)
            for node in nodes[:2]:
                node.client().delete("{redlock}:lock:b")
            with pytest.raises(LockLost):
                lock.extend()
            assert not lock.held
            assert lock.remaining == 0.0
        see_freed(nodes, "a")

    def test_two_processes_that_name_them_in_opposite_orders_block_each_other_not_for_ever(
        self, nodes: Nodes
    ) -> None:
        urls = [node.url for node in nodes]
        both = [
            PROCESSES.Process(target=take_turns, args=(urls, names), daemon=True)
            for names in (["a", "b"], ["b", "a"])
        ]
        for process in both:
            process.start()
        for process in both:
            process.join(240)
            process.kill()
        assert [process.exitcode for process in both] == [0, 0]
        eventually(lambda: is_free(nodes, "a") and is_free(nodes, "b"))

    @pytest.mark.parametrize("options", [{"renew": False}, {"max_hold": 0.1}])
    def test_they_end_together_where_they_are_not_to_be_renewed(
        self, fakes: list[FakeNode], options: dict[str, Any]
    ) -> None:
        with settled(fakes) as made:
            lock = made.lock(["a", "b"], wait=60, **options).acquire()
            fakes[0].advance(31)
            assert not lock.held
            with pytest.raises(LockLost, match=r"'a, b' is lost .its (ttl|max_hold) of "):
                lock.ensure()
            lock.release()


def token_of(redlock: Redlock, resource: str | list[str] = "r") -> int:
    """Hold a lock for a moment, and return its fencing token."""
    with redlock.lock(resource, wait=60, fencing=True) as lock:
        return lock.fencing_token


def grows(tokens: list[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(tokens))


class TestFencing:
    def test_each_holder_has_a_greater_token_also_of_other_resources(
        self, redlock: Redlock, rival: Redlock
    ) -> None:
        names: list[str | list[str]] = ["r", "s", ["r", "s"], "r", ["t", "r"], "s"]
        tokens = [token_of(made, name) for name in names for made in (redlock, rival)]
        assert grows(tokens)

    def test_it_is_there_from_the_acquire_to_the_release_of_one_that_asked_for_it(
        self, redlock: Redlock
    ) -> None:
        lock = redlock.lock("r", wait=60, fencing=True)
        with pytest.raises(RedlockError, match="not acquired"):
            _ = lock.fencing_token
        assert not hasattr(lock, "fencing_token")
        with lock:
            assert lock.fencing_token > 0
        with redlock.lock("s") as other, pytest.raises(RedlockError, match="fencing=True"):
            _ = other.fencing_token

    def test_it_grows_past_a_node_that_is_ahead_of_every_wall_clock(
        self, mortal_nodes: Nodes
    ) -> None:
        first, second, third = mortal_nodes
        ahead = time.time_ns() // 1000 + 3600 * 10**6  # by an hour; a day ahead is a forged one
        first.client().set(FENCE, ahead)
        with settled(mortal_nodes, NODE_TIMEOUT) as redlock:
            tokens = []
            for away in (second, first, third):  # whoever has not seen it must have been told
                settle(redlock)
                with paused(away):
                    tokens.append(token_of(redlock))
        assert tokens[0] > ahead
        assert grows(tokens)

    @MAJORITY
    def test_it_grows_though_a_minority_of_nodes_forgets_its_counters(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        tokens = []
        for node in 2 * nodes:
            tokens.append(token_of(redlock))
            settle(redlock)
            node.client().delete(FENCE)
        assert grows(tokens)

    def test_it_grows_though_nodes_restart_empty(self, mortal_nodes: Nodes) -> None:
        tokens = []
        with settled(mortal_nodes) as redlock:
            for node in mortal_nodes:
                tokens.append(token_of(redlock))
                node.kill()
                tokens.append(token_of(redlock))
                node.start()
                tokens.append(token_of(redlock))
                trust_nodes(mortal_nodes)
        assert grows(tokens)
