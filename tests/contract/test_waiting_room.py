"""The room in which a worker keeps the messages that wait, between its threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery.utils.timer2 import Timer
from kombu.common import QoS

from celery_redlock.lock.clock import SystemClock
from celery_redlock.tasks import waiting as waiting_module
from celery_redlock.tasks.deferral import CLOCKS_DIFFER
from celery_redlock.tasks.waiting import Room, Waiting
from tests.conftest import eventually


class Consumer(SimpleNamespace):
    """What a room needs of Celery's consumer, or of a message."""

    __hash__ = object.__hash__


def test_while_a_body_runs_in_the_main_process_one_can_look_who_waits() -> None:
    """A solo pool runs it where its message is handed on."""
    seen: list[Any] = []

    def run(request: Any) -> None:
        other = threading.Thread(target=lambda: seen.append(room.waiting()), daemon=True)
        other.start()
        other.join(60)

    qos = QoS(lambda prefetch_count: None, 1)
    room = Room(Consumer(apply_eta_task=run, qos=qos, timer=Timer(), hub=None))
    room._seats = 0
    waiting = Waiting(Consumer(), ("10:01", 1), ("a", 1), 0.0, patient=True)
    room._lines.add(waiting)
    room._standing = 1
    room._make_way()
    assert seen == [[]]


def test_a_word_passes_those_that_are_not_to_run_any_more() -> None:
    handed_on: list[Any] = []
    qos, timer = QoS(lambda prefetch_count: None, 1), Timer()
    controller = SimpleNamespace(state=SimpleNamespace(revoked={"revoked"}))
    room = Room(
        Consumer(
            apply_eta_task=handed_on.append, qos=qos, timer=timer, hub=None, controller=controller
        )
    )
    past = datetime.now(timezone.utc) - timedelta(seconds=1)
    due = SystemClock().now() + 100
    requests = [
        Consumer(id="expired", expires=past, stamped_headers=None),
        Consumer(id="revoked", expires=None, stamped_headers=None),
        Consumer(id="stamped", expires=None, stamped_headers=["of"], revoked=lambda: True),
        Consumer(id="other", expires=None, stamped_headers=["of"], revoked=lambda: False),
        Consumer(id="behind", expires=past + timedelta(days=1), stamped_headers=None),
    ]
    for number, request in enumerate(requests):
        order = (f"10:0{number}", number)
        room._lines.add(Waiting(request, order, ("a", 1), due, patient=True))
    try:
        room._call("a", "a release")
    finally:
        timer.stop()
    assert [request.id for request in handed_on] == ["expired", "revoked", "stamped", "other"]


def test_one_that_cannot_be_handed_on_ends_neither_the_event_loop_nor_the_wait_of_others() -> None:
    """The result backend may be away as one is handed on whose end is to be stored."""
    handed_on: list[Any] = []

    def apply(request: Any) -> None:
        if request.id == "revoked":
            raise ConnectionError("backend")
        handed_on.append(request.id)

    qos, timer = QoS(lambda prefetch_count: None, 1), Timer()
    controller = SimpleNamespace(state=SimpleNamespace(revoked={"revoked"}))
    room = Room(
        Consumer(apply_eta_task=apply, qos=qos, timer=timer, hub=None, controller=controller)
    )
    for number, id_ in enumerate(["revoked", "stamped", "behind"]):
        request = Consumer(
            id=id_, name="task", expires=None, revoked=fail, stamped_headers=id_ == "stamped"
        )
        order, due = (f"10:0{number}", number), SystemClock().now() + 100
        room._lines.add(Waiting(request, order, ("a", 1), due, patient=True))
    try:
        room._call("a", "a release")
    finally:
        timer.stop()
    assert handed_on == ["stamped", "behind"]


