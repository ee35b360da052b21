from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock import Backoff, LockTaken, NotAcquired, QuorumUnreachable, SettingsError
from celery_redlock.errors import abstention_cause
from celery_redlock.tasks.arguments import parameters_of
from celery_redlock.tasks.delivery.header import NEVER_DEFERRED, Deferral
from celery_redlock.tasks.execution.deferral import (
    REDELIVERY_BACKOFF,
    Contention,
    Decision,
    Refusal,
    Skip,
    countdown_of,
    decide,
    with_history,
)
from celery_redlock.tasks.settings.call import TaskCall
from celery_redlock.tasks.settings.levels import read_app
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.settings.task_config import compile_config

TAKEN = LockTaken("stock:7", "the other", expires_in=9.0)
AWAY = QuorumUnreachable("stock:7", ["a:1: refused"], 2)


def rules(**lock: Any) -> TaskLockOptions:
    app = read_app({"redlock_nodes": ["redis://a"]})
    named = {f"lock_{name}": value for name, value in lock.items()}
    return compile_config(app, "t", named, parameters_of(lambda: None)).options_for("q")


NOW = 1_700_000_000.0  # s since 1970


def past(deferrals: int = 0, waited: float = 0.0) -> Deferral:
    """Return what a message has been through."""
    return Deferral(count=deferrals, since=NOW - waited, at=NOW)


def refusal(error: NotAcquired = TAKEN, before: Deferral = NEVER_DEFERRED, **lock: Any) -> Refusal:
    call = TaskCall(None, (), {}, "q")
    return Refusal(error, NOW, rules(**lock), (error.resource,), call, before)


def decided(
    error: NotAcquired = TAKEN,
    before: Deferral = NEVER_DEFERRED,
    *,
    uniform: Callable[[float, float], float] = lambda low, high: high,
    cap: float = 900.0,
    **lock: Any,
) -> Decision:
    return decide(refusal(error, before, **lock), cap, uniform)


def countdown(decision: Decision) -> float:
    assert isinstance(decision, Deferral)
    return decision.countdown


def test_by_default_the_message_goes_back() -> None:
    assert decided() == Deferral(
        count=1, since=NOW, at=NOW, countdown=0.25, resource="stock:7", resources=("stock:7",),
        holder="the other", expires_in=9.0, why="held by the other", waits_for_release=True,
    )  # fmt: skip


def test_a_message_is_told_from_its_first_try_on() -> None:
    decision = decided(AWAY, past(3, waited=7.5))
    assert isinstance(decision, Deferral)
    assert (decision.count, decision.since, decision.at) == (4, NOW - 7.5, NOW)
    assert not decision.is_taken
    assert decision.why == "no quorum of 2 nodes (a:1: refused)"


@pytest.mark.parametrize(
    ("lock", "waits"),
    [
        ({}, True),
        ({"max_wait": 60}, False),
        ({"on_conflict": lambda contention: "defer"}, False),
        ({"limit": lambda *_: 1}, False),
    ],
    ids=["nothing else", "a budget", "a callable", "a limit that may change"],
)
def test_a_message_waits_for_a_release_alone_if_nothing_else_can_end_its_wait(
    lock: dict[str, Any], waits: bool
) -> None:
    for error, may in ((TAKEN, waits), (AWAY, False)):
        decision = decided(error, **lock)
        assert isinstance(decision, Deferral)
        assert decision.waits_for_release == may


@pytest.mark.parametrize(
    ("error", "deferrals", "cap", "seconds"),
    [
        *((AWAY, deferrals, 900.0, 0.25 * 2**deferrals) for deferrals in range(4)),
        (LockTaken("r", "h", expires_in=2.0), 20, 900.0, 2.25),
        (LockTaken("r", "h", expires_in=None), 20, 900.0, 30.0),
        (AWAY, 20, 5.0, 5.0),
    ],
)
def test_the_countdown_grows_and_ends_with_the_lease_or_before_the_broker_takes_it_for_lost(
    error: NotAcquired, deferrals: int, cap: float, seconds: float
) -> None:
    assert countdown(decided(error, past(deferrals), cap=cap)) == seconds


@given(st.integers(0, 100), st.floats(0, 120), st.floats(0, 1e4), st.integers())
def test_the_last_delay_is_cut_to_max_wait(
    deferrals: int, waited: float, expires_in: float, seed: int
) -> None:
    refused = LockTaken("r", "h", expires_in=expires_in)
    decision = decided(
        refused, past(deferrals, waited), uniform=random.Random(seed).uniform, max_wait=100.0
    )
    if waited >= 100:
        assert decision == "fail"
    else:
        assert waited + countdown(decision) <= 100 + 1e-6


