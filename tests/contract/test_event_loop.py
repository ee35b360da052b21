"""One event loop for the ways a worker runs: each callback runs once, in the right place."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.asynchronous import Hub

from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.lock.platform.threads import Waker
from celery_redlock.tasks.waiting.loop import EventLoop
from tests.conftest import eventually
from tests.contract import stories

IN_GREENLETS = """
import threading
from types import SimpleNamespace
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.lock.platform.threads import start_thread
from celery_redlock.tasks.waiting.loop import EventLoop
consumer = SimpleNamespace(hub=None, pool=SimpleNamespace(is_green=True), timer=None)
loop, ran = EventLoop(consumer, Platform(SystemClock())), []
loop.start()
hub = gevent.get_hub()
def run():
    gevent.sleep(0)
    ran.append((gevent.get_hub() is hub, gevent.getcurrent() is not main))
main = gevent.getcurrent()
start_thread(lambda: loop.call_soon(run))
while not ran:
    gevent.sleep(0.01)
told = ran
"""


class Timer:
    """What a worker has for a timer; a test says what is due."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def call_after(self, seconds: float, call: Any, args: Any = (), priority: int = 0) -> Any:
        self.entries.append(entry := lambda: call(*args))
        return entry

    def cancel(self, entry: Any) -> None:
        if entry in self.entries:
            self.entries.remove(entry)

    def fire(self) -> Any:
        entry = self.entries.pop(0)
        entry()
        return entry


def loop_of(waker: Waker | None = None, **consumer: Any) -> EventLoop:
    given = {"hub": None, "pool": None, "timer": Timer(), **consumer}
    platform = Platform(SystemClock(), new_waker=lambda: waker or Waker())
    made = EventLoop(SimpleNamespace(**given), platform)
    made.start()
    return made


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    made.timer.call_repeatedly(0.02, int)  # so that each turn of it is short
    yield made
    made.close()


def test_with_a_hub_what_another_thread_asks_for_runs_in_the_hubs_thread(hub: Hub) -> None:
    loop, ran = loop_of(hub=hub), list[tuple[str, int]]()

    def run(name: str) -> None:
        ran.append((name, threading.get_ident()))

    def ask() -> None:
        loop.call_soon(run, "first")
        loop.call_soon(run, "second")

    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert ran == []
    eventually(lambda: hub.run_once() or len(ran) == 2)
    assert ran == [("first", threading.get_ident()), ("second", threading.get_ident())]


def test_what_a_callback_asks_for_runs_after_it(hub: Hub) -> None:
    loop, ran = loop_of(hub=hub), list[str]()

    def run() -> None:
        loop.call_soon(ran.append, "second")
        ran.append("first")

    loop.call_soon(run)
    eventually(lambda: hub.run_once() or len(ran) == 2)
    assert ran == ["first", "second"]


def test_a_call_that_raises_neither_ends_the_loop_nor_the_calls_after_it(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []
    loop = loop_of(hub=hub)
    loop.call_soon(lambda: ran[0])
    loop.call_soon(ran.append, 1)
    eventually(lambda: hub.run_once() or ran == [1])
    assert "a release could not be dispatched" in caplog.text


def test_a_hub_with_nothing_to_do_is_not_woken_all_the_time(hub: Hub) -> None:
    waker, ran = Waker(), list[int]()
    loop_of(waker, hub=hub).call_soon(ran.append, 1)
    eventually(lambda: hub.run_once() or ran)
    assert select.select([waker.descriptor], [], [], 0.0)[0] == []


def test_a_closed_room_has_no_calls_left(hub: Hub) -> None:
    loop, ran = loop_of(hub=hub), list[str]()
    loop.call_soon(ran.append, "of the old connection")
    loop.clear()
    loop.start()
    loop.call_soon(ran.append, "of the new one")
    eventually(lambda: hub.run_once() or ran)
    assert ran == ["of the new one"]


@stories.TOGETHER
def test_with_gevent_a_callback_runs_in_a_greenlet_of_its_own() -> None:
    pytest.importorskip("gevent")
    assert stories.tell(stories.GEVENT, IN_GREENLETS) == [[True, True]]


def test_without_a_loop_a_callback_runs_where_it_is_asked_for() -> None:
    loop, ran = loop_of(), list[int]()
    loop.call_soon(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]


def test_a_call_is_repeated_until_it_is_cancelled() -> None:
    timer, ran = Timer(), list[int]()
    cancel = loop_of(timer=timer).call_repeatedly(1.0, lambda: ran.append(1))
    for _ in range(3):
        timer.fire()
    assert (len(ran), len(timer.entries)) == (3, 1)
    cancel()
    assert timer.entries == []


def test_a_call_that_fails_is_repeated_too() -> None:
    timer = Timer()
    loop_of(timer=timer).call_repeatedly(1.0, lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            timer.fire()
    assert len(timer.entries) == 1


def test_a_repeated_call_that_is_cancelled_while_it_runs_is_the_last_one() -> None:
    timer, ran = Timer(), list[int]()

    def run() -> None:
        ran.append(1)
        cancel()

    cancel = loop_of(timer=timer).call_repeatedly(1.0, run)
    entry = timer.fire()
    assert timer.entries == []
    entry()  # as a thread's timer may still do
    assert (ran, timer.entries) == ([1], [])
