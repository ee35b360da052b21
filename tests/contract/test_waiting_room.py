"""The room in which a worker keeps the messages that wait, between its threads."""

from __future__ import annotations

import math
import threading
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery.utils.timer2 import Timer
from kombu.common import QoS

from celery_redlock.lock.clock import SystemClock
from celery_redlock.tasks.deferral import CLOCKS_DIFFER
from celery_redlock.tasks.waiting import Room, Waiting


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


def fail() -> None:
    raise ConnectionError("backend")
