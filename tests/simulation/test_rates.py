"""What a rate promises where nothing, or one known thing, goes wrong."""

from __future__ import annotations

import functools
import gc
import itertools

import hiredis
import pytest

from celery_redlock.errors import LockTaken, QuorumUnreachable
from celery_redlock.lock.engine.acquirer import START_REPETITIONS
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.keys import rate_keys
from celery_redlock.lock.model.rate import Rate
from celery_redlock.lock.server.requests import CANCEL
from tests.simulation.clients import patched, simulated_system
from tests.simulation.nodes import patched_scripts
from tests.simulation.stage import Actor, Stage
from tests.simulation.test_properties import delays_of, keys_on, steady

TTL = 40.0  # s; an answer within 10 s
ONE = "1/100 s"
SLACK = 1.0  # s, of a period of 100 s
NEXT = 101.1  # s after a start: the next one of the same permit


@pytest.fixture(autouse=True)
def system() -> object:
    with simulated_system():
        yield


def starts_on(stage: Stage, resource: str = "a") -> list[int]:
    """Return how many permits of a rate each node counts as taken."""
    counts = []
    for node in stage.nodes:
        reader = hiredis.Reader()
        key = rate_keys("redlock", resource)[0].encode()
        reader.feed(node.execute([b"ZCARD", key])[1])
        counts.append(reader.gets())
    return counts


