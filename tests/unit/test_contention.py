from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock import Backoff, LockTaken, NotAcquired, QuorumUnreachable, SettingsError
from celery_redlock.tasks.execution.contention import (
    Contention,
    Decision,
    Defer,
    Fail,
    RunUnlocked,
    Skip,
    decide,
    decide_redelivery,
)
from celery_redlock.tasks.settings.conf import read_app
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.settings.task_config import compile_config

TAKEN = LockTaken("stock:7", "the other", expires_in=9.0)
AWAY = QuorumUnreachable("stock:7", ["a:1: refused"], 2)


def rules(**lock: Any) -> TaskLockOptions:
    app = read_app({"redlock_nodes": ["redis://a"]})
    named = {f"lock_{name}": value for name, value in lock.items()}
    return compile_config(app, "t", named, inspect.signature(lambda: None)).options_for("q")


class Past(NamedTuple):
    """What a message has been through."""

    deferrals: int = 0
    waited: float = 0.0
    delay: float | None = None


def decided(
    refused: NotAcquired = TAKEN,
    past: Past = Past(),  # noqa: B008 - frozen
    *,
    uniform: Callable[[float, float], float] = lambda low, high: high,
    cap: float = 900.0,
    **lock: Any,
) -> Decision:
    holder = refused.holder if isinstance(refused, LockTaken) else ""
    found = Contention(refused.resource, holder, past.deferrals, past.waited, None, (), {})
    return decide(rules(**lock), refused, found, past.delay, uniform, cap)


def test_by_default_the_message_goes_back() -> None:
    assert decided() == Defer(countdown=0.25, delay=0.25)


def test_the_countdown_grows_with_the_deferrals() -> None:
    countdowns = [decided(AWAY, Past(deferrals=n)) for n in range(4)]
    assert [d.countdown for d in countdowns if isinstance(d, Defer)] == [0.25, 0.5, 1.0, 2.0]


def test_the_countdown_ends_with_the_lease_that_refused_it() -> None:
    decision = decided(LockTaken("r", "h", expires_in=2.0), Past(deferrals=20))
    assert isinstance(decision, Defer)
    assert decision.delay == 30.0
    assert 2.0 <= decision.countdown <= 2.25


def test_a_lease_without_a_known_end_leaves_the_backoff_alone() -> None:
    decision = decided(LockTaken("r", "h", expires_in=None), Past(deferrals=20))
    assert decision == Defer(30.0, 30.0)


def test_the_countdown_stays_below_what_the_broker_takes_for_a_lost_message() -> None:
    decision = decided(AWAY, Past(deferrals=20), cap=5.0)
    assert decision == Defer(countdown=5.0, delay=30.0)


@given(st.integers(0, 100), st.floats(0, 120), st.floats(0, 1e4), st.integers())
def test_the_last_delay_is_cut_to_max_wait(
    deferrals: int, waited: float, expires_in: float, seed: int
) -> None:
    refused = LockTaken("r", "h", expires_in=expires_in)
    decision = decided(
        refused, Past(deferrals, waited), uniform=random.Random(seed).uniform, max_wait=100.0
    )
    if waited >= 100:
        assert isinstance(decision, Fail)
    else:
        assert isinstance(decision, Defer)
        assert waited + decision.countdown <= 100 + 1e-6


def test_a_spent_wait_ends_as_failure_with_what_happened() -> None:
    decision = decided(TAKEN, Past(deferrals=3, waited=7.5), max_wait=7.5)
    assert isinstance(decision, Fail)
    error = decision.error
    assert isinstance(error, LockTaken)
    assert (error.resource, error.holder, error.waited, error.deferrals) == (
        "stock:7", "the other", 7.5, 3,
    )  # fmt: skip
    assert "max_wait" in str(error)


def test_giving_up_counts_the_wait_whatever_its_cause_and_names_the_last_one() -> None:
    decision = decided(AWAY, Past(waited=7.5), max_wait=7.5)
    assert isinstance(decision, Fail)
    assert isinstance(decision.error, QuorumUnreachable)
    assert decision.error.causes == ["a:1: refused"]


def test_giving_up_can_skip() -> None:
    assert isinstance(decided(TAKEN, Past(waited=1.0), max_wait=1, on_give_up="skip"), Skip)


def test_conflict_can_skip_or_fail() -> None:
    assert isinstance(decided(on_conflict="skip"), Skip)
    assert isinstance(decided(on_conflict="fail"), Fail)


def test_unreachable_is_not_contention() -> None:
    assert isinstance(decided(AWAY, on_conflict="skip"), Defer)
    assert isinstance(decided(AWAY, on_unreachable="fail"), Fail)
    assert isinstance(decided(AWAY, on_unreachable="run"), RunUnlocked)
    assert isinstance(decided(TAKEN, on_unreachable="run"), Defer)


def test_a_conflict_callable_decides_by_what_it_is_told() -> None:
    with_history: list[Contention] = []

    def on_conflict(contention: Contention) -> str:
        with_history.append(contention)
        return "skip" if contention.deferrals else "defer"

    assert isinstance(decided(on_conflict=on_conflict), Defer)
    assert isinstance(decided(TAKEN, Past(deferrals=1, waited=2.0), on_conflict=on_conflict), Skip)
    assert (with_history[1].resource, with_history[1].holder, with_history[1].waited) == (
        "stock:7",
        "the other",
        2.0,
    )


def test_a_conflict_callable_that_returns_another_word_is_an_error() -> None:
    with pytest.raises(SettingsError, match="returned 'perhaps'"):
        decided(on_conflict=lambda contention: "perhaps")


def test_decorrelated_delays_follow_the_one_before() -> None:
    backoff = Backoff(first=1, cap=100, jitter="decorrelated")
    assert decided(AWAY, Past(3, 9.0, delay=4.0), backoff=backoff) == Defer(12.0, 12.0)


@given(st.integers(0, 200), st.floats(0, 100), st.integers())
def test_a_twin_looks_again_soon_after_the_lease_and_never_gives_up(
    tries: int, expires_in: float, seed: int
) -> None:
    refused = LockTaken("stock:7", "itself", expires_in=expires_in)
    decision = decide_redelivery(refused, tries, random.Random(seed).uniform, 20.0)
    assert 0 <= decision.countdown <= min(20.0, expires_in + 0.25)


def test_a_twin_looks_less_often_the_longer_it_waits() -> None:
    delays = [
        decide_redelivery(TAKEN, tries, lambda low, high: high, 900.0).delay for tries in range(7)
    ]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