@pytest.mark.parametrize("error", [TAKEN, AWAY])
def test_a_spent_wait_ends_as_failure_with_what_happened_last(error: NotAcquired) -> None:
    before = past(3, waited=7.5)
    assert decided(error, before, max_wait=7.5) == "fail"
    told = with_history(refusal(error, before))
    assert isinstance(told, LockTaken | QuorumUnreachable)
    assert (type(told), told.resource) == (type(error), "stock:7")
    assert (told.waited, told.deferrals) == (7.5, 3)
    if isinstance(told, LockTaken):
        assert told.holder == "the other"
        assert "max_wait" in str(told)
    else:
        assert told.causes == ["a:1: refused"]


def test_giving_up_can_skip() -> None:
    assert isinstance(decided(TAKEN, past(waited=1.0), max_wait=1, on_give_up="skip"), Skip)


def test_giving_up_on_a_rate_names_it() -> None:
    used_up = LockTaken("partner", rate="100/h")
    skip = decided(used_up, past(waited=1.0), max_wait=1, on_give_up="skip", rate="100/h")
    assert isinstance(skip, Skip)
    assert skip.rate == "100/h"


@pytest.mark.parametrize(
    ("error", "lock", "decision"),
    [
        (TAKEN, {"on_conflict": "skip"}, Skip),
        (TAKEN, {"on_conflict": "fail"}, "fail"),
        (TAKEN, {"on_unreachable": "run"}, Deferral),
        (AWAY, {"on_conflict": "skip"}, Deferral),
        (AWAY, {"on_unreachable": "fail"}, "fail"),
        (AWAY, {"on_unreachable": "run"}, "run"),
    ],
)
def test_conflict_and_unreachable_are_decided_by_options_of_their_own(
    error: NotAcquired, lock: dict[str, Any], decision: Any
) -> None:
    found = decided(error, **lock)
    assert decision in (found, type(found))


def test_a_conflict_callable_decides_by_what_it_is_told() -> None:
    told: list[Contention] = []

    def on_conflict(contention: Contention) -> str:
        told.append(contention)
        return "skip" if contention.deferrals else "defer"

    assert isinstance(decided(on_conflict=on_conflict), Deferral)
    assert isinstance(decided(TAKEN, past(1, waited=2.0), on_conflict=on_conflict), Skip)
    _, last = told
    assert (last.resource, last.holder, last.waited) == ("stock:7", "the other", 2.0)


def test_a_conflict_callable_that_returns_another_word_is_an_error() -> None:
    with pytest.raises(SettingsError, match="returned 'perhaps'"):
        decided(on_conflict=lambda contention: "perhaps")


@given(st.integers(0, 200), st.floats(0, 100), st.integers())
def test_a_twin_looks_again_soon_after_the_lease_and_never_gives_up(
    tries: int, expires_in: float, seed: int
) -> None:
    refused = LockTaken("stock:7", "itself", expires_in=expires_in)
    uniform = random.Random(seed).uniform
    seconds = countdown_of(REDELIVERY_BACKOFF, tries, refused, 20.0, uniform)
    assert 0 <= seconds <= min(20.0, expires_in + 0.25)


def test_a_twin_looks_less_often_the_longer_it_waits() -> None:
    delays = [
        countdown_of(REDELIVERY_BACKOFF, tries, AWAY, 900.0, lambda low, high: high)
        for tries in range(7)
    ]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("expires_in", "cap", "countdown"), [(40.0, 300.0, 40.0), (4000.0, 300.0, 300.0)]
)
def test_a_message_whose_rate_is_used_up_waits_until_the_next_start(
    expires_in: float, cap: float, countdown: float
) -> None:
    used_up = LockTaken("r", "", expires_in, rate="100/h")
    assert countdown_of(REDELIVERY_BACKOFF, 0, used_up, cap, lambda low, high: low) == countdown


def test_a_message_waits_until_the_next_node_ends_its_grace_period() -> None:
    """It is known to the second: forty-six messages that looked by themselves wrote 207 lines."""
    waiting = [f"{node}: {abstention_cause(left)}" for node, left in (("a", 54.0), ("b", 59.0))]
    of_all, of_some = (QuorumUnreachable("r", found, 2) for found in (waiting, [*waiting, "c: ?"]))
    assert (of_all.votes_in, of_some.votes_in, AWAY.votes_in) == (54.0, None, None)
    for backoff, cap, countdown in (
        (Backoff(cap=60.0), 300.0, 54.0),
        (Backoff(cap=60.0), 20.0, 20.0),
        (Backoff(cap=30.0), 300.0, 30.0),
    ):
        assert countdown_of(backoff, 0, of_all, cap, lambda low, high: low) == countdown
    assert countdown_of(REDELIVERY_BACKOFF, 0, of_some, 300.0, lambda low, high: low) < 2.0
