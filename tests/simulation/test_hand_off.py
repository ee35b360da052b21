"""A release names who is next, and each way in which that fails costs a turn or a look."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from celery_redlock.errors import LockTaken
from celery_redlock.lock.engine.callers import MAX_SPIN
from celery_redlock.lock.model.handoff import MAX_TURNS, TURN
from celery_redlock.lock.retry import FIRST_SPIN, MAX_LISTENING_PAUSE
from tests.simulation.clients import simulated_system
from tests.simulation.stage import A_LITTLE, Actor, Stage

TTL = 40.0  # s; an answer within 10 s
SOON = 5 * A_LITTLE  # s: some messages one after another, with no time on the way
LOOK = MAX_LISTENING_PAUSE + MAX_TURNS * TURN + SOON  # s: what nobody is named for is taken by then
ALL = (0, 1, 2)


@pytest.fixture(autouse=True)
def system() -> object:
    with simulated_system():
        yield


def lined_up(
    stage: Stage, count: int, section: float = 0.0, **terms: Any
) -> tuple[Actor, list[Actor]]:
    """Return a holder and those that wait for its lock, in order; each takes one turn."""
    random.seed(count)
    holder, waiters = stage.actor("H").tries(**terms), []
    for number in range(count):
        waiters.append(stage.actor(f"A{number}").takes_turns(1, section, **terms))
        stage.at(stage.world.now + 0.01)
    stage.at(stage.world.now + 1.0)
    return holder, waiters


def release(stage: Stage, holder: Actor) -> float:
    """Release the lock; return when."""
    released = stage.world.now
    holder.releases()
    return released


def test_the_waiters_take_the_lock_in_order_and_none_tries_in_vain() -> None:
    stage = Stage(ttl=TTL)
    holder, waiters = lined_up(stage, 12, section=0.05)
    tried = stage.world.counts["claims"]
    released = release(stage, holder)
    stage.at(released + 12 * 0.05 + TURN)
    assert all(waiter.turns == 1 for waiter in waiters)
    assert [w.taken_at for w in waiters] == sorted(w.taken_at for w in waiters)
    assert waiters[0].taken_at[0] - released < SOON
    assert stage.world.counts["claims"] - tried == 12


def test_those_behind_ask_and_do_not_try_while_the_lock_is_taken() -> None:
    stage = Stage(ttl=TTL)
    holder, _ = lined_up(stage, 5, section=10.0)
    tried = stage.world.counts["claims"]
    released = release(stage, holder)
    stage.at(released + 9.0)
    assert stage.world.counts["claims"] - tried == 1


def test_nobody_stays_registered_who_waits_no_more() -> None:
    stage = Stage(ttl=TTL)
    holder, waiters = lined_up(stage, 3)
    assert all(len(stage.waiting(node)) == 3 for node in ALL)
    stage.at(release(stage, holder) + 1.0)
    assert all(waiter.turns == 1 for waiter in waiters)
    assert all(stage.waiting(node) == [] for node in ALL)


def differ_on_two_nodes(stage: Stage) -> None:
    for node in (0, 1):
        name = stage.waiting(node)[0].encode()
        stage.nodes[node].execute([b"ZREM", b"{redlock}:waiting:a", name])


# what befalls the first waiter, and how many s the others wait for that
FAULTS: dict[str, tuple[Callable[[Stage, Actor], object], float]] = {
    "it is stopped": (lambda stage, first: first.stops(until=stage.world.now + 30), TURN),
    "it is killed": (lambda stage, first: first.process.kill(), 0.0),
    "it loses power": (lambda stage, first: first.process.vanish(), TURN),
    "it loses its subscriptions": (lambda stage, first: first.deafened(*ALL), TURN),
    "it is cut off": (lambda stage, first: first.cut_off(*ALL), TURN),
    "it is cut off from one node": (lambda stage, first: first.cut_off(0), 0.0),
    "it waits no longer": (lambda stage, first: first.cut_after(1), TURN),
    "one node forgets": (lambda stage, first: stage.forgets_waiters(0), 0.0),
    "two nodes forget": (lambda stage, first: stage.forgets_waiters(0, 1), TURN),
    "all nodes forget": (lambda stage, first: stage.forgets_waiters(*ALL), LOOK),
    "two nodes differ": (lambda stage, first: differ_on_two_nodes(stage), TURN),
    "one node freezes": (lambda stage, first: stage.nodes[1].freeze(1e6), 0.0),
    "no word arrives": (lambda stage, first: setattr(stage.world, "is_mute", True), LOOK),
}
DEADLY = {"it is killed", "it loses power", "it waits no longer"}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_befalls_the_first_costs_the_others_no_more_than_a_turn_or_a_look(fault: str) -> None:
    stage, (strike, costs) = Stage(ttl=TTL), FAULTS[fault]
    holder, waiters = lined_up(stage, 4)
    strike(stage, waiters[0])
    released = release(stage, holder)
    stage.at(released + costs + SOON)
    assert sum(waiter.turns for waiter in waiters) >= 1
    waiters[0].reaches(*ALL)
    stage.at(released + 30 + 4 * LOOK)
    assert [waiter.turns for waiter in waiters] == [int(fault not in DEADLY), 1, 1, 1]


def test_one_that_does_not_act_costs_one_release_a_turn_and_no_other() -> None:
    stage = Stage(ttl=TTL)
    holder, waiters = lined_up(stage, 5)
    waiters[0].stops(until=stage.world.now + 30)
    released = release(stage, holder)
    stage.at(released + TURN + 4 * SOON)
    assert [waiter.turns for waiter in waiters] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("wall_error", [-2.0, 1.0])
def test_a_calendar_that_is_off_costs_nobody_a_place(wall_error: float) -> None:
    stage = Stage(ttl=TTL)
    holder, waiters = lined_up(stage, 2)
    off = stage.actor("off", wall_error=wall_error).takes_turns(1, 0.0)
    stage.at(stage.world.now + 0.5)
    released = release(stage, holder)
    stage.at(released + SOON * 3)
    assert [one.turns for one in (*waiters, off)] == [1, 1, 1]
    assert off.taken_at[0] > max(waiter.taken_at[0] for waiter in waiters)


@pytest.mark.parametrize("vanished", [3, 10, 25])
def test_a_host_that_lost_power_with_many_waiters_holds_up_the_others_for_a_look(
    vanished: int,
) -> None:
    """No node learns that they are gone, so each release names three of them."""
    stage = Stage(ttl=TTL)
    holder, waiters = lined_up(stage, vanished + 2)
    for waiter in waiters[:vanished]:
        waiter.process.vanish()
    released = release(stage, holder)
    # a look, and as many turns as there are waiters that do not act
    stage.at(released + LOOK + vanished * TURN + SOON)
    assert waiters[-2].turns == 1
    assert waiters[-1].turns == 1


@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_lease_that_ends_without_a_release_is_followed_in_order(count: int) -> None:
    stage = Stage(ttl=TTL)
    holder, waiters = lined_up(stage, count, section=0.05)
    tried = stage.world.counts["claims"]
    ends = stage.world.now + holder.lock.remaining
    holder.process.kill()
    stage.at(ends)
    while not any(waiter.turns for waiter in waiters):
        stage.at(stage.world.now + A_LITTLE)
        assert stage.world.now < ends + TTL * 0.02 + 2 * FIRST_SPIN + TURN * MAX_TURNS
    stage.at(stage.world.now + count * 0.05 + TURN)
    assert all(waiter.turns == 1 for waiter in waiters)
    assert [w.taken_at for w in waiters] == sorted(w.taken_at for w in waiters)
    assert stage.world.counts["claims"] - tried <= 2 * count


def test_who_does_not_wait_keeps_taking_the_lock_and_yet_the_second_gets_it() -> None:
    """The first is stopped, and each release comes before the second one's turn."""
    stage = Stage(ttl=TTL)
    holder, (first, second) = lined_up(stage, 2)
    first.stops(until=1e6)
    began, draw = stage.world.now, random.Random(1).uniform
    while not second.turns:
        holder.releases()
        stage.at(stage.world.now + draw(0.1, 0.4) * TURN)
        if not second.turns:
            holder.tries()
        stage.at(stage.world.now + draw(0.1, 0.4) * TURN)
        assert stage.world.now < began + 2 * LOOK


