"""What a run holds already, its body may take again, by `apply` and by `lock_for`."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_redlock import LockedTask, LockTaken, SettingsError, current_lock
from tests.conftest import Nodes, eventually, is_free, see_freed
from tests.integration.conftest import STANDING, Stage, Standing, pools

WORKER = STANDING


@pytest.mark.parametrize("name", ["nests_early", "nests_late"])
def test_a_worker_runs_a_body_that_takes_its_own_key_again(
    stage: Stage, key: str, name: str
) -> None:
    results = [getattr(stage.tasks, name).delay(key) for _ in range(4)]
    assert [result.get(timeout=120) for result in results] == ["SUCCESS"] * 4
    assert {line.more["held"] for line in stage.lines("with", "after")} == {True}
    assert len(stage.lines("end")) == 4, "the inner bodies ran"
    stage.see_freed(f"k:{key}")


def test_what_ends_inside_does_not_free_what_is_held_outside(app: Celery, nodes: Nodes) -> None:
    @app.task(base=LockedTask, lock_key="order:{order}", shared=False)
    def inner(order: int) -> bool:
        return current_lock() is not None

    @app.task(bind=True, base=LockedTask, lock_key="order:{order}", shared=False)
    def outer(self: Any, order: int) -> bool:
        with inner.lock_for(order):
            assert inner.apply((order,), throw=True).get()
        assert not is_free(nodes, f"order:{order}")
        return bool(self.lock.held)

    assert outer.apply((7,), throw=True).get()
    see_freed(nodes, "order:7")


def test_a_task_may_apply_itself(app: Celery, nodes: Nodes) -> None:
    @app.task(bind=True, base=LockedTask, lock_key="tree", shared=False)
    def walk(self: Any, depth: int) -> int:
        below = walk.apply((depth - 1,), throw=True).get() if depth else 0
        self.lock.ensure()
        return int(below + 1)

    assert walk.apply((3,), throw=True).get() == 4
    see_freed(nodes, "tree")


def test_an_error_inside_leaves_the_outer_lock_to_its_body(app: Celery, nodes: Nodes) -> None:
    @app.task(base=LockedTask, lock_key="tree", shared=False)
    def fails() -> None:
        raise ValueError("inside")

    @app.task(bind=True, base=LockedTask, lock_key="tree", shared=False)
    def outer(self: Any) -> tuple[str, bool]:
        return fails.apply().state, self.lock.held

    assert outer.apply(throw=True).get() == ("FAILURE", True)
    see_freed(nodes, "tree")


def test_several_resources_take_again_what_is_held_and_add_the_rest(
    app: Celery, nodes: Nodes
) -> None:
    @app.task(base=LockedTask, lock_key=["k:{a}", "k:{b}"], shared=False)
    def both(a: str, b: str) -> bool:
        return not any(is_free(nodes, f"k:{name}") for name in (a, b))

    @app.task(base=LockedTask, lock_key="k:{a}", shared=False)
    def outer(a: str) -> bool:
        assert both.apply((a, "other"), throw=True).get()
        see_freed(nodes, "k:other")
        return not is_free(nodes, f"k:{a}")

    assert outer.apply(("own",), throw=True).get()
    see_freed(nodes, "k:own")


@pytest.mark.parametrize("pool", pools("threads", every=["threads"]))
def test_another_run_does_not_nest_though_it_is_in_the_same_process(
    of_pool: Standing, key: str
) -> None:
    stage, alone = of_pool.stage, {"limit": 1}
    holder = stage.tasks.permitted.apply_async((key,), {"until": f"{key}-go"}, lock=alone)
    stage.wait_for("begin")
    rival = stage.tasks.permitted.apply_async((key,), lock=alone)
    eventually(lambda: stage.deferrals(rival) >= 1)
    stage.log.with_name(f"{key}-go").touch()
    for result in (holder, rival):
        result.get(timeout=120)


def test_a_permit_among_several_cannot_stand_for_the_plain_lock(app: Celery) -> None:
    @app.task(base=LockedTask, lock_key="pool", shared=False)
    def alone() -> None: ...

    @app.task(base=LockedTask, lock_key="pool", lock_limit=3, shared=False)
    def one_of_three() -> Any:
        return alone.apply().result

    refused = one_of_three.apply(throw=True).get()
    assert isinstance(refused, SettingsError)
    assert "one of 3 permits" in str(refused)


def test_an_unrelated_key_inside_is_a_lock_of_its_own(app: Celery, nodes: Nodes) -> None:
    @app.task(base=LockedTask, lock_key="inner", shared=False)
    def inner() -> None: ...

    @app.task(base=LockedTask, lock_key="outer", shared=False)
    def outer() -> Any:
        return inner.apply().result

    for node in nodes:
        node.client().set("{redlock}:lock:inner", "theirs:another", px=60_000)
    refused = outer.apply(throw=True).get()
    assert isinstance(refused, LockTaken)
    assert refused.resource == "inner"
