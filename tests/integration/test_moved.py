"""What the guide for those who come from other plugins says, run as it stands there."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_redlock import DuplicateTask, LockTaken, Redlock
from tests.conftest import PATIENCE, Nodes, eventually
from tests.integration.conftest import MakeStage, Stage, no_shared_task_left

pytestmark = pytest.mark.slow

ALL = "TASK:[0-9a-f]{32}"  # of all arguments, as a digest
ALONE = "TASK:any-arguments"
# by spelling: the resource of a call, another call of the same resource, and what the latter meets
HERE: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "@app.task(base=LockedTask)": (ALL, (1, 2), "waits"),
    'lock_args=["a"]': (ALL, (1, 9), "waits"),
    'lock_args=["a", "c"]': (ALL, (1, 9), "waits"),
    "lock_args=[]": (ALONE, (9, 9), "waits"),
    'lock_key="report"': ("report", (9, 9), "waits"),
    'lock_key=lambda task, args, kwargs: f"report:{args[0]}"': ("report:1", (1, 9), "waits"),
    "lock_key=False": ("", (1, 2), "runs"),
    'lock_key="stock:{sku}"': ("stock:s", (9, 9), "waits"),
    'lock_key="stock:{sku}", lock_wait=5': ("stock:s", (9, 9), "waits"),
    "lock_max_hold=120": (ALL, (1, 2), "waits"),
    'lock_on_conflict="fail"': (ALL, (1, 2), "fails"),
    'lock_on_conflict="skip"': (ALL, (1, 2), "is skipped"),
    '@shared_task(base=LockedTask, lock_on_conflict="skip")': (ALL, (1, 2), "is skipped"),
    '@app.task(base=LockedTask, lock_on_conflict="skip")': (ALL, (1, 2), "is skipped"),
    '@app.task(base=LockedTask, lock_args=[], lock_on_conflict="skip")': (
        ALONE, (9, 9), "is skipped",
    ),
    'with redlock.lock("ledger", wait=5):': ("ledger", (), "waits here"),
}  # fmt: skip

# by spelling: what a second send meets while the first one waits, and once that has begun
AT_THE_SEND = {
    "lock_unique_for=3600": ("is the first", "is the first", "is new"),
    'lock_unique_for=3600, lock_on_duplicate="fail"': ("raises", "raises", "is new"),
    'lock_unique_for=3600, lock_on_duplicate="replace"': ("replaces it", "is new", "is new"),
    'lock_unique_for=3600, lock_unique_until="started"': ("is the first", "is new", "is new"),
    'lock_unique_for=3600, lock_unique_until="expired"': ("is the first",) * 3,
    '@shared_task(base=LockedTask, lock_unique_for=3600, lock_unique_until="started", '
    'lock_on_conflict="skip")': ("", "is skipped", "is new"),
}


@pytest.fixture(scope="module")
def stage(set_standing_stage: MakeStage) -> Stage:
    """Give a stage whose one worker runs every spelling as a task."""
    made = set_standing_stage()
    made.stack.enter_context(no_shared_task_left(made.app))
    made.stack.callback(sys.modules.pop, "tests.integration.moved")
    made.tasks = importlib.import_module("tests.integration.moved")
    made.worker(module="tests.integration.moved", concurrency=3)
    return made


def test_every_spelling_of_the_guide_is_run_here(stage: Stage) -> None:
    assert sorted([*HERE, *AT_THE_SEND]) == stage.tasks.spellings()


@pytest.mark.parametrize("spelling", [s for s in HERE if not s.startswith("with ")])
def test_a_spelling_does_what_the_guide_says(stage: Stage, spelling: str) -> None:
    pattern, other, meets = HERE[spelling]
    name = stage.tasks.name_of(spelling)
    task = stage.app.tasks[name]
    resource = task.apply_async((1, 2)).get(timeout=120)
    assert re.fullmatch(pattern.replace("TASK", re.escape(name)), resource or "")
    if meets == "runs":
        staying = task.delay("stay")
        eventually(lambda: len([line for line in stage.lines("begin") if line.key == name]) == 2)
        assert task.delay("stays not").get(timeout=120) is None
        stage.log.with_name(name).touch()
        assert staying.get(timeout=120) is None
        return
    with task.lock_for(1, 2, wait=60):
        second = task.delay(*other)
        if meets == "waits":
            stage.see_deferred(second)
        if meets == "fails":
            with pytest.raises(LockTaken) as caught:
                second.get(timeout=120)
            assert caught.value.expires_in is not None
        if meets == "is skipped":
            with pytest.raises(TaskRevokedError):
                second.get(timeout=120)
    if meets == "waits":
        assert second.get(timeout=120) == resource


def meet(task: Any, first: AsyncResult, meets: str) -> AsyncResult | None:
    """Send again, and return what became a message of its own."""
    if meets == "raises":
        with pytest.raises(DuplicateTask) as caught:
            task.delay("stay")
        assert caught.value.task_id == first.id
        return None
    second = task.delay("stay")
    assert (second.id == first.id) == (meets == "is the first")
    return None if second.id == first.id else second


@pytest.mark.parametrize("spelling", AT_THE_SEND)
def test_a_second_send_meets_what_the_guide_says(stage: Stage, spelling: str) -> None:
    waiting, running, over = AT_THE_SEND[spelling]
    name = stage.tasks.name_of(spelling)
    task, begun = stage.app.tasks[name], lambda: [x for x in stage.lines("begin") if x.key == name]
    if waiting:
        with task.lock_for("stay", wait=60):
            first = task.delay("stay")
            stage.see_deferred(first)
            second = meet(task, first, waiting)
        if second is not None:
            with pytest.raises(TaskRevokedError, match="took its place"):
                first.get(timeout=120)
            first = second
    else:
        first = task.delay("stay")
    eventually(begun)
    beside = meet(task, first, running)
    if running == "is skipped":
        assert beside is not None
        with pytest.raises(TaskRevokedError):
            beside.get(timeout=120)
    stage.log.with_name(name).touch()
    for result in filter(None, (first, None if running == "is skipped" else beside)):
        assert result.get(timeout=120)
    if over == "is the first":
        assert task.delay("stay").id == first.id
        return
    # the window ends behind the result
    eventually(
        lambda: (
            (last := task.apply_async(("stay",), lock={"on_duplicate": "existing"})).id
            not in (first.id, beside and beside.id)
            and last
        )
    ).get(timeout=120)


def test_the_two_releases_of_a_switch_over_exclude_each_other(stage: Stage) -> None:
    """The first release takes a `Redlock`'s lock in its body, the second one is a `LockedTask`."""
    task = stage.app.tasks[stage.tasks.name_of('lock_key="stock:{sku}"')]
    conf = {"node_timeout": PATIENCE, "max_ttl": stage.app.conf.get("redlock_max_ttl", 60.0)}
    with Redlock([node.url for node in stage.nodes], **conf) as redlock:
        with redlock.lock("stock:s", wait=60):
            second = task.delay(1)
            stage.see_deferred(second)
        assert second.get(timeout=120) == "stock:s"


def test_a_lock_in_the_middle_of_a_body_is_taken_outside_of_tasks_too(nodes: Nodes) -> None:
    (spelling,) = [s for s in HERE if s.startswith("with ")]
    held: list[bool] = []
    with Redlock([node.url for node in nodes], node_timeout=PATIENCE) as redlock:
        lines = f"{spelling[:-1]} as lock:\n    held.append(lock.held)"
        exec(lines, {"redlock": redlock, "held": held})
    assert held == [True]
