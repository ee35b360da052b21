"""The id of a run has one spelling, which can be read back."""

from __future__ import annotations

import pytest
from celery.app.task import Context
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.errors import RUN
from celery_redlock.lock.model.keys import is_of_run
from celery_redlock.tasks.delivery.run_id import RunId

NAMES = st.from_regex(r"[A-Za-z_][\w.]*", fullmatch=True)
COUNTS = st.integers(min_value=0, max_value=10**6)


@given(st.text(min_size=1), NAMES, COUNTS, COUNTS, st.sampled_from(["", "wide", "a%20b"]))
def test_the_text_of_an_id_is_read_back(
    task_id: str, name: str, retries: int, nesting: int, queue: str
) -> None:
    run = RunId(task_id, name, retries, nesting, queue)
    assert RunId.parse(str(run)) == run


@pytest.mark.parametrize("text", ["", "lock_for tasks.take", "1:t", "1:t:0", "1:t:x:0", ":t:0:0"])
def test_any_other_text_is_no_run(text: str) -> None:
    assert RunId.parse(text) is None


def test_a_retry_and_a_replaced_task_are_runs_of_their_own() -> None:
    request = {"id": "1", "retries": 2, "replaced_task_nesting": 1, "delivery_info": {}}
    assert str(RunId.of("t", Context(request))) == "1:t:2:1"
    assert str(RunId.of("t", Context({"id": "1"}))) == "1:t:0:0"


@pytest.mark.parametrize(
    ("exchange", "queue", "text"),
    [("", "wide", "1:t:0:0"), ("x", "wide", "1:t:0:0@wide"), ("x", None, "1:t:0:0"),
     ("x", "a b@c", "1:t:0:0@a%20b%40c")],
)  # fmt: skip
def test_only_a_copy_of_a_message_to_several_queues_names_its_queue(
    exchange: str, queue: str | None, text: str
) -> None:
    properties = {} if queue is None else {"redlock_queue": queue}
    request = Context(
        {"id": "1", "delivery_info": {"exchange": exchange}, "properties": properties}
    )
    run = RunId.of("t", request)
    assert str(run) == text
    assert str(run.of_all_copies) == "1:t:0:0"


def test_a_label_names_the_run_and_the_worker_as_people_and_nodes_read_them() -> None:
    label = RunId("1", "shop.take").label("celery@host")
    assert label == "1:shop.take:0:0 celery@host"
    found = RUN.fullmatch(label)
    assert found is not None
    assert found.groupdict() == {"task_id": "1", "task": "shop.take", "worker": "celery@host"}
    assert is_of_run(label, "1:shop.take:0:0")
    assert not is_of_run(label, "1:shop.take:0")