def test_two_permits_that_are_free_at_once_are_taken_at_once_by_one_process() -> None:
    stage = Stage(ttl=TTL)
    one = stage.actor("H1").tries(limit=2)
    other = stage.actor("H2").tries(limit=2)
    first = stage.actor("A").takes_turns(1, 20.0, limit=2)
    second = first.beside().takes_turns(1, 20.0, limit=2)
    stage.at(1.0)
    one.releases()
    other.releases()
    stage.at(1.0 + SOON + 2 * A_LITTLE)
    assert (first.turns, second.turns) == (1, 1)


def test_a_permit_that_is_free_goes_to_the_next_thread_of_the_process() -> None:
    stage = Stage(ttl=TTL)
    one = stage.actor("H1").tries(limit=2)
    stage.actor("H2").tries(limit=2)
    first = stage.actor("A").takes_turns(1, 0.0, limit=2)
    threads = [first, first.beside().takes_turns(1, 0.0, limit=2)]
    stage.at(1.0)
    one.releases()
    stage.at(1.0 + 3 * SOON)
    assert [thread.turns for thread in threads] == [1, 1]


def test_who_gives_up_as_it_is_named_leaves_the_lock_to_the_next() -> None:
    stage = Stage(ttl=TTL)
    holder = stage.actor("H").tries()
    first = stage.actor("A")
    first.waits(2.0)
    second = stage.actor("B").takes_turns(1, 0.0)
    stage.at(first.began + 2.0)  # its time is over by now, or a little later
    released = release(stage, holder)
    stage.at(released + TURN + SOON)
    assert first.error is not None or first.holds
    if first.holds:
        first.releases()
    stage.at(stage.world.now + TURN + SOON)
    assert second.turns == 1


