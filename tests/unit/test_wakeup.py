"""Which callers of a process act after a release, and which take over from one that leaves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from celery_redlock.lock.engine.callers import Caller, Callers
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.handoff import ACTED, LADDER, LOOK, TURN
from celery_redlock.lock.model.keys import waiting_key
from celery_redlock.lock.model.options import ClientOptions, Guard
from celery_redlock.lock.platform.clock import Platform, SystemClock

PLATFORM = Platform(SystemClock())
GUARD = Guard("off", "p", 1.0)
LATER = 1.0  # s: every step that a test plans is due by then

numbers = itertools.count()


@pytest.fixture
def session() -> Iterator[Session]:
    """Give a session without nodes: a test says what a node would."""
    made = Session(Session, ClientOptions("p", 1.0, 0.01, 60.0, GUARD), [], PLATFORM)
    yield made
    made.close()


@pytest.fixture
def callers(session: Session) -> Callers:
    """Give its callers."""
    return session.callers


def join(callers: Callers, *resources: str, limit: int = 1) -> list[Caller]:
    """Return a caller for each resource, in the order in which they came."""
    made = [Caller(resource, limit, float(number)) for number, resource in enumerate(resources)]
    for caller in made:
        callers.join(caller)
    return made


def name(callers: Callers, resource: str, rank: int = 0, release: str = "") -> None:
    """Let a node name the process for a release of its own, or for this one."""
    release = release or f"release-{next(numbers)}"
    message = f"{rank} {release} {waiting_key('p', resource)}"
    callers.inbox.on_message(callers.inbox.channel, message, 0)


def open_inbox(callers: Callers) -> None:
    callers.inbox.on_message(callers.inbox.channel, "", 0)


def why(caller: Caller) -> str | None:
    """Return why the caller acts, None if it sleeps on."""
    step = caller.take_step(PLATFORM.clock.now() + LATER)
    return None if step is None else step.why


def test_a_release_is_for_the_first_caller_alone(callers: Callers) -> None:
    first, *others = join(callers, "a", "a", "b")
    name(callers, "a")
    name(callers, "a")
    assert [why(caller) for caller in (first, *others)] == [ACTED, None, None]
    assert [caller.decided for caller in others] == [False, False]


def test_a_step_is_taken_once_and_not_before_it_is_due(callers: Callers) -> None:
    (caller,) = join(callers, "a")
    before = PLATFORM.clock.now()
    name(callers, "a", 2)
    assert caller.decided
    assert caller.due >= before + 2 * TURN
    assert caller.take_step(before) is None
    step = caller.take_step(caller.due)
    assert step is not None
    assert (step.why, step.passed) == (LADDER, 2)
    assert step.named_at is not None
    assert step.named_at >= before
    assert (why(caller), caller.due) == (None, math.inf)


@pytest.mark.parametrize("reason", [ACTED, LOOK])
def test_the_first_of_each_limit_acts_after_a_release_and_as_the_inbox_opens(
    callers: Callers, reason: str
) -> None:
    found = [join(callers, "a", limit=limit)[0] for limit in (1, 1, 3, 3)]
    if reason == ACTED:
        name(callers, "a")
    else:
        open_inbox(callers)
    assert [why(caller) for caller in found] == [reason, None, reason, None]


def test_later_releases_and_one_more_node_put_off_no_step(callers: Callers) -> None:
    (caller,) = join(callers, "a")
    name(callers, "a", 1)
    due = caller.due
    for _ in range(3):
        name(callers, "a", 2)
    assert caller.due == due
    name(callers, "a")  # this one is due before
    soonest = caller.due
    assert soonest < due
    open_inbox(callers)
    assert caller.due == soonest
    assert why(caller) == ACTED


def test_one_that_was_refused_something_else_holds_up_nobody(callers: Callers) -> None:
    first, second = join(callers, "a", "a")
    name(callers, "a")
    callers.move(first, "b", 1)
    assert callers.first_of(second) is second
    assert why(second) == ACTED
    name(callers, "b")
    assert (why(first), why(second)) == (ACTED, None)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_step_that_one_leaves_behind_is_the_next_ones(callers: Callers, rank: int) -> None:
    first, second = join(callers, "a", "a")
    name(callers, "a", rank)
    step, due = first.step, first.due
    assert not second.decided
    callers.leave(first)
    assert (second.step, second.due, second.decided) == (step, due, True)


def test_a_step_that_one_took_and_could_not_use_makes_the_next_one_ask_once(
    callers: Callers,
) -> None:
    first, second = join(callers, "a", "a")
    name(callers, "a")
    assert why(first) == ACTED
    callers.leave(first)
    assert why(second) == LOOK
    second.decided = False
    callers.leave(first)  # an exception may have cut the first call off
    assert (why(second), second.decided) == (None, False)


def test_the_next_one_after_one_that_has_the_lock_needs_not_ask(callers: Callers) -> None:
    first, second = join(callers, "a", "a")
    before = PLATFORM.clock.now()
    callers.leave(first, acquired=True)
    assert second.looked_at >= before
    assert second.decided, "it is the first one now, and is to sleep until its own look"
    assert why(second) is None


def test_the_next_one_after_one_that_has_a_permit_asks_for_another(callers: Callers) -> None:
    first, second = join(callers, "a", "a", limit=2)
    callers.leave(first, acquired=True)
    assert why(second) == LOOK


def test_one_that_leaves_out_of_turn_wakes_nobody(callers: Callers) -> None:
    first, second, third = join(callers, "a", "a", "a")
    callers.leave(second)
    assert [first.decided, third.decided] == [False, False]


def test_a_process_waits_since_its_first_caller_does_and_hears_nothing_if_none_does(
    callers: Callers,
) -> None:
    first, second, other = join(callers, "a", "a", "b")
    assert callers.inbox.channels() == {callers.inbox.channel}
    assert (sorted(callers.resources()), callers.count) == (["a", "b"], 2)
    assert callers.since("a") == first.since
    for gone, since in ((first, second.since), (second, None), (other, None)):
        callers.leave(gone)
        assert callers.since("a") == since
    assert callers.inbox.channels() == set()
    assert (list(callers.resources()), callers.count) == ([], 0)


def test_a_message_that_makes_no_sense_or_of_another_channel_wakes_nobody(
    callers: Callers,
) -> None:
    (caller,) = join(callers, "a")
    named = f"0 r1 {waiting_key('p', 'a')}"
    for channel, word in ((callers.inbox.channel, "0 r1"), ("another", named)):
        callers.inbox.on_message(channel, word, 0)
    assert (why(caller), caller.decided) == (None, False)


@pytest.mark.parametrize(
    ("limit", "reasons"), [(1, [ACTED, None, None]), (2, [ACTED, ACTED, None])]
)
def test_a_second_release_is_for_the_first_again_and_of_permits_for_the_next(
    callers: Callers, limit: int, reasons: list[str | None]
) -> None:
    found = join(callers, "a", "a", "a", limit=limit)
    for release in ("r1", "r2", "r1"):
        name(callers, "a", release=release)
    assert [why(caller) for caller in found] == reasons


def test_a_forked_child_has_another_name_and_waits_for_nothing(session: Session) -> None:
    join(session.callers, "a")
    before = session.callers.inbox.name, session.callers.inbox.channel
    session.forget()
    callers = session.callers
    assert not {callers.inbox.name, callers.inbox.channel} & {*before}
    assert callers.inbox.channels() == set()
    assert not callers.resources()
