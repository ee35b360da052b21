"""How waiting messages go on to Celery, by a clock that the test turns."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import kombu.asynchronous.timer
import pytest
from celery.worker import state
from celery.worker.control import scheduled
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.model.handoff import LADDER, TURN, Place, Step
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.reporting import StoringThread
from celery_redlock.tasks.waiting.buckets import Buckets
from celery_redlock.tasks.waiting.dispatch import Dispatcher
from celery_redlock.tasks.waiting.loop import EventLoop
from celery_redlock.tasks.waiting.prefetch import Prefetch
from celery_redlock.tasks.waiting.queues import (
    FIRST_PAUSE,
    MessageQueues,
    QueueKey,
    WaitingMessage,
    WaitingTimes,
)
from celery_redlock.tasks.waiting.successor import Successor
from tests.clocks import StoppedClock
from tests.unit.test_delivery import request_of

TIMES = WaitingTimes()
TASK = SimpleNamespace(name="task")
PREFETCH = 4  # of the worker, without waiting messages
DEADLINE = 60.0  # s after a message's arrival


class Timer:
    """What a worker has for a timer, by a clock that a test turns."""

    def __init__(self, clock: StoppedClock) -> None:
        self._clock, self._numbers = clock, itertools.count()
        self._entries: list[tuple[float, int, Callable[[], object]]] = []
        self._cancelled: set[int] = set()

    def call_after(self, seconds: float, call: Any, args: Any = (), priority: int = 0) -> int:
        number = next(self._numbers)
        heapq.heappush(self._entries, (self._clock.time + seconds, number, lambda: call(*args)))
        return number

    def cancel(self, entry: int) -> None:
        self._cancelled.add(entry)

    def turn(self, until: float) -> None:
        while self._entries and self._entries[0][0] <= until:
            at, number, call = heapq.heappop(self._entries)
            self._clock.time = max(at, self._clock.time)
            if number not in self._cancelled:
                call()
        self._clock.time = max(until, self._clock.time)


class Message(SimpleNamespace):
    """What stands for a worker's request."""

    __hash__ = object.__hash__


class Qos:
    """What stands for a consumer's QoS."""

    value = PREFETCH

    def increment_eventually(self) -> None:
        self.value += 1

    def decrement_eventually(self) -> None:
        self.value -= 1


class Heads:
    """What a dispatcher tells of its heads.

    changed: the resources, in order. due: what happens if a head is to look for its lock.
    """

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.due: Callable[[WaitingMessage], object] = str

    def on_head(self, resource: str, first: WaitingMessage | None) -> None:
        said = "" if first is None else f"{first.request.id} is first on "
        self.changed.append(f"{said}{resource}")

    def on_due(self, waiter: WaitingMessage) -> None:
        self.due(waiter)


