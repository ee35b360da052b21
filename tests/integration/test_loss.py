"""A lock lost in mid-run: its body is told where its pool can, and never ends as SUCCESS."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from celery_redlock import LockLost
from tests.clocks import HOUR, WallClock
from tests.conftest import TTL, eventually
from tests.integration.conftest import Stage, overlaps, slow_but
from tests.integration.deliveries import heard

INTERRUPTING = ("prefork", "solo", "gevent")
POOLS = (*INTERRUPTING, "threads")
FAST = ("prefork",)
WAYS = ("sleeps", "works in steps", "logs", "takes others")


def take_away(stage: Stage, key: str) -> None:
    """Let the lock of a key be another's on all nodes; the holder finds out when it renews."""
    for node in stage.nodes:
        node.client().set(f"{{redlock}}:lock:k:{key}", "theirs", px=300_000)


def outcome(stage: Stage, result: Any) -> Any:
    eventually(lambda: stage.info(result)["status"] in ("SUCCESS", "FAILURE"), within=120)
    return stage.info(result)["result"]


def see_lost(stage: Stage, result: Any, body: str = "its body had not ended") -> None:
    lost = outcome(stage, result)
    assert isinstance(lost, LockLost), lost
    assert body in str(lost)


def lose_in_mid_run(stage: Stage, task: Any, key: str, how: str) -> Any:
    """Run a body of a kind, and take its lock away once it runs."""
    result = task.delay(key, how)
    eventually(lambda: any(line.key == key for line in stage.lines("begin")))
    take_away(stage, key)
    return result


@pytest.mark.parametrize("pool", slow_but(FAST, INTERRUPTING))
def test_a_body_is_interrupted_whatever_it_does(stage: Stage, pool: str) -> None:
    stage.worker(pool=pool, concurrency=1)
    early, late = stage.tasks.holds_on, stage.tasks.holds_on_late
    for how in (*WAYS, "computes") if pool in ("prefork", "solo") else WAYS:
        result = lose_in_mid_run(stage, late if how == "sleeps" else early, how, how)
        see_lost(stage, result)
        assert not stage.is_free(f"k:{how}"), "its release touched another's key"
        told = [line for line in stage.lines("told") if line.key == how]
        assert [line.more for line in told] == [{"ended": False}]
    assert outcome(stage, stage.tasks.work.delay("another")) == 0, "its child lives on"
    stage.see_freed("k:takes others-0", "k:takes others-4")


@pytest.mark.parametrize("ahead", slow_but([HOUR], [HOUR, -HOUR]), ids=["forward", "back"])
def test_a_workers_wall_clock_that_is_set_changes_nothing_under_a_held_lock(
    stage: Stage, wall_clock: WallClock, ahead: int
) -> None:
    stage.worker("rival", queues=["waiting"], concurrency=1)
    stage.env.update(wall_clock.environment)
    stage.worker("clocked", queues=["held"], concurrency=1)
    result = stage.tasks.waits.apply_async(("k",), queue="held")
    stage.wait_for("begin")
    wall_clock.set(ahead)
    rival = stage.tasks.work.apply_async(("k",), queue="waiting")
    for _ in range(4):  # more than the ttl
        see_renewed(stage, "k")
    stage.see_deferred(rival)
    assert len(stage.lines("begin")) == 1
    stage.log.with_name("go on").touch()
    assert result.get(timeout=120) is None
    assert [line.more["held"] for line in stage.lines("waited")] == [True]
    assert rival.get(timeout=120) == 0
    assert not overlaps(stage.intervals()["k"])
    stage.see_freed("k:k")
    clocked = stage.tasks.clock.apply_async(queue="held").get(timeout=120)
    assert abs(clocked - time.time() - ahead) < HOUR / 2, "its clock was not set"


def see_renewed(stage: Stage, key: str) -> None:
    client, name = stage.nodes[0].client(), f"{{redlock}}:lock:k:{key}"
    end = time.monotonic() + client.pttl(name) / 1000
    eventually(lambda: time.monotonic() + client.pttl(name) / 1000 > end + TTL / 10)


def test_a_thread_is_told_when_it_asks(stage: Stage) -> None:
    stage.worker(pool="threads", concurrency=1)
    result = lose_in_mid_run(stage, stage.tasks.holds_on, "k", "asks")
    see_lost(stage, result)


