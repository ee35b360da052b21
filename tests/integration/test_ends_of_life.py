"""However a run ends, as far as its process can see it: the lock is free, the state is right."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from celery_redlock import LockLost
from celery_redlock.testing import EmbeddedNode
from tests.conftest import TTL, eventually
from tests.integration.conftest import Stage

# way to end: (state, the body's runs)
ENDS = {
    "return": ("SUCCESS", 1),
    "raise": ("FAILURE", 1),
    "retry": ("SUCCESS", 2),
    "soft limit": ("FAILURE", 1),
    "unpicklable result": ("FAILURE", 1),
}
SOFT_LIMIT = 8.0  # s: for the one body that waits for it, and it strikes nowhere before that
UNSTORED = {"ignore": 1, "ignore, with a state": 1, "reject": 1, "requeue": 2, "memory": 1}


@pytest.mark.parametrize("late", [False, True], ids=["acks early", "acks late"])
def test_the_lock_is_free_and_the_state_is_right(stage: Stage, late: bool) -> None:
    task = stage.tasks.late_end if late else stage.tasks.early_end
    stage.worker(concurrency=4)
    limit = {"soft limit": SOFT_LIMIT}
    results = {how: task.apply_async((how, how), soft_time_limit=limit.get(how)) for how in ENDS}
    for how, result in results.items():
        state, runs = ENDS[how]
        ended = eventually(lambda r=result: stage.info(r)["status"] in ("SUCCESS", "FAILURE"))
        assert ended
        stage.see_freed(f"k:{how}")
        begun = [line for line in stage.lines("begin") if line.key == how]
        assert (how, stage.info(result)["status"], len(begun)) == (how, state, runs)


@pytest.mark.parametrize("late", [False, True], ids=["acks early", "acks late"])
def test_the_lock_is_free_where_no_state_is_written(stage: Stage, late: bool) -> None:
    task = stage.tasks.late_end if late else stage.tasks.early_end
    stage.worker(concurrency=4)
    for how, runs in UNSTORED.items():
        if how == "requeue" and not late:
            continue  # acknowledged before it began: nothing to hand back
        result = task.delay(how, how)
        eventually(lambda how=how, runs=runs: len([line for line in stage.lines("begin")
                                                   if line.key == how]) == runs)  # fmt: skip
        stage.see_freed(f"k:{how}")
        if how == "ignore, with a state":
            eventually(lambda r=result: stage.info(r)["status"] == "MINE")


def test_a_late_acknowledging_task_keeps_its_lock_until_its_result_is_stored(stage: Stage) -> None:
    stage.worker(concurrency=1)
    for task in (stage.tasks.told_early, stage.tasks.told_late):
        task.delay().get(timeout=120)
    held = {line.key: line.more["held"] for line in stage.wait_for("after", 2)}
    assert held == {"tests.told_early": False, "tests.told_late": True}
    stage.see_freed("told:tests.told_late")


def test_a_retry_with_other_arguments_frees_the_old_key_and_takes_the_new(stage: Stage) -> None:
    stage.worker(concurrency=2)
    result = stage.tasks.early_end.delay("old", "retry with other arguments")
    assert result.get(timeout=120) == "again"
    assert [line.key for line in stage.lines("begin")] == ["old", "old-other"]
    stage.see_freed("k:old", "k:old-other")


def test_a_task_that_replaces_itself_frees_its_key(stage: Stage) -> None:
    stage.worker(concurrency=2)
    assert stage.tasks.early_end.delay("old", "replace").get(timeout=120) == 0
    assert [line.key for line in stage.lines("begin")] == ["old", "old-other"]
    stage.see_freed("k:old", "k:old-other")


def test_a_body_that_exits_its_process_frees_its_key(stage: Stage) -> None:
    stage.worker(concurrency=1)
    stage.tasks.early_end.delay("k", "system exit")
    stage.wait_for("begin")
    stage.see_freed("k:k")
    assert stage.tasks.work.delay("k").get(timeout=120) == 0


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
@pytest.mark.parametrize("how", ["memory", "system exit", "keyboard interrupt", "greenlet exit"])
@pytest.mark.parametrize("name", ["early_end", "late_end"])
def test_what_no_except_clause_expects_frees_the_lock_at_once(
    stage: Stage, pool: str, how: str, name: str
) -> None:
    stage.worker(pool=pool, concurrency=1)  # of its own: Celery ends whole workers for some
    stage.app.send_task(f"tests.{name}", ("k", how))
    stage.wait_for("begin")
    stage.see_freed("k:k")


@pytest.mark.parametrize(
    "recycling",
    ["--max-tasks-per-child=1", "--max-memory-per-child=1"],
)
def test_a_child_that_is_recycled_leaves_no_lock_behind(stage: Stage, recycling: str) -> None:
    stage.worker(concurrency=1, options=[recycling])
    for task in (stage.tasks.work, stage.tasks.late):
        results = [task.delay("k") for _ in range(3)]
        assert [result.get(timeout=120) for result in results] == [0, 0, 0]
        stage.see_freed("k:k")
    assert len({line.pid for line in stage.lines("begin")}) == 6, "each had a child of its own"


@pytest.mark.parametrize("name", ["careless_early", "careless_late"])
def test_hooks_that_fail_keep_no_lock(stage: Stage, name: str) -> None:
    stage.worker(concurrency=1)
    for how in ("return", "raise", "retry"):
        getattr(stage.tasks, name).delay(how, how)
        eventually(lambda how=how: any(line.key == how for line in stage.lines("begin")))
        stage.see_freed(f"k:{how}")
    assert stage.lines("hook")
    assert stage.tasks.work.delay("return").get(timeout=120) == 0


def test_a_result_backend_that_fails_keeps_no_lock(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(nodes)
    conf = {
        **json.loads(stage.env["TEST_CONF"]),
        "result_backend": "redis://127.0.0.1:1/0",  # the workers' alone: nobody is there
        "result_backend_transport_options": {"retry_policy": {"max_retries": 1}},
    }
    stage.env["TEST_CONF"] = json.dumps(conf)
    stage.worker(concurrency=1)
    for name in ("early_end", "late_end"):
        for how in ("return", "raise"):
            key = f"{how}, {name}"
            stage.app.send_task(f"tests.{name}", (key, how))
            eventually(lambda key=key: any(line.key == key for line in stage.lines("begin")))
            stage.see_freed(f"k:{key}")


def test_the_lock_is_held_while_a_body_cleans_up_after_its_soft_limit(stage: Stage) -> None:
    stage.worker(concurrency=1)
    stage.tasks.early_end.apply_async(("k", "soft limit"), soft_time_limit=SOFT_LIMIT)
    assert stage.wait_for("cleaning")[0].more == {"held": True}
    stage.see_freed("k:k")


def test_autoretry_takes_the_lock_anew_and_ends_with_the_bodys_error(stage: Stage) -> None:
    stage.worker(concurrency=2)
    with pytest.raises(ValueError, match="k"):
        stage.tasks.autoretried.delay("k").get(timeout=120)
    assert len(stage.lines("begin")) == 3
    stage.see_freed("k:k")


def test_a_child_that_is_killed_keeps_nobody_out_for_longer_than_the_ttl(stage: Stage) -> None:
    stage.worker(concurrency=2)
    stage.tasks.dies.apply_async(("k",), lock={"ttl": TTL})
    stage.wait_for("begin")
    assert stage.tasks.work.delay("k").get(timeout=25) == 0  # the default ttl is longer


def test_a_lock_taken_away_in_mid_run_ends_the_run_as_failure(stage: Stage) -> None:
    stage.worker(concurrency=1)
    result = stage.tasks.loses.delay("k")
    stage.wait_for("begin")
    for node in stage.nodes:
        node.client().set("{redlock}:lock:k:k", "theirs", px=300_000)
    with pytest.raises(LockLost, match="another token took its key"):
        result.get(timeout=120)
    assert not stage.is_free("k:k"), "the first one's release touched another's key"


def test_warn_lets_a_run_end_as_success_though_its_lock_was_lost(stage: Stage) -> None:
    worker = stage.worker(concurrency=1)
    result = stage.tasks.loses.apply_async(("k",), lock={"lost": "warn"})
    stage.wait_for("begin")
    for node in stage.nodes:
        node.client().delete("{redlock}:lock:k:k")
    assert result.get(timeout=120) == "went on"
    eventually(lambda: "lost 'k:k': its key is gone from the nodes" in worker.output())


@pytest.mark.parametrize(
    ("number", "ttl"), [(signal.SIGTERM, TTL), (signal.SIGQUIT, 30)], ids=["warm", "cold"]
)
def test_a_shutdown_leaves_no_lock_behind(stage: Stage, number: int, ttl: float) -> None:
    worker = stage.worker(concurrency=1)
    stage.tasks.long_work.apply_async(("k", TTL + 2), lock={"ttl": ttl})
    stage.wait_for("begin")
    worker.signal(number)
    if number == signal.SIGTERM:
        stage.wait_for("end")  # renewed until then: the body takes longer than its ttl
    stage.see_freed("k:k")


def test_an_outcome_can_be_waited_for_by_name_alone(stage: Stage) -> None:
    stage.worker(concurrency=2)
    sent: list[Any] = [stage.app.send_task("tests.late", ("k",)) for _ in range(3)]
    assert [result.get(timeout=120) for result in sent] == [0, 0, 0]
