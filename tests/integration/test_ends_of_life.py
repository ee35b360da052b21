"""Ends of a run that the matrix does not tell of, or that are looked at more closely here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import Nodes, eventually
from tests.integration.conftest import MakeStage, Stage
from tests.integration.deliveries import deliver, messages_of

SOFT_LIMIT = 8.0  # s: it strikes nowhere before the body waits for it


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    """Give the module's stage, and its worker; tests with settings of their own make another."""
    return shared_stage


@pytest.mark.parametrize("late", [False, True], ids=["acks early", "acks late"])
def test_a_state_that_a_body_wrote_stays_and_its_lock_is_free(
    stage: Stage, key: str, late: bool
) -> None:
    task = stage.tasks.late_end if late else stage.tasks.early_end
    result = task.delay(key, "ignore, with a state")
    stage.wait_for("begin")
    stage.see_freed(f"k:{key}")
    eventually(lambda: stage.info(result)["status"] == "MINE")


def test_a_late_acknowledging_task_keeps_its_lock_until_its_result_is_stored(stage: Stage) -> None:
    for task in (stage.tasks.told_early, stage.tasks.told_late):
        task.delay().get(timeout=120)
    held = {line.key: line.more["held"] for line in stage.wait_for("after", 2)}
    assert held == {"tests.told_early": False, "tests.told_late": True}
    stage.see_freed("told:tests.told_late")


def test_a_retry_with_other_arguments_frees_the_old_key_and_takes_the_new(
    stage: Stage, key: str
) -> None:
    result = stage.tasks.early_end.delay(key, "retry with other arguments")
    assert result.get(timeout=120) == "again"
    assert [line.key for line in stage.lines("begin")] == [key, f"{key}-other"]
    stage.see_freed(f"k:{key}", f"k:{key}-other")


def test_a_task_that_replaces_itself_frees_its_key(stage: Stage, key: str) -> None:
    assert stage.tasks.early_end.delay(key, "replace").get(timeout=120) == 0
    assert [line.key for line in stage.lines("begin")] == [key, f"{key}-other"]
    stage.see_freed(f"k:{key}", f"k:{key}-other")


def test_a_body_that_exits_its_process_frees_its_key(stage: Stage, key: str) -> None:
    stage.tasks.early_end.delay(key, "system exit")
    stage.wait_for("begin")
    stage.see_freed(f"k:{key}")
    assert stage.tasks.work.delay(key).get(timeout=120) == 0


@pytest.mark.parametrize(
    "recycling",
    ["--max-tasks-per-child=1", pytest.param("--max-memory-per-child=1", marks=pytest.mark.slow)],
)
def test_a_child_that_is_recycled_leaves_no_lock_behind(own_stage: Stage, recycling: str) -> None:
    stage = own_stage
    stage.worker(concurrency=1, options=[recycling])
    for task in (stage.tasks.work, stage.tasks.late):
        results = [task.delay("k") for _ in range(3)]
        assert [result.get(timeout=120) for result in results] == [0, 0, 0]
        stage.see_freed("k:k")
    assert len({line.pid for line in stage.lines("begin")}) == 6, "each had a child of its own"


@pytest.mark.parametrize("name", ["careless_early", "careless_late"])
def test_hooks_that_fail_keep_no_lock(stage: Stage, key: str, name: str) -> None:
    for how, runs in (("return", 1), ("raise", 1), ("retry", 2)):
        own = f"{key}-{how}"
        getattr(stage.tasks, name).delay(own, how)
        eventually(lambda own=own, runs=runs: stage.runs_of(own) == runs)
        stage.see_freed(f"k:{own}")
    assert stage.lines("hook")
    assert stage.tasks.work.delay(f"{key}-return").get(timeout=120) == 0


def test_a_result_backend_that_fails_keeps_no_lock_and_loses_no_run(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    stage = make_stage(nodes)
    conf = {
        **json.loads(stage.env["TEST_CONF"]),
        "result_backend": "redis://127.0.0.1:1/0",  # the workers' alone: nobody is there
        "result_backend_transport_options": {"retry_policy": {"max_retries": 1}},
    }
    stage.env["TEST_CONF"] = json.dumps(conf)
    names = [f"{how}, {name}" for name in ("early_end", "late_end") for how in ("return", "raise")]
    for key in names:
        how, name = key.split(", ")
        stage.app.send_task(f"tests.{name}", (key, how), task_id=key)
    messages = messages_of(stage)
    stage.worker(concurrency=1)
    for key in names:
        eventually(lambda key=key: stage.runs_of(key) == 1)
        stage.see_freed(f"k:{key}")
    for key in names[2:]:  # what nobody stored is not done: it runs again if it comes again
        deliver(stage, messages[key])
        eventually(lambda key=key: stage.runs_of(key) == 2)


@pytest.mark.slow
def test_the_lock_is_held_while_a_body_cleans_up_after_its_soft_limit(
    stage: Stage, key: str
) -> None:
    stage.tasks.early_end.apply_async((key, "soft limit"), soft_time_limit=SOFT_LIMIT)
    assert stage.wait_for("cleaning")[0].more == {"held": True}
    stage.see_freed(f"k:{key}")


def test_autoretry_takes_the_lock_anew_and_ends_with_the_bodys_error(
    stage: Stage, key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        stage.tasks.autoretried.delay(key).get(timeout=120)
    assert stage.runs_of(key) == 3
    stage.see_freed(f"k:{key}")


def test_an_outcome_can_be_waited_for_by_name_alone(stage: Stage, key: str) -> None:
    sent: list[Any] = [stage.app.send_task("tests.late", (key,)) for _ in range(3)]
    assert [result.get(timeout=120) for result in sent] == [0, 0, 0]
