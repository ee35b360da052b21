"""At most N bodies of a key begin in any period, over all workers; each message gets its turn."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_redlock import LockTaken
from tests.conftest import Nodes, eventually, settled
from tests.integration.conftest import STANDING, MakeStage, Stage, Standing, pools

WORKER = STANDING
STARTS, PERIOD = 10, 1.0  # of `rated`


def most_in_a_period(stage: Stage, key: str, period: float = PERIOD) -> int:
    """Return the most starts of a key that were counted in any half-open period.

    A busy machine may let a body write later than the next one that its rate allows.
    """
    at = sorted(line.at for line in stage.lines("begin") if line.key == key)
    return max(sum(first <= each < first + period for each in at) for first in at)


@pytest.mark.xdist_group("two workers")
def test_no_period_has_more_starts_than_its_rate_over_two_workers(
    of_two: Standing, key: str
) -> None:
    stage = of_two.stage
    results = [stage.tasks.rated.delay(key) for _ in range(35)]
    for result in results:
        result.get(timeout=120)
    assert stage.runs_of(key) == 35
    assert most_in_a_period(stage, key) <= STARTS


@pytest.mark.parametrize("pool", pools("gevent"))
def test_each_message_that_waits_for_a_rate_starts_when_its_start_is_due(
    of_pool: Standing, key: str
) -> None:
    """A gevent worker keeps its timers in greenlets: one that cancelled itself asked no more."""
    stage, slow = of_pool.stage, {"rate": "1/s"}
    results = [stage.tasks.rated.apply_async((key,), lock=slow) for _ in range(5)]
    for result in results:
        result.get(timeout=60)
    assert most_in_a_period(stage, key) == 1


def test_a_message_whose_rate_is_used_up_says_so_and_when_its_next_start_is(
    stage: Stage, key: str
) -> None:
    hourly = {"rate": "1/h"}
    stage.tasks.rated.apply_async((key,), lock=hourly).get(timeout=120)
    waiting = stage.tasks.rated.apply_async((key,), lock=hourly)
    stage.see_deferred(waiting)
    info = stage.info(waiting)["result"]
    assert (info["resource"], info["rate"]) == (f"rated:{key}", "1/h")
    in_s = (datetime.fromisoformat(info["next_start"]) - datetime.now(UTC)).total_seconds()
    assert 3000 < in_s <= 3700
    waiting.revoke()


def test_a_throttle_skips_and_a_strict_caller_fails(stage: Stage, key: str) -> None:
    def send(on_conflict: str) -> Any:
        how = {"rate": "1/h", "on_conflict": on_conflict}
        return stage.tasks.rated.apply_async((key,), lock=how)

    send("defer").get(timeout=120)  # before the others are sent: of several slots any may be first
    skipped, failed = send("skip"), send("fail")
    eventually(lambda: skipped.ready() and failed.ready())
    with pytest.raises(TaskRevokedError, match=r"rate of rated:.*: 1/h, next start in \d+ s"):
        skipped.get()
    with pytest.raises(LockTaken) as refused:
        failed.get()
    assert (refused.value.rate, stage.runs_of(key)) == ("1/h", 1)


def test_a_retry_is_a_start(stage: Stage, key: str) -> None:
    result = stage.tasks.rated.apply_async((key, 1), lock={"rate": "2/h"})
    result.get(timeout=120)
    assert stage.runs_of(key) == 2
    third = stage.tasks.rated.apply_async((key,), lock={"rate": "2/h"})
    stage.see_deferred(third)
    third.revoke()


def test_a_run_that_its_lock_refuses_uses_up_no_start(stage: Stage, key: str) -> None:
    with settled(stage.nodes) as other, other.lock(f"rated:{key}"):
        alone = {"rate": "2/h", "limit": 1}
        results = [stage.tasks.rated.apply_async((key,), lock=alone) for _ in range(3)]
        for result in results:
            stage.see_deferred(result)
            assert "rate" not in stage.info(result)["result"]
    eventually(lambda: stage.runs_of(key) == 2)
    eventually(lambda: sum(result.ready() for result in results) == 2)
    [late] = [result for result in results if not result.ready()]
    eventually(lambda: stage.info(late)["result"].get("rate") == "2/h")
    late.revoke()


@pytest.mark.slow
def test_a_body_that_is_killed_has_used_up_its_start_and_its_redelivery_takes_another(
    make_stage: MakeStage, nodes: Nodes, key: str
) -> None:
    stage = make_stage(nodes)
    stage.worker("w1", concurrency=2)
    call = stage.tasks.rated_late.apply_async((key, True))
    call.get(timeout=120)
    first, second = stage.lines("begin")
    assert (first.more["id"], second.more["id"]) == (call.id, call.id)
    third = stage.tasks.rated_late.apply_async((key, False))
    stage.see_deferred(third)
    assert stage.info(third)["result"]["rate"] == "2/h"
    third.revoke()
