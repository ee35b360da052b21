from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

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
