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


def test_a_name_wakes_the_first_for_its_turn() -> None:
    with line(["a"], ["a"]) as (listener, (first, second)):
        listener.heard(listener.inbox, "0 r1 a")
        assert (first.take(), first.turns, second.take()) == (True, 0, False)
        listener.heard(listener.inbox, "2 r2 a")
        assert (first.take(), first.turns, second.take()) == (True, 2, False)


def test_a_name_is_of_one_resource() -> None:
    with line(["a"], ["b"]) as (listener, (first, second)):
        listener.heard(listener.inbox, "0 r1 b")
        assert (first.take(), second.take()) == (False, True)


def test_a_name_that_makes_no_sense_wakes_nobody() -> None:
    with line(["a"]) as (listener, (waiter,)):
        for word in ("a", "x r1 a", "0 r1", "-1 r1 a", "0  "):
            listener.heard(listener.inbox, word)
        assert not waiter.take()


def test_a_second_release_is_for_the_next_of_those_that_wait_for_permits() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()))
    with contextlib.ExitStack() as stack:
        waiters = [stack.enter_context(listener.waiting(["a"], 2)) for _ in range(3)]
        for release in ("r1", "r2", "r1"):
            listener.heard(listener.inbox, f"0 {release} a")
        assert [waiter.take() for waiter in waiters] == [True, True, False]
        assert [waiter.release for waiter in waiters] == ["r1", "r2", ""]


def test_a_second_release_of_a_plain_lock_is_for_the_first_again() -> None:
    with line(["a"], ["a"]) as (listener, waiters):
        for release in ("r1", "r2"):
            listener.heard(listener.inbox, f"0 {release} a")
        assert [waiter.take() for waiter in waiters] == [True, False]


def test_a_turn_that_one_leaves_behind_is_the_next_ones() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()))
    with contextlib.ExitStack() as first:
        left = first.enter_context(listener.waiting(["a"]))
        with listener.waiting(["a"]) as second:
            listener.heard(listener.inbox, "2 r1 a")
            first.close()
            assert (second.take(), second.turn, second.turns) == (True, left.turn, 2)


def test_a_wake_up_that_one_took_and_could_not_use_is_the_next_ones() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()))
    with contextlib.ExitStack() as others:
        with contextlib.suppress(KeyboardInterrupt), listener.waiting(["a"]) as first:
            second = others.enter_context(listener.waiting(["a"]))
            listener.heard(listener.inbox, "0 r1 a")
            assert first.take()
            raise KeyboardInterrupt
        assert second.take()


def test_what_is_for_clients_of_an_earlier_version_wakes_whom_no_node_can_name() -> None:
    with line(["a"]) as (listener, (waiter,)):
        listener.heard("a", "value named")
        assert waiter.take()


def test_a_forked_child_has_another_name_and_waits_for_nothing() -> None:
    with line(["a"]) as (listener, _):
        before = listener.inbox
        listener.forget()
        assert listener.inbox != before
        assert listener.channels() == set()