@pytest.mark.parametrize("pool", slow_but(FAST, POOLS))
def test_a_body_that_ends_without_its_lock_is_no_success(stage: Stage, pool: str) -> None:
    stage.worker(pool=pool, concurrency=1)
    task = stage.tasks.swallows
    see_lost(stage, lose_in_mid_run(stage, task, "returns", "return"), "its body had ended")
    assert isinstance(outcome(stage, lose_in_mid_run(stage, task, "raises", "raise")), ValueError)
    ignored = lose_in_mid_run(stage, task, "ignores", "ignore")
    eventually(lambda: stage.lines("swallowed:ignore"))
    retried = task.delay("retries", "retry")
    eventually(lambda: any(line.key == "retries" for line in stage.lines("begin")))
    for node in stage.nodes:  # for a while only: the retry takes it anew
        node.client().delete("{redlock}:lock:k:retries")
    assert outcome(stage, retried) == "again"
    assert stage.info(ignored)["status"] != "SUCCESS"


@pytest.mark.slow
def test_a_greenlet_that_never_gives_way_is_renewed(stage: Stage) -> None:
    stage.worker(pool="gevent", concurrency=2)
    result = stage.tasks.gives_nobody_way.delay("k", TTL + 2, in_c=False)
    assert outcome(stage, result) is True


@pytest.mark.slow
def test_a_body_that_keeps_the_interpreter_for_itself_is_no_success(stage: Stage) -> None:
    stage.worker(concurrency=1)
    result = stage.tasks.gives_nobody_way.delay("k", TTL + 2, in_c=True)
    see_lost(stage, result, "its body had")
    stage.see_freed("k:k")


def test_autoretry_covers_a_loss_where_the_task_says_so(stage: Stage) -> None:
    stage.worker(concurrency=1)
    assert outcome(stage, stage.tasks.autoretried_loss.delay("k")) == 1
    assert len(stage.lines("begin")) == 2
    stage.see_freed("k:k")


@pytest.mark.parametrize("pool", slow_but(FAST, INTERRUPTING))
@pytest.mark.parametrize(
    "nested", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "nested locks"]
)
def test_a_loss_about_the_end_of_a_body_strikes_nothing_else(
    stage: Stage, pool: str, nested: bool
) -> None:
    worker = stage.worker(pool=pool, concurrency=10 if pool == "gevent" else 1)
    # it acknowledges late, so that its lock is there to be lost while Celery stores its result
    task, outcomes = stage.tasks.ends_about_then, Counter[str]()
    keys: list[str] = []
    for scale in (2e-5, 8e-5, 3e-4):  # s: how soon a body is told depends on the machine
        names = [f"{scale}-{n}" for n in range(40)]
        results = [task.delay(name, n**2 * scale, nested) for n, name in enumerate(names)]
        keys += names
        for result in results:
            ended = outcome(stage, result)
            outcomes[ended[0] if isinstance(ended, list) else type(ended).__name__] += 1
            raised = stage.info(result)["traceback"] or "in ends_about_then"
            assert "in ends_about_then" in raised or "its body had ended" in raised, raised
        if outcomes["LockLost"]:
            break
    assert set(outcomes) <= {"ended", "LockLost"}, outcomes
    assert outcomes["LockLost"], "none was struck, so nothing was tested"
    begun = Counter(line.key for line in stage.lines("begin") if line.key != "another")
    assert set(begun.values()) == {1}
    assert outcome(stage, stage.tasks.work.delay("another")) == 0
    assert "exited" not in worker.output()
    stage.see_freed(*(f"k:{key}" for key in keys), *(f"k:nested-{key}" for key in keys))


@pytest.mark.parametrize(
    ("pool", "lost"),
    slow_but(
        [("prefork", "abort"), ("threads", "abort"), ("gevent", "warn")],
        [*((pool, "abort") for pool in POOLS), ("prefork", "warn"), ("gevent", "warn")],
    ),
)
def test_a_loss_is_told_as_an_event(stage: Stage, pool: str, lost: str) -> None:
    worker = stage.worker(pool=pool, concurrency=1)
    with heard(stage, "task-lock-lost") as events:
        result = stage.tasks.goes_on.apply_async(("k",), lock={"on_lost": lost})
        stage.wait_for("begin")
        if lost == "warn":
            for node in stage.nodes:
                node.client().delete("{redlock}:lock:k:k")
        else:
            take_away(stage, "k")
        eventually(lambda: events)
        stage.log.with_name("go on").touch()
        if lost == "warn":
            assert outcome(stage, result) == "went on"
        else:
            see_lost(stage, result, "its body had")
    assert [(e["uuid"], e["resource"]) for e in events] == [(result.id, "k:k")]
    why = "its key is gone from the nodes" if lost == "warn" else "another token took its key"
    assert why in events[0]["reason"]
    eventually(lambda: f"lost 'k:k': {why}" in worker.output())
    assert events[0]["result"] == f"k:k: lost, {events[0]['reason']}"  # which monitors show
