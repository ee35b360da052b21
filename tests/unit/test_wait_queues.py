"""The queues of one worker's waiters: who is the head, who follows, and who may try when."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from celery_redlock.tasks.waiting.queues import (
    MessageQueues,
    QueueKey,
    QuorumHistory,
    WaitingMessage,
    WaitingTimes,
    priority_order,
)

TIMES = WaitingTimes()
RETRY_NEXT_AFTER, AT_MOST = TIMES.retry_next_after, TIMES.retry_next_at_most  # s
LATER = 10_000.0  # monotonic s: no deadline of a test is after that


class Message:
    """What stands for a worker's request."""


def waiter(
    since: float, resource: str = "a", limit: int = 1, deadline: float = LATER, priority: int = 0
) -> WaitingMessage:
    queue = QueueKey(resource, limit)
    return WaitingMessage(
        Message(), since, queue, 0.0, deadline, waits_for_release=True, priority=priority
    )


def queued(*sinces: float) -> tuple[MessageQueues, Sequence[WaitingMessage]]:
    queues, waiters = MessageQueues(TIMES), [waiter(since) for since in sinces]
    for each in waiters:
        queues.add(each)
    return queues, waiters


@pytest.mark.parametrize(
    ("driver", "in_order"),
    [("redis", [0, 1, 9]), ("amqp", [9, 1, 0]), ("mongodb", [9, 1, 0]), ("SQS", [1, 9, 0])],
)
def test_priorities_are_in_the_order_of_the_broker(driver: str, in_order: list[int]) -> None:
    assert sorted([1, 9, 0], key=lambda each: priority_order(each, driver)) == in_order


@pytest.mark.parametrize("nonsense", [None, "9", [], {}, math.nan, math.inf])
def test_nonsense_is_the_priority_of_a_message_without_one(nonsense: object) -> None:
    assert [priority_order(nonsense, driver) for driver in ("redis", "amqp")] == [0, 0]


@pytest.mark.parametrize("since", [1, 3], ids=["deferred before", "deferred after"])
def test_while_the_dispatched_head_tries_the_next_one_holds_back_for_a_moment(since: int) -> None:
    queues = MessageQueues(TIMES)
    urgent, again, plain = (waiter(s, priority=p) for s, p in ((2, 1), (2, 1), (since, 2)))
    queues.add(urgent)
    queues.remove(urgent, 100.0)
    queues.add(plain)
    assert queues.retry_in(plain, 100.25) == RETRY_NEXT_AFTER - 0.25
    assert queues.retry_in(plain, 100.0 + RETRY_NEXT_AFTER) == 0.0
    queues.add(again)
    assert queues.retry_in(again, 100.25) == 0.0


def test_the_next_one_holds_back_for_longer_if_the_lock_comes_round_less_often() -> None:
    queues, (first, second, third, fourth, fifth) = queued(1, 2, 3, 4, 5)
    first.came_at = 100.0
    queues.remove(first, 102.0, is_named=True)
    assert queues.retry_in(second, 102.0) == 4.0
    queues.remove(second, 103.5, is_named=True)
    assert queues.retry_in(third, 103.5) == 3.0
    queues.remove(third, 160.0, is_named=True)
    assert queues.retry_in(fourth, 160.0) == AT_MOST
    queues.remove(fourth, 161.5)  # it found its lock free by itself: no release is to be counted on
    assert queues.retry_in(fifth, 161.5) == RETRY_NEXT_AFTER


def test_a_resource_without_waiters_is_known_until_it_is_forgotten() -> None:
    queues, (first,) = queued(1)
    queues.remove(first, 100.0)
    queues.forget_empty(100.0)
    assert queues.resources() == {"a"}
    queues.forget_empty(100.1)
    assert queues.resources() == set()
    queues.add(waiter(2))
    queues.forget_empty(math.inf)
    assert queues.resources() == {"a"}


def test_a_postponed_head_looks_at_its_new_time_and_at_its_deadline_at_the_latest() -> None:
    queues, (head, _) = queued(1, 2)
    head.eta, head.is_postponed = 30.0, True
    assert queues.retry_in(head, 10.0) == 20.0
    head.deadline = 15.0
    assert queues.retry_in(head, 10.0) == 5.0


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_an_eviction_keeps_the_order_of_those_that_stay(
    messages: list[tuple[int, str, bool]],
) -> None:
    queues = MessageQueues(TIMES)
    for since, resource, waits in messages:
        each = waiter(since, resource)
        each.waits_for_release = waits
        queues.add(each)
    while (evicted := queues.last_of_longest()) is not None:
        queue = queues.on(evicted.queue.name)
        longest = max((queues.on(resource) for resource in "ab"), key=len)
        assert len(queue) == len(longest) or not any(w.waits_for_release for w in longest)
        behind = queue[queue.index(evicted) + 1 :]
        assert not [each for each in behind if each.waits_for_release]
        queues.remove(evicted, 0.0)
        assert queues.on(evicted.queue.name) == [w for w in queue if w is not evicted]
    assert queues.waiting_for_release == 0