@pytest.mark.parametrize(
    ("refused_before", "tries"), [(math.inf, 1), (60.0, 1), (CLOCKS_DIFFER * 0.9, 0), (-0.1, 0)]
)
def test_after_a_refusal_in_its_own_line_nobody_tries_each_second(
    refused_before: float, tries: int
) -> None:
    """refused_before: s before it was to be looked at, by the calendar of who was refused."""
    handed_on: list[Any] = []
    qos, timer = QoS(lambda prefetch_count: None, 1), Timer()
    controller = SimpleNamespace(state=SimpleNamespace(revoked=set()))
    room = Room(
        Consumer(
            apply_eta_task=handed_on.append, qos=qos, timer=timer, hub=None, controller=controller
        )
    )
    now, line = SystemClock().now(), ("a", 1)
    request = Consumer(id="first", expires=None, stamped_headers=None)
    room._lines.add(Waiting(request, ("10:00", 1), line, now + 100, patient=True))
    room._told_at["a"], room._refused[line] = now, now - refused_before
    try:
        room._try_again("a", now, first_time=False)
    finally:
        timer.stop()
    assert (len(handed_on), len(room._told_at)) == (tries, tries)


@pytest.fixture
def room() -> Iterator[Room]:
    """Give a room that a worker has just opened."""
    qos, timer = QoS(lambda prefetch_count: None, 1), Timer()
    app, parent = SimpleNamespace(conf={}), {"initial_prefetch_count": 1, "hub": None, "pool": None}
    made = Room(Consumer(apply_eta_task=fail, app=app, qos=qos, timer=timer, **parent))
    made.start(made._consumer)
    try:
        yield made
    finally:
        timer.stop()


def missed(room: Room, count: int, limit: int, refused_at: float) -> list[bool]:
    """Return which of so many messages hear that they missed a release on their way here."""
    line, due = ("a", limit), SystemClock().now() + 100
    come = [
        Waiting(Consumer(), (f"10:0{number}", number), line, due, patient=True)
        for number in range(count)
    ]
    return [room._has_missed(waiting, refused_at) for waiting in come]


@pytest.mark.parametrize(("limit", "heard"), [(1, 1), (2, 2), (3, 2)])
def test_of_permits_each_release_is_for_one_that_was_on_its_way(
    room: Room, limit: int, heard: int
) -> None:
    refused_at = SystemClock().now()
    room._call("a", "a release")
    room._call("a", "another one")
    assert sum(missed(room, 4, limit, refused_at)) == heard


def test_a_word_counts_where_one_node_says_many_before_another_says_any(room: Room) -> None:
    """After a stall each connection hands on all that one read of it gives."""
    room._consumer.hub = "an event loop, which does not come to serve them"
    room._ears = [SimpleNamespace(confirmed={"a"}) for _ in range(3)]  # type: ignore[misc]
    room._majority = 2
    words = [f"word {number}" for number in range(1000)]
    for _ in room._ears:
        for word in words:
            room.heard("a", word)
    assert list(room._calls) == [("a", word) for word in words]


def test_what_was_refused_before_the_broker_was_lost_may_have_missed_a_release(
    room: Room,
) -> None:
    refused_at = SystemClock().now()
    room._call("a", "a release")
    room.stop(room._consumer)
    room.start(room._consumer)
    assert missed(room, 2, 1, refused_at) == [True, False]
    assert missed(room, 1, 1, SystemClock().now()) == [False]


def test_of_a_room_that_opens_anew_no_look_is_left_over(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greenlets' timer can cancel the next call of a repeated one only where that is known."""
    gevent = pytest.importorskip("gevent")
    timers = pytest.importorskip("celery.concurrency.gevent")
    monkeypatch.setattr(waiting_module, "LOOK", 0.01)
    timer = room._consumer.timer = timers.Timer()

    def calls() -> set[Any]:
        gevent.sleep(0.01)
        return {greenlet for greenlet in timer.queue if not greenlet.dead}

    for _ in range(3):
        room.start(room._consumer)
        (first,) = calls()
        eventually(lambda first=first: first not in calls())
        assert len(calls()) == 1
        room.stop(room._consumer)
        assert not calls()


def fail() -> None:
    raise ConnectionError("backend")
