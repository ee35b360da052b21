"""A rate: at most N starts in any period over all clients, on real servers."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from celery_redlock import Lock, LockTaken, QuorumUnreachable, Redlock, SettingsError
from celery_redlock.lock.model.keys import name_of_rate, rate_keys, waiting_key
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.model.rate import Rate
from celery_redlock.testing import EmbeddedNode, fake_nodes
from tests.conftest import Nodes, eventually, is_free, paused, settle, settled, trust_nodes
from tests.contract.conftest import MAJORITY, at_once, quorum_of
from tests.contract.renewals import hurry

TAKEN, TOKENS = rate_keys("redlock", "r")
HOUR = "3/h"


def starts_on(node: EmbeddedNode, key: str = TAKEN) -> dict[str, float]:
    """Return when each permit was taken, in ms by the node's clock."""
    return dict(node.client().zrange(key, 0, -1, withscores=True))


def use_up(redlock: Redlock, rate: Any = HOUR, times: int = 3) -> None:
    for _ in range(times):
        with redlock.lock("r", rate=rate):
            pass


def later(redlock: Redlock, rate: Rate, **more: Any) -> Lock:
    """Return a lock whose body begins when the test says so."""
    options = LockOptions(
        ("r",), 6.0, 0.0, True, None, "label", rates={"r": rate}, body_follows=True, **more
    )
    return Lock(redlock, options)


