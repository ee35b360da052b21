"""conflict="coalesce": of those that come while one runs, one more runs, and it sees them all."""

from __future__ import annotations

import pytest
from celery.exceptions import TaskRevokedError

from celery_redlock import SettingsError
from tests.conftest import eventually
from tests.integration.conftest import Stage


def waiting_keys(stage: Stage) -> list[str]:
    return [key for node in stage.nodes for key in node.client().keys("*:waiting:*")]


def test_one_that_runs_and_ten_that_come_meanwhile_are_two_runs(stage: Stage) -> None:
    for name in ("w1", "w2"):
        stage.worker(name, concurrency=2)
    running = stage.tasks.rebuild.delay("k", until="go on")
    stage.wait_for("begin")
    sent = [stage.tasks.rebuild.delay("k") for _ in range(10)]

    def of(state: str) -> list[str]:
        return [result.id for result in sent if stage.info(result)["status"] == state]

    eventually(lambda: len(of("REVOKED")) == 9)
    (first,) = eventually(lambda: of("DEFERRED"))
    for result in sent:
        if result.id != first:
            with pytest.raises(TaskRevokedError, match=f"waited for already, by {first}:"):
                result.get(timeout=120)
    stage.log.with_name("go on").touch()
    assert running.get(timeout=120) == "k"
    assert stage.app.AsyncResult(first).get(timeout=120) == "k"
    assert len(stage.wait_for("end", 2)) == 2
    assert len(stage.lines("begin")) == 2
    assert waiting_keys(stage) == []


def test_who_comes_once_the_waiting_one_has_begun_waits_for_a_run_of_its_own(stage: Stage) -> None:
    stage.worker(concurrency=2)
    with stage.tasks.rebuild.lock_for("k", wait=60):
        first = stage.tasks.rebuild.delay("k", until="go on")
        stage.see_deferred(first)
    stage.wait_for("begin")
    second = stage.tasks.rebuild.delay("k")
    stage.see_deferred(second)
    stage.log.with_name("go on").touch()
    assert [first.get(timeout=120), second.get(timeout=120)] == ["k", "k"]


def test_for_one_that_failed_while_it_waited_nobody_is_skipped(stage: Stage) -> None:
    stage.worker(concurrency=2)
    with stage.tasks.decided.lock_for("k", "coalesce", wait=60):
        failed = stage.tasks.decided.delay("k", "coalesce, then raise")
        with pytest.raises(SettingsError):
            failed.get(timeout=120)
        last = stage.tasks.decided.delay("k", "coalesce")
        stage.see_deferred(last)
    assert last.get(timeout=120) == "k"
    assert waiting_keys(stage) == []


def test_a_waiting_one_of_another_task_or_one_that_is_revoked_skips_nobody(stage: Stage) -> None:
    stage.worker(concurrency=2)
    with stage.tasks.rebuild.lock_for("k", wait=60):
        other = stage.tasks.step.apply_async(("k",), lock={"conflict": "coalesce"})
        stage.see_deferred(other)
        revoked = stage.tasks.rebuild.delay("k")
        stage.see_deferred(revoked)
        revoked.revoke()
        eventually(lambda: stage.info(revoked)["status"] == "REVOKED")
        last = stage.tasks.rebuild.delay("k")
        stage.see_deferred(last)
    assert [other.get(timeout=120), last.get(timeout=120)] == ["k", "k"]
    assert waiting_keys(stage) == []
