"""An operator's hold on real servers: whom its mark refuses, and when the resource is drained."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from redis import Redis

from celery_redlock import LockLost, LockTaken, Redlock
from celery_redlock.lock.model.keys import HOLD_MARK, guard_keys, lock_key, waiting_key
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.server.requests import PERMIT, REGISTER
from celery_redlock.lock.validation import MAX_PERMITS
from celery_redlock.operate.cli.hold import ResourceHold
from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually, register, settle
from tests.contract.conftest import MAJORITY
from tests.contract.renewals import hurry

BASE = lock_key("redlock", "r")
RUN, QUIET = guard_keys("redlock")
OPERATOR = "operator anna@ops-1: stock-taking"
HELD = f"{HOLD_MARK}h:1:{OPERATOR}"


def key_of(permit: int) -> str:
    return lock_key("redlock", "r", permit)


def options(**changed: Any) -> LockOptions:
    return LockOptions(
        resources=("r",), ttl=30.0, wait=0.0, renew=True, max_hold=None, label=OPERATOR,
        reentrant=False, is_hold=True,
    )._replace(**changed)  # fmt: skip


def ask(client: Redis, value: str = "mine", asked: str = "", quiet: str = "") -> Any:
    """Ask for one of three permits."""
    guard = (quiet, "60000") if quiet else ("", "")
    words = value, "30000", "3", "0", asked, *guard
    return client.eval(PERMIT.source.decode(), 3, BASE, RUN, QUIET, *words)


def marked_permits(nodes: Nodes) -> list[int]:
    """Return the permits of which a quorum of nodes has a mark."""
    values = [[node.client().get(key_of(permit)) or "" for node in nodes] for permit in range(10)]
    needed = len(nodes) // 2 + 1
    return [
        p for p, each in enumerate(values) if sum(v.startswith(HOLD_MARK) for v in each) >= needed
    ]


class TestMark:
    @pytest.fixture
    def client(self, nodes: Nodes) -> Redis:
        client: Redis = nodes[0].client()
        client.set(key_of(1), HELD, px=20_000)
        return client

    @pytest.mark.parametrize("asked", ["", "0", "1", "2"])
    def test_it_refuses_each_permit_and_the_hold_is_named(self, client: Redis, asked: str) -> None:
        zero, ms, holder, _, view = ask(client, asked=asked)
        assert (zero, holder, view, 0 < ms <= 20_000) == (0, HELD, "111", True)
        assert not client.exists(key_of(0), key_of(2))

    def test_it_refuses_on_a_node_without_memory_too(self, client: Redis) -> None:
        assert ask(client, quiet="another")[0] == 0

    def test_who_has_a_permit_keeps_it(self, client: Redis) -> None:
        client.set(key_of(2), "mine", px=9_000)
        assert ask(client)[:2] == [1, 2]
        assert client.pttl(key_of(2)) > 9_000

    def test_it_refuses_no_other_hold(self, client: Redis) -> None:
        assert ask(client, f"{HOLD_MARK}g:1:other") == [1, 0, "0h0"]

    @pytest.mark.parametrize(
        ("since", "limit", "free"), [("1.000", "3", 0), ("1.000", "1", 1), ("0.000", "3", 2)]
    )
    def test_who_waits_is_told_that_none_is_free_until_the_hold_ends_but_not_a_hold(
        self, client: Redis, since: str, limit: str, free: int
    ) -> None:
        """Else each waiter would try again and again for as long as the hold lasts."""
        keys = waiting_key("redlock", "r"), BASE
        words = "host:1:waiter", since, "60000", "0", "inbox:", limit, ""
        rank, found, ms = client.eval(REGISTER.source.decode(), 2, *keys, *words)
        assert (rank, found, ms > 0) == (0, free, not free)

    def test_no_other_value_is_one(self, client: Redis) -> None:
        client.set(key_of(1), f"t{HOLD_MARK}:1:{HOLD_MARK}", px=20_000)
        assert ask(client) == [1, 0, "0t0"]


def test_a_mark_refuses_whoever_reads_it_whatever_his_limit(nodes: Nodes, redlock: Redlock) -> None:
    """A callable, another app or a new deploy may have another limit than the operator knows."""
    held = redlock.lock("r", limit=3, reentrant=False).acquire()  # below the mark
    for node in nodes:
        node.client().set(key_of(3), HELD, px=60_000)
    for limit in (4, 5, MAX_PERMITS):
        with pytest.raises(LockTaken) as caught:
            redlock.lock("r", limit=limit, reentrant=False).acquire()
        assert caught.value.holder == OPERATOR
        assert f"held by {OPERATOR};" in str(caught.value)
    assert redlock.lock("r", limit=3, reentrant=False).try_acquire(), "it reads no mark"
    held.extend()


class Operator(threading.Thread):
    """A hold in a thread of its own, which gives it back once it is told to."""

    def __init__(self, redlock: Redlock, **changed: Any) -> None:
        super().__init__()
        self.hold = ResourceHold(redlock, options(**changed))
        self.has_it, self.may_end = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            if self.hold.take(60.0):
                self.has_it.set()
                self.may_end.wait(60.0)
        finally:
            self.hold.release()


def test_a_hold_drains_a_semaphore_and_takes_its_lowest_permit_at_last(
    nodes: Nodes, redlock: Redlock, rival: Redlock
) -> None:
    locks = [redlock.lock("r", limit=5, reentrant=False).acquire() for _ in range(5)]
    operator = Operator(rival)
    operator.start()
    for lock in locks:
        lock.release()
        eventually(lambda: min(marked_permits(nodes), default=5) < 5)  # one of those that are read
        with pytest.raises(LockTaken):
            redlock.lock("r", limit=5, reentrant=False).acquire()
    assert operator.has_it.wait(60)
    assert marked_permits(nodes) == [0]
    operator.may_end.set()
    operator.join()
    assert redlock.lock("r", limit=5).try_acquire()


@MAJORITY
def test_it_is_not_had_while_a_permit_stands_on_nodes_that_leave_no_quorum(
    nodes: Nodes, rival: Redlock
) -> None:
    """A permit that one node lacks is held all the same."""
    for node in nodes[:2]:
        node.client().set(key_of(4), "t:1:other", px=600_000)
    hold = ResourceHold(rival, options())
    told: list[str] = []

    def waits() -> bool:
        told.clear()
        is_had = hold.take(0.75, told.append)  # two looks
        return not is_had and bool(nodes[2].client().get(BASE))

    eventually(waits)
    assert told == ["other"]  # once, as it stays the same
    nodes[0].client().delete(key_of(4))
    value = nodes[2].client().getdel(BASE)  # it may grant a permit, together with node 1
    assert not hold.take(1.5)  # three looks
    nodes[2].client().set(BASE, value, px=30_000)
    assert hold.take(60.0)


@MAJORITY
def test_a_node_that_lost_its_keys_does_not_prove_that_nothing_runs(
    nodes: Nodes, rival: Redlock
) -> None:
    for node in nodes[:2]:
        node.client().set(key_of(4), "t:1:other", px=600_000)
    hold = ResourceHold(rival, options())
    eventually(lambda: not hold.take(0.5) and nodes[1].client().get(BASE))
    settle(rival)
    client = nodes[1].client()
    value = client.get(BASE)
    client.flushall()
    client.set(BASE, value, px=30_000)  # the hold reclaims it before the other one does
    assert not hold.take(1.5)  # three looks


def test_two_holds_do_not_wait_for_each_other(
    nodes: Nodes, redlock: Redlock, rival: Redlock
) -> None:
    """Each has a permit of a semaphore while it drains; permit 0 decides, the other one follows."""
    lock = redlock.lock("r", limit=2, reentrant=False).acquire()
    operators = [Operator(one) for one in (redlock, rival)]
    for operator in operators:
        operator.start()
    eventually(lambda: len(marked_permits(nodes)) == 2)
    lock.release()
    first = eventually(lambda: [one for one in operators if one.has_it.is_set()])
    assert len(first) == 1
    first[0].may_end.set()
    for operator in operators:
        operator.may_end.set()
        operator.join()
        assert operator.has_it.is_set()


def test_a_hold_waits_before_all_that_wait_already(
    nodes: Nodes, redlock: Redlock, rival: Redlock
) -> None:
    lock = redlock.lock("r").acquire()
    register(redlock, "host:1:waiter", "r", 1_700_000_000.0)
    settle(redlock)
    operator, waiting = Operator(rival), waiting_key("redlock", "r")
    operator.start()

    def first_since(node: EmbeddedNode) -> float:
        return float(node.client().zrange(waiting, 0, 0, withscores=True)[0][1])

    eventually(lambda: not any(map(first_since, nodes)))
    lock.release()
    assert operator.has_it.wait(60)
    operator.may_end.set()
    operator.join()


def test_a_broken_hold_says_that_it_is_lost(nodes: Nodes, redlock: Redlock) -> None:
    hold = ResourceHold(redlock, options())
    assert hold.take(60.0)
    for node in nodes:
        node.client().set(BASE, "t:1:other", px=60_000)
    hurry(redlock)
    with pytest.raises(LockLost):
        hold.keep()
