"""Tasks as users write them, on a real worker: the bases of others, beat, and our errors."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
from celery.beat import Scheduler
from celery.contrib.abortable import AbortableAsyncResult
from celery.schedules import schedule
from redbeat import RedBeatScheduler, RedBeatSchedulerEntry

from celery_redlock import Redlock
from celery_redlock.testing import WorkerProcess
from tests.conftest import NODE_TIMEOUT, eventually
from tests.integration.conftest import STANDING, Stage, overlaps

TASKS = [f"{name}_{order}" for name in ("flask", "django", "abortable", "all")
         for order in ("first", "last")]  # fmt: skip


WORKER = {**STANDING, "module": "tests.integration.frameworks"}
pytestmark = pytest.mark.xdist_group("frameworks")


@pytest.fixture
def outside(stage: Stage) -> Iterator[Redlock]:
    with Redlock([node.url for node in stage.nodes], node_timeout=NODE_TIMEOUT) as made:
        yield made


@pytest.mark.parametrize("name", [*TASKS, "shared"])
def test_a_task_with_bases_of_others_is_locked_in_any_order(
    stage: Stage, key: str, name: str, outside: Redlock
) -> None:
    with outside.lock(f"k:{key}", wait=60):
        results = [stage.app.send_task(f"tests.{name}", (key,)) for _ in range(3)]
        for result in results:
            stage.see_deferred(result)
    in_flask = name.startswith(("flask", "all"))
    assert [result.get(timeout=120) for result in results] == [in_flask] * 3
    spans = stage.intervals()[key]
    assert len(spans) == 3
    assert not overlaps(spans)
    stage.see_freed(f"k:{key}")


@pytest.mark.parametrize("name", ["tests.integration.found.body", "shop.renamed"])
def test_a_task_that_the_app_found_is_locked_by_the_name_that_it_has(
    stage: Stage, key: str, name: str, outside: Redlock
) -> None:
    resource = stage.app.send_task(name, (key,)).get(timeout=120)
    assert resource.startswith(f"{name}:")
    with outside.lock(resource, wait=60):
        results = [stage.app.send_task(name, (key,)) for _ in range(3)]
        for result in results:
            stage.see_deferred(result)
    assert [result.get(timeout=120) for result in results] == [resource] * 3
    spans = stage.intervals()[key]
    assert len(spans) == 4
    assert not overlaps(spans)
    stage.see_freed(resource)


def test_what_is_sent_on_commit_is_locked(stage: Stage, key: str, outside: Redlock) -> None:
    with outside.lock(f"k:{key}", wait=60):
        stage.app.send_task("tests.commits", (key,)).get(timeout=120)
        assert key not in stage.intervals()
    eventually(lambda: key in stage.intervals())


def test_an_abort_reaches_a_task_that_runs(stage: Stage, key: str) -> None:
    sent = stage.app.send_task("tests.aborts", (key,))
    eventually(lambda: [line for line in stage.lines("begin") if line.key == key])
    AbortableAsyncResult(sent.id, backend=stage.app.backend).abort()
    assert sent.get(timeout=120) == "aborted"


def test_an_abort_reaches_a_task_that_waits(
    stage: Stage, worker: WorkerProcess, key: str, outside: Redlock
) -> None:
    with outside.lock(f"k:{key}", wait=60):
        sent = stage.app.send_task("tests.aborts", (key,))
        stage.see_deferred(sent)
        result = AbortableAsyncResult(sent.id, backend=stage.app.backend)

        def deliveries() -> int:
            return worker.output().count(f"Task tests.aborts[{sent.id}] deferred")

        def stays_aborted() -> bool:
            result.abort()
            before = deliveries()  # one that is under way may not have seen it, the next one has
            eventually(lambda: deliveries() >= before + 2)
            return bool(result.is_aborted())

        eventually(stays_aborted)
    assert sent.get(timeout=120) == "aborted"


def test_what_beat_sends_is_locked(stage: Stage, key: str, outside: Redlock) -> None:
    beat = Scheduler(stage.app, schedule={})
    work = {"task": stage.tasks.work.name, "schedule": 0.01, "args": (key,)}
    beat.update_from_dict({name: {**work, "name": name} for name in ("one", "two")})

    def both_were_sent() -> bool:
        beat.tick()
        return all(entry.total_run_count for entry in beat.schedule.values())

    with outside.lock(f"k:{key}", wait=60):
        eventually(both_were_sent)
    count = sum(entry.total_run_count for entry in beat.schedule.values())
    spans = eventually(lambda: len(found := stage.intervals().get(key, [])) >= count and found)
    assert not overlaps(spans)


def test_what_redbeat_sends_is_locked(stage: Stage, key: str, outside: Redlock) -> None:
    stage.app.conf.redbeat_redis_url = stage.broker.url
    stage.app.conf.redbeat_lock_key = None
    entry = RedBeatSchedulerEntry(
        key, stage.tasks.work.name, schedule(dt.timedelta(seconds=1)), args=(key,), app=stage.app
    )
    entry.save()
    beat = RedBeatScheduler(stage.app, lazy=False)
    with outside.lock(f"k:{key}", wait=60):
        eventually(lambda: beat.tick() is not None and sent(stage, entry) >= 2)
    count = sent(stage, entry)
    entry.delete()
    spans = eventually(lambda: len(found := stage.intervals().get(key, [])) >= count and found)
    assert not overlaps(spans)


def sent(stage: Stage, entry: Any) -> int:
    return int(RedBeatSchedulerEntry.from_key(entry.key, app=stage.app).total_run_count)
