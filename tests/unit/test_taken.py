"""Which worker has a message, although it goes on while the worker is asked."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.operate.cli.taken import TASK_QUERIES, ids_by_worker

WAYS = (["scheduled", "reserved"], ["reserved", "active"], ["redlock_waiting", "active"])


class OneMessage:
    """Celery's remote control of a worker whose one message goes on after so many questions."""

    def __init__(self, way: Sequence[str], goes_on_after: int) -> None:
        self.way = way
        self.goes_on_after = goes_on_after
        self.asked = 0

    def broadcast(self, command: str, **_: Any) -> list[dict[str, Any]]:
        place = self.way[self.asked >= self.goes_on_after]
        self.asked += 1
        return [{"w1": [{"id": "one"}] if command == place else []}]


@pytest.mark.parametrize("goes_on_after", range(len(TASK_QUERIES) + 1))
@pytest.mark.parametrize("way", WAYS)
def test_a_message_that_goes_on_between_two_questions_is_in_an_answer(
    way: list[str], goes_on_after: int
) -> None:
    app = SimpleNamespace(control=OneMessage(way, goes_on_after))
    assert ids_by_worker(app) == ({"w1": {"one"}}, "")
