"""A deferral keeps the message whole, and nothing of it is ever lost."""

from __future__ import annotations

import datetime as dt
import json
import time
from contextlib import ExitStack

import pytest
from celery.exceptions import MaxRetriesExceededError

from celery_redlock import SettingsError
from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually
from tests.integration import carried
from tests.integration.conftest import STANDING, MakeStage, Stage

WORKER = STANDING
OFTEN = {"max_wait": 3600}  # so that it does not wait for a release alone


RETRIES = [(0, 0, [0]), (3, 0, [0, 1, 2, 3]), (3, 2, [2, 3]), (None, 0, [0, 1, 2, 3, 4, 5]),
           (None, 4, [4, 5])]  # fmt: skip


def test_ten_deferrals_leave_a_task_all_its_retries_and_the_count_of_those_it_had(
    stage: Stage, key: str
) -> None:
    retried, keys = stage.tasks.retried, [f"{key}-{n}" for n in range(len(RETRIES))]
    with ExitStack() as held:
        for each in keys:
            held.enter_context(retried[0].lock_for(each, wait=60))
        results = [
            retried[most].apply_async((each,), retries=had, lock=OFTEN)
            for each, (most, had, _) in zip(keys, RETRIES, strict=True)
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
    seen = [[line.more["retries"] for line in begun if line.key == each] for each in keys]
    assert seen == [expected for _, _, expected in RETRIES]


def test_a_deferral_keeps_everything_that_a_message_carries(stage: Stage, key: str) -> None:
    fresh_id, back_id = f"{key}-fresh", f"{key}-back"
    with stage.consumed(key) as queue:
        carried.send(stage, fresh_id, queue=queue)
        fresh, none = eventually(
            lambda: carried.seen(stage, fresh_id)[0] and carried.seen(stage, fresh_id)
        )
        with stage.tasks.shows_its_message.lock_for(wait=60):
            carried.send(stage, back_id, queue=queue)
            eventually(lambda: len(carried.received(stage, back_id)) >= 2)
        back, deferrals = eventually(
            lambda: carried.seen(stage, back_id)[0] and carried.seen(stage, back_id)
        )
    assert none == 0
    assert deferrals >= 1
    assert carried.own_words(back) == carried.own_words(fresh)
    assert (back["exchange"], back["routing_key"]) == (fresh["exchange"], fresh["routing_key"])
    assert (back["id"], back["correlation_id"]) == (back_id, back_id)
    received = carried.received(stage, back_id)
    assert received == [received[0]] * len(received)
    assert received[0] == {"content_type": "application/x-python-serialize", "delivery_mode": 1}


@pytest.mark.parametrize("late", [False, True])
def test_a_deferral_leaves_eta_and_expires_where_they_were(
    stage: Stage, key: str, late: bool
) -> None:
    eta = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=30)
    expires = eta + dt.timedelta(seconds=900)
    task = stage.tasks.shows_its_message_late if late else stage.tasks.shows_its_message
    with task.lock_for(wait=60):
        result = task.apply_async(eta=eta, expires=expires, task_id=key, lock=OFTEN)
        stage.see_deferred(result, 2)
    seen = eventually(lambda: carried.seen(stage, key)[0])
    assert dt.datetime.fromisoformat(seen["eta"]) == eta
    assert dt.datetime.fromisoformat(seen["expires"]) == expires


def test_a_task_without_a_parent_does_not_become_its_own(stage: Stage, key: str) -> None:
    with stage.tasks.shows_its_message.lock_for(wait=60):
        result = stage.tasks.shows_its_message.apply_async(task_id=key)
        stage.see_deferred(result)
    seen = eventually(lambda: carried.seen(stage, key)[0])
    assert (seen["parent_id"], seen["root_id"]) == (None, key)
    assert result.get(timeout=120) is None
    assert not result.children


