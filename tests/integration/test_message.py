"""A deferral keeps the message whole, and nothing of it is ever lost."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from celery import chain, chord, group
from celery.exceptions import MaxRetriesExceededError

from celery_redlock import SettingsError
from celery_redlock.testing import EmbeddedNode
from tests.conftest import eventually
from tests.integration import carried
from tests.integration.conftest import Stage


def test_ten_deferrals_burn_no_retries(stage: Stage) -> None:
    stage.worker(concurrency=1)
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.delay("k")
        stage.see_deferred(result, 10)
    assert stage.tasks.work.max_retries == 0
    assert result.get(timeout=120) == 0  # what the body saw in request.retries
    assert stage.info(result)["status"] == "SUCCESS"


RETRIES = [(0, 0, [0]), (3, 0, [0, 1, 2, 3]), (3, 2, [2, 3]), (None, 0, [0, 1, 2, 3, 4, 5]),
           (None, 4, [4, 5])]  # fmt: skip


def test_ten_deferrals_leave_a_task_all_its_retries_and_the_count_of_those_it_had(
    stage: Stage,
) -> None:
    stage.worker(concurrency=4)
    retried, keys = stage.tasks.retried, [f"k{n}" for n in range(len(RETRIES))]
    with ExitStack() as held:
        for key in keys:
            held.enter_context(retried[0].lock_for(key, wait=60))
        results = [
            retried[most].apply_async((key,), retries=had)
            for key, (most, had, _) in zip(keys, RETRIES, strict=True)
        ]
        for result in results:
            stage.see_deferred(result, 10)
    for (most, _, _), result in zip(RETRIES, results, strict=True):
        if most is None:
            assert result.get(timeout=120) == 5
        else:
            with pytest.raises(MaxRetriesExceededError):
                result.get(timeout=120)
    begun = stage.lines("begin")
    seen = [[line.more["retries"] for line in begun if line.key == key] for key in keys]
    assert seen == [expected for _, _, expected in RETRIES]


def test_a_deferral_keeps_everything_that_a_message_carries(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(nodes, accept_content=["json", "pickle"])
    stage.worker(concurrency=1, queues=["other"])
    carried.send(stage, "fresh", queue="other")
    fresh, none = eventually(
        lambda: carried.seen(stage, "fresh")[0] and carried.seen(stage, "fresh")
    )
    with stage.tasks.shows_its_message.lock_for(wait=60):
        carried.send(stage, "back", queue="other")
        eventually(lambda: len(carried.received(stage, "back")) >= 4)
    back, deferrals = eventually(
        lambda: carried.seen(stage, "back")[0] and carried.seen(stage, "back")
    )
    assert none == 0
    assert deferrals >= 3
    assert carried.own_words(back) == carried.own_words(fresh)
    assert (back["exchange"], back["routing_key"]) == (fresh["exchange"], fresh["routing_key"])
    assert (back["id"], back["correlation_id"]) == ("back", "back")
    received = carried.received(stage, "back")
    assert received == [received[0]] * len(received)
    assert received[0] == {"content_type": "application/x-python-serialize", "delivery_mode": 1}


def test_a_deferral_leaves_expires_where_it_was(stage: Stage) -> None:
    stage.worker(concurrency=1)
    expires = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=900)
    with stage.tasks.shows_its_message.lock_for(wait=60):
        result = stage.tasks.shows_its_message.apply_async(expires=expires, task_id="expiring")
        stage.see_deferred(result, 3)
    seen = eventually(lambda: carried.seen(stage, "expiring")[0])
    assert dt.datetime.fromisoformat(seen["expires"]) == expires


def test_a_task_without_a_parent_does_not_become_its_own(stage: Stage) -> None:
    stage.worker(concurrency=1)
    with stage.tasks.shows_its_message.lock_for(wait=60):
        result = stage.tasks.shows_its_message.apply_async(task_id="orphan")
        stage.see_deferred(result, 2)
    seen = eventually(lambda: carried.seen(stage, "orphan")[0])
    assert (seen["parent_id"], seen["root_id"]) == (None, "orphan")
    assert result.get(timeout=120) is None
    assert not result.children


def test_a_message_that_expires_while_it_waits_is_revoked_and_leaves_nothing(
    stage: Stage,
) -> None:
    stage.worker(concurrency=1)
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.apply_async(("k",), expires=1.0)
        eventually(lambda: stage.info(result)["status"] == "REVOKED")
    assert stage.lines("begin") == []
    stage.see_freed("k:k")


def test_a_chain_goes_on_with_the_real_result_of_a_contended_step(stage: Stage) -> None:
    stage.worker(concurrency=2)
    with stage.tasks.work.lock_for("k", wait=60):
        result = chain(
            stage.tasks.add.si(1), stage.tasks.work.si("k"), stage.tasks.add.s()
        ).apply_async()
        stage.see_deferred(result.parent, 2)
    assert result.get(timeout=120) == 1
    assert len(stage.lines("begin")) == 1


def test_a_chord_of_equal_headers_runs_its_body_once(stage: Stage) -> None:
    stage.worker(concurrency=4)
    header = group(stage.tasks.work.si("k") for _ in range(4))
    assert chord(header)(stage.tasks.gather.s()).get(timeout=120) == 4
    assert len(stage.lines("begin")) == 4
    assert len(stage.lines("gathered")) == 1


def test_callbacks_fire_once_at_the_end_and_not_for_a_deferral(stage: Stage) -> None:
    stage.worker(concurrency=2)
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.apply_async(
            ("k",), link=stage.tasks.gather.si([1]), link_error=stage.tasks.gather.si([2])
        )
        stage.see_deferred(result, 2)
        assert stage.lines("gathered") == []
    stage.wait_for("gathered")
    assert result.get(timeout=120) == 0
    assert len(stage.lines("gathered")) == 1


@pytest.mark.parametrize("late", [True, False], ids=["acks late", "acks early"])
def test_a_broker_that_is_away_while_a_message_is_put_back_loses_none(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode], late: bool
) -> None:
    with EmbeddedNode(appendonly="yes", appendfsync="always") as broker:
        stage = make_stage(
            nodes, broker, broker_transport_options={"visibility_timeout": 8}, result_backend=None
        )
        worker = stage.worker(concurrency=1)
        task = stage.tasks.late if late else stage.tasks.work
        held = task.lock_for("k", wait=60).acquire()
        task.apply_async(("k",), lock={"wait": 9.0}, ignore_result=True)
        # the slot waits for the lock in there; then the broker goes
        eventually(lambda: "received" in worker.output())
        eventually(lambda: broker.client().hlen("unacked") == int(late))
        broker.kill()
        eventually(lambda: "cannot put back" in worker.output())
        held.release()
        broker.start()
        if not late:
            stage.wait_for("end")
            return
        # what was not acknowledged is delivered again when a consumer starts
        eventually(lambda: "Connection to broker lost" in worker.output())
        time.sleep(8)  # the visibility timeout, which kombu alone can see the end of
        stage.worker("w2", concurrency=1)
        stage.wait_for("end")


def test_a_message_keeps_the_options_of_its_call_over_a_deferral(stage: Stage) -> None:
    stage.worker(concurrency=1)
    other = stage.tasks.work.lock_for("elsewhere", wait=60)
    with other:
        result = stage.tasks.work.apply_async(("k",), lock={"key": "k:elsewhere"})
        stage.see_deferred(result, 2)
        assert stage.info(result)["result"]["resource"] == "k:elsewhere"
    assert result.get(timeout=120) == 0


class TestAMessageForAnOlderVersionOfItsTask:
    """It waits while its task is given one more argument."""

    NEWER = "tests.integration.newer"

    def test_fails_with_an_error_that_names_the_task_and_the_way_out_and_waits_no_more(
        self, stage: Stage
    ) -> None:
        with stage.tasks.rebuild.lock_for("k", wait=60):
            older = stage.worker("older", concurrency=1)
            result = stage.tasks.rebuild.delay("k", until="s3cret")
            stage.see_deferred(result)
            older.stop()
            stage.worker("newer", self.NEWER, concurrency=1)
            with pytest.raises(SettingsError) as caught:
                result.get(timeout=120)
            # nobody is skipped for one that has failed
            after = stage.app.send_task(stage.tasks.rebuild.name, ("k", 7))
            stage.see_deferred(after)
        assert after.get(timeout=120) == "k"
        said, name = str(caught.value), stage.tasks.rebuild.name
        assert f"task '{name}': arguments=(1 by position, until by name): do not fit" in said
        assert f"{name}(key, since, *, until=''): missing a required argument: 'since'" in said
        assert "sent for another version of the task" in said
        assert "s3cret" not in said
        stage.see_freed("k:k")

    def test_is_not_retried_for_a_retry_would_not_fit_either(self, stage: Stage) -> None:
        stage.worker("newer", self.NEWER, concurrency=1)
        result = stage.app.send_task(stage.tasks.step.name, ("k",))
        with pytest.raises(SettingsError, match="another version"):
            result.get(timeout=120)
        assert stage.info(result)["status"] == "FAILURE"
        assert stage.lines("begin", "step") == []
