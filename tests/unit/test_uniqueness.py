from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redlock.tasks.unique.claim import ClaimToken
from celery_redlock.tasks.unique.send import unique_name

texts = st.text(alphabet="t:%1", min_size=1, max_size=5)
sends = st.tuples(texts, st.lists(texts, min_size=1, max_size=2).map(tuple))


@given(sends, sends)
@example(("t", ("1",)), ("t", ("t:1",)))
@example(("t", ("1:2",)), ("t:1", ("2",)))
@example(("t:", ("1",)), ("t", (":1",)))
def test_what_two_tasks_or_two_keys_send_is_no_duplicate(
    one: tuple[str, tuple[str, ...]], other: tuple[str, tuple[str, ...]]
) -> None:
    assert (unique_name(*one) == unique_name(*other)) == (one == other)


def test_what_is_sent_once_is_named_by_task_and_resource() -> None:
    assert unique_name("shop.sync", ("stock:42",)) == "shop.sync:stock:42"


TOKEN = {"name": "t:k", "token": "0f" * 16, "until": "finished"}


@pytest.mark.parametrize(
    "strange",
    [
        {"token": "0"}, {"token": ""}, {"token": "0f" * 16 + "0"}, {"token": "x" * 32},
        {"until": "never"}, {"name": ""}, {"replaces": 7}, {"kept_for": math.nan},
        {"kept_for": math.inf}, {"kept_for": -1}, {"ends_at": 10**400}, {"ends_at": None},
    ],
)  # fmt: skip
def test_a_token_that_no_sender_wrote_counts_as_absent(strange: dict[str, Any]) -> None:
    assert ClaimToken.of(TOKEN) is not None
    assert ClaimToken.of({**TOKEN, **strange}) is None
