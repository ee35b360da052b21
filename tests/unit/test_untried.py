"""Which messages are deferred without a try, and what is told of them; in a worker's main process.

Each test sends a message, and gives it to the receiver as Celery's strategy does.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.utils.imports import symbol_by_name
from celery.worker import state
from freezegun import freeze_time
from kombu import Connection, Queue
from kombu.common import Broadcast

from celery_redlock import LockedTask
from celery_redlock.errors import Deferred
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.node_status import ask_nodes
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.signals import LockDeferredEvent, lock_deferred
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.delivery.header import HEADER, Deferral, LockHeader
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.untried import defer_untried
from celery_redlock.tasks.waiting.queues import QueueKey, WaitingTimes
from celery_redlock.tasks.waiting.room import WaitingRoom
from tests.clocks import StoppedClock
from tests.conftest import eventually

REMEMBERED = WaitingTimes().remember_refusal
HOLDER, LEASE = "pid 7 on host", 30.0
EVERYBODY = Broadcast("everybody")
EARLIER = "2026-01-01T00:00:00+00:00"
A_REQUEST = SimpleNamespace(id="another", name="task", task=SimpleNamespace(name="task"))


class Consumer(SimpleNamespace):
    """What stands for Celery's consumer."""

    __hash__ = object.__hash__


class Worker:
    """A worker's room, to which `k:held` was refused just now; its nodes are never asked.

    events: the kinds of those sent, with their fields.
    """

    def __init__(self) -> None:
        self.app = Celery("untried", broker="memory://", set_as_current=False)
        self.app.conf.update(
            result_backend="cache+memory://",
            redlock_nodes=["redis://nowhere"],
            task_queues=[Queue("celery"), EVERYBODY],
        )
        self.clock = StoppedClock()
        self.consumer = Consumer(
            app=self.app,
            hub=None,
            pool=None,
            timer=SimpleNamespace(cancel=str),
            qos=None,
            task_buckets=defaultdict(lambda: None),
            disable_rate_limits=False,
            apply_eta_task=str,
            create_task_handler=str,
            _limit_move_to_pool=str,
            _limit_task=str,
            connection_for_read=str,
        )
        with self.app.connection_for_write() as connection:  # kombu keeps it for the whole process
            connection.default_channel.queue_declare("celery")
            connection.default_channel.queue_purge("celery")
        self.room = WaitingRoom(self.consumer, platform=Platform(self.clock))
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.refuse("k:held")

    def refuse(
        self,
        resource: str,
        limit: int = 1,
        expires_in: float | None = LEASE,
        *,
        is_taken: bool = True,
    ) -> None:
        """End a run of this worker that was refused a lock."""
        refused = Deferral(
            resource=resource, holder=HOLDER, limit=limit, expires_in=expires_in, is_taken=is_taken
        )
        self.room.note_refusal(refused)

    def task(self, **options: Any) -> LockedTask:
        """Declare a task whose lock is that of its argument."""
        options = {"lock_key": "k:{key}", "name": f"task{len(self.app.tasks)}", **options}

        @self.app.task(base=LockedTask, shared=False, **options)
        def body(key: str) -> None: ...

        made: LockedTask = self.app.tasks[options["name"]]
        return made

    def receive(
        self, task: LockedTask, *, change: Callable[[Any], object] = str, **how: Any
    ) -> Any:
        """Send a call, and return its request once the receiver has seen it.

        change: what is done to the message on its way. how: as of `apply_async`.
        """
        task.apply_async(**{"args": ("held",), **how})
        with self.app.connection_for_read() as connection:
            message = take(connection)
        change(message)
        eventer = SimpleNamespace(enabled=True, send=self._note)
        request = symbol_by_name(task.Request)(
            message, app=self.app, task=task, eventer=eventer, hostname="host"
        )
        defer_untried(self.consumer, request)
        return request

    def _note(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))


def take(connection: Connection) -> Any:
    queue = connection.SimpleQueue("celery")
    try:
        message = queue.get(timeout=60)
        message.ack()
        return message
    finally:
        queue.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.app.close()


def with_header(**fields: Any) -> Callable[[Any], object]:
    """Return what gives a message a header of ours."""

    def change(message: Any) -> None:
        message.headers[HEADER] = LockHeader(id=message.headers["id"], **fields).to_message()

    return change


def redelivered(message: Any) -> None:
    message.delivery_info["redelivered"] = True


def fanned_out(message: Any) -> None:
    message.delivery_info["exchange"] = EVERYBODY.exchange.name


