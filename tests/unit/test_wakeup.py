from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from celery_redlock.lock.engine.wait_queue import Waiter, WaitQueue

from celery_redlock.lock.model.keys import waiting_key
from celery_redlock.lock.platform.clock import Platform, SystemClock


@contextlib.contextmanager
def line(*names: list[str]) -> Iterator[tuple[WaitQueue, list[Waiter]]]:
    """Give a listener without nodes, and waiters in the order in which they came."""
    listener = WaitQueue([], 1.0, Platform(SystemClock()), "p")
    with contextlib.ExitStack() as stack:
        yield listener, [stack.enter_context(listener.waiting(some)) for some in names]


numbers = itertools.count()


def name(listener: WaitQueue, resource: str, rank: int = 0, release: str = "") -> None:
    """Let a node name the process for a release of its own, or for this one."""
    release = release or f"release-{next(numbers)}"
    listener.heard(listener.inbox, f"{rank} {release} {waiting_key('p', resource)}")


def test_a_word_wakes_the_first_that_waits_alone() -> None:
    with line(["a"], ["a"], ["b"]) as (listener, waiters):
        name(listener, "a")
        name(listener, "a")
        assert [waiter.take() for waiter in waiters] == [True, False, False]


def test_a_word_is_taken_once() -> None:
    with line(["a"]) as (listener, (waiter,)):
        name(listener, "a")
        assert waiter.take()
        assert not waiter.take()


def test_one_that_waits_for_several_hears_of_each() -> None:
    with line(["a", "b"]) as (listener, (waiter,)):
        name(listener, "b")
        assert waiter.take()


def test_the_first_of_each_limit_is_woken() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()), "p")
    with contextlib.ExitStack() as stack:
        waiters = [stack.enter_context(listener.waiting(["a"], limit)) for limit in (1, 1, 3, 3)]
        name(listener, "a")
        assert [waiter.take() for waiter in waiters] == [True, False, True, False]


def test_as_the_inbox_opens_the_first_one_looks_and_all_that_wait_for_permits() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()), "p")
    with contextlib.ExitStack() as stack:
        waiters = [stack.enter_context(listener.waiting(["a"], limit)) for limit in (1, 1, 3, 3)]
        listener.heard(listener.inbox, "")
        assert [waiter.take() for waiter in waiters] == [True, False, True, True]
        assert [waiter.turn for waiter in waiters] == [None] * 4


def test_an_inbox_that_opens_on_one_more_node_puts_off_no_turn() -> None:
    with line(["a"]) as (listener, (waiter,)):
        name(listener, "a", 2)
        turn = waiter.turn
        listener.heard(listener.inbox, "")
        assert (waiter.turn, waiter.turns) == (turn, 2)


def test_one_that_was_refused_something_else_holds_up_nobody() -> None:
    with line(["a", "b"], ["a"]) as (listener, waiters):
        waiters[0].awaits = "b"
        name(listener, "a")
        assert [waiter.take() for waiter in waiters] == [False, True]
        name(listener, "b")
        assert [waiter.take() for waiter in waiters] == [True, False]


def test_a_word_that_one_leaves_behind_is_the_next_ones() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()), "p")
    with contextlib.ExitStack() as first:
        first.enter_context(listener.waiting(["a"]))
        with listener.waiting(["a"]) as second:
            name(listener, "a")
            assert not second.decided
            first.close()
            assert second.take()


def test_nobody_is_waited_for_where_nobody_waits() -> None:
    with line(["a"]) as (listener, _):
        assert listener.channels() == {listener.inbox}
    assert listener.channels() == set()
    name(listener, "a")


def test_a_name_wakes_the_first_for_its_turn() -> None:
    with line(["a"], ["a"]) as (listener, (first, second)):
        name(listener, "a", 0, "r1")
        assert (first.take(), first.turns, second.take()) == (True, 0, False)
        name(listener, "a", 2, "r2")
        assert (first.take(), first.turns, second.take()) == (True, 2, False)


def test_a_name_is_of_one_resource() -> None:
    with line(["a"], ["b"]) as (listener, (first, second)):
        name(listener, "b", 0, "r1")
        assert (first.take(), second.take()) == (False, True)


def test_a_name_that_makes_no_sense_wakes_nobody() -> None:
    with line(["a"]) as (listener, (waiter,)):
        for word in ("a", "x r1 {p}:waiting:a", "0 r1", "-1 r1 {p}:waiting:a", "0 r1 a", "0  "):
            listener.heard(listener.inbox, word)
        assert not waiter.take()


def test_a_second_release_is_for_the_next_of_those_that_wait_for_permits() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()), "p")
    with contextlib.ExitStack() as stack:
        waiters = [stack.enter_context(listener.waiting(["a"], 2)) for _ in range(3)]
        for release in ("r1", "r2", "r1"):
            name(listener, "a", release=release)
        assert [waiter.take() for waiter in waiters] == [True, True, False]
        assert [waiter.release for waiter in waiters] == ["r1", "r2", ""]


def test_a_second_release_of_a_plain_lock_is_for_the_first_again() -> None:
    with line(["a"], ["a"]) as (listener, waiters):
        for release in ("r1", "r2"):
            name(listener, "a", release=release)
        assert [waiter.take() for waiter in waiters] == [True, False]


def test_a_turn_that_one_leaves_behind_is_the_next_ones() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()), "p")
    with contextlib.ExitStack() as first:
        left = first.enter_context(listener.waiting(["a"]))
        with listener.waiting(["a"]) as second:
            name(listener, "a", 2, "r1")
            first.close()
            assert (second.take(), second.turn, second.turns) == (True, left.turn, 2)


def test_a_wake_up_that_one_took_and_could_not_use_is_the_next_ones() -> None:
    listener = WaitQueue([], 1.0, Platform(SystemClock()), "p")
    with contextlib.ExitStack() as others:
        with contextlib.suppress(KeyboardInterrupt), listener.waiting(["a"]) as first:
            second = others.enter_context(listener.waiting(["a"]))
            name(listener, "a", 0, "r1")
            assert first.take()
            raise KeyboardInterrupt
        assert second.take()


def test_a_forked_child_has_another_name_and_waits_for_nothing() -> None:
    with line(["a"]) as (listener, _):
        before = listener.inbox
        listener.forget()
        assert listener.inbox != before
        assert listener.channels() == set()
