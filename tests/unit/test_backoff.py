from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock import Backoff, SettingsError

attempts = st.integers(0, 10_000)


@given(attempts, st.integers())
def test_no_delay_is_below_zero_or_above_the_cap(attempt: int, seed: int) -> None:
    delay = Backoff(0.25, 30, 2).delay(attempt, random.Random(seed).uniform)
    assert 0 <= delay <= 30


def test_its_bound_grows_by_the_factor_up_to_the_cap() -> None:
    backoff = Backoff(first=1, cap=10, factor=3)
    assert [backoff.delay(n, lambda low, high: high) for n in range(4)] == [1, 3, 9, 10]


def test_a_delay_is_drawn_from_zero_to_its_bound() -> None:
    drawn: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        drawn.append((low, high))
        return low

    Backoff(first=0.5, cap=8).delay(3, uniform)
    assert drawn == [(0.0, 4.0)]


@pytest.mark.parametrize("first", [1, 0.5])
def test_no_number_of_deferrals_takes_time(first: float) -> None:
    began = time.process_time()
    assert Backoff(first, 30, 3).delay(10_000_000, lambda low, high: high) == 30
    assert time.process_time() - began < 1.0  # the power of an int takes many seconds


@given(attempts)
def test_it_comes_through_a_message(attempt: int) -> None:
    backoff = Backoff(0.5, 7, 3)
    assert Backoff.from_message(backoff.to_message()) == backoff


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"first": 0}, "first"), ({"first": 5, "cap": 1}, "cap"), ({"first": "1"}, "first"),
        ({"cap": float("inf")}, "cap"), ({"first": 10**400, "cap": 10**400}, "first"),
        ({"factor": float("nan")}, "factor"), ({"factor": 10**400}, "factor"),
        ({"factor": 0.5}, "factor"), ({"factor": True}, "factor"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        Backoff(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"first": 1, "jitter": "none"}, "jitter='none': is not a field: use first, cap, factor"),
        ({1: 2, "x": 3}, "1=2: is not a field"),
    ],
)
def test_an_unknown_field_of_a_message_is_refused(fields: dict[Any, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        Backoff.from_message(fields)