def test_who_waits_gives_up_at_its_time_though_it_is_not_its_turn() -> None:
    stage = Stage(ttl=TTL)
    holder, _ = lined_up(stage, 3, section=30.0)
    late = stage.actor("L")
    late.waits(2.0)
    stage.at(stage.world.now + 1.9)
    release(stage, holder)
    stage.at(late.began + 2.0 + SOON)
    assert isinstance(late.error, LockTaken)
    assert late.ended - late.began < 2.0 + SOON


def test_a_registration_that_arrives_after_its_removal_costs_one_turn_once() -> None:
    stage = Stage(ttl=TTL)
    holder, waiters = lined_up(stage, 2)
    other = stage.actor("O").tries("b")
    stays = stage.actor("S")
    stays.waits(1e6, resource="b")  # so its process is alive, and is named for what it waits for
    stage.at(stage.world.now + 1.0)
    (name,) = stage.waiting(0, "b")
    for node in ALL:
        stage.nodes[node].execute([b"ZADD", b"{redlock}:waiting:a", b"1", name.encode()])
    released = release(stage, holder)
    stage.at(released + TURN + 3 * SOON)
    assert [waiter.turns for waiter in waiters] == [1, 1]
    assert all(stage.waiting(node) == [] for node in ALL)
    for node in ALL:
        stage.nodes[node].execute([b"ZADD", b"{redlock}:waiting:a", b"1", name.encode()])
    holder.tries()
    holder.releases()  # names nobody else
    stage.at(stage.world.now + SOON)
    assert all(stage.waiting(node) == [] for node in ALL)
    other.releases()
    stage.at(stage.world.now + SOON)
    assert stays.holds


def test_two_nodes_of_three_name_a_successor_while_the_third_still_has_the_key() -> None:
    stage = Stage(ttl=TTL)
    holder, waiters = lined_up(stage, 2)
    holder.cut_off(2)
    released = release(stage, holder)
    stage.at(released + SOON)
    assert waiters[0].turns == 1
    assert stage.nodes[2].holder(b"{redlock}:lock:a") is not None


def test_who_was_struck_out_though_it_lives_is_registered_again() -> None:
    stage = Stage(ttl=TTL)
    holder, (first, second, third) = lined_up(stage, 3, section=5.0)
    first.stops(until=stage.world.now + 1.0)
    released = release(stage, holder)
    stage.at(released + 0.9)
    assert (second.turns, len(stage.waiting(0))) == (1, 1)
    stage.at(released + 1.0 + SOON)  # it was named first, and is refused
    assert len(stage.waiting(0)) == 2
    stage.at(released + 5.0 + LOOK + 5.0 + TURN)
    assert first.taken_at < third.taken_at


def test_who_waits_for_one_of_several_is_named_for_that_one_alone() -> None:
    stage = Stage(ttl=TTL)
    stage.actor("H").tries("b")
    both = stage.actor("A")
    both.tries(["a", "b"], wait=1e6)
    stage.at(stage.world.now + 1.0)
    assert stage.waiting(0, "a") == []
    assert len(stage.waiting(0, "b")) == 1


def test_a_node_that_forgot_its_waiters_is_told_again() -> None:
    stage = Stage(ttl=TTL)
    _, _ = lined_up(stage, 3)
    stage.forgets_waiters(*ALL)
    stage.at(stage.world.now + LOOK)
    assert all(len(stage.waiting(node)) == 3 for node in ALL)


def test_a_node_that_restarts_is_told_who_waits_as_they_subscribe_again() -> None:
    stage = Stage(ttl=TTL)
    stage.options["node_timeout"] = TURN  # after which a reply that nobody waits for is read
    lined_up(stage, 3)
    stage.restarts(1)
    stage.at(stage.world.now + MAX_SPIN + 4 * TURN)  # before a look
    assert len(stage.waiting(1)) == 3
