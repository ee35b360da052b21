"""The id of a run has one spelling, and no other run has it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.app.task import Context
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.label import Holder, RunId, is_of_run, label_of_run, run_of_label
from celery_redlock.tasks.delivery.delivery import SEEN, Delivery

TASK = SimpleNamespace(name="t", acks_late=False)
FEW = st.integers(min_value=0, max_value=11)
RUNS = st.builds(
    RunId, st.text(":+@1t", min_size=1, max_size=5), st.sampled_from("t1"), FEW, FEW,
    st.sampled_from(["", "1", "a%20b"]), FEW,
)  # fmt: skip


@given(RUNS, RUNS)
def test_no_other_run_has_the_text_of_an_id(one: RunId, other: RunId) -> None:
    assert (str(one) == str(other)) == (one == other)


def test_a_retry_and_a_replaced_task_are_runs_of_their_own() -> None:
    request = {"id": "1", "retries": 2, "replaced_task_nesting": 1, "delivery_info": {}}
    assert str(Delivery(TASK, Context(request)).run_id) == "1:t:2:1"
    assert str(Delivery(TASK, Context({"id": "1"})).run_id) == "1:t:0:0"


@pytest.mark.parametrize(
    ("exchange", "queue", "text"),
    [("", "wide", "1:t:0:0"), ("x", "wide", "1:t:0:0@wide"), ("x", None, "1:t:0:0"),
     ("x", "a b@c", "1:t:0:0@a%20b%40c")],
)  # fmt: skip
def test_only_a_copy_of_a_message_to_several_queues_names_its_queue(
    exchange: str, queue: str | None, text: str
) -> None:
    properties = {} if queue is None else {SEEN: {"queue": queue}}
    request = Context(
        {"id": "1", "delivery_info": {"exchange": exchange}, "properties": properties}
    )
    run = Delivery(TASK, request).run_id
    assert str(run) == text
    assert str(run.of_all_copies) == "1:t:0:0"


def test_a_label_names_the_run_and_the_worker_as_people_and_nodes_read_them() -> None:
    label = label_of_run(str(RunId("1", "shop.take")), "celery@host")
    assert label == "1:shop.take:0:0 celery@host"
    assert Holder.of(label) == Holder(label, "1", "shop.take", "celery@host")
    assert run_of_label(label) == "1:shop.take:0:0"
    assert is_of_run(label, "1:shop.take:0:0")
    assert not is_of_run(label, "1:shop.take:0")
