"""How many messages may wait in a worker, and by how much its prefetch changes for them."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.tasks.waiting.dispatch import CAPACITY, Overflow, capacity


@pytest.mark.parametrize(
    ("limit", "prefetch", "expected"),
    [
        (None, 4, CAPACITY),
        (10_000, 4, CAPACITY),
        (CAPACITY + 3, 4, CAPACITY - 1),
        (20, 4, 16),
        (3, 4, 1),
        (None, 0, sys.maxsize),
        (20, 0, sys.maxsize),
    ],
)
def test_the_capacity_stays_below_celerys_limit(
    limit: int | None, prefetch: int, expected: int
) -> None:
    conf = {} if limit is None else {"worker_eta_task_limit": limit}
    assert capacity(conf, prefetch) == expected


@given(st.integers(1, 20), st.lists(st.integers(0, 40)))
def test_the_prefetch_is_taken_back_for_the_messages_above_the_capacity_alone(
    room_for: int, counts: list[int]
) -> None:
    overflow, changes = Overflow(room_for), 0
    for waiting in counts:
        changes += overflow.update(waiting)
        assert waiting + changes == min(waiting, room_for)
        assert overflow.evicts == (waiting > room_for)