@pytest.mark.slow
@pytest.mark.every_celery
@pytest.mark.parametrize("late", [True, False], ids=["acks late", "acks early"])
def test_a_broker_that_is_away_while_a_message_is_put_back_loses_none(
    make_stage: MakeStage, nodes: Nodes, late: bool
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
        eventually(lambda: any(n.client().exists("{redlock}:waiting:k:k") for n in nodes))
        eventually(lambda: broker.client().hlen("unacked") == int(late))
        broker.kill()
        eventually(lambda: "cannot republish" in worker.output())
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


def test_a_deferral_goes_past_what_is_for_sends_alone(make_stage: MakeStage, nodes: Nodes) -> None:
    stage = make_stage(nodes)
    conf = {**json.loads(stage.env["TEST_CONF"]), "task_always_eager": True}  # the worker's alone
    stage.env["TEST_CONF"] = json.dumps(conf)
    stage.worker(concurrency=1)
    task = stage.tasks.sent_once
    with task.lock_for("k", wait=60):
        result = task.apply_async(("k",))
        stage.see_deferred(result)
    assert result.get(timeout=60) == 0
    assert len(stage.lines("applied")) == 1
    assert len(stage.lines("begin")) == 1


def test_a_deferral_keeps_the_arguments_as_they_came(stage: Stage, key: str) -> None:
    task = stage.tasks.of_a_tenant
    with task.lock_for(key, wait=60):
        result = task.apply_async((key,), {"_tenant": "acme", "_locale": "fr"})
        stage.see_deferred(result)
    assert result.get(timeout=60) == "acme, fr"


def test_a_deferral_keeps_headers_beside_one_that_is_called_headers(stage: Stage, key: str) -> None:
    """As where an instrumentation wraps its own in one of that name."""
    task, ours = stage.tasks.shows_its_headers, {"trace": "1", "x-own": "v", "headers": {"b": 2}}
    fresh = task.apply_async(("fresh",), headers=ours).get(timeout=60)
    with task.lock_for(key, wait=60):
        result = task.apply_async((key,), headers=ours, lock=OFTEN)
        stage.see_deferred(result)
    assert result.get(timeout=60) == fresh == [{"b": 2}, "v"]


def test_a_deferral_keeps_what_a_send_gave_to_its_publisher(stage: Stage) -> None:
    carried.see_properties_kept(stage, user_id="somebody", shop_user=3, shop_branch={"id": "b"})


def test_a_message_for_an_older_version_of_its_task_fails_and_is_not_retried(
    own_stage: Stage,
) -> None:
    """It waits while its task is given one more argument; a retry would not fit either."""
    stage = own_stage
    with stage.tasks.rebuild.lock_for("k", wait=60):
        older = stage.worker("older", concurrency=1)
        result = stage.tasks.rebuild.apply_async(("k",), {"until": "s3cret"}, lock=OFTEN)
        stage.see_deferred(result)
        older.stop(timeout=60)  # killed, it would not give back what waits in it
        stage.worker("newer", "tests.integration.newer", concurrency=1)
        with pytest.raises(SettingsError) as caught:
            result.get(timeout=120)
        after = stage.app.send_task(stage.tasks.rebuild.name, ("k", 7))
        stage.see_deferred(after)
    assert after.get(timeout=120) == "k"
    said, name = str(caught.value), stage.tasks.rebuild.name
    assert f"task '{name}': arguments=(1 by position, until by name): do not fit" in said
    why = "missing 1 required positional argument: 'since'"
    assert f"{name}(key, since, *, until=''): {why}" in said
    assert "sent for another version of the task" in said
    assert "s3cret" not in said
    stage.see_freed("k:k")
    autoretried = stage.app.send_task(stage.tasks.step.name, ("k",))
    with pytest.raises(SettingsError, match="another version"):
        autoretried.get(timeout=120)
    assert stage.info(autoretried)["status"] == "FAILURE"
    assert stage.lines("step") == []
