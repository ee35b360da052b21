"""What the lock promises where nothing, or one known thing, goes wrong."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from celery_redlock.errors import LockLost, LockTaken, QuorumUnreachable
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError
from celery_redlock.lock.engine.callers import MAX_SPIN
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.retry import FIRST_SPIN
from tests.clocks import HOUR
from tests.simulation.clients import simulated_system
from tests.simulation.network import Path
from tests.simulation.stage import A_LITTLE, Actor, Stage

TTL = 40.0  # s; an answer within 10 s
SIZES = [1, 3, 4, 5]


class Steady(Path):
    """A way that always takes as long."""

    def delay(self, now: float) -> float:
        """Return how long something takes that is sent now."""
        return self.base


@pytest.fixture(autouse=True)
def system() -> object:
    with simulated_system():
        yield


def steady(actor: Actor, delays: list[float]) -> None:
    """Let each way of a client take so many s; no time at all is a closed one."""
    for path, delay in zip(actor.paths, delays, strict=True):
        path.base, path.closed = delay, False
        path.__class__ = Steady


def delays_of(size: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.uniform(0.001, 1.0) for _ in range(size)]


def keys_on(stage: Stage) -> list[bytes]:
    """Return the lock keys that stand on nodes."""
    names = itertools.chain.from_iterable(node.keys() for node in stage.nodes)
    return [name for name in names if b":lock:" in name]


def took(actor: Actor) -> float:
    """Return the real s that the last attempt took."""
    return actor.ended - actor.began


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(10))
def test_a_free_lock_takes_the_round_trip_of_the_last_node_of_the_fastest_quorum(
    size: int, seed: int
) -> None:
    stage = Stage(size, ttl=TTL)
    a, delays = stage.actor("A"), delays_of(size, seed)
    steady(a, delays)
    a.tries()
    stage.at(5)
    assert a.holds
    assert took(a) == pytest.approx(2 * sorted(delays)[quorum_of(size) - 1], abs=A_LITTLE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(10))
def test_stalled_nodes_that_leave_a_quorum_delay_neither_acquire_nor_renewal(
    size: int, seed: int
) -> None:
    stage = Stage(size, ttl=TTL)
    a, delays = stage.actor("A"), delays_of(size, seed)
    steady(a, delays)
    for stalled in random.Random(seed).sample(range(size), size - quorum_of(size)):
        stage.nodes[stalled].freeze(1e6)
        delays[stalled] = 0.0
    a.tries()
    stage.at(5)
    assert took(a) == pytest.approx(2 * max(delays), abs=A_LITTLE)
    a.extends()
    stage.at(10)
    assert took(a) == pytest.approx(2 * max(delays), abs=A_LITTLE)
    assert a.lock.remaining > TTL - 5.1


@pytest.mark.parametrize("size", SIZES)
def test_a_release_frees_every_node(size: int) -> None:
    stage = Stage(size, ttl=TTL)
    a = stage.actor("A")
    steady(a, delays_of(size, 1))
    a.tries()
    stage.at(5)
    assert len(keys_on(stage)) == size
    a.releases()
    stage.at(7)
    assert keys_on(stage) == []


@pytest.mark.parametrize("size", SIZES)
def test_no_key_outlives_the_ttl_of_a_client_that_is_gone(size: int) -> None:
    stage = Stage(size, ttl=TTL)
    a = stage.actor("A").tries(renew=True)
    stage.at(25)
    a.process.kill()
    stage.at(25 + TTL + 0.1)
    assert keys_on(stage) == []


@pytest.mark.parametrize("killed_at", [11.0, 25.0, 26.5])
def test_who_waits_for_a_dead_holder_takes_the_lock_as_its_lease_ends(killed_at: float) -> None:
    stage = Stage(ttl=TTL)
    holder, waiter = stage.actor("A").tries(renew=True), stage.actor("B").takes_turns(1, 0.0)
    random.seed(7)
    stage.at(killed_at)
    holder.process.kill()
    stage.at(killed_at + TTL / 2)  # renewed every third of it
    while keys_on(stage):
        stage.at(stage.world.now + A_LITTLE)
    assert waiter.turns == 0
    stage.at(stage.world.now + 2 * FIRST_SPIN)
    assert waiter.turns == 1


STATES = ["free", "taken", "silent", "down"]


@pytest.mark.parametrize("size", [3, 4])
def test_taken_means_that_a_quorum_voted_and_unreachable_that_none_could(size: int) -> None:
    quorum = quorum_of(size)
    for states in itertools.combinations_with_replacement(STATES, size):
        stage = Stage(size, ttl=TTL)
        a = stage.actor("A")
        # who gives no vote says so first: a node not heard at an early end counts as one that can
        steady(a, [0.01 if state in ("silent", "down") else 0.1 for state in states])
        for index, state in enumerate(states):
            if state == "taken":
                stage.nodes[index].put(b"{redlock}:lock:a", b"another:one", TTL)
            elif state == "silent":
                stage.restarts(index)
            elif state == "down":
                stage.nodes[index].stop(keeps="nothing")
        a.tries()
        stage.at(15)
        free, taken = states.count("free"), states.count("taken")
        if free >= quorum:
            assert a.holds, states
        else:
            expected = LockTaken if free + taken >= quorum else QuorumUnreachable
            assert isinstance(a.error, expected), (states, a.error)
            assert len(keys_on(stage)) == taken, states
        stage.world.close()


def test_a_loss_is_announced_once_in_time_with_every_node_stalled() -> None:
    stage = Stage(ttl=TTL)
    a = stage.actor("A").tries(renew=True)
    stage.at(20)
    for node in stage.nodes:
        node.freeze(1e6)
    end = a.process.clock.now() + a.lock.remaining
    while not a.process.lost:
        assert a.process.clock.now() <= end + 0.01
        stage.at(stage.world.now + 0.01)
    assert any("at risk" in text for text in a.process.said)
    stage.at(300)
    assert len(a.process.lost) == 1
    with pytest.raises(LockLost):
        a.lock.ensure()


@pytest.mark.parametrize("operation", ["acquire", "extend", "release"])
def test_a_client_that_is_cut_anywhere_leaves_no_key_behind(operation: str) -> None:
    for step in itertools.count(1):
        stage = Stage(ttl=TTL)
        a = stage.actor("A")
        steady(a, delays_of(3, step))
        if operation == "acquire":
            was_cut = a.is_cut(step, a.tries)
        else:
            a.tries()
            stage.at(5)
            was_cut = a.is_cut(step, a.extends if operation == "extend" else a.releases)
            a.releases()  # as leaving `with` does
        stage.at(stage.world.now + 2.5 * stage.options["node_timeout"])
        if not was_cut:
            a.releases()
            break
        assert keys_on(stage) == [], f"cut at step {step}"
        b = stage.actor("B").tries()
        stage.at(stage.world.now + 5)
        assert b.holds
        stage.world.close()
    assert step > 3


def test_a_node_that_was_reclaimed_is_freed_though_its_connection_breaks_at_the_release() -> None:
    stage = Stage(ttl=TTL)
    a = stage.actor("A")
    stage.nodes[2].stop(keeps="nothing")
    a.tries("x")  # finds its connection broken
    a.releases()
    stage.at(1)
    a.tries(renew=True)
    stage.nodes[2].start()
    while len(keys_on(stage)) < 3:
        stage.at(stage.world.now + 0.1)
    a.cut_off(2)
    a.releases()
    a.breaks(2)
    a.reaches(2)
    stage.at(stage.world.now + 3.5 * stage.options["node_timeout"])
    assert keys_on(stage) == []


def test_a_lock_is_not_lost_where_it_is_released_before_restarted_nodes_are_reclaimed() -> None:
    stage = Stage(ttl=TTL)
    a = stage.actor("A").tries()
    stage.at(5)
    stage.restarts(0, 1)
    a.tries("x")  # meets them: they are silent
    a.locks.pop()
    a.releases()
    stage.at(30)
    assert a.process.lost == []


def test_several_locks_are_all_held_or_none() -> None:
    stage = Stage(ttl=TTL)
    b, a = stage.actor("B").tries("b"), stage.actor("A")
    a.tries(["a", "b", "c"], wait=30.0)
    for _ in range(200):
        stage.at(stage.world.now + 0.1)
        assert {key[-1:] for key in keys_on(stage)} == {b"b"}
    b.releases()
    stage.at(stage.world.now + 6)
    assert a.holds
    assert len(keys_on(stage)) == 9


@pytest.mark.parametrize("contenders", [3, 10, 50])
def test_everybody_gets_the_lock_in_the_end(contenders: int) -> None:
    stage = Stage(ttl=TTL)
    actors = [stage.actor(f"A{number}") for number in range(contenders)]
    for number, actor in enumerate(actors):
        steady(actor, [0.001 * (1 + (number + node) % 3) for node in range(3)])
        actor.takes_turns(1, 0.01)
    stage.at(120)
    assert all(actor.turns == 1 for actor in actors)
    assert stage.world.counts["claims"] <= 10 * contenders


@pytest.mark.parametrize("run", [*range(8), 29])
def test_those_that_one_release_wakes_come_to_terms_before_they_would_try_by_themselves(
    run: int,
) -> None:
    stage = Stage(ttl=TTL)
    holder, contenders = stage.actor("H").tries(), [stage.actor(f"A{n}") for n in range(12)]
    random.seed(1000 * run + len(contenders))
    for number, actor in enumerate(contenders):  # each node hears another one of them first
        steady(actor, [0.01 * (1 + (number + run + node) % 3) for node in range(3)])
        actor.takes_turns(1, 0.01)
    stage.at(1.0 + run * 0.037)
    tried = stage.world.counts["claims"]
    holder.releases()
    stage.at(stage.world.now + MAX_SPIN)
    assert any(actor.turns for actor in contenders)
    assert stage.world.counts["claims"] - tried <= 10 * len(contenders)


def apart(stage: Stage, seed: int) -> list[Actor]:
    """Return three processes; their clocks, and those of the nodes, have nothing in common."""
    draw = random.Random(seed)
    for node in stage.nodes:
        node.offset = draw.uniform(1.0, 2.0) * HOUR
    errors = draw.sample([-HOUR, 0.0, HOUR], 3)
    actors = [
        stage.actor(name, wall_error=error, offset=draw.uniform(0.0, 1e6))
        for name, error in zip("ABC", errors, strict=True)
    ]
    for actor in actors:
        steady(actor, [draw.uniform(0.001, 0.1) for _ in stage.nodes])
    return actors


@pytest.mark.parametrize("seed", range(20))
def test_a_run_has_ended_as_long_ago_as_it_has_by_any_clock(seed: int) -> None:
    stage = Stage(ttl=TTL)
    a, b, c = apart(stage, seed)
    a.delivers("run", math.inf)
    stage.at(5)
    a.ends()
    stage.at(20)
    b.delivers("run", b.process.clock.now() - 16)
    stage.at(21)
    assert isinstance(b.error, AlreadyCompletedError), "a finished twin runs again"
    c.delivers("run", c.process.clock.now() - 15)
    stage.at(22)
    assert c.holds, "a task id that is sent again does not run"


@pytest.mark.parametrize("seed", range(20))
def test_processes_that_were_refused_agree_about_the_time(seed: int) -> None:
    stage = Stage(ttl=TTL)
    a, b, c = apart(stage, seed)
    a.tries()
    stage.at(5)
    b.tries()
    stage.at(10)
    c.tries()
    stage.at(15)
    first, second = (actor.process.redlock.session.guard.wall() for actor in (b, c))
    assert first == pytest.approx(second, abs=0.3)
    stage.at(25)
    assert b.process.redlock.session.guard.wall() == pytest.approx(first + 10)
