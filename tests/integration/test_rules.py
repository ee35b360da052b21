"""Each rule, on a real worker: what it makes of a run that does not get its lock."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_redlock import LockLost, LockTaken, SettingsError
from tests.conftest import eventually
from tests.integration.conftest import STANDING, Stage

WORKER = STANDING


def begun(stage: Stage, key: str) -> int:
    return len([line for line in stage.lines("begin", "step") if line.key == key])


ENDS = [
    ({"on_conflict": "skip"}, TaskRevokedError),
    ({"on_conflict": "fail"}, LockTaken),
    ({"max_wait": 0.4}, LockTaken),
    ({"max_wait": 0.4, "on_give_up": "skip"}, TaskRevokedError),
    ({"on_conflict": "fail", "wait": 0.2}, LockTaken),
    ({"key": ["k:{key}", "k:{key}-too"], "on_conflict": "skip"}, TaskRevokedError),
    ({"key": ["k:{key}-too", "k:{key}"], "on_conflict": "fail"}, LockTaken),
    ({"key": ["k:{key}", "k:{key}-too"], "max_wait": 0.2}, LockTaken),
]


@pytest.mark.parametrize(("lock", "error"), ENDS, ids=[str(lock) for lock, _ in ENDS])
def test_what_does_not_run_ends_and_whoever_waits_is_told(
    stage: Stage, key: str, lock: dict[str, Any], error: type[Exception]
) -> None:
    with stage.tasks.step.lock_for(key, wait=60):
        stage.see_all_end(error, stage.tasks.step.si(key).set(lock=lock))
    assert begun(stage, key) == 0
    stage.see_freed(f"k:{key}", f"k:{key}-too")


@pytest.mark.slow
def test_a_lease_that_is_not_renewed_is_lost_and_each_rule_of_a_loss_holds(
    stage: Stage, key: str
) -> None:
    rules: list[dict[str, Any]] = [
        {"renew": False},
        {"max_hold": 0.1},
        {"renew": False, "on_lost": "warn"},
    ]
    fixed, ended, warned = (
        stage.tasks.loses.apply_async((f"{key}-{n}",), lock=lock) for n, lock in enumerate(rules)
    )
    for result in (fixed, ended):
        with pytest.raises(LockLost):
            result.get(timeout=120)
    assert warned.get(timeout=120) == "went on"


def test_a_wait_inside_the_slot_is_no_deferral(stage: Stage, key: str) -> None:
    waiting = f"{{redlock}}:waiting:k:{key}"
    with stage.tasks.step.lock_for(key, wait=60):
        lock = {"wait": 600, "on_conflict": "fail"}  # a refusal would end it
        result = stage.tasks.step.apply_async((key,), lock=lock)
        eventually(lambda: any(n.client().exists(waiting) for n in stage.nodes))
    assert result.get(timeout=120) == key


class TestACallable:
    @pytest.mark.parametrize(
        ("word", "error"),
        [("skip", TaskRevokedError), ("later skip", TaskRevokedError), ("fail", LockTaken)],
    )
    def test_decides(self, stage: Stage, key: str, word: str, error: type[Exception]) -> None:
        with stage.tasks.decided.lock_for(key, word, wait=60):
            stage.see_all_end(error, stage.tasks.decided.si(key, word))
        assert begun(stage, key) == 0
        stage.see_freed(f"k:{key}")

    def test_is_told_what_there_is_to_know_and_asked_each_time(
        self, stage: Stage, key: str
    ) -> None:
        with stage.tasks.decided.lock_for(key, "x", wait=60):
            result = stage.tasks.decided.delay(key, "defer", more=7)
            stage.see_deferred(result, 2)
        assert result.get(timeout=120) == key
        asked = [line.more for line in stage.lines("asked") if line.key == key]
        assert [one["deferrals"] for one in asked] == list(range(len(asked)))
        assert asked[0]["waited"] == 0 < asked[-1]["waited"]
        assert "lock_for tests.decided" in asked[0]["holder"]
        told = {name: asked[0][name] for name in ("resource", "task", "kwargs")}
        assert told == {"resource": f"k:{key}", "task": "tests.decided", "kwargs": {"more": 7}}

    @pytest.mark.parametrize(
        ("word", "says"),
        [("raise", "raised KeyError: 'no word'"), ("no such word", "returned 'word'")],
    )
    def test_that_gives_no_word_ends_its_run_as_an_error_that_is_not_retried(
        self, stage: Stage, key: str, word: str, says: str
    ) -> None:
        with stage.tasks.decided.lock_for(key, word, wait=60):
            result = stage.tasks.decided.delay(key, word)
            with pytest.raises(SettingsError, match=says):
                result.get(timeout=120)
        assert stage.info(result)["retries"] == 0


class TestAQueue:
    def test_has_rules_for_all_that_comes_through_it(self, stage: Stage, key: str) -> None:
        with stage.tasks.step.lock_for(key, wait=60):
            result = stage.tasks.step.apply_async((key,), queue="other")
            with pytest.raises(LockTaken):
                result.get(timeout=120)
            near = stage.tasks.step.apply_async((key,), queue="other", lock={"on_conflict": "skip"})
            with pytest.raises(TaskRevokedError):
                near.get(timeout=120)

    def test_may_have_a_key_of_its_own_which_a_tasks_key_goes_before(
        self, stage: Stage, key: str
    ) -> None:
        keyless, keyed = stage.tasks.keyless, stage.tasks.step
        assert keyless.lock_options("held")["key"].value == "{queue}:{key}"
        own = stage.app.tasks[keyless.name]  # in the queue of its own routing
        with own.lock_for(key, wait=60):
            assert keyless.apply_async((key,), queue="held").get(timeout=120) == f"held:{key}"
        with keyed.lock_for(key, wait=60), pytest.raises(TaskRevokedError):
            keyed.apply_async((key,), queue="held").get(timeout=120)
