"""What else may happen to messages that wait in a worker, and to the worker meanwhile."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from celery_redlock import LockTaken
from celery_redlock.testing import EmbeddedNode
from tests.clocks import HOUR, WallClock
from tests.conftest import Nodes, eventually
from tests.integration.conftest import STANDING, MakeStage, Stage

LONG = {"first": 1e7, "cap": 1e7}
WOKEN = 60.0  # s: well before the end of `patient`'s countdown of 100 s
WORKER = STANDING


def defer(stage: Stage, key: str, name: str) -> Any:
    """Send a task, and return its result once it waits."""
    result = stage.tasks.patient.delay(key, name)
    stage.see_deferred(result)
    return result


def test_a_rate_limit_of_celery_holds_for_plain_tasks_with_a_countdown(
    stage: Stage, key: str
) -> None:
    """Also under another name, by which monitors show them."""
    plain, where = stage.tasks.add, stage.see_listening()
    limit = functools.partial(
        stage.app.control.rate_limit, plain.name, destination=where, reply=True, timeout=60
    )
    limit(rate_limit="1/h")
    try:
        results = [plain.apply_async(countdown=1, shadow="nightly") for _ in range(3)]
        eventually(lambda: any(result.ready() for result in results))
        assert stage.tasks.work.delay(key).get(timeout=60) == 0
        assert not all(result.ready() for result in results)  # Celery lets the first two run
    finally:
        limit(rate_limit="0")
    for result in results:
        result.revoke()


def test_those_that_were_revoked_by_a_stamp_are_seen_to_be_while_they_wait(
    stage: Stage, key: str
) -> None:
    stamp = {"stamped_headers": ["of"], "of": "x", "headers": {"of": "x"}}
    with stage.tasks.patient.lock_for(key, wait=60):
        stamped = [
            task.apply_async((key,), lock={"backoff": LONG}, **stamp)
            for task in (stage.tasks.patient, stage.tasks.late, stage.tasks.patient)
        ]
        for result in stamped:
            stage.see_deferred(result)
        one = defer(stage, key, "one")
        stage.app.control.revoke_by_stamped_headers({"of": "x"})
        for result in stamped:
            eventually(lambda result=result: result.status == "REVOKED", within=WOKEN)
    assert one.get(timeout=WOKEN) == "one"


def test_a_restart_of_the_broker_ends_no_worker_in_which_messages_wait(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    with EmbeddedNode() as broker:
        stage = make_stage(nodes, broker, result_backend=nodes[0].url, redlock_max_ttl=200)
        worker = stage.worker(concurrency=2)
        with stage.tasks.patient.lock_for("k", wait=60):
            defer(stage, "k", "a")
            connected = worker.output().count("Connected to ")
            broker.kill()
            eventually(lambda: "Cannot connect to " in worker.output())
            broker.start()
            eventually(lambda: worker.output().count("Connected to ") > connected)
            assert stage.tasks.patient.delay("other", "b").get(timeout=WOKEN) == "b"


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_a_wait_that_began_at_a_worker_with_another_clock_goes_on_in_time(
    own_stage: Stage, wall_clock: WallClock, ahead: int
) -> None:
    stage = own_stage
    wall_clock.set(ahead)
    clocked = replace(stage, env={**stage.env, **wall_clock.environment}).worker("w1")
    budget = {"max_wait": 4}
    with stage.tasks.work.lock_for("held", wait=60):
        for node in stage.nodes:
            node.client().set("{redlock}:lock:k:left", "of a dead holder", px=8_000)
        timed = stage.tasks.work.apply_async(("held",), lock=budget)
        freed = stage.tasks.work.delay("left")
        freed_in_time = stage.tasks.work.apply_async(("left",), lock={"max_wait": 600})
        for one in (timed, freed, freed_in_time):
            stage.see_deferred(one)
        clocked.stop()
        stage.worker("w2")
        assert [freed.get(timeout=120), freed_in_time.get(timeout=120)] == [0, 0]
        with pytest.raises(LockTaken) as caught:
            timed.get(timeout=120)
    assert 4 <= caught.value.waited < HOUR / 2
