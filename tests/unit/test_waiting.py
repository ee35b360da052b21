"""The lines of those that wait in one worker: who is first, who follows, and who may try when."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import pytest

from celery_redlock.tasks.waiting.capacity import CAPACITY, capacity
from celery_redlock.tasks.waiting.queues import RETRY_NEXT_AFTER, Waiter, WaitQueues


class Message:
    """What stands for a worker's request."""


def waiting(since: str, channel: str = "a", limit: int = 1) -> Waiter:
    request = Message()
    return Waiter(request, (since, id(request)), (channel, limit), 0.0, patient=True)


def line(*sinces: str) -> tuple[WaitQueues, Sequence[Waiter]]:
    lines, all_ = WaitQueues(), [waiting(since) for since in sinces]
    for one in all_:
        lines.add(one)
    return lines, all_


def test_they_stand_in_the_order_of_their_first_deferral_and_not_of_their_coming() -> None:
    lines, (second, first, third) = line("10:02", "10:01", "10:03")
    assert lines.firsts("a") == [first]
    assert lines.remove(third, 0.0) is None
    lines.add(third)
    assert lines.remove(first, 0.0) is second
    assert lines.remove(second, 0.0) is third
    assert lines.remove(third, 0.0) is None
    assert lines.firsts("a") == []


def test_who_comes_before_the_first_displaces_it() -> None:
    lines, (first,) = line("10:02")
    assert lines.add(waiting("10:01")) is first
    assert lines.add(waiting("10:03")) is None


def test_those_of_another_limit_stand_in_a_line_of_their_own() -> None:
    lines, (one, behind) = line("10:01", "10:03")
    of_three = waiting("10:02", limit=3)
    assert lines.add(of_three) is None
    assert lines.firsts("a") == [one, of_three]
    assert (lines.may_try(of_three, 0.0), lines.may_try(behind, 0.0)) == (0.0, math.inf)
    assert lines.remove(of_three, 0.0) is None
    assert lines.firsts("a") == [one]
    assert lines.of(of_three.request) is None
    assert lines.all() == [one, behind]


def test_the_last_patient_one_of_the_longest_line_can_best_be_spared() -> None:
    lines, (first, second, third) = line("10:01", "10:02", "10:03")
    lines.add(waiting("10:04", "b"))
    assert lines.patient == 4
    assert lines.last_of_longest() is third
    third.patient = False
    assert lines.last_of_longest() is second
    for one in (first, second):
        lines.remove(one, 0.0)
    assert lines.patient == 2
    assert WaitQueues().last_of_longest() is None


@pytest.mark.parametrize(
    ("limit", "prefetch", "expected"),
    [
        (None, 4, CAPACITY),
        (10_000, 4, CAPACITY),
        (CAPACITY + 3, 4, CAPACITY - 1),
        (20, 4, 16),
        (3, 4, 1),
        (None, 0, sys.maxsize),
        (20, 0, sys.maxsize),
    ],
)
def test_the_seats_stay_below_celerys_limit(
    limit: int | None, prefetch: int, expected: int
) -> None:
    conf = {} if limit is None else {"worker_eta_task_limit": limit}
    assert capacity(conf, prefetch) == expected


def test_only_the_first_may_try_by_itself() -> None:
    lines, (first, second) = line("10:01", "10:02")
    assert lines.may_try(first, 0.0) == 0.0
    assert lines.may_try(second, 0.0) == math.inf


def test_while_the_first_tries_the_next_holds_back_for_a_moment() -> None:
    lines, (first, second) = line("10:01", "10:02")
    lines.remove(first, 100.0)
    assert lines.may_try(second, 100.25) == RETRY_NEXT_AFTER - 0.25
    assert lines.may_try(second, 100.0 + RETRY_NEXT_AFTER) == 0.0


def test_one_that_comes_while_the_first_tries_holds_back_too() -> None:
    lines, (first,) = line("10:01")
    lines.remove(first, 100.0)
    second = waiting("10:02")
    lines.add(second)
    assert lines.may_try(second, 100.0) == RETRY_NEXT_AFTER


def test_the_first_that_is_back_goes_by_its_own_countdown() -> None:
    lines, (first, _) = line("10:01", "10:02")
    lines.remove(first, 100.0)
    again = waiting("10:01")
    lines.add(again)
    assert lines.may_try(again, 100.0) == 0.0


def test_an_empty_line_is_listened_for_until_it_is_forgotten() -> None:
    lines, (first,) = line("10:01")
    lines.remove(first, 100.0)
    lines.forget_empty(100.0)
    assert lines.channels() == {"a"}
    lines.forget_empty(100.1)
    assert lines.channels() == set()
    lines.add(waiting("10:02"))
    lines.forget_empty(math.inf)
    assert lines.channels() == {"a"}