@pytest.mark.parametrize(("callers", "rate"), [(3, "5/10 s"), (12, "5/10 s"), (12, "1/2 s")])
def test_callers_that_wait_take_all_starts_of_a_rate_in_time(callers: int, rate: str) -> None:
    stage, terms = Stage(ttl=TTL), Rate.parse(rate)
    assert terms is not None
    actors = [stage.actor(f"A{number}") for number in range(callers)]
    for number, actor in enumerate(actors):
        steady(actor, [0.0005 * (1 + (number + node) % 3) for node in range(3)])
        actor.takes_turns(24 // callers, 0.01, rate=rate, limit=100)
    periods = -(-24 // terms.starts) - 1
    stage.at(periods * (terms.period + terms.slack) * 1.05 + 1.0)
    assert [actor.turns for actor in actors] == [24 // callers] * callers


def test_a_refusal_says_when_the_next_start_is() -> None:
    stage = Stage(ttl=TTL)
    a, b = stage.actor("A").tries(rate=ONE), stage.actor("B")
    a.releases()
    stage.at(30)
    b.tries(rate=ONE)
    assert isinstance(b.error, LockTaken)
    assert b.error.rate == ONE
    assert b.error.expires_in == pytest.approx(NEXT - 30, abs=0.2)
    assert keys_on(stage) == []
    stage.at(NEXT)
    b.tries(rate=ONE)
    assert b.holds


def test_who_is_refused_by_one_rate_leaves_no_start_of_another() -> None:
    stage, rates = Stage(ttl=TTL), {"a": "5/100 s", "b": ONE}
    a, b = stage.actor("A"), stage.actor("B")
    a.tries(["a", "b"], rate=rates)
    a.releases()
    stage.at(5)
    b.tries(["a", "b"], rate=rates)
    assert isinstance(b.error, LockTaken)
    stage.at(6)
    assert starts_on(stage, "a") == starts_on(stage, "b") == [1, 1, 1]


def test_who_is_refused_by_a_lock_takes_no_start() -> None:
    stage = Stage(ttl=TTL)
    a, b = stage.actor("A").tries("b"), stage.actor("B")
    b.tries(["a", "b"], rate={"a": ONE})
    assert isinstance(b.error, LockTaken)
    assert starts_on(stage) == [0, 0, 0]
    assert a.holds


def test_a_start_that_is_given_back_is_for_the_one_that_waits() -> None:
    stage = Stage(ttl=TTL)
    a, b = stage.actor("A"), stage.actor("B")
    a.tries(rate=ONE, limit=2, body_follows=True)
    b.waits(30.0, rate=ONE, limit=2)
    stage.at(5)
    assert not b.idle
    a.releases()
    stage.at(5.5)
    assert b.holds
    assert starts_on(stage) == [1, 1, 1]


def free_after(late: float, stage: Stage, a: Actor, b: Actor) -> None:
    """See that the start of a body that began late is free a period after the body began."""
    a.releases()
    stage.at(NEXT)
    b.tries(rate=ONE)
    assert isinstance(b.error, LockTaken)
    stage.at(late + NEXT)
    b.tries(rate=ONE)
    assert b.holds


def test_a_body_that_begins_late_begins_a_period_after_the_one_before() -> None:
    stage = Stage(ttl=TTL)
    a, b = stage.actor("A"), stage.actor("B")
    a.tries(rate=ONE, body_follows=True)
    stage.at(20)
    a.begins()
    assert a.error is None
    free_after(20, stage, a, b)


def test_who_hears_of_an_acquire_does_not_put_off_the_body_of_its_start() -> None:
    stage = Stage(ttl=TTL)
    a, b = stage.actor("A"), stage.actor("B")
    told = a.process.redlock.session.events.acquired

    def slowly(acquisition: Acquisition) -> None:
        told(acquisition)
        a.process.clock.sleep(20.0)  # as the receiver of a signal

    with patched(a.process.redlock.session.events, acquired=slowly):
        a.tries(rate=ONE)
        stage.at(21)
    assert a.holds
    free_after(20, stage, a, b)


def test_a_start_that_is_asked_for_again_may_be_another_ones_by_then() -> None:
    stage = Stage(ttl=TTL)
    a, b = stage.actor("A"), stage.actor("B")
    a.tries(rate=ONE, limit=2, body_follows=True, renew=True)
    stage.at(NEXT)
    b.tries(rate=ONE, limit=2)
    assert b.holds
    stage.at(NEXT + 10)
    a.begins()
    assert isinstance(a.error, LockTaken)
    a.releases()
    assert starts_on(stage) == [1, 1, 1]


def test_a_start_is_asked_for_again_so_often_and_then_given_back() -> None:
    stage = Stage(ttl=TTL, trace=True)
    a = stage.actor("A")
    steady(a, [0.6, 0.6, 0.6])  # there and back takes longer than the slack
    a.tries(rate=ONE)
    stage.at(20)
    assert isinstance(a.error, QuorumUnreachable)
    assert "replies took 1.2" in str(a.error)
    taken = [line for line in stage.world.lines or () if "A > node0 take" in line]
    assert len(taken) == 1 + START_REPETITIONS
    assert starts_on(stage) == [0, 0, 0]


def test_a_lock_that_is_garbage_collected_keeps_the_start_of_its_body() -> None:
    stage = Stage(ttl=TTL)
    a, b = stage.actor("A"), stage.actor("B")
    a.tries(rate=ONE, renew=True)
    a.locks.clear()
    gc.collect()
    stage.at(50)
    assert keys_on(stage) == []
    b.tries(rate=ONE)
    assert isinstance(b.error, LockTaken)
    assert b.error.rate == ONE


def test_a_client_that_is_cut_anywhere_leaves_no_start_without_a_body() -> None:
    for step in itertools.count(1):
        stage = Stage(ttl=TTL)
        a = stage.actor("A")
        steady(a, [delay / 10 for delay in delays_of(3, step)])
        if not a.is_cut(step, functools.partial(a.tries, rate=ONE)):
            break
        begun = stage.world.counts["starts"]
        stage.at(stage.world.now + 2.5 * stage.options["node_timeout"])
        assert keys_on(stage) == [], f"cut at step {step}"
        assert begun or starts_on(stage) == [0, 0, 0], f"cut at step {step}"
        stage.world.close()
    assert step > 10


@pytest.mark.parametrize("step", range(1, 14))
def test_two_threads_that_release_at_once_give_back_every_start(step: int) -> None:
    """As the watchdog does with what its owner is about to release."""
    stage, rates = Stage(ttl=TTL), {"a": ONE, "b": ONE}
    a = stage.actor("A")
    a.tries(["a", "b"], rate=rates, body_follows=True)
    a.beside().gives_up(a.lock.ownership.acquisitions[0], 0.5)
    a.process.stop_after(step, 1.0)
    a.releases()
    stage.at(5)
    assert starts_on(stage, "a") == starts_on(stage, "b") == [0, 0, 0]
    assert keys_on(stage) == []


def test_a_node_that_was_away_learns_of_a_start() -> None:
    stage = Stage(ttl=TTL)
    a: Actor = stage.actor("A")
    stage.nodes[2].stop(keeps="all")
    a.tries("x")
    a.tries(rate=ONE)
    assert starts_on(stage) == [1, 1, 0]
    stage.nodes[2].start()
    stage.at(3.5 * stage.options["node_timeout"])
    assert starts_on(stage) == [1, 1, 1]


def test_a_start_without_a_body_is_given_back_to_nodes_that_went_away_before_it() -> None:
    stage = Stage(ttl=TTL)
    a = stage.actor("A")
    a.tries(rate=ONE, body_follows=True)
    for node in stage.nodes[:2]:
        node.stop(keeps="all")
    a.beside().tries("x")  # so the connections are known to be gone
    stage.at(2 * SLACK)
    a.begins()
    assert isinstance(a.error, QuorumUnreachable)
    a.releases()
    stage.at(65)  # over a minute
    assert starts_on(stage) == [1, 1, 0]
    for node in stage.nodes[:2]:
        node.start()
    stage.at(65 + 3 * stage.options["node_timeout"])
    assert starts_on(stage) == [0, 0, 0]


def has_told_all(actor: Actor) -> bool:
    return actor.process.redlock.session.releaser.outbox.is_empty


def test_a_refused_start_is_not_kept_for_a_node_that_was_never_asked_for_it() -> None:
    stage = Stage(ttl=TTL)
    a, b = stage.actor("A"), stage.actor("B")
    a.tries(rate=ONE).releases()
    stage.nodes[2].stop(keeps="all")
    b.beside().tries("x")  # so the connection is known to be gone
    b.tries(rate=ONE)
    assert isinstance(b.error, LockTaken)
    assert b.error.rate == ONE
    stage.at(2 * stage.options["node_timeout"])
    assert has_told_all(b)


def test_a_refused_start_is_not_kept_for_a_node_that_is_silent() -> None:
    stage = Stage(ttl=TTL)
    a, b = stage.actor("A"), stage.actor("B")
    a.tries(rate=ONE).releases()
    b.cut_off(2)
    b.breaks(2)
    b.beside().tries("x")  # so it connects, and both requests below wait for that
    b.tries(rate=ONE)
    assert isinstance(b.error, LockTaken)
    stage.at(5 * stage.options["node_timeout"])
    assert has_told_all(b)


def test_a_start_without_a_body_is_given_back_to_a_node_that_came_back_before_it() -> None:
    stage = Stage(ttl=TTL)
    a = stage.actor("A")
    stage.nodes[2].stop(keeps="all")
    a.beside().tries("x")
    a.tries(rate=ONE, body_follows=True)
    stage.nodes[2].start()
    stage.at(TTL / 2)
    a.extends()
    stage.at(TTL + 5)  # the node votes again
    for node in stage.nodes[:2]:
        node.stop(keeps="all")
    a.begins()
    assert isinstance(a.error, QuorumUnreachable)
    assert starts_on(stage) == [1, 1, 1]
    a.releases()
    stage.at(TTL + 5 + 2 * stage.options["node_timeout"])  # it has forgotten the scripts
    assert starts_on(stage)[2] == 0


def test_a_node_that_answers_with_errors_is_told_of_a_start_for_a_minute() -> None:
    busy = b"redis.call('SET', 'told', redis.call('TIME')[1]) return redis.error_reply('BUSY')"
    with patched_scripts({CANCEL: busy}):
        stage = Stage(ttl=TTL)
    stage.actor("A").tries(rate=ONE, body_follows=True).releases()
    told = []
    for moment in (50, 59, 62, 90):
        stage.at(moment)
        told.append(stage.nodes[0].holder(b"told"))
    assert told[0] != told[1]
    assert told[2] == told[3]
