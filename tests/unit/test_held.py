"""A worker holds a message whose header has a number that it does not know, and gives it back."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from kombu.common import QoS

from celery_redlock import LockedTask, anchors
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.tasks.delivery import header
from celery_redlock.tasks.delivery.header import NO_HEADER, LockHeader, unknown_format
from celery_redlock.tasks.waiting.room import WaitingRoom

PREFETCH = 4


class Timer:
    """Celery's timer, whose entries a test lets come."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def call_after(self, seconds: float, function: Any, args: Any = (), priority: int = 0) -> Any:
        entry = SimpleNamespace(seconds=seconds, function=function, args=args, tref=None)
        self.entries.append(entry)
        return entry

    def cancel(self, entry: Any) -> None:
        self.entries = [other for other in self.entries if other is not entry]

    def come(self) -> None:
        """Let each entry come that is set now."""
        entries, self.entries = self.entries, []
        for entry in entries:
            entry.function(*entry.args)


class Consumer(SimpleNamespace):
    """What stands for Celery's consumer."""

    __hash__ = object.__hash__


class Message:
    """One delivery. returned: whether each response to the broker gave it back."""

    def __init__(self, name: str | None, number: object = None, *, has_header: bool = True) -> None:
        carried: dict[str, Any] = {"options": {}, "id": "1"}
        if number is not None:
            carried["format"] = number
        self.headers: Any = {"id": "1", **({"task": name} if name else {})}
        if has_header:
            self.headers["redlock"] = carried
        self.returned: list[bool] = []

    def reject_log_error(self, _logger: Any, _errors: Any, requeue: bool = False) -> None:
        self.returned.append(requeue)


def body() -> None: ...


class Worker:
    """A worker's room, and what Celery gets of its messages."""

    def __init__(self, **conf: Any) -> None:
        self.app = Celery("held", broker="memory://", set_as_current=False)
        self.app.conf.update(redlock_nodes=["redis://nowhere"], **conf)
        self.app.task(base=LockedTask, shared=False, name="locked")(body)
        self.app.task(shared=False, name="plain")(body)
        self.app.finalize()
        self.received: list[Any] = []
        self.timer = Timer()
        self.consumer = Consumer(
            app=self.app, hub=None, pool=None, timer=self.timer,
            qos=QoS(lambda prefetch_count: None, PREFETCH), initial_prefetch_count=PREFETCH,
            task_buckets={}, disable_rate_limits=False, apply_eta_task=str,
            create_task_handler=lambda **_: self.received.append, connection_errors=(OSError,),
            call_soon=lambda function, *args, **options: function(*args, **options),
        )  # fmt: skip
        self.room = WaitingRoom(self.consumer, platform=Platform(SystemClock()))
        self.room.start(self.consumer)
        self.timer.entries.clear()  # of its sweeps
        self.receive = self.consumer.create_task_handler()

    @property
    def prefetch(self) -> int:
        return int(self.consumer.qos.value)


@pytest.mark.parametrize("number", [0, 2, -1, 10**9])
def test_such_a_message_is_held_and_goes_back_after_30_s(number: int) -> None:
    worker, message = Worker(), Message("locked", number)
    worker.receive(message)
    assert worker.received == []
    assert message.returned == []
    assert worker.prefetch == PREFETCH + 1
    assert [entry.seconds for entry in worker.timer.entries] == [30.0]
    worker.timer.come()
    assert message.returned == [True]
    assert worker.received == []
    assert worker.prefetch == PREFETCH


@pytest.mark.parametrize("number", [None, 1, True, 2.0, "2", [2]])
def test_a_message_of_this_format_and_what_is_no_number_go_on(number: object) -> None:
    worker, message = Worker(), Message("locked", number)
    worker.receive(message)
    assert worker.received == [message]
    assert worker.timer.entries == []


def test_a_message_without_a_header_goes_on_in_every_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(header, "HEADER_FORMAT", 2)
    worker, bare, old = Worker(), Message("locked", has_header=False), Message("locked")
    worker.receive(bare)
    worker.receive(old)
    assert worker.received == [bare]
    assert len(worker.timer.entries) == 1


@pytest.mark.parametrize("name", ["plain", "unknown", "celery.chunks"])
def test_what_takes_no_lock_here_goes_on(name: str) -> None:
    worker, message = Worker(), Message(name, 2)
    worker.receive(message)
    assert worker.received == [message]


def test_a_message_of_protocol_1_names_its_task_elsewhere_and_is_held() -> None:
    worker = Worker()
    worker.receive(Message(None, 2))
    assert worker.received == []


def test_headers_of_another_program_go_on() -> None:
    worker, message = Worker(), Message("locked")
    for headers in (None, ["redlock"], {"task": "locked", "redlock": "x"}):
        message.headers = headers
        worker.receive(message)
    assert worker.received == [message] * 3


def test_each_number_is_said_once_at_error(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    with caplog.at_level(logging.INFO):
        for number in (2, 2, 3):
            worker.receive(Message("locked", number))
    first, second = caplog.records
    assert (first.levelname, second.levelname) == ("ERROR", "ERROR")
    assert (first.event, first.task, first.task_id) == ("format_unknown", "locked", "1")  # type: ignore[attr-defined]
    assert first.getMessage().startswith("locked[1] has format 2 of the lock header")
    assert first.getMessage().endswith(anchors.OTHER_FORMAT)
    assert " format 3 " in second.getMessage()


def test_what_is_held_counts_for_the_capacity() -> None:
    worker = Worker(worker_eta_task_limit=PREFETCH + 2)
    for _ in range(5):
        worker.receive(Message("locked", 2))
    assert worker.prefetch == PREFETCH + 2  # three of them stay within the prefetch
    worker.timer.come()
    assert worker.prefetch == PREFETCH


def test_what_is_held_is_forgotten_with_its_connection() -> None:
    worker, message = Worker(), Message("locked", 2)
    worker.receive(message)
    entries = [*worker.timer.entries]
    worker.room.stop(worker.consumer)
    assert worker.timer.entries == []
    for entry in entries:  # one that comes all the same
        entry.function(message)
    assert message.returned == []


def test_a_run_that_gets_one_all_the_same_is_refused() -> None:
    carried = {"options": {}, "id": "1", "format": 2}
    assert LockHeader.of(Context({"id": "1", "redlock": carried})).options == {"format": 2}
    assert LockHeader.of(Context({"id": "1", "redlock": {**carried, "format": 1}})) != NO_HEADER
    assert unknown_format(carried) == 2
