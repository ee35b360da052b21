"""What is stored and sent of a run, where the result backend fails or a time limit strikes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.backends.base import KeyValueStoreBackend
from celery.events.state import State
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import task_revoked

from celery_redlock.tasks.reporting import MAX_PENDING, StateReporter, StoringThread
from tests.conftest import eventually


class Backend(KeyValueStoreBackend):
    """A result backend that keeps nothing, or that fails as a test says."""

    persistent = True
    error: BaseException | None = None

    def get(self, key: Any) -> Any:
        return self._answer()

    def set(self, key: Any, value: Any) -> Any:
        return self._answer()

    def mget(self, keys: Any) -> Any:
        return [self._answer() for _ in keys]

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error


Make = Callable[[BaseException | None], Any]


@pytest.fixture
def make_task() -> Make:
    """Give a function that makes a task whose result backend raises an error at each call."""

    def make(error: BaseException | None) -> Any:
        app = Celery("states", broker="memory://", set_as_default=False)

        @app.task(name="unit.states", shared=False)
        def task() -> None: ...

        task.backend = Backend(app)
        task.backend.error = error
        return task

    return make


def a_request() -> Context:
    return Context({"id": "1", "retries": 0, "delivery_info": {}}, called_directly=False)


def test_a_soft_limit_that_strikes_as_started_is_stored_ends_the_run(make_task: Make) -> None:
    """A body that began after its own limit would run for as long as it likes."""
    with pytest.raises(SoftTimeLimitExceeded):
        StateReporter(make_task(SoftTimeLimitExceeded()), a_request()).started(was_deferred=False)


def test_a_soft_limit_that_strikes_as_monitors_are_told_of_a_start_ends_the_run(
    make_task: Make,
) -> None:
    def send(*_: Any, **fields: Any) -> None:
        raise SoftTimeLimitExceeded

    with pytest.raises(SoftTimeLimitExceeded):
        StateReporter(make_task(None), a_request(), send).started(was_deferred=True)


def test_a_task_that_sends_no_events_sends_none_of_its_lock(make_task: Make) -> None:
    task, sent = make_task(None), []
    for task.send_events in (False, True):
        reporter = StateReporter(task, a_request(), lambda event, **_: sent.append(event))
        reporter.started(was_deferred=True)
        assert sent == (["task-retried", "task-started"] if task.send_events else [])


def test_a_backend_that_is_away_as_started_is_stored_lets_the_body_run(
    make_task: Make, caplog: pytest.LogCaptureFixture
) -> None:
    StateReporter(make_task(OSError("backend")), a_request()).started(was_deferred=False)
    assert "cannot report the state" in caplog.text


def test_a_body_that_can_be_aborted_does_not_begin_if_its_state_cannot_be_read(
    make_task: Make,
) -> None:
    def is_aborted(task_id: str) -> bool:
        raise OSError("backend")

    task = make_task(None)
    task.is_aborted = is_aborted
    with pytest.raises(OSError, match="backend"):
        StateReporter(task, a_request()).started(was_deferred=False)


def test_of_a_backend_that_cannot_be_read_no_message_is_dropped(make_task: Make) -> None:
    """An end that nobody knows of is none: else the only delivery would be let go of."""
    reporter = StateReporter(make_task(OSError("backend")), a_request())
    assert not reporter.has_final_state()
    assert not reporter.has_final_state(if_none_wanted=True)


@pytest.mark.parametrize("end", ["revoked", "expired", "started"])
def test_a_monitor_leaves_deferred_and_its_reason_with_each_end(make_task: Make, end: str) -> None:
    shown, clock = State(), itertools.count(1)

    def send(kind: str, **fields: Any) -> None:
        at = {"timestamp": next(clock), "local_received": next(clock), "clock": next(clock)}
        shown.event({"type": kind, "uuid": "1", "hostname": "w1@here", "pid": 1, **at, **fields})

    reporter, why = StateReporter(make_task(None), a_request(), send), "k: held by another"
    send("task-received", name="unit.states")
    reporter.deferred({"resource": "k", "deferrals": 1, "waited": 0.0, "next_try": "later"}, why)
    assert (shown.tasks["1"].state, shown.tasks["1"].result[:7]) == ("DEFERRED", "k: k: h")
    if end == "started":
        reporter.started(was_deferred=True)
    else:
        reporter.revoked(end, was_deferred=True)
    task = shown.tasks["1"]
    assert task.state == ("STARTED" if end == "started" else "REVOKED")
    assert (task.result, task.exception, task.traceback) == (None, None, None)


def test_receivers_hear_of_what_the_gate_revokes_as_of_what_celery_does(make_task: Make) -> None:
    task, request, told = make_task(None), a_request(), []

    def hear(sender: Any, request: Any, **how: Any) -> None:
        told.append((sender, request, how["terminated"], how["expired"]))

    task_revoked.connect(hear, sender=task)
    for reason in ("expired", "revoked"):
        StateReporter(task, request).revoked(reason, was_deferred=False)
    assert told == [(task, request, False, True), (task, request, False, False)]


class Storing:
    """A thread that stores states in a result backend that hangs until a test says.

    stored, lost: the names of the states, in order. failing: those that fail once. ended: the final
    states after which their message was acknowledged.
    """

    def __init__(self, *, is_final: bool = False) -> None:
        self.thread = StoringThread(SimpleNamespace(backend=None), lambda call: call())
        self.stored, self.lost, self.failing = list[str](), list[str](), set[str]()
        self.error: type[BaseException] = OSError
        self.ended: list[str] = []
        self.answers = threading.Event()
        self.put("1", "first", is_final=is_final)
        eventually(lambda: self.stored)

    def put(self, id_: str, name: str, *, is_final: bool = False) -> None:
        def store() -> None:
            self.stored.append(name)
            assert self.answers.wait(60)
            if name in self.failing:
                self.failing.remove(name)
                raise self.error("backend")

        then = (lambda: self.ended.append(name)) if is_final else None
        lost = lambda cause: self.lost.append(name)  # noqa: E731
        self.thread.put(id_, store, lost, then)


@pytest.fixture
def storing() -> Iterator[Storing]:
    made = Storing()
    yield made
    made.answers.set()


def test_a_message_runs_once_the_store_of_its_state_has_ended(storing: Storing) -> None:
    ended, others = threading.Event(), list[str]()
    assert not storing.thread.withdraw("1", ended.set)
    assert storing.thread.withdraw("2", lambda: others.append("2"))
    assert not ended.is_set()
    storing.answers.set()
    assert ended.wait(60)
    assert storing.thread.withdraw("1", ended.clear)
    assert others == []


def test_of_a_message_that_runs_meanwhile_no_state_is_stored_but_a_final_one(
    storing: Storing,
) -> None:
    storing.put("2", "second")
    storing.put("3", "third")
    storing.put("3", "revoked", is_final=True)
    storing.put("4", "fourth")
    for id_ in "23":
        assert storing.thread.withdraw(id_, str)
    storing.answers.set()
    eventually(lambda: storing.stored == ["first", "revoked", "fourth"])
    assert storing.lost == []


@pytest.mark.parametrize("keeps_ends", [True, False])
def test_of_messages_that_the_broker_delivers_anew_only_final_states_are_stored(
    storing: Storing, keeps_ends: bool
) -> None:
    storing.put("2", "second")
    storing.put("3", "revoked", is_final=True)
    storing.thread.forget(keeps_ends=keeps_ends)
    storing.answers.set()
    storing.thread.flush()
    assert storing.stored == ["first", "revoked"]
    assert storing.ended == ["revoked"] * keeps_ends  # else by a connection that is lost


def test_a_message_that_comes_anew_is_acknowledged_once_its_new_delivery_has_an_end(
    storing: Storing,
) -> None:
    storing.put("2", "revoked", is_final=True)
    storing.thread.forget()
    storing.put("2", "revoked again", is_final=True)
    assert storing.ended == []
    storing.answers.set()
    eventually(lambda: storing.ended == ["revoked again"])


def test_a_message_whose_end_is_just_being_stored_is_not_acknowledged_by_a_lost_connection() -> (
    None
):
    storing = Storing(is_final=True)
    storing.thread.forget()
    storing.answers.set()
    storing.put("2", "second", is_final=True)
    eventually(lambda: storing.ended == ["second"])


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_final_state_that_cannot_be_stored_is_stored_later(
    storing: Storing, error: type[BaseException]
) -> None:
    storing.put("2", "second")
    storing.put("3", "revoked", is_final=True)
    storing.failing, storing.error = {"second", "revoked"}, error
    storing.answers.set()
    eventually(lambda: storing.ended == ["revoked"])
    assert storing.stored == ["first", "second", "revoked", "revoked"]
    assert storing.lost == ["second"]


def test_a_message_is_acknowledged_once_its_final_state_is_stored_or_replaced(
    storing: Storing,
) -> None:
    storing.put("2", "revoked", is_final=True)
    storing.put("2", "revoked again", is_final=True)
    assert storing.ended == ["revoked"]
    storing.put("3", "expired", is_final=True)
    storing.answers.set()
    eventually(lambda: storing.ended == ["revoked", "revoked again", "expired"])
    assert storing.stored == ["first", "revoked again", "expired"]


def test_states_above_a_bound_are_lost_but_no_final_ones(storing: Storing) -> None:
    for number in range(MAX_PENDING):
        storing.put(f"m{number}", "kept")
    storing.put("one more", "dropped")
    storing.put("m0", "newer")
    storing.put("another", "revoked", is_final=True)
    assert storing.lost == ["dropped"]
