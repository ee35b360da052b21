"""What a person sees: DEFERRED with its reason, STARTED once the lock is held, then the end."""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_redlock import LockTaken, QuorumUnreachable, SettingsError
from celery_redlock.testing import EmbeddedNode
from tests.conftest import PATIENCE, eventually
from tests.integration.conftest import PASSWORD, Stage


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


PICKLED = {"result_serializer": "pickle", "accept_content": ["json", "pickle"]}
BACKENDS: dict[str, dict[str, Any]] = {
    "redis": {},
    "redis, pickled": PICKLED,
    "rpc": {"result_backend": "rpc://"},
    "rpc, pickled": {"result_backend": "rpc://", **PICKLED},
    "database": {"result_backend": "db+sqlite:///{folder}/results"},
    "database, pickled": {"result_backend": "db+sqlite:///{folder}/results", **PICKLED},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_states_are_the_same_in_each_result_backend(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode], tmp_path: Path, backend: str
) -> None:
    conf = dict(BACKENDS[backend])
    if "result_backend" in conf:
        conf["result_backend"] = conf["result_backend"].format(folder=tmp_path)
    stage = make_stage(nodes, **conf)
    worker = stage.worker(concurrency=2)
    with stage.tasks.until.lock_for("k", "go", wait=60):
        result = stage.tasks.until.delay("k", "go")
        eventually(lambda: result.state == "DEFERRED")
        info = result.info
        assert sorted(info) == ["deferrals", "holder", "next_try", "resource", "waited"]
        assert info["resource"] == "k:k"
        skipped = stage.tasks.work.apply_async(("k",), lock={"conflict": "skip"})
        with pytest.raises(TaskRevokedError):
            skipped.get(timeout=120)
        assert skipped.state == "REVOKED"
    eventually(lambda: result.state == "STARTED")
    assert result.info["hostname"].startswith("w1@")
    stage.log.with_name("go").touch()
    assert result.get(timeout=120).startswith("w1@")
    assert result.state == "SUCCESS"
    assert "cannot" not in worker.output()


