"""What a thread sleeps on, and how other threads wake it."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

from celery_redlock.lock.platform.threads import Sleeper, new_sleeper

FREED = 60.0  # s in which a thread that was woken has returned, on any machine


def test_a_sleeper_that_nobody_wakes_sleeps_for_its_time_alone() -> None:
    sleeper = new_sleeper()
    assert not sleeper.sleep(0.001)
    assert not sleeper.sleep(-1.0)


def test_a_wake_up_before_the_sleep_ends_it_at_once_and_counts_once() -> None:
    sleeper = new_sleeper()
    sleeper.wake()
    sleeper.wake()
    assert sleeper.sleep(math.inf)
    assert not sleeper.sleep(0.0)


def test_another_thread_wakes_a_sleeper_each_time() -> None:
    made: list[Sleeper] = []
    ready, seen = threading.Semaphore(0), threading.Semaphore(0)

    def sleep() -> list[bool]:
        made.append(new_sleeper())
        woken = []
        for _ in range(3):
            ready.release()
            woken.append(made[0].sleep(math.inf))
            seen.release()
        return woken

    with ThreadPoolExecutor() as pool:
        slept = pool.submit(sleep)
        for _ in range(3):
            assert ready.acquire(timeout=FREED)
            made[0].wake()
            assert seen.acquire(timeout=FREED)
        assert slept.result(FREED) == [True, True, True]