class Worker:
    """A dispatcher, and as much of a worker as it needs.

    applied: the messages that Celery got, and when. in_bucket: those that wait for their rate.
    apply: what happens as it gets one. A head that is due finds its lock free.
    """

    def __init__(self, *, names_timer: bool = True, capacity: int = 1000) -> None:
        self.clock, self.revoked = StoppedClock(), set[str]()
        self.timer, self.qos, self.names_timer = Timer(self.clock), Qos(), names_timer
        self.applied: list[tuple[str, float]] = []
        self.in_bucket: list[Message] = []
        self.apply: Callable[[Message], object] = lambda message: None
        state = SimpleNamespace(revoked=self.revoked, successful_requests=set[str]())
        self.consumer = SimpleNamespace(
            app=None,
            timer=self.timer,
            hub=None,
            pool=None,
            qos=self.qos,
            controller=SimpleNamespace(state=state),
            apply_eta_task=self._apply,
            disable_rate_limits=False,
            task_buckets=defaultdict(lambda: None),
            _limit_task=lambda message, bucket, tokens: self.in_bucket.append(message),
            _limit_move_to_pool=self._apply,
        )
        self.loop = EventLoop(self.consumer, Platform(self.clock))
        self.heads, self.queues = Heads(), MessageQueues(TIMES)
        self.buckets = Buckets(self.consumer)
        prefetch = Prefetch(self.consumer, self.loop, self.queues, TIMES.eviction_interval)
        states = StoringThread(None, self.loop.call_soon)
        self.dispatcher = Dispatcher(
            self.consumer, self.loop, self.clock, self.queues, self.buckets, prefetch, states
        )
        prefetch.capacity, prefetch.on_evict = capacity, self.dispatcher.dispatch
        self.heads.due = self.dispatcher.dispatch
        self.dispatcher.on_head = self.heads.on_head
        self.dispatcher.on_due = self.heads.on_due

    def _apply(self, message: Message) -> None:
        self.applied.append((message.id, self.clock.time))
        self.apply(message)
        self.qos.decrement_eventually()

    def admit(
        self, id_: str, since: int, resource: str = "a", countdown: float = 100.0,
        *, waits: bool = True, limit: int = 1, **fields: Any,
    ) -> WaitingMessage:  # fmt: skip
        """Let a message wait, as Celery's strategy does. fields: of the message."""
        plain = {"expires": None, "stamped_headers": None, "request_dict": {"properties": {}}}
        message = Message(**{"id": id_, "name": "task", "task": TASK, **plain, **fields})
        eta, deadline = self.clock.time + countdown, self.clock.time + DEADLINE
        waiter = WaitingMessage(message, since, QueueKey(resource, limit), eta, deadline, waits)
        self.dispatcher.add(waiter)
        self.qos.increment_eventually()
        entry = self.timer.call_after(countdown, self.dispatcher.on_eta, (message,))
        if self.names_timer:
            message._eta_timer_entry = entry
        return waiter

    def waiting(self) -> list[WaitingMessage]:
        return sorted(self.queues.all())

    def release(self, resource: str = "a") -> None:
        for head in self.dispatcher.heads_to_run(resource):
            self.dispatcher.dispatch(head)

    @property
    def ids(self) -> list[str]:
        return [id_ for id_, _ in self.applied]


def test_a_release_dispatches_the_head_and_the_next_one_tries_a_moment_after_its_eta() -> None:
    worker = Worker()
    for number in (2, 1, 3):
        worker.admit(f"{number}", number, countdown=10.0)
    worker.timer.turn(until=9.5)
    worker.release()
    assert worker.applied == [("1", 9.5)]
    worker.timer.turn(until=30.0)
    assert worker.applied == [
        ("1", 9.5),
        ("2", 9.5 + TIMES.retry_next_after),
        ("3", 9.5 + 2 * TIMES.retry_next_after),
    ]