def threaded(work: Callable[[], object]) -> None:
    """Do something in another thread, which owns no lock of this one; raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_no_period_has_more_starts_than_the_rate_over_several_clients() -> None:
    with fake_nodes(3) as fakes, ExitStack() as stack:
        trust_nodes(fakes)
        clients = [stack.enter_context(settled(fakes)) for _ in range(4)]

        def work(client: Redlock, most: int) -> int:
            lock = client.lock("r", limit=50, rate="5/h")
            return sum(try_once(lock) for _ in range(most))

        def starts(most: int) -> int:
            """Return how many starts are got by many that try at once, each for so many."""
            return sum(at_once(*(partial(work, client, most) for client in clients * 2)))

        begun = [sum(try_once(clients[0].lock("r", rate="5/h")) for _ in range(2))]
        for _ in range(4):
            fakes[0].advance(1900)  # of an hour a little more than half
            begun.append(starts(3))
    # what began before the last half hour is free again, and no more
    assert begun == [2, 3, 2, 3, 2]


def try_once(lock: Lock) -> bool:
    """Begin, and end at once, where that is allowed now."""
    if not lock.try_acquire():
        return False
    lock.release()
    return True


def test_a_refusal_says_the_rate_and_when_the_next_start_is_and_leaves_nothing_behind(
    redlock: Redlock, nodes: Nodes
) -> None:
    use_up(redlock)
    with pytest.raises(LockTaken, match=r"rate of r: 3/h, next start in \d+ s") as refused:
        redlock.lock("r", rate=HOUR).acquire()
    error = refused.value
    assert (error.resource, error.rate, error.holder) == ("r", HOUR, "")
    assert error.expires_in is not None
    assert 3000 < error.expires_in <= Rate(3, 3600.0).kept_ms(0.01) / 1000
    eventually(lambda: is_free(nodes, "r"))
    assert [len(starts_on(node)) for node in nodes] == [3] * len(nodes)


def test_a_refusal_by_another_key_uses_up_no_start(redlock: Redlock, nodes: Nodes) -> None:
    with settled(nodes) as other, other.lock("b"):
        for _ in range(5):
            assert not redlock.lock(["r", "b"], rate={"r": HOUR}).try_acquire()
    assert all(starts_on(node) == {} for node in nodes)
    use_up(redlock)


def test_one_of_two_rates_that_refuses_gives_back_the_start_of_the_other_one(
    redlock: Redlock, nodes: Nodes
) -> None:
    other, _ = rate_keys("redlock", "a")
    use_up(redlock)
    with pytest.raises(LockTaken) as refused:
        redlock.lock(["a", "r"], rate={"a": HOUR, "r": HOUR}).acquire()
    assert refused.value.resource == "r"

    def is_given_back() -> bool:
        settle(redlock)  # which reads the reply of a node that was late, too
        return all(starts_on(node, other) == {} for node in nodes)

    eventually(is_given_back)


def test_a_release_gives_no_start_back(redlock: Redlock) -> None:
    use_up(redlock)
    assert not redlock.lock("r", rate=HOUR).try_acquire()
    assert redlock.lock("r").try_acquire()


def test_a_nested_acquire_is_no_start(redlock: Redlock, nodes: Nodes) -> None:
    with redlock.lock("r", rate=HOUR):
        for _ in range(5):
            redlock.lock("r", rate=HOUR).acquire()
    assert len(starts_on(nodes[0])) == 1


def test_a_higher_rate_counts_at_once_and_a_lower_one_never_adds(redlock: Redlock) -> None:
    use_up(redlock)
    assert not redlock.lock("r", rate=HOUR).try_acquire()
    use_up(redlock, "5/h", 2)
    assert not redlock.lock("r", rate="5/h").try_acquire()
    assert not redlock.lock("r", rate=HOUR).try_acquire()
    # so does a shorter period, by which those before are over
    redlock.lock("r", rate="1/s").acquire(wait=60)


@MAJORITY
def test_a_start_is_counted_where_a_node_was_away(nodes: Nodes) -> None:
    with settled(nodes, node_timeout=0.5) as made:
        with paused(nodes[2]), made.lock("r", rate=HOUR, wait=60):
            pass
        assert len(starts_on(nodes[0])) == 1
        eventually(lambda: starts_on(nodes[2]).keys() == starts_on(nodes[0]).keys())


@MAJORITY
def test_one_wiped_node_of_three_lets_no_more_start(redlock: Redlock, nodes: Nodes) -> None:
    use_up(redlock)
    eventually(lambda: [len(starts_on(node)) for node in nodes] == [3] * len(nodes))
    nodes[1].client().delete(TAKEN, TOKENS)
    for _ in range(10):
        assert not redlock.lock("r", rate=HOUR).try_acquire()


def test_a_start_that_is_given_back_leaves_the_one_that_a_longer_period_still_counts(
    redlock: Redlock,
) -> None:
    use_up(redlock, "1/m", 1)
    use_up_other = redlock.lock("z", rate="1/h")
    use_up_other.acquire()
    both = redlock.lock(["r", "z"], limit={"z": 2}, rate={"r": "1/s", "z": "1/h"})

    def is_refused_by_the_other() -> bool:
        with pytest.raises(LockTaken) as refused:
            threaded(both.acquire)
        return refused.value.resource == "z"

    eventually(is_refused_by_the_other)
    assert not redlock.lock("r", rate="1/m").try_acquire()


@MAJORITY
def test_permits_that_no_quorum_shares_make_no_hot_loop(redlock: Redlock, nodes: Nodes) -> None:
    use_up(redlock)
    eventually(lambda: [len(starts_on(node)) for node in nodes] == [3] * len(nodes))
    for permit, node in enumerate(nodes):
        node.client().zrem(TAKEN, permit)
        node.client().config_resetstat()
    with pytest.raises(LockTaken) as refused:
        redlock.lock("r", rate=HOUR).acquire(wait=1)
    assert refused.value.expires_in is None
    stats = nodes[0].client().info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] < 100


class TestBody:
    """The caller says when its body begins, as a task's run does."""

    def test_a_body_that_begins_late_moves_its_start(self, redlock: Redlock, nodes: Nodes) -> None:
        rate = Rate(3, 1.0)
        lock = later(redlock, rate).acquire()
        before = starts_on(nodes[0])
        (start,) = lock.ownership.acquisitions[0].starts
        eventually(lambda: not start.held(redlock.session.clock.now()))
        lock.ownership.begin_body()
        after = starts_on(nodes[0])
        assert after.keys() == before.keys()
        (permit,) = after
        assert after[permit] >= before[permit] + 1000 * rate.slack - 10
        lock.release()

    def test_a_start_without_a_body_is_given_back(self, redlock: Redlock, nodes: Nodes) -> None:
        lock = later(redlock, Rate(3, 60.0)).acquire()
        settle(redlock)
        assert len(starts_on(nodes[0])) == 1
        lock.ownership.release_all()
        eventually(lambda: all(starts_on(node) == {} for node in nodes))

    def test_an_abandoned_start_is_given_back_and_one_with_a_body_is_not(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        begun = later(redlock, Rate(3, 60.0), limits={"r": 5}).acquire()
        begun.ownership.begin_body()
        lock = later(redlock, Rate(3, 60.0), limits={"r": 5})
        threading.Thread(target=lock.acquire).start()
        eventually(lambda: len(starts_on(nodes[0])) == 2)
        del begun, lock
        gc.collect()

        def is_given_back() -> bool:
            hurry(redlock)
            settle(redlock)
            return all(len(starts_on(node)) == 1 for node in nodes)

        eventually(is_given_back)

    def test_who_waits_for_a_start_goes_on_as_one_is_given_back(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        rate = Rate(1, 3600.0)
        lock, got = later(redlock, rate, limits={"r": 5}).acquire(), threading.Event()
        with settled(nodes) as other:

            def wait() -> None:
                with other.lock("r", limit=5, rate=(1, 3600), wait=600):
                    got.set()

            thread = threading.Thread(target=wait)
            thread.start()
            name = waiting_key("redlock", name_of_rate("r"))
            eventually(lambda: all(node.client().zcard(name) for node in nodes))
            lock.ownership.release_all()
            assert got.wait(60)
            thread.join()


def test_a_coroutine_takes_a_start_too(redlock: Redlock, nodes: Nodes) -> None:
    async def work() -> None:
        async with redlock.lock("r", rate=HOUR):
            assert len(starts_on(nodes[0])) == 1

    asyncio.run(work())


def test_a_lock_without_a_quorum_takes_no_start(nodes: Nodes) -> None:
    with (
        settled(nodes, node_timeout=0.5) as made,
        paused(*quorum_of(nodes)),
        pytest.raises(QuorumUnreachable),
    ):
        made.lock("r", rate=HOUR).acquire()
    eventually(lambda: all(starts_on(node) == {} for node in nodes))


@pytest.mark.parametrize(
    ("rate", "says"),
    [
        ("0/s", "must be a text as"),
        ("10", "must be a text as"),
        ((10, "s"), "must be a text as"),
        ((1001, 60), "token bucket"),
        ("1001/m", "token bucket"),
        ((1, 0.5), "from 1 to 86400 seconds"),
        ("1/86401 s", "from 1 to 86400 seconds"),
        ({"x": "1/s"}, "'x' is not in the key"),
        (True, "must be a text as"),
    ],
)
def test_a_wrong_rate_says_what_is_allowed(redlock: Redlock, rate: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        redlock.lock("r", rate=rate)


def test_one_rate_of_several_resources_names_its_own(redlock: Redlock) -> None:
    with pytest.raises(SettingsError, match="one rate applies to one resource: name it, as"):
        redlock.lock(["a", "b"], rate="1/s")