class Queues(RuleBasedStateMachine):
    """Messages come and go in any order, while the clock goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.here = 0.0, list[WaitingMessage]()
        self.queues = MessageQueues(TIMES)

    @rule(seconds=st.floats(0.0, 40.0))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        order=st.tuples(st.integers(0, 2), st.integers(0, 9)),
        resource=st.sampled_from("ab"),
        limit=st.integers(1, 2),
        countdown=st.floats(0.0, 20.0),
        waits=st.booleans(),
    )
    def add(
        self, order: tuple[int, int], resource: str, limit: int, countdown: float, waits: bool
    ) -> None:
        priority, since = order
        new = waiter(since, resource, limit, self.now + 30.0, priority)
        new.eta, new.waits_for_release = self.now + countdown, waits
        before = self.queue_of(new)
        displaced = self.queues.add(new)
        self.here.append(new)
        is_head = self.queue_of(new)[0] is new
        assert displaced is (before[0] if is_head and before else None)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.here))
        before = self.queue_of(gone)
        following = self.queues.remove(gone, self.now, is_named=data.draw(st.booleans()))
        self.here.remove(gone)
        after = self.queue_of(gone)
        assert following is (after[0] if before[0] is gone and after else None)
        if following is not None and following.eta <= self.now and following.waits_for_release:
            seconds = self.queues.retry_in(following, self.now)
            left = max(0.0, following.deadline - self.now)
            rounding = 1e-9  # a difference of two floats
            least = RETRY_NEXT_AFTER if following.queue.limit == 1 else TIMES.ask_next_after
            assert min(least, left) - rounding <= seconds <= min(AT_MOST, left) + rounding

    @rule()
    def forget_empty(self) -> None:
        self.queues.forget_empty(self.now)

    def queue_of(self, one: WaitingMessage) -> list[WaitingMessage]:
        return sorted(each for each in self.here if each.queue == one.queue)

    @invariant()
    def nobody_is_lost(self) -> None:
        assert self.queues.all() == self.here
        found = [each for resource in "ab" for each in self.queues.on(resource)]
        assert sorted(found) == sorted(self.here)
        assert all(self.queues.of(each.request) is each for each in self.here)
        assert {each.queue.name for each in self.here} <= self.queues.resources()
        waiting = [each for each in self.here if each.waits_for_release]
        assert self.queues.waiting_for_release == len(waiting)

    @invariant()
    def waiters_are_in_order(self) -> None:
        heads = [each for resource in "ab" for each in self.queues.heads(resource)]
        assert sorted(heads) == sorted({self.queue_of(each)[0] for each in self.here})
        for each in self.here:
            assert self.queues.head(each.queue) is self.queue_of(each)[0]
            in_order = [w for w in self.queues.on(each.queue.name) if w.queue == each.queue]
            assert in_order == self.queue_of(each)

    @invariant()
    def only_the_head_tries_before_its_deadline(self) -> None:
        for each in self.here:
            seconds = self.queues.retry_in(each, self.now)
            left = max(0.0, each.deadline - self.now)
            if each.eta > self.now or not each.waits_for_release:
                assert seconds is None
            elif self.queue_of(each)[0] is each:
                assert seconds is not None
                assert seconds <= min(AT_MOST, left) + 1e-9  # of rounding
            else:
                assert seconds == left


TestQueues = Queues.TestCase


def test_a_message_misses_the_return_of_a_quorum_once() -> None:
    history = QuorumHistory()
    assert not history.claim("task", 0.0)
    history.record(100.0, {"task"})
    assert not history.claim("task", 50.0)
    assert not history.claim("another task", 100.1)
    assert history.claim("another task", 100.0)
    assert not history.claim("another task", 100.0)


@pytest.mark.parametrize("rate", ["", "0/s", "1/0 s", "1001/m", "5/99999 s", "often"])
def test_a_rate_of_a_strange_message_counts_as_none(rate: str) -> None:
    assert QueueKey.of("a", 3, rate) == QueueKey("a", 3)