def test_a_message_whose_lock_was_refused_just_now_waits_without_a_try(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    task, signals = worker.task(), list[LockDeferredEvent]()

    def note(event: LockDeferredEvent, **_: Any) -> None:
        signals.append(event)

    lock_deferred.connect(note, sender=task)
    with caplog.at_level(logging.INFO, "celery_redlock"), freeze_time(EARLIER):
        request = worker.receive(task)
        now = utc_now()

    header = request.delivery.header
    assert header.id == request.id
    deferral = header.deferral
    assert (deferral.count, deferral.since, deferral.at) == (1, now.timestamp(), now.timestamp())
    assert (deferral.resources, deferral.resource) == (("k:held",), "k:held")
    assert deferral.waits_for_release
    countdown = deferral.countdown
    assert countdown > 0
    assert request.eta == now + timedelta(seconds=countdown)
    assert header.to_message() == request.request_dict[HEADER]  # which a pool gets

    stored = task.AsyncResult(request.id)
    eventually(lambda: stored.status == "DEFERRED")
    info = {"resource": "k:held", "holder": HOLDER, "deferrals": 1, "waited": 0.0}
    assert {name: stored.info[name] for name in info} == info
    ((kind, fields),) = worker.events
    assert (kind, fields["uuid"]) == ("task-deferred", request.id)
    assert {name: fields[name] for name in info} == info
    assert signals == [LockDeferredEvent("k:held", HOLDER, 1, 0.0, countdown)]
    held = f"deferred: lock 'k:held' is held by {HOLDER}; it waits for a release"
    assert deferrals(caplog) == [f"Task {task.name}[{request.id}] {held}"]


def deferrals(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [one for one in caplog.records if one.__dict__.get("event") == "run_deferred"]
    return [one.getMessage() for one in records]


def test_a_line_has_no_time_but_that_of_its_wait(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "celery_redlock"):
        first = worker.receive(worker.task(lock_max_wait=60.0)).delivery.header.deferral
        worker.receive(worker.task(), expires=3600.0)
        worker.refuse("k:held", limit=3)
        worker.receive(worker.task(lock_limit=3))
    ends = [line.partition(" is held by ")[2] for line in deferrals(caplog)]
    assert ends[0] == f"{HOLDER}; it waits for a release, for {first.countdown:.2f} s at most"
    assert ends[1].endswith(" s at most")
    assert ends[2] == "3 holders, its limit; it waits for a release"


def test_a_refusal_is_soon_forgotten(worker: Worker) -> None:
    task = worker.task()
    worker.clock.time += REMEMBERED / 2
    assert worker.receive(task).eta is not None
    worker.clock.time += REMEMBERED / 2
    assert worker.receive(task).eta is None


@pytest.mark.parametrize(("lease", "left"), [(LEASE, LEASE - 0.5), (0.25, 0.0), (None, None)])
def test_a_refusal_says_what_is_left_of_the_lease(
    worker: Worker, lease: float | None, left: float | None
) -> None:
    worker.refuse("k:held", expires_in=lease)
    worker.clock.time += 0.5
    refusal = worker.room.refusal_of(A_REQUEST, [QueueKey("k:held", 1)])
    assert refusal is not None
    assert (refusal.resource, refusal.holder, refusal.expires_in) == ("k:held", HOLDER, left)


def test_a_run_of_the_worker_refuses_other_messages_and_not_its_own(worker: Worker) -> None:
    worker.consumer.pool = SimpleNamespace(num_processes=2)
    task, asked = worker.task(), [QueueKey("k:other", 1)]
    run = worker.receive(task, args=("other",))
    assert run.eta is None
    state.reserved_requests.add(run)
    try:
        assert worker.room.refusal_of(run, asked) is None  # its message, delivered once more
        refusal = worker.room.refusal_of(A_REQUEST, asked)
        assert refusal is not None
        assert (refusal.resource, refusal.expires_in) == ("k:other", None)
        assert run.id in refusal.holder
    finally:
        state.reserved_requests.discard(run)


def knows_that_its_node_is_away(session: Session) -> bool:
    """Return whether the worker knows it: a busy machine may look the name up for longer."""
    ask_nodes(session)
    return all(node.error is not None for node in session.nodes.all)


def test_a_message_behind_a_run_without_a_quorum_is_not_told_that_the_run_holds_its_lock(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.consumer.pool = SimpleNamespace(num_processes=2)
    session = redlock_of(worker.app).session
    task = worker.task()
    run = worker.receive(task, args=("other",))
    state.reserved_requests.add(run)
    first = f"{task.name}[{run.id}] on host"
    try:
        with caplog.at_level(logging.INFO, "celery_redlock"):
            eventually(lambda: knows_that_its_node_is_away(session))
            waits = worker.receive(task, args=("other",))
            worker.receive(worker.task(lock_max_wait=60.0), args=("other",))
    finally:
        state.reserved_requests.discard(run)
    ends = [line.partition(" deferred: lock 'k:other' is ")[2] for line in deferrals(caplog)]
    assert ends[0] == f"needed first by {first}; it waits behind that task"
    assert ends[1].startswith(f"needed first by {first}; it waits behind that task, for ")
    stored = eventually(lambda: task.AsyncResult(waits.id).info)
    assert run.id in stored["holder"]


def test_a_run_for_which_no_quorum_voted_says_nothing_of_its_lock(worker: Worker) -> None:
    worker.refuse("k:other", is_taken=False)
    assert worker.room.refusal_of(A_REQUEST, [QueueKey("k:other", 1)]) is None


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"lock_key": "k:held"}, {}),
        ({"lock_key": ["k:free", "k:{key}"]}, {}),
        ({"lock_on_conflict": "defer"}, {}),
        ({"lock_max_wait": 60}, {}),
        ({"acks_late": True}, {}),
        ({"lock_on_unreachable": "fail"}, {}),
        ({}, {"expires": 60}),
        ({}, {"retries": 2}),
        ({"lock_key": "k:{key}-2"}, {"lock": {"key": "k:{key}"}}),
        ({"lock_on_conflict": "fail"}, {"lock": {"on_conflict": "defer"}}),
        ({"lock_wait": 5}, {"lock": {"wait": 0}}),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_message_of_which_the_lock_alone_decides_waits(
    worker: Worker, options: dict[str, Any], how: dict[str, Any]
) -> None:
    assert worker.receive(worker.task(**options), **how).eta is not None


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"lock_key": lambda task, args, kwargs: f"k:{args[0]}"}, {}),
        ({"lock_key": False}, {}),
        ({"name": "celery.own"}, {}),  # it takes no lock
        ({"lock_on_conflict": "skip"}, {}),
        ({"lock_on_conflict": "fail"}, {}),
        ({"lock_on_conflict": lambda contention: "defer"}, {}),
        ({"lock_wait": 5}, {}),
        ({"lock_limit": 2}, {}),
        ({"acks_late": True}, {"change": redelivered}),
        ({}, {"change": with_header(waits=1)}),
        ({}, {"change": with_header(deferral=Deferral(since=1.0))}),
        ({}, {"change": with_header(deferral=Deferral(at=1.0))}),
        ({}, {"change": with_header(unique={"name": "n"})}),
        ({}, {"change": fanned_out}),
        ({}, {"countdown": 60}),
        ({}, {"args": ("free",)}),
        ({}, {"lock": {"key": "k:{key}-2"}}),
        ({}, {"lock": {"on_conflict": "skip"}}),
        ({}, {"lock": {"wait": 5}}),
        ({}, {"lock": {"limit": 2}}),
        ({}, {"change": with_header(options={"no_such_option": 1})}),
        ({}, {"change": with_header(options={"key": "k:{nothing}"})}),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_message_of_which_a_run_decides_tries(
    worker: Worker, options: dict[str, Any], how: dict[str, Any]
) -> None:
    had_an_eta = "countdown" in how
    request = worker.receive(worker.task(**options), **how)
    assert (request.eta is not None) == had_an_eta
    assert worker.events == []
    assert task_state(request) == "PENDING"


