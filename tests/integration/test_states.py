"""What a person sees: DEFERRED with its reason, STARTED once the lock is held, then the end."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_redlock import LockTaken, QuorumUnreachable, SettingsError
from celery_redlock.testing import EmbeddedNode
from tests.conftest import PATIENCE, eventually
from tests.integration.conftest import Stage


def test_deferred_says_what_it_waits_for_and_until_when(stage: Stage) -> None:
    stage.worker(concurrency=1)
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.delay("k")
        eventually(lambda: result.state == "DEFERRED")
        info = eventually(lambda: result.info["holder"] and result.info)
        assert info["resource"] == "k:k"
        assert "lock_for tests.integration.app.work" in info["holder"]
        assert info["deferrals"] >= 1
        assert info["waited"] >= 0
        assert dt.datetime.fromisoformat(info["next_try"]).utcoffset() == dt.timedelta(0)
        assert not result.ready()
    assert result.get(timeout=120) == 0


@pytest.mark.parametrize("tracked", [True, False])
def test_started_means_that_the_lock_is_held(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode], tracked: bool
) -> None:
    stage = make_stage(nodes, task_track_started=tracked)
    stage.worker(concurrency=1)
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.sees_its_state.delay("k")
        eventually(lambda: stage.info(result)["status"] == "DEFERRED")
    result.get(timeout=120)
    assert [line.more for line in stage.lines("state")] == [{"status": "STARTED", "held": True}]


def test_a_monitor_sees_deferred_and_does_not_keep_it(stage: Stage) -> None:
    state, seen = stage.app.events.State(), []
    ready = threading.Event()

    class Monitor(stage.app.events.Receiver):
        def on_consume_ready(self, *args: Any, **kwargs: Any) -> None:
            super().on_consume_ready(*args, **kwargs)
            ready.set()

    def note(event: dict[str, object]) -> None:
        state.event(event)
        for task in state.tasks.values():
            if task.name and task.name.endswith(".work") and seen[-1:] != [task.state]:
                seen.append(task.state)

    connection = stage.app.connection_for_read()
    monitor = Monitor(connection, handlers={"*": note})
    thread = threading.Thread(target=monitor.capture, kwargs={"wakeup": False})
    thread.start()
    try:
        assert ready.wait(60)
        stage.worker(concurrency=1, options=["-E"])
        with stage.tasks.work.lock_for("k", wait=60):
            result = stage.tasks.work.delay("k", 0.5)
            eventually(lambda: "DEFERRED" in seen)
        assert result.get(timeout=120) == 0
        eventually(lambda: seen[-1:] == ["SUCCESS"])
    finally:
        monitor.should_stop = True
        thread.join()
        connection.close()
    # the worker's main process says RECEIVED at a time of its own
    assert [word for word in seen if word != "RECEIVED"][-3:] == ["RETRY", "STARTED", "SUCCESS"]


def test_a_skipped_run_is_revoked_and_nobody_waits_for_ever(stage: Stage) -> None:
    stage.worker(concurrency=1)
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.apply_async(("k",), lock={"conflict": "skip"})
        with pytest.raises(TaskRevokedError):
            result.get(timeout=120)
        chained = (stage.tasks.work.si("k").set(lock={"conflict": "skip"})
                   | stage.tasks.add.s()).apply_async()  # fmt: skip
        with pytest.raises(TaskRevokedError):
            chained.parent.get(timeout=120)
    assert stage.lines("begin") == []


def test_a_failed_run_says_who_held_the_lock(stage: Stage) -> None:
    stage.worker(concurrency=1)
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.apply_async(("k",), lock={"conflict": "fail"})
        with pytest.raises(LockTaken) as caught:
            result.get(timeout=120)
    assert caught.value.resource == "k:k"
    assert "lock_for" in caught.value.holder


def test_giving_up_ends_as_failure_after_the_deferrals_that_were_allowed(stage: Stage) -> None:
    stage.worker(concurrency=1)
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.apply_async(("k",), lock={"max_deferrals": 3})
        with pytest.raises(LockTaken, match="3 deferrals"):
            result.get(timeout=120)
        timed = stage.tasks.work.apply_async(("k",), lock={"max_wait": 1.0})
        with pytest.raises(LockTaken) as caught:
            timed.get(timeout=120)
    assert caught.value.waited >= 1.0


def test_without_a_quorum_a_run_can_fail_or_run_unlocked(
    make_stage: Callable[..., Stage], mortal_nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(mortal_nodes)
    worker = stage.worker(concurrency=1)
    for node in mortal_nodes[:2]:
        node.kill()
    failing = stage.tasks.work.apply_async(("k",), lock={"unreachable": "fail"})
    with pytest.raises(QuorumUnreachable, match=r"127\.0\.0\.1"):
        failing.get(timeout=120)
    running = stage.tasks.loses.apply_async(("k",), lock={"unreachable": "run"})
    assert running.get(timeout=120) == "went on"
    assert "runs WITHOUT its lock" in worker.output()


def test_a_wrong_option_in_a_message_ends_that_run_as_failure(stage: Stage) -> None:
    stage.worker(concurrency=1)
    header = {"redlock": {"options": {"ttl": -1}}}
    result = stage.tasks.work.apply_async(("k",), headers=header)
    with pytest.raises(SettingsError, match="ttl"):
        result.get(timeout=120)
    assert stage.lines("begin") == []


def test_a_key_that_cannot_be_made_ends_the_run_as_failure(stage: Stage) -> None:
    stage.worker(concurrency=1)
    with pytest.raises(SettingsError, match="key is None"):
        stage.tasks.work.delay(None).get(timeout=120)
    assert stage.lines("begin") == []


def test_without_a_result_backend_nothing_is_written_and_the_lock_works(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(nodes, result_backend=None, task_ignore_result=True)
    stage.worker(concurrency=2)
    for _ in range(4):
        stage.tasks.work.delay("k")
    stage.wait_for("end", 4)
    assert not [key for key in stage.broker.client().keys("*") if "meta" in key]


def test_a_worker_says_at_its_start_what_its_nodes_say(
    make_stage: Callable[..., Stage], mortal_nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(mortal_nodes, redlock_node_timeout=PATIENCE)  # each says it once
    first = stage.worker("w1", concurrency=1)
    eventually(lambda: "3 of 3 lock nodes answer, 2 needed" in first.output())
    mortal_nodes[0].kill()
    second = stage.worker("w2", concurrency=1)
    eventually(lambda: "2 of 3 lock nodes answer, 2 needed; not: 127.0.0.1" in second.output())
