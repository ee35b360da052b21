"""Ends of a run that the matrix does not tell of, or that are looked at more closely here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import eventually
from tests.integration.conftest import STANDING, Stage

WORKER = STANDING
SOFT_LIMIT = 8.0  # s: it strikes nowhere before the body waits for it


@pytest.mark.parametrize("late", [False, True], ids=["acks early", "acks late"])
def test_a_state_that_a_body_wrote_stays_and_its_lock_is_free(
    stage: Stage, key: str, late: bool
) -> None:
    task = stage.tasks.late_end if late else stage.tasks.early_end
    result = task.delay(key, "ignore, with a state")
    stage.wait_for("begin")
    stage.see_freed(f"k:{key}")
    eventually(lambda: stage.info(result)["status"] == "MINE")


def test_a_task_keeps_its_lock_until_its_result_is_stored(stage: Stage) -> None:
    for task in (stage.tasks.told_early, stage.tasks.told_late):
        task.delay().get(timeout=120)
    held = {line.key: line.more["held"] for line in stage.wait_for("after", 2)}
    assert held == {"tests.told_early": True, "tests.told_late": True}
    for name in held:
        stage.see_freed(f"told:{name}")


@pytest.mark.parametrize(
    "recycling",
    ["--max-tasks-per-child=1", pytest.param("--max-memory-per-child=1", marks=pytest.mark.slow)],
)
def test_a_child_that_is_recycled_leaves_no_lock_behind(own_stage: Stage, recycling: str) -> None:
    stage = own_stage
    stage.worker(concurrency=1, options=[recycling])
    for task in (stage.tasks.work, stage.tasks.late, stage.tasks.work):  # s: one child comes in 5
        assert task.delay("k").get(timeout=120) == 0
        stage.see_freed("k:k")
    assert len({line.pid for line in stage.lines("begin")}) == 3, "each had a child of its own"


@pytest.mark.slow
def test_the_lock_is_held_while_a_body_cleans_up_after_its_soft_limit(
    stage: Stage, key: str
) -> None:
    stage.tasks.early_end.apply_async((key, "soft limit"), soft_time_limit=SOFT_LIMIT)
    assert stage.wait_for("cleaning")[0].more == {"held": True}
    stage.see_freed(f"k:{key}")


def test_an_outcome_can_be_waited_for_by_name_alone(stage: Stage, key: str) -> None:
    sent: list[Any] = [stage.app.send_task("tests.late", (key,)) for _ in range(3)]
    assert [result.get(timeout=120) for result in sent] == [0, 0, 0]
