from __future__ import annotations

import contextlib
from collections.abc import Iterator

from celery_redlock.lock.engine.wait_queue import Waiter, WaitQueue
from celery_redlock.lock.platform.clock import Platform, SystemClock


@contextlib.contextmanager
def line(*channels: list[str]) -> Iterator[tuple[WaitQueue, list[Waiter]]]:
    """Give a listener without nodes, and waiters in the order in which they came."""
    listener = WaitQueue([], 1.0, Platform(SystemClock()))
    with contextlib.ExitStack() as stack:
        yield listener, [stack.enter_context(listener.waiting(some)) for some in channels]


def test_a_word_wakes_the_first_that_waits_alone() -> None:
    with line(["a"], ["a"], ["b"]) as (listener, waiters):
        listener.heard("a")
        listener.heard("a")
        assert [waiter.take() for waiter in waiters] == [True, False, False]


def test_a_word_is_taken_once() -> None:
    with line(["a"]) as (listener, (waiter,)):
        listener.heard("a")
        assert waiter.take()
        assert not waiter.take()


def test_one_that_waits_for_several_hears_of_each() -> None:
    with line(["a", "b"]) as (listener, (waiter,)):
        listener.heard("b")
        assert waiter.take()


def test_the_first_of_each_limit_is_woken() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()))
    with contextlib.ExitStack() as stack:
        waiters = [stack.enter_context(listener.waiting(["a"], limit)) for limit in (1, 1, 3, 3)]
        listener.heard("a")
        assert [waiter.take() for waiter in waiters] == [True, False, True, False]
        listener.pass_on(waiters[2])
        assert [waiter.take() for waiter in waiters] == [False, False, False, True]


def test_one_that_was_refused_something_else_holds_up_nobody() -> None:
    with line(["a", "b"], ["a"]) as (listener, waiters):
        waiters[0].awaits = "b"
        listener.heard("a")
        assert [waiter.take() for waiter in waiters] == [False, True]
        listener.heard("b")
        assert [waiter.take() for waiter in waiters] == [True, False]


def test_a_word_that_one_leaves_behind_is_the_next_ones() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()))
    with contextlib.ExitStack() as first:
        first.enter_context(listener.waiting(["a"]))
        with listener.waiting(["a"]) as second:
            listener.heard("a")
            assert not second.decided
            first.close()
            assert second.take()


def test_a_word_that_may_be_for_two_is_passed_on_to_who_stands_behind() -> None:
    with line(["a", "b"], ["a"], ["a"], ["b"]) as (listener, waiters):
        listener.pass_on(waiters[0])
        assert [waiter.take() for waiter in waiters] == [False, True, False, True]


def test_nobody_is_waited_for_where_nobody_waits() -> None:
    with line(["a"]) as (listener, _):
        assert listener.channels() == {"a"}
    assert listener.channels() == set()
    listener.heard("a")