def test_a_head_goes_on_though_the_news_of_it_fails() -> None:
    """As that starts threads, which a system may refuse."""

    def fail(resource: str, first: WaitingMessage | None = None) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker()
    head = worker.admit("1", 1)
    worker.dispatcher.on_head = fail
    worker.dispatcher.dispatch(head)
    assert worker.ids == ["1"]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_message_that_no_thread_could_take_holds_up_none_of_those_behind_it(
    limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Celery counts it as in the pool until the worker ends."""

    def fail(message: Message) -> None:
        state.reserved_requests.add(message)
        raise RuntimeError("can't start new thread")

    worker = Worker()
    worker.consumer.pool = SimpleNamespace(num_processes=2)
    first = worker.admit("1", 1, limit=limit)
    worker.admit("2", 2, limit=limit)
    worker.apply = fail
    try:
        worker.release()
        worker.apply = lambda message: None
        assert "cannot dispatch task[1]" in caplog.text
        assert worker.dispatcher.run_of("a") is None
        assert worker.dispatcher.unbegun(first.queue) == 0
        worker.release()
        assert worker.ids == ["1", "2"]
    finally:
        state.reserved_requests.discard(first.request)


def test_a_head_that_is_displaced_waits_for_its_turn() -> None:
    """The dispatched head is back before the next one tried."""
    worker = Worker()
    for number in (1, 2):
        worker.admit(f"{number}", number, countdown=10.0)
    worker.timer.turn(until=9.5)
    worker.release()
    worker.timer.turn(until=9.9)
    worker.admit("1 again", 1)
    worker.timer.turn(until=50.0)
    assert worker.applied == [("1", 9.5)]


def test_a_message_whose_timer_is_a_little_early_waits_for_a_release_all_the_same() -> None:
    """A timer goes by the wall clock, and a waiter's ETA by the monotonic one."""
    worker = Worker()
    worker.admit("head", 1)
    behind = worker.admit("behind", 2, countdown=10.0)
    behind.eta += 0.001
    worker.timer.turn(until=99.0)
    assert worker.applied == [("behind", DEADLINE)]


def test_celery_can_cancel_the_timer_of_a_message_that_waits_past_its_eta() -> None:
    """As it closes a connection, Celery 5.7 cancels the entry that it finds on each request."""
    worker = Worker()
    worker.admit("head", 1)
    behind = worker.admit("behind", 2, countdown=10.0)
    worker.timer.turn(until=11.0)
    assert behind.timer_entry is not None
    assert behind.request._eta_timer_entry == behind.timer_entry
    worker.timer.cancel(behind.request._eta_timer_entry)
    worker.timer.turn(until=99.0)
    assert worker.applied == []


def test_inspect_scheduled_lists_a_message_once_however_often_its_timer_was_set() -> None:
    consumer, entry = SimpleNamespace(timer=kombu.asynchronous.timer.Timer()), None
    loop, request = EventLoop(consumer, Platform(StoppedClock())), request_of({})
    for seconds in (60.0, 10.0, 30.0):  # what is cancelled stays in kombu's timer until its time
        loop.cancel(entry)
        entry = loop.call_after(seconds, print, request)
    listed = scheduled(SimpleNamespace(consumer=consumer))
    assert [one["request"]["id"] for one in listed] == [request.id]
    loop.cancel(entry)
    assert scheduled(SimpleNamespace(consumer=consumer)) == []


def test_a_head_that_is_due_looks_first_and_may_wait_on() -> None:
    worker, looks = Worker(), list[float]()

    def look(head: WaitingMessage) -> None:
        looks.append(worker.clock.time)
        worker.dispatcher.postpone(head, 20.0)

    worker.heads.due = look
    worker.admit("head", 1, countdown=10.0)
    worker.timer.turn(until=99.0)
    assert looks == [10.0, 30.0, 50.0]
    assert worker.applied == [("head", DEADLINE)]


@pytest.mark.parametrize("names_timer", [True, False])
def test_a_head_that_is_postponed_before_its_eta_looks_later(names_timer: bool) -> None:
    """Before Celery 5.7 nobody can cancel Celery's own timer."""
    worker = Worker(names_timer=names_timer)
    head = worker.admit("head", 1, countdown=10.0)
    worker.dispatcher.postpone(head, 25.0)
    worker.timer.turn(until=99.0)
    assert worker.applied == [("head", 25.0)]


def test_the_heads_that_change_are_told() -> None:
    worker = Worker()
    worker.admit("second", 2)
    worker.admit("third", 3)
    worker.admit("first", 1)
    worker.admit("of permits", 4, limit=2)
    assert worker.heads.changed == ["second is first on a", "a", "of permits is first on a"]
    worker.dispatcher.dispatch(worker.waiting()[0])
    assert worker.heads.changed[3:] == ["a"]
    worker.dispatcher.dispatch(worker.waiting()[1])
    assert worker.heads.changed[4:] == []


def worker_with_a_successor() -> tuple[Worker, Successor]:
    """Return a worker whose successor acts unasked, as it has no nodes."""
    worker = Worker()
    successor = Successor(
        worker.loop, worker.clock, TIMES, worker.queues, worker.buckets, worker.dispatcher
    )
    worker.dispatcher.on_head = successor.on_head
    worker.dispatcher.on_due = successor.on_due
    return worker, successor


def name(worker: Worker, successor: Successor, turns: int) -> None:
    """Let a release name the worker behind so many others."""
    now = worker.clock.now()
    successor.on_step("a", Step(LADDER, turns, now), now + turns * TURN)


def test_releases_that_follow_each_other_fast_do_not_put_off_a_turn() -> None:
    worker, successor = worker_with_a_successor()
    worker.admit("one", 1)
    for _ in range(8):
        name(worker, successor, 2)
        worker.timer.turn(until=worker.clock.time + TURN / 2)
    assert worker.applied == [("one", 2 * TURN)]


def test_an_earlier_turn_replaces_the_one_that_is_planned() -> None:
    worker, successor = worker_with_a_successor()
    worker.admit("one", 1)
    name(worker, successor, 2)
    name(worker, successor, 1)
    worker.timer.turn(until=10 * TURN)
    assert worker.applied == [("one", TURN)]


def test_a_turn_comes_though_the_run_before_it_succeeds() -> None:
    """The success makes the look superfluous that is planned for a moment before the turn."""
    worker, successor = worker_with_a_successor()
    for since, id_ in enumerate(("one", "two")):
        worker.admit(id_, since)
    name(worker, successor, 0)
    worker.timer.turn(until=TIMES.retry_next_after - TURN / 2)
    name(worker, successor, 1)
    worker.consumer.controller.state.successful_requests.add("one")
    worker.timer.turn(until=2 * TIMES.retry_next_after)
    assert [id_ for id_, _ in worker.applied] == ["one", "two"]


def test_the_success_of_a_run_does_not_hide_that_the_one_after_it_left_the_lock_free() -> None:
    """The one after it was refused another lock, and no release follows."""
    worker, successor = worker_with_a_successor()
    _, two, _ = (worker.admit(id_, since) for since, id_ in enumerate(("one", "two", "three")))
    name(worker, successor, 0)
    worker.timer.turn(until=TURN)
    successor.ask(two, Step(LADDER))
    worker.consumer.controller.state.successful_requests.add("one")
    worker.timer.turn(until=2 * TIMES.retry_next_after)
    assert [id_ for id_, _ in worker.applied] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("limit", "succeeds", "ids"),
    [
        (1, "at once", ["one"]),
        (1, "later", ["one"]),
        (1, "before", ["one", "two"]),  # an earlier message with the same id
        (2, "at once", ["one", "two"]),  # a release hands on one message, but more may be free
    ],
)
def test_the_next_one_waits_for_the_release_of_a_run_that_succeeds(
    limit: int, succeeds: str, ids: list[str]
) -> None:
    """With many workers each would ask the nodes in vain after each of its runs."""
    worker, successor = worker_with_a_successor()
    succeeded = worker.consumer.controller.state.successful_requests
    if succeeds == "before":
        succeeded.add("one")
    elif succeeds == "at once":
        worker.apply = lambda message: succeeded.add(message.id)
    for since, id_ in enumerate(("one", "two")):
        worker.admit(id_, since, limit=limit)
    name(worker, successor, 0)
    succeeded.add("one")
    worker.timer.turn(until=2 * TIMES.retry_next_after)
    assert worker.ids == ids