@contextmanager
def watched(stage: Stage, note: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Have a monitor that is told of every event."""
    ready = threading.Event()

    class Monitor(stage.app.events.Receiver):
        def on_consume_ready(self, *args: Any, **kwargs: Any) -> None:
            super().on_consume_ready(*args, **kwargs)
            ready.set()

    connection = stage.app.connection_for_read()
    monitor = Monitor(connection, handlers={"*": note})
    thread = threading.Thread(target=monitor.capture, kwargs={"wakeup": False})
    thread.start()
    try:
        assert ready.wait(60)
        yield
    finally:
        monitor.should_stop = True
        thread.join()
        connection.close()


def test_a_monitor_sees_deferred_with_its_reason_and_keeps_neither(stage: Stage) -> None:
    state, seen = stage.app.events.State(), []
    shown: dict[str, dict[str, Any]] = {}  # the last of each state, by the fields that Celery knows

    def note(event: dict[str, object]) -> None:
        state.event(event)
        for task in state.tasks.values():
            if task.name and task.name.endswith(".work"):
                shown[task.state] = task.as_dict()
                if seen[-1:] != [task.state]:
                    seen.append(task.state)

    with watched(stage, note):
        stage.worker(concurrency=1, options=["-E"])
        with stage.tasks.work.lock_for("k", wait=60):
            result = stage.tasks.work.delay("k", 0.5)
            eventually(lambda: "DEFERRED" in seen)
        assert result.get(timeout=120) == 0
        eventually(lambda: seen[-1:] == ["SUCCESS"])
    # the worker's main process says RECEIVED at a time of its own
    assert [word for word in seen if word != "RECEIVED"][-3:] == ["RETRY", "STARTED", "SUCCESS"]
    reason = shown["DEFERRED"]["result"]
    assert reason.startswith("k:k: held by lock_for tests.integration.app.work"), reason
    for word in ("; deferrals: ", "; waited: ", "; next try: 20"):
        assert word in reason
    kept = [(shown[at][name], at) for at in ("STARTED", "SUCCESS") for name in ERRORS]
    assert [text for text in kept if text[0] is not None] == []
    assert (shown["STARTED"]["result"], shown["SUCCESS"]["result"]) == (None, "0")


ERRORS = ("exception", "traceback")


def test_a_monitor_is_told_what_deferred_says(stage: Stage) -> None:
    events: list[dict[str, Any]] = []
    with watched(stage, events.append):
        stage.worker(concurrency=1, options=["-E"])
        with stage.tasks.work.lock_for("k", wait=60):
            result = stage.tasks.work.delay("k")
            stage.see_deferred(result)
            told = eventually(lambda: [e for e in events if e["type"] == "task-deferred"])
        result.get(timeout=120)
    assert [one["deferrals"] for one in told] == list(range(1, len(told) + 1))
    for one in told:
        assert (one["uuid"], one["resource"]) == (result.id, "k:k")
        assert "lock_for" in one["holder"]
        assert one["waited"] >= 0
        assert dt.datetime.fromisoformat(one["next_try"]).utcoffset() == dt.timedelta(0)


def test_a_monitor_sees_what_is_skipped_as_such(stage: Stage) -> None:
    state, events = stage.app.events.State(), []

    def note(event: dict[str, Any]) -> None:
        state.event(event)
        events.append(event)

    with watched(stage, note):
        stage.worker(concurrency=1, options=["-E"])
        with stage.tasks.work.lock_for("k", wait=60):
            result = stage.tasks.work.apply_async(("k",), lock={"conflict": "skip"})
            stage.tasks.work.delay("another").get(timeout=120)
        eventually(lambda: [e for e in events if e["type"] == "task-succeeded"])
    (skipped,) = [e for e in events if e["type"] == "task-skipped"]
    assert (skipped["uuid"], skipped["resource"]) == (result.id, "k:k")
    assert "lock_for" in skipped["reason"]
    assert state.tasks[result.id].state == "SKIPPED"
    assert [e["type"] for e in events if e.get("uuid") == result.id][-1] == "task-skipped"


CARD = "4111-1111"


def test_no_argument_and_no_password_stands_in_logs_events_and_states(
    guarded_stage: Stage,
) -> None:
    stage = guarded_stage
    events: list[str] = []
    with watched(stage, lambda event: events.append(repr(event))):
        worker = stage.worker(concurrency=2, options=["-E"])
        task = stage.tasks.keyless
        shown = {"argsrepr": "(...)", "kwargsrepr": "{}"}  # what Celery itself shows
        misfit = stage.app.send_task(task.name, (CARD, CARD), **shown)
        with task.lock_for(CARD, wait=60):
            skipped, failed, deferred = results = [
                task.apply_async((CARD,), lock={"conflict": conflict}, **shown)
                for conflict in ("skip", "fail", "requeue")
            ]
            stage.see_deferred(deferred, 3)
            told = [repr(stage.info(deferred))]
            for result, error in (
                (skipped, TaskRevokedError), (failed, LockTaken), (misfit, SettingsError)
            ):  # fmt: skip
                with pytest.raises(error):
                    result.get(timeout=120)
        assert deferred.get(timeout=120).startswith(f"{task.name}:")
        eventually(lambda: any("task-succeeded" in event for event in events))
    told += [repr(stage.info(result)) for result in (misfit, *results)]
    assert any("task-deferred" in event for event in events)
    for hint in ("gives no vote", "deferred tests.", "skipped tests.", "do not fit"):
        assert hint in worker.output()
    for secret in (PASSWORD, CARD):
        assert secret not in worker.output()
        assert secret not in "".join(events)
        assert secret not in "".join(told)


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


def test_without_a_quorum_each_deferral_says_how_long_it_has_been_so(
    make_stage: Callable[..., Stage], mortal_nodes: list[EmbeddedNode]
) -> None:
    stage, steady = make_stage(mortal_nodes), {"first": 0.2, "cap": 0.2, "jitter": "none"}
    for node in mortal_nodes[:2]:
        node.kill()
    worker = stage.worker(concurrency=1)
    result = stage.tasks.work.apply_async(("k",), lock={"backoff": steady})
    stage.see_deferred(result, 3)
    (why,) = re.findall(r"deferred tests.*: (no quorum of .*), 2 deferrals", worker.output())
    assert float(re.findall(r"waited ([\d.]+) s", why)[0]) >= 0.3


def test_without_a_quorum_whoever_waits_is_told_by_every_rule(
    make_stage: Callable[..., Stage], mortal_nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(mortal_nodes)
    stage.worker(concurrency=3)
    for node in mortal_nodes[:2]:
        node.kill()
    for lock, error in (
        ({"unreachable": "fail"}, QuorumUnreachable),
        ({"conflict": "skip", "max_deferrals": 1}, QuorumUnreachable),
        ({"conflict": "fail", "max_wait": 0.2, "give_up": "skip"}, TaskRevokedError),
    ):
        calls = [stage.tasks.step.si(f"k{n}").set(lock=lock) for n in range(3)]
        stage.see_all_end(error, *calls)
    assert stage.lines("step") == []


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
