"""LockLost is raised in a body, and never in a release or in code that would swallow it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import billiard.pool
import pytest
from celery import Celery, Task
from celery.app import trace
from celery.utils.dispatch import Signal

from celery_redlock import Lock, LockedTask, Redlock, signals
from celery_redlock.lock.engine.releaser import Releaser
from celery_redlock.lock.ownership import Ownership
from celery_redlock.lock.platform.threads import is_uninterruptible
from celery_redlock.tasks.body import UNINTERRUPTIBLE_MODULES, MonitoredBody, running_bodies
from celery_redlock.tasks.execution.end import end_run, release_after_run
from celery_redlock.tasks.execution.run import LockedRun
from celery_redlock.tasks.settings.task_config import TaskLockConfig
from celery_redlock.tasks.unique.claim import Claim, ClaimToken, end_claim
from celery_redlock.tasks.unique.rounds import ClaimRelease
from celery_redlock.testing import locking_off

RELEASES = [
    Lock.release, Lock.__exit__, Ownership.release, Ownership.release_hold, Redlock.__exit__,
    Releaser.release, Releaser.roll_back,
    Releaser.roll_back_last, Releaser.release_if_abandoned, Releaser.release_hold, Claim.give_up,
    Claim.confirm, ClaimRelease.send, ClaimToken.release, release_after_run, end_run, end_claim,
    LockedRun.release,
]  # fmt: skip
OF_EACH_MODULE = [
    *(billiard.pool.Pool.apply_async, trace.build_tracer, Signal.send, logging.Logger.handle),
    *(LockedTask.apply_async, LockedTask.apply, Claim.send),
    *(release_after_run, end_run, signals.send, TaskLockConfig.resources),
]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.__qualname__)
def test_what_releases_is_not_interrupted(release: Callable[..., Any]) -> None:
    assert is_uninterruptible(release.__code__)


@pytest.mark.parametrize("other", [Lock.acquire, Lock.extend, Lock.ensure, Lock.__enter__])
def test_what_acquires_is_made_to_be_interrupted(other: Callable[..., Any]) -> None:
    assert not is_uninterruptible(other.__code__)


@pytest.fixture
def body() -> Iterator[MonitoredBody]:
    with Redlock(["redis://127.0.0.1:1"]) as redlock:
        yield MonitoredBody(redlock.lock("k"), abort=True, report=lambda loss: None)


def is_interruptible_below(body: MonitoredBody, module: str) -> bool:
    """Return whether a body may be interrupted in what a function of this module calls."""
    functions: dict[str, Any] = {"__name__": module}
    exec("def calls(function): return function()", functions)

    def in_body() -> bool:
        here = functions["calls"](lambda: body.is_interruptible_at(sys._getframe()))
        return bool(here)

    return bool(body.run(in_body, (), {}))


def test_a_body_is_interrupted_in_itself_and_in_what_it_calls(body: MonitoredBody) -> None:
    assert body.run(lambda: body.is_interruptible_at(sys._getframe()), (), {})
    for module in ("shop.orders", "celery.app.base", "celery_redlock.lock.lock", "logging_of_shop"):
        assert is_interruptible_below(body, module), module


def test_it_is_not_interrupted_before_its_first_frame_or_beside_it(body: MonitoredBody) -> None:
    other = MonitoredBody(body.lock, abort=True, report=lambda loss: None)
    assert not body.is_interruptible_at(sys._getframe())
    assert not body.run(lambda: other.is_interruptible_at(sys._getframe()), (), {})


@pytest.mark.parametrize("name", UNINTERRUPTIBLE_MODULES)
def test_each_module_that_is_not_interrupted_is_there(name: str) -> None:
    importlib.import_module(name)
    homes = [function.__module__ for function in OF_EACH_MODULE]
    assert [home for home in homes if f"{home}.".startswith(f"{name}.")]


@pytest.mark.parametrize("function", OF_EACH_MODULE, ids=lambda function: function.__qualname__)
def test_a_body_is_not_interrupted_in_what_would_swallow_it(
    body: MonitoredBody, function: Callable[..., Any]
) -> None:
    assert not is_interruptible_below(body, function.__module__)


def locked_task(app: Celery, name: str, run: Callable[..., Any]) -> Task:
    return app.task(name=name, shared=False, base=LockedTask)(run)


def test_a_run_inside_a_body_ends_before_the_body_is_interrupted() -> None:
    app, seen = Celery("interrupts", broker="memory://", set_as_current=False), list[bool]()
    app.conf.redlock_nodes = ["redis://127.0.0.1:1"]

    def look() -> None:
        bodies = list(running_bodies.values())
        seen.extend(one.is_interruptible_at(sys._getframe()) for one in bodies)

    inner = locked_task(app, "inner", look)

    def run() -> None:
        inner.apply().get()
        look()

    with locking_off():
        locked_task(app, "outer", run).apply().get()
    assert seen == [False, True, True]