@pytest.fixture
def ahead() -> Iterator[tuple[Worker, Successor, Message]]:
    """Give a worker of two slots, one message of which is in its pool; the next one waits."""
    worker, successor = worker_with_a_successor()
    worker.consumer.pool = SimpleNamespace(num_processes=2)
    first, _ = (worker.admit(id_, since) for since, id_ in enumerate(("first", "next")))
    worker.dispatcher.dispatch(first)
    state.reserved_requests.add(first.request)
    yield worker, successor, first.request
    state.reserved_requests.discard(first.request)


@pytest.mark.parametrize(
    ("began", "pause"),  # s since then; s until the next one looks again
    [(None, FIRST_PAUSE), (0.0, TURN), (TIMES.asks_within, 0.0)],
    ids=["it has not begun", "it is about to ask", "it has asked"],
)
def test_the_next_one_does_not_try_while_a_run_of_its_worker_is_to_ask_first(
    ahead: tuple[Worker, Successor, Message], began: float | None, pause: float
) -> None:
    worker, successor, run = ahead
    run.time_start = None if began is None else utc_now().timestamp() - began
    (waiter,) = worker.waiting()
    successor.on_due(waiter)
    assert worker.ids == ["first", "next"][: 1 if pause else 2]
    if pause:
        assert waiter.eta == worker.clock.time + pause


