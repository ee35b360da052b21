"""Questions to a silent server do not pile up in a process that goes on."""

from __future__ import annotations

import threading

from celery_redlock.operate.cli.group import MOST_UNANSWERED, within_deadline
from tests.conftest import eventually


def test_while_many_questions_have_no_answer_no_other_one_is_asked() -> None:
    answer = threading.Event()
    for _ in range(MOST_UNANSWERED):
        said, cause = within_deadline(answer.wait, 0.0)
        assert said is None
        assert "no answer" in cause
    before = threading.active_count()
    said, cause = within_deadline(answer.wait, 0.0)
    assert said is None
    assert cause == f"{MOST_UNANSWERED} earlier questions have no answer yet"
    assert threading.active_count() == before
    answer.set()
    assert eventually(lambda: within_deadline(lambda: 7) == (7, ""))
