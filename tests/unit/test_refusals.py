"""What a worker knows of refusals, by a clock that the test turns."""

from __future__ import annotations

from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.waiting.queues import QueueKey
from celery_redlock.tasks.waiting.refusals import KnownRefusal, Refusals

QUEUE, OTHER = QueueKey("a", 1), QueueKey("a", 2)


class StoppedClock(SystemClock):
    """A clock that goes on as a test turns it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 100.0
        self.now = lambda: self.time


def refusals() -> tuple[Refusals, StoppedClock]:
    clock = StoppedClock()
    return Refusals(clock, remembered=1.0), clock


def test_a_refusal_is_one_for_the_messages_of_the_next_moment() -> None:
    known, clock = refusals()
    assert known.of(QUEUE, waits=False) is None
    known.note(QUEUE, "holder", 30.0)
    clock.time += 0.5
    assert known.of(QUEUE, waits=False) == KnownRefusal(100.5, "holder", 29.5)
    assert known.of(OTHER, waits=False) is None
    clock.time += 0.5
    assert known.of(QUEUE, waits=False) is None


def test_a_lease_that_is_over_or_unknown_says_so() -> None:
    known, clock = refusals()
    known.note(QUEUE, "holder", 0.25)
    known.note(OTHER, "holder", None)
    clock.time += 0.5
    assert known.of(QUEUE, waits=False) == KnownRefusal(100.5, "holder", 0.0)
    assert known.of(OTHER, waits=False) == KnownRefusal(100.0, "holder", None)


def test_while_a_message_waits_the_next_one_is_refused_by_the_last_known_holder() -> None:
    known, clock = refusals()
    assert known.of(QUEUE, waits=True) == KnownRefusal(100.0)
    known.note(QUEUE, "holder", 30.0)
    clock.time += 60.0
    assert known.of(QUEUE, waits=True) == KnownRefusal(160.0, "holder")


def test_only_what_is_new_or_waited_for_is_kept() -> None:
    known, clock = refusals()
    known.note(QUEUE, "holder", 30.0)
    known.note(OTHER, "holder", 30.0)
    clock.time += 2.0
    known.keep(lambda queue: queue == OTHER)
    assert known.is_known
    assert known.of(OTHER, waits=True) == KnownRefusal(102.0, "holder")
    assert known.of(QUEUE, waits=True) == KnownRefusal(102.0)
    known.keep(lambda queue: False)
    assert not known.is_known