def test_the_next_one_tries_as_a_release_names_its_worker(
    ahead: tuple[Worker, Successor, Message],
) -> None:
    """The run of the worker that is before it has just released."""
    worker, successor, run = ahead
    run.time_start = None
    name(worker, successor, 0)
    assert worker.ids == ["first", "next"]


def test_permits_that_are_free_together_are_asked_for_without_a_pause() -> None:
    worker, successor = worker_with_a_successor()
    free = Place(rank=0, free=3, free_in=0.0)
    inbox: Any = SimpleNamespace(
        is_listening=False, changed=str, ask=lambda name, limit, passed, report: report(free)
    )
    successor.inbox = inbox
    for since, id_ in enumerate(("one", "two", "three")):
        worker.admit(id_, since, limit=3)
    name(worker, successor, 0)
    worker.timer.turn(until=TURN)
    asked = TIMES.ask_next_after
    assert worker.applied == [("one", 0.0), ("two", asked), ("three", asked)]


def fail() -> None:
    raise ConnectionError("backend")


@pytest.mark.parametrize(
    ("fields", "is_passed"),
    [
        ({"expires": utc_now() - timedelta(seconds=1)}, True),
        ({"expires": utc_now() + timedelta(days=1)}, False),
        ({"stamped_headers": ["of"], "revoked": lambda: True}, True),
        ({"stamped_headers": ["of"], "revoked": lambda: False}, False),
        ({"stamped_headers": ["of"], "revoked": fail}, True),  # its end could not be stored
        ({"revoked": fail}, False),
    ],
)
def test_a_release_passes_one_that_is_not_to_run_any_more(
    fields: dict[str, Any], is_passed: bool
) -> None:
    worker = Worker()
    worker.admit("first", 1, **fields)
    worker.admit("next", 2)
    worker.release()
    assert worker.ids == (["first", "next"] if is_passed else ["first"])


def test_what_a_closed_room_held_is_not_dispatched_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    waiter = worker.admit("of the old connection", 1)
    worker.queues.forget()
    worker.dispatcher.forget()
    worker.dispatcher.dispatch(waiter)
    assert worker.applied == []
    assert worker.waiting() == []
    assert not caplog.records


def test_cancelled_messages_are_dispatched_and_leave_the_others_where_they_are() -> None:
    worker = Worker()
    for number in range(4):
        worker.admit(f"{number}", number)
    worker.revoked |= {"0", "2"}
    worker.dispatcher.sweep()
    assert worker.ids == ["0", "2"]
    assert [waiter.request.id for waiter in worker.waiting()] == ["1", "3"]


def test_above_the_capacity_the_last_ones_are_dispatched_one_by_one() -> None:
    worker = Worker(capacity=2)
    for number in range(5):
        worker.admit(f"{number}", number)
    assert worker.qos.value == PREFETCH + 2
    worker.timer.turn(until=TIMES.eviction_interval)
    assert worker.ids == ["4"]
    worker.timer.turn(until=1.0)
    assert worker.ids == ["4", "3", "2"]
    assert worker.qos.value == PREFETCH + 2


@given(st.integers(1, 20), st.lists(st.integers(0, 40), max_size=20))
def test_the_prefetch_is_taken_back_for_the_messages_above_the_capacity_alone(
    room_for: int, counts: list[int]
) -> None:
    worker, waiting, numbers = Worker(capacity=room_for), list[WaitingMessage](), itertools.count()
    for count in counts:
        while len(waiting) < count:
            number = next(numbers)
            waiting.append(worker.admit(f"{number}", number))
        while len(waiting) > count:
            worker.dispatcher.dispatch(waiting.pop())
        assert worker.qos.value == PREFETCH + min(count, room_for)


