"""The mark that a run is done: made with its release, asked for with the next grant."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from celery_redlock import Lock, LockTaken, Redlock
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.tasks.execution.completion_markers import read_markers
from tests.conftest import PATIENCE, TTL, Nodes, eventually, keys_on, paused, settle
from tests.contract.conftest import MAJORITY, REDIS_SERVER

RUN = "1:shop.settle:0:0"
DONE = "{redlock}:done:" + RUN
KEPT = 500.0  # s
ANY = -math.inf
AWAY = 10.0  # s: twice as long as a stall that changes nothing


def lock_of(
    redlock: Redlock, since: float | None = None, run: str = RUN, resource: Any = "r",
    limit: int = 1, **terms: Any,
) -> Lock:  # fmt: skip
    """Return the lock of a run that may be delivered again; since: what it asks, None nothing."""
    resources = (resource,) if isinstance(resource, str) else tuple(resource)
    terms = {"ttl": 30.0, "wait": 0.0, "renew": True, "max_hold": None, **terms}
    mark, label = CompletionMarker(run, KEPT, since), f"{run} w1@here"
    limits = dict.fromkeys(resources, limit) if limit > 1 else None
    return Lock(redlock, LockOptions(resources, marker=mark, label=label, limits=limits, **terms))


def ends(redlock: Redlock, **lock: Any) -> None:
    """Let a run take its lock, end, and be marked as done."""
    lock_of(redlock, **lock).acquire().ownership.release_all(ended=True)
    settle(redlock)


def marks_on(nodes: Nodes) -> list[bool]:
    return [bool(node.client().exists(DONE)) for node in nodes]


def test_the_release_of_a_run_that_is_done_marks_it_on_every_node(
    redlock: Redlock, nodes: Nodes
) -> None:
    ends(redlock)
    assert keys_on(nodes) == [[]] * len(nodes)
    for node in nodes:
        assert int(node.client().get(DONE)) == KEPT * 1000
        assert KEPT - 100 < node.client().pttl(DONE) / 1000 <= KEPT


def test_a_release_that_is_no_end_marks_nothing(redlock: Redlock, nodes: Nodes) -> None:
    lock_of(redlock).acquire().ownership.release_all()
    lock_of(redlock).acquire().release()
    settle(redlock)
    assert marks_on(nodes) == [False] * len(nodes)


def test_a_delivery_that_asks_is_told_and_leaves_nothing_behind(
    redlock: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    ends(redlock)
    with pytest.raises(AlreadyCompletedError):
        lock_of(rival, since=ANY, wait=60.0).acquire()
    settle(rival)
    assert keys_on(nodes) == [[]] * len(nodes)


def test_a_delivery_that_does_not_ask_runs(redlock: Redlock, rival: Redlock) -> None:
    ends(redlock)
    with lock_of(rival) as lock:
        assert lock.held


def test_another_run_is_not_done(redlock: Redlock, rival: Redlock) -> None:
    ends(redlock)
    with lock_of(rival, since=ANY, run="1:shop.settle:1:0") as lock:
        assert lock.held


@MAJORITY
@pytest.mark.parametrize("told", [0, 1, 2])
def test_one_node_of_the_quorum_that_says_so_is_enough(
    redlock: Redlock, rival: Redlock, nodes: Nodes, told: int
) -> None:
    ends(redlock)
    for index, node in enumerate(nodes):
        if index != told:
            node.client().delete(DONE)
    with paused(nodes[told - 1]):
        assert outcome(rival) == "done"


def outcome(redlock: Redlock) -> str:
    lock = lock_of(redlock, since=ANY)
    try:
        lock.acquire()
    except AlreadyCompletedError:
        return "done"
    lock.release()
    settle(redlock)
    return "held"


@MAJORITY
def test_a_mark_on_a_quorum_is_met_by_every_quorum(
    redlock: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    ends(redlock)
    for node in nodes:
        mark = node.client().get(DONE)
        node.client().delete(DONE)
        assert [outcome(rival) for _ in range(5)] == ["done"] * 5
        node.client().set(DONE, mark)


def test_a_run_that_is_done_is_told_so_also_where_another_holds_the_lock(
    redlock: Redlock, rival: Redlock
) -> None:
    ends(redlock)
    with redlock.lock("r"), pytest.raises(AlreadyCompletedError):
        lock_of(rival, since=ANY).acquire()


def test_a_mark_from_before_the_first_try_is_of_an_earlier_message(
    redlock: Redlock, rival: Redlock
) -> None:
    ends(redlock)
    now = rival.session.clock.now()
    with lock_of(rival, since=now + 60) as lock:
        assert lock.held
    with pytest.raises(AlreadyCompletedError):
        lock_of(rival, since=now - 60).acquire()


def test_fencing_and_asking_go_together(redlock: Redlock, rival: Redlock) -> None:
    with lock_of(redlock, since=ANY, fencing=True) as lock:
        first = lock.fencing_token
    ends(redlock, fencing=True)
    with pytest.raises(AlreadyCompletedError):
        lock_of(rival, since=ANY, fencing=True).acquire()
    with lock_of(rival, since=ANY, run="2:t:0:0", fencing=True) as lock:
        assert lock.fencing_token > first


def test_a_lost_lock_does_not_keep_a_run_that_ended_from_being_marked(
    brisk_redlock: Redlock, nodes: Nodes
) -> None:
    redlock = brisk_redlock
    lock = lock_of(redlock, ttl=TTL).acquire()
    for node in nodes:
        node.client().set("{redlock}:lock:r", "theirs", px=300_000)
    redlock.session.watchdog.renew_by(redlock.session.clock.now())
    eventually(lambda: not lock.held)
    lock.ownership.release_all(ended=True)
    settle(redlock)
    assert marks_on(nodes) == [True] * len(nodes)
    assert all(node.client().get("{redlock}:lock:r") == "theirs" for node in nodes)


def test_a_run_that_released_its_lock_itself_is_marked_at_its_end(
    redlock: Redlock, nodes: Nodes
) -> None:
    lock = lock_of(redlock).acquire()
    lock.release()
    settle(redlock)
    assert marks_on(nodes) == [False] * len(nodes)
    lock.ownership.release_all(ended=True)
    settle(redlock)
    assert marks_on(nodes) == [True] * len(nodes)


def test_the_end_of_an_inner_run_neither_ends_nor_releases_what_is_around_it(
    redlock: Redlock, nodes: Nodes
) -> None:
    outer = lock_of(redlock).acquire()
    for released in (False, True):
        inner = lock_of(redlock, run="2:t:0:0").acquire()
        if released:
            inner.release()
        inner.ownership.release_all(ended=True)
        settle(redlock)
        assert outer.held
        assert keys_on(nodes) == [["{redlock}:lock:r"]] * len(nodes)
    outer.release()
    settle(redlock)
    assert marks_on(nodes) == [False] * len(nodes)


def test_of_several_resources_the_mark_is_ahead_of_the_first_release(
    redlock: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    ends(redlock, resource=["a", "b"])
    assert marks_on(nodes) == [True] * len(nodes)
    with pytest.raises(AlreadyCompletedError):
        lock_of(rival, since=ANY, resource=["a", "b"]).acquire()


def test_a_twin_does_not_take_another_permit(redlock: Redlock, rival: Redlock) -> None:
    with lock_of(redlock, limit=3) as first:
        with pytest.raises(LockTaken) as refused:
            lock_of(rival, since=ANY, limit=3).acquire()
        assert refused.value.holder.startswith(f"{RUN} ")
        with lock_of(rival, run="2:t:0:0", limit=3) as another:
            assert another.held
            assert first.held
    ends(redlock, limit=3)
    with pytest.raises(AlreadyCompletedError):
        lock_of(rival, since=ANY, limit=3).acquire()


def test_a_run_without_a_permit_leaves_nothing_of_its_own_lock(
    redlock: Redlock, rival: Redlock, nodes: Nodes
) -> None:
    third = Redlock([node.url for node in nodes], node_timeout=PATIENCE)
    with third, lock_of(redlock, limit=2), lock_of(rival, run="2:t:0:0", limit=2):
        with pytest.raises(LockTaken):
            lock_of(third, run="3:t:0:0", limit=2).acquire()
        settle(third)
        names = [key for keys in keys_on(nodes) for key in keys]
        assert not [name for name in names if "run:3" in name]
        assert [name for name in names if "run:2" in name]
    settle(redlock)
    settle(rival)
    assert keys_on(nodes) == [[]] * len(nodes)


@REDIS_SERVER
def test_a_node_without_memory_for_the_mark_frees_the_lock_all_the_same(
    redlock: Redlock, nodes: Nodes
) -> None:
    lock = lock_of(redlock).acquire()
    clients = [node.client() for node in nodes]
    for client in clients:
        client.config_set("maxmemory", "1")
    try:
        lock.ownership.release_all(ended=True)
        settle(redlock)
    finally:
        for client in clients:
            client.config_set("maxmemory", "0")
    assert keys_on(nodes) == [[]] * len(nodes)
    assert marks_on(nodes) == [False] * len(nodes)


@pytest.mark.slow
def test_the_mark_is_owed_with_its_release_to_a_node_that_is_away(mortal_nodes: Nodes) -> None:
    urls = [node.url for node in mortal_nodes]
    with Redlock(urls, node_timeout=PATIENCE) as redlock:
        settle(redlock)
        lock = lock_of(redlock, ttl=60.0).acquire()  # long: it is owed in proportion
        settle(redlock)
        mortal_nodes[0].kill()
        lock.ownership.release_all(ended=True)
        released = time.monotonic()
        eventually(lambda: marks_on(mortal_nodes[1:]) == [True] * 2)
        eventually(lambda: time.monotonic() - released > AWAY)
        mortal_nodes[0].start()
        eventually(lambda: marks_on(mortal_nodes) == [True] * len(mortal_nodes))
        ages = read_markers(redlock.session, RUN)
    assert max(ages) - min(ages) < AWAY / 2, "the run seems to have ended when the node came back"