def task_state(request: Any) -> str:
    return str(request.task.AsyncResult(request.id).status)


def test_of_a_task_with_a_rate_limit_one_message_of_each_lock_waits_for_its_rate(
    worker: Worker,
) -> None:
    task = worker.task()
    worker.consumer.task_buckets[task.name] = object()
    assert worker.receive(task).eta is not None
    first = worker.receive(task, args=("other",))
    assert first.eta is None
    assert worker.receive(task, args=("other",)).eta is not None
    assert worker.receive(worker.task(), args=("other",)).eta is None  # of a task without a limit
    permits = {"lock": {"limit": 2}}
    assert [worker.receive(task, args=("free",), **permits).eta for _ in "12"] == [None, None]
    worker.consumer._limit_move_to_pool(first)
    assert worker.receive(task, args=("other",)).eta is None


def test_a_lost_connection_forgets_which_message_waits_for_its_rate(worker: Worker) -> None:
    task = worker.task()
    worker.consumer.task_buckets[task.name] = object()
    assert worker.receive(task, args=("other",)).eta is None
    worker.room.stop(worker.consumer)
    assert worker.receive(task, args=("other",)).eta is None


def test_a_budget_of_waiting_goes_into_the_countdown(worker: Worker) -> None:
    deferral = worker.receive(worker.task(lock_max_wait=0.01)).delivery.header.deferral
    assert deferral.countdown <= 0.01
    assert not deferral.waits_for_release


def test_a_message_of_a_task_without_a_lock_is_let_alone(worker: Worker) -> None:
    @worker.app.task(shared=False)
    def plain(key: str) -> None: ...

    assert worker.receive(plain).eta is None


def test_the_end_of_a_refused_run_lets_the_next_message_wait(worker: Worker) -> None:
    task = worker.task()
    first = worker.receive(task, args=("other",))
    assert first.eta is None
    deferral = Deferral(resource="k:other", holder=HOLDER, expires_in=LEASE)
    deferred = Deferred(LockHeader(deferral=deferral))
    first.on_failure(SimpleNamespace(type=Deferred, exception=deferred))
    request = worker.receive(task, args=("other",))
    assert request.eta is not None
    stored = eventually(lambda: task.AsyncResult(request.id).info)
    assert stored["holder"] == HOLDER