arrivals = st.lists(
    st.tuples(
        st.floats(0.0, 30.0),  # s since the one before
        st.integers(0, 9),
        st.sampled_from("ab"),
        st.floats(0.0, 50.0),
        st.booleans(),
        st.sampled_from(["", "releases a", "releases b", "cannot be applied", "sweeps"]),
    ),
    max_size=20,
)


@given(arrivals, st.integers(1, 5), st.booleans())
def test_every_message_goes_on_exactly_once_and_in_time_with_or_without_a_release(
    messages: list[tuple[float, int, str, float, bool, str]], capacity: int, names_timer: bool
) -> None:
    worker = Worker(names_timer=names_timer, capacity=capacity)
    latest: dict[str, float] = {}
    broken: set[str] = set()

    def apply(message: Message) -> None:
        if message.id in broken:
            raise ConnectionError("backend")

    worker.apply = apply
    for number, (seconds, since, resource, countdown, waits, then) in enumerate(messages):
        worker.timer.turn(until=worker.clock.time + seconds)
        id_ = f"{number}"
        waiter = worker.admit(id_, since, resource, countdown, waits=waits)
        latest[id_] = max(waiter.eta, waiter.deadline) if waits else waiter.eta
        if then == "cannot be applied":
            broken.add(id_)
            worker.dispatcher.dispatch(waiter)
        elif then == "sweeps":
            worker.revoked.add(id_)
            worker.dispatcher.sweep()
        elif then:
            before = [w.request.id for w in worker.queues.heads(then[-1])]
            count = len(worker.applied)
            worker.release(then[-1])
            assert worker.ids[count:] == before
    worker.timer.turn(until=worker.clock.time + DEADLINE + 50.0)
    assert sorted(worker.ids) == sorted(latest)
    assert all(at <= latest[id_] + 1e-6 for id_, at in worker.applied)
    assert worker.waiting() == []
    assert worker.qos.value == PREFETCH + len(broken)  # Celery had not lowered it for those


def test_a_message_that_waits_for_no_lock_is_the_run_of_none() -> None:
    worker = Worker()
    worker.consumer.pool = SimpleNamespace(num_processes=2)
    for resource, run in (("", False), ("a", True)):
        waiter = worker.admit(f"of {resource}", 1, resource)
        state.reserved_requests.add(waiter.request)
        worker.dispatcher.dispatch(waiter)
        assert (worker.dispatcher.run_of(resource) is waiter.request) == run
        state.reserved_requests.discard(waiter.request)


def test_a_message_of_a_task_with_a_rate_limit_waits_for_its_rate_and_the_next_one_for_it() -> None:
    worker = Worker()
    worker.consumer.task_buckets["task"] = object()
    first, second = worker.admit("first", 1), worker.admit("second", 2)
    worker.dispatcher.dispatch(first)
    assert worker.in_bucket == [first.request]
    assert worker.dispatcher.heads_to_run("a") == []
    assert worker.dispatcher.unaccepted() == [first.request]
    worker.buckets.on_token(first.request)
    assert worker.applied == [("first", 0.0)]
    assert worker.dispatcher.unaccepted() == []
    assert worker.dispatcher.heads_to_run("a") == [second]


@pytest.mark.parametrize("leaves_first", ["first", "cancelled"])
def test_a_cancelled_message_that_leaves_lets_the_others_wait_on_for_the_rate(
    leaves_first: str,
) -> None:
    worker = Worker()
    worker.consumer.task_buckets["task"] = object()
    first, cancelled, third = (
        worker.admit(id_, since) for since, id_ in enumerate(("first", "cancelled", "third"))
    )
    worker.dispatcher.dispatch(first)
    worker.revoked.add("cancelled")
    worker.dispatcher.sweep()
    assert worker.in_bucket == [first.request, cancelled.request]
    leaves = first if leaves_first == "first" else cancelled
    worker.buckets.on_token(leaves.request)
    # the cancelled one neither takes the place of the one before it, nor makes it free
    assert worker.dispatcher.heads_to_run("a") == ([third] if leaves is first else [])
