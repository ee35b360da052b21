"""How many messages may wait in a worker."""

from __future__ import annotations

import sys

import pytest

from celery_redlock.tasks.waiting.prefetch import CAPACITY, capacity


@pytest.mark.parametrize(
    ("limit", "prefetch", "expected"),
    [
        (None, 4, CAPACITY), (10_000, 4, CAPACITY), (CAPACITY + 3, 4, CAPACITY - 1), (20, 4, 16),
        (3, 4, 1), (None, 0, sys.maxsize), (20, 0, sys.maxsize),
    ],
)  # fmt: skip
def test_the_capacity_stays_below_celerys_limit(
    limit: int | None, prefetch: int, expected: int
) -> None:
    conf = {} if limit is None else {"worker_eta_task_limit": limit}
    assert capacity(conf, prefetch) == expected
