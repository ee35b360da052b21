"""What a person sees: DEFERRED with its reason, STARTED once the lock is held, then the end."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_redlock import LockedTask, LockTaken, QuorumUnreachable, SettingsError
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import PATIENCE, Nodes, eventually, settled, trust_nodes
from tests.integration.conftest import PASSWORD, STANDING, MakeStage, Stage
from tests.integration.deliveries import heard, run_here, watched

WORKER = STANDING


def test_deferred_says_what_it_waits_for_and_until_when(stage: Stage, key: str) -> None:
    with stage.tasks.work.lock_for(key, wait=60):
        result = stage.tasks.work.delay(key)
        eventually(lambda: result.state == "DEFERRED")
        info = eventually(lambda: result.info["holder"] and result.info)
        assert info["resource"] == f"k:{key}"
        assert "lock_for tests.integration.app.work" in info["holder"]
        assert info["deferrals"] >= 1
        assert info["waited"] >= 0
        assert dt.datetime.fromisoformat(info["next_try"]).utcoffset() == dt.timedelta(0)
        assert not result.ready()
    assert result.get(timeout=120) == 0


def test_deferred_is_stored_before_the_message_is_published(stage: Stage, key: str) -> None:
    asked = stage.log.with_name("publishes")
    asked.touch()
    with stage.tasks.work.lock_for(key, wait=60):
        result = stage.tasks.work.delay(key)
        stage.see_deferred(result)
    assert result.get(timeout=120) == 0
    told = [(line.more["status"], line.pid != os.getpid()) for line in stage.lines("publish")]
    assert told[0] == ("PENDING", False)
    assert set(told[1:]) == {("DEFERRED", True)}
    asked.unlink()


@pytest.mark.parametrize("is_stored", [True, False])
def test_deferred_is_stored_unless_the_app_has_no_place_for_it(
    make_stage: MakeStage, nodes: Nodes, is_stored: bool
) -> None:
    stage = make_stage(nodes, redlock_store_deferred=is_stored)
    task, task_id = stage.tasks.work, str(uuid.uuid4())
    with heard(stage, "task-deferred") as events, task.lock_for("k", wait=60):
        run = threading.Thread(target=lambda: run_here(task, "k", id=task_id))
        run.start()  # in this one the lock is held already
        run.join()
        eventually(lambda: [event["uuid"] for event in events] == [task_id])
    state = stage.info(stage.app.AsyncResult(task_id))["status"]
    assert state == ("DEFERRED" if is_stored else "PENDING")


def test_started_means_that_the_lock_is_held(stage: Stage, key: str) -> None:
    see_started_under_its_lock(stage, key)


@pytest.mark.slow
def test_started_means_so_where_it_is_stored_for_every_task(
    make_stage: MakeStage, nodes: Nodes, key: str
) -> None:
    stage = make_stage(nodes, task_track_started=True)
    stage.worker(concurrency=1)
    see_started_under_its_lock(stage, key)


def see_started_under_its_lock(stage: Stage, key: str) -> None:
    task_id = str(uuid.uuid4())
    with states_stored(stage, task_id) as stored:
        with stage.tasks.work.lock_for(key, wait=60):
            result = stage.tasks.sees_its_state.apply_async((key,), task_id=task_id)
            stage.see_deferred(result)
        result.get(timeout=120)
        in_order = list(itertools.takewhile("SUCCESS".__ne__, stored))
    assert [state for state, _ in itertools.groupby(in_order)] == ["DEFERRED", "STARTED"]
    assert [line.more for line in stage.lines("state")] == [{"status": "STARTED", "held": True}]


def test_a_try_that_its_rate_refuses_stores_no_started(stage: Stage, key: str) -> None:
    task_id = str(uuid.uuid4())
    with states_stored(stage, task_id) as stored, settled(stage.nodes) as other:
        with other.lock(f"rated:{key}", rate="1/h", wait=60):
            alone = {"rate": "1/h", "limit": 1}
            result = stage.tasks.rated.apply_async((key,), lock=alone, task_id=task_id)
            stage.see_deferred(result)
        eventually(lambda: stage.info(result)["result"].get("rate") == "1/h")
        other.break_lock(f"rated:{key}")
        result.get(timeout=120)
        in_order = list(itertools.takewhile("SUCCESS".__ne__, stored))
    assert [state for state, _ in itertools.groupby(in_order)] == ["DEFERRED", "STARTED"]


@contextmanager
def states_stored(stage: Stage, task_id: str) -> Iterator[Iterator[str]]:
    """Give each state that is stored for a task from now on; waits for the next one.

    Source: celery.backends.redis publishes what it stores under the name of its key.
    """
    with stage.broker.client().pubsub() as channel:
        channel.subscribe(f"celery-task-meta-{task_id}")
        assert channel.get_message(timeout=60)["type"] == "subscribe"
        yield (json.loads(message["data"])["status"] for message in channel.listen())


PICKLED = {"result_serializer": "pickle", "accept_content": ["json", "pickle"]}
BACKENDS: dict[str, dict[str, Any]] = {
    "redis, pickled": PICKLED,
    "rpc": {"result_backend": "rpc://"},
    "rpc, pickled": {"result_backend": "rpc://", **PICKLED},
    "database": {"result_backend": "db+sqlite:///{folder}/results"},
    "database, pickled": {"result_backend": "db+sqlite:///{folder}/results", **PICKLED},
}


def test_each_state_is_stored_where_results_are(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    see_states(stage, worker, key)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_states_are_the_same_in_each_result_backend(
    make_stage: MakeStage, nodes: Nodes, tmp_path: Path, key: str, backend: str
) -> None:
    conf = dict(BACKENDS[backend])
    if "result_backend" in conf:
        conf["result_backend"] = conf["result_backend"].format(folder=tmp_path)
    stage = make_stage(nodes, **conf)
    see_states(stage, stage.worker(concurrency=2), key)


def see_states(stage: Stage, worker: WorkerProcess, key: str) -> None:
    with stage.tasks.until.lock_for(key, wait=60):
        result = stage.tasks.until.delay(key, f"{key}-go")
        eventually(lambda: result.state == "DEFERRED")
        info = result.info
        assert sorted(info) == ["deferrals", "holder", "next_try", "resource", "waited"]
        assert info["resource"] == f"k:{key}"
        skipped = stage.tasks.work.apply_async((key,), lock={"on_conflict": "skip"})
        with pytest.raises(TaskRevokedError):
            skipped.get(timeout=120)
        assert skipped.state == "REVOKED"
    eventually(lambda: result.state == "STARTED")
    assert result.info["hostname"].startswith("w1@")
    stage.log.with_name(f"{key}-go").touch()
    assert result.get(timeout=120).startswith("w1@")
    assert result.state == "SUCCESS"
    assert "cannot report" not in worker.output()


def test_a_monitor_sees_deferred_with_its_reason_and_keeps_neither(stage: Stage, key: str) -> None:
    state, seen = stage.app.events.State(), []
    shown: dict[str, dict[str, Any]] = {}  # the last of each state, by the fields that Celery knows

    def note(event: dict[str, object]) -> None:
        state.event(event)
        for task in state.tasks.values():
            if task.uuid == key:
                shown[task.state] = task.as_dict()
                if seen[-1:] != [task.state]:
                    seen.append(task.state)

    with watched(stage, note):
        with stage.tasks.work.lock_for(key, wait=60):
            result = stage.tasks.work.apply_async((key, 0.5), task_id=key)
            eventually(lambda: "DEFERRED" in seen)
        assert result.get(timeout=120) == 0
        eventually(lambda: seen[-1:] == ["SUCCESS"])
    # the worker's main process says RECEIVED at a time of its own
    assert [word for word in seen if word != "RECEIVED"][-3:] == ["RETRY", "STARTED", "SUCCESS"]
    reason = shown["DEFERRED"]["result"]
    assert reason.startswith(f"k:{key}: held by lock_for tests.integration.app.work"), reason
    for word in ("; deferrals: ", "; waited: ", "; next try: 20"):
        assert word in reason
    kept = [(shown[at][name], at) for at in ("STARTED", "SUCCESS") for name in ERRORS]
    assert [text for text in kept if text[0] is not None] == []
    assert (shown["STARTED"]["result"], shown["SUCCESS"]["result"]) == (None, "0")


ERRORS = ("exception", "traceback")


def of(result: Any, kind: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if (event.get("uuid"), event["type"]) == (result.id, kind)]


def test_a_monitor_is_told_what_deferred_says(stage: Stage, key: str) -> None:
    events: list[dict[str, Any]] = []
    with watched(stage, events.append):
        with stage.tasks.work.lock_for(key, wait=60):
            result = stage.tasks.work.delay(key)
            stage.see_deferred(result)
            told = eventually(lambda: of(result, "task-deferred", events))
        result.get(timeout=120)
    assert [one["deferrals"] for one in told] == list(range(1, len(told) + 1))
    for one in told:
        assert one["resource"] == f"k:{key}"
        assert "lock_for" in one["holder"]
        assert one["waited"] >= 0
        assert dt.datetime.fromisoformat(one["next_try"]).utcoffset() == dt.timedelta(0)


def test_a_monitor_sees_what_is_skipped_as_such(stage: Stage, key: str) -> None:
    state, events = stage.app.events.State(), []

    def note(event: dict[str, Any]) -> None:
        state.event(event)
        events.append(event)

    with watched(stage, note):
        with stage.tasks.work.lock_for(key, wait=60):
            result = stage.tasks.work.apply_async((key,), lock={"on_conflict": "skip"})
            another = stage.tasks.work.delay(f"{key}-another")
            another.get(timeout=120)
        eventually(lambda: of(another, "task-succeeded", events))
        (skipped,) = eventually(lambda: of(result, "task-skipped", events))
    assert skipped["resource"] == f"k:{key}"
    assert "lock_for" in skipped["reason"]
    assert state.tasks[result.id].state == "SKIPPED"
    # task-started comes from the main process, and may come last
    seen = {event["type"] for event in events if event.get("uuid") == result.id}
    assert seen <= {"task-sent", "task-received", "task-started", "task-skipped"}


CARD = "4111-1111"


@pytest.mark.slow
def test_no_argument_and_no_password_stands_in_logs_events_and_states(guarded_stage: Stage) -> None:
    stage = guarded_stage
    events: list[str] = []
    with watched(stage, lambda event: events.append(repr(event))):
        worker = stage.worker(concurrency=2, options=["-E"])
        task = stage.tasks.keyless
        shown = {"argsrepr": "(...)", "kwargsrepr": "{}"}  # what Celery itself shows
        misfit = stage.app.send_task(task.name, (CARD, CARD), **shown)
        with task.lock_for(CARD, wait=60):
            skipped, failed, deferred = results = [
                task.apply_async((CARD,), lock={"on_conflict": on_conflict}, **shown)
                for on_conflict in ("skip", "fail", "defer")
            ]
            stage.see_deferred(deferred)
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
    for hint in ("gives no vote", "] deferred: ", "skipped tests.", "do not fit"):
        assert hint in worker.output()
    for secret in (PASSWORD, CARD):
        assert secret not in worker.output()
        assert secret not in "".join(events)
        assert secret not in "".join(told)


@pytest.mark.slow
def test_a_send_is_a_new_one_from_the_start_of_a_body_without_a_lock(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes)
    task = stage.tasks.once_to_start

    def windows() -> list[str]:
        found = [(n.client(), k) for n in mortal_nodes for k in n.client().keys("*:unique:*")]
        return [str(client.get(name)) for client, name in found]

    first = task.apply_async(("k", "wait"), lock={"on_unreachable": "run"})
    # a node that was slow to answer is told to forget it
    eventually(lambda: len(windows()) > 1 and all(":sent:" in value for value in windows()))
    for node in mortal_nodes[:2]:
        node.pause()
    stage.worker(concurrency=1)
    stage.wait_for("once")
    for node in mortal_nodes[:2]:
        node.resume()
    eventually(lambda: not windows())
    second = task.delay("k")
    assert second.id != first.id
    stage.log.with_name("k").touch()
    second.get(timeout=120)


def test_without_a_quorum_whoever_waits_is_told_by_every_rule_or_it_runs_unlocked(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage, short = make_stage(mortal_nodes), {"first": 0.4, "cap": 0.4}
    worker = stage.worker(concurrency=3)
    for node in mortal_nodes[:2]:
        node.kill()
    waiting = stage.tasks.work.apply_async(("waits",), lock={"backoff": short})
    for lock, error in (
        ({"on_unreachable": "fail"}, QuorumUnreachable),
        ({"on_conflict": "skip", "max_wait": 0.2}, QuorumUnreachable),
        ({"on_conflict": "fail", "max_wait": 0.2, "on_give_up": "skip"}, TaskRevokedError),
    ):
        calls = [stage.tasks.step.si(f"k{n}").set(lock=lock) for n in range(3)]
        stage.see_all_end(error, *calls)
    assert stage.lines("step") == []
    running = stage.tasks.loses.apply_async(("k",), lock={"on_unreachable": "run"})
    assert running.get(timeout=120) == "went on"
    assert "runs WITHOUT its lock" in worker.output()
    stage.see_deferred(waiting, 2)
    waited = stage.info(waiting)["result"]["waited"]  # each deferral says how long it has been so
    stage.see_deferred(waiting, stage.deferrals(waiting) + 1)
    assert 0 < waited < stage.info(waiting)["result"]["waited"]
    line = r"lock 'k:waits' has no quorum of 2 nodes \(\S+: .*; \S+: .*\); it tries again within "
    assert re.search(line + r"[\d.]+ s\n", worker.output())


@pytest.mark.parametrize(
    ("options", "said"), [({"ttl": -1}, "ttl"), ({"max_deferrals": 3}, "max_wait ends a wait")]
)
def test_a_wrong_option_in_a_message_ends_that_run_as_failure(
    stage: Stage, key: str, options: dict[str, Any], said: str
) -> None:
    result = stage.tasks.work.apply_async((key,), headers={"redlock": {"options": options}})
    with pytest.raises(SettingsError, match=said):
        result.get(timeout=120)
    assert stage.lines("begin") == []


def test_a_key_that_cannot_be_made_ends_the_run_as_failure(stage: Stage) -> None:
    with pytest.raises(SettingsError, match="key is None"):
        stage.tasks.work.delay(None).get(timeout=120)
    assert stage.lines("begin") == []


def test_without_a_result_backend_nothing_is_written_and_the_lock_works(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    stage = make_stage(nodes, result_backend=None, task_ignore_result=True)
    stage.worker(concurrency=2)
    for _ in range(4):
        stage.tasks.work.delay("k")
    stage.wait_for("end", 4)
    assert not [key for key in stage.broker.client().keys("*") if "meta" in key]


@pytest.mark.parametrize("said", ["by the task", "by the call"])
def test_where_only_errors_are_wanted_they_are_stored_and_nothing_else(
    stage: Stage, worker: WorkerProcess, key: str, said: str
) -> None:
    by_task, ended = said == "by the task", stage.app.AsyncResult
    task, call = (
        (stage.tasks.ignored, {}) if by_task else (stage.tasks.work, {"ignore_result": True})
    )
    with task.lock_for(key, wait=60):
        for on_conflict, error in (("skip", TaskRevokedError), ("fail", LockTaken)):
            sent = task.apply_async((key,), lock={"on_conflict": on_conflict}, **call)
            with pytest.raises(error):
                ended(sent.id).get(timeout=120)
        deferred = task.apply_async((key,), **call)
        eventually(lambda: f"[{deferred.id}] deferred" in worker.output())
        assert stage.info(deferred)["status"] == "PENDING"
    stage.wait_for("end")
    assert stage.info(deferred)["status"] == "PENDING"


def test_what_is_skipped_here_and_now_is_stored_where_eager_results_are() -> None:
    app = Celery("eager", backend="cache+memory://", set_as_default=False)
    app.conf.update(task_always_eager=True, task_store_eager_result=True)

    @app.task(base=LockedTask, shared=False, lock_key="k", lock_on_conflict="skip")
    def skips() -> None: ...

    with EmbeddedNode() as node:
        trust_nodes([node])
        app.conf.update(redlock_nodes=[node.url], redlock_node_timeout=PATIENCE)
        node.client().set("{redlock}:lock:k", "another's", px=60_000)
        sent = skips.delay()
        redlock_of(app).close()
    with pytest.raises(TaskRevokedError):
        app.AsyncResult(sent.id).get(timeout=1)


def test_a_worker_says_at_its_start_what_its_nodes_say(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes, redlock_node_timeout=PATIENCE)  # each says it once
    mortal_nodes[0].kill()
    said = "2 of 3 lock nodes answer, 2 needed; failing: 127.0.0.1"
    worker = stage.worker(pool="solo")
    eventually(lambda: said in worker.output())
