"""A run that needs several resources takes all of them or none, in whatever order it names them."""

from __future__ import annotations

import pytest

from celery_redlock import SettingsError
from tests.conftest import eventually
from tests.integration.conftest import STANDING, Stage, overlaps

WORKER = STANDING
PAIRS = 40  # of tasks that name their two resources in opposite orders


@pytest.fixture
def x(key: str) -> str:
    return f"{key}-x"


@pytest.fixture
def y(key: str) -> str:
    return f"{key}-y"


@pytest.mark.slow
def test_two_resources_named_in_either_order_never_deadlock_or_overlap(
    stage: Stage, x: str, y: str
) -> None:
    stage.worker("w2", concurrency=4)  # beside the module's
    results = []
    for _ in range(PAIRS):
        results.append(stage.tasks.transfer.delay(x, y))
        results.append(stage.tasks.transfer.delay(y, x))
        results.append(stage.tasks.work.delay(x))
    for result in results:
        assert result.get(timeout=120) in (f"k:{x}, k:{y}", 0)
    intervals = stage.intervals()
    assert {key: len(spans) for key, spans in intervals.items()} == {x: 3 * PAIRS, y: 2 * PAIRS}
    assert not overlaps(intervals[x])
    assert not overlaps(intervals[y])
    stage.see_freed(f"k:{x}", f"k:{y}")


def test_deferred_names_the_resource_that_is_held_and_keeps_none_of_the_others(
    stage: Stage, x: str, y: str
) -> None:
    with stage.tasks.work.lock_for(y, wait=60):
        result = stage.tasks.transfer.delay(x, y)
        eventually(lambda: stage.deferrals(result) >= 1)
        assert stage.info(result)["result"]["resource"] == f"k:{y}"
        # all or none: the other one is free for whoever needs that alone
        assert stage.tasks.work.delay(x).get(timeout=120) == 0
    both = f"k:{x}, k:{y}"
    assert result.get(timeout=120) == stage.tasks.transfer.lock_for(y, x).resource == both


def test_a_call_may_name_several_and_then_no_permits(stage: Stage, key: str) -> None:
    several = {"key": ["k:{key}", "k:{seconds}"]}
    with stage.tasks.work.lock_for("0.05", wait=60):
        result = stage.tasks.work.apply_async((key,), lock=several)
        eventually(lambda: stage.deferrals(result) >= 1)
    assert result.get(timeout=120) == 0
    with pytest.raises(SettingsError, match="to one resource"):
        stage.tasks.work.apply_async((key,), lock={**several, "limit": 2})
