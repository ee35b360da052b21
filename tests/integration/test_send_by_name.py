"""`lock={...}` goes along with a send by name, also from a process that has not the task."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from celery import Celery

from celery_redlock import Backoff, LockTaken, SettingsError, send_unique
from tests import fork_server
from tests.conftest import eventually
from tests.integration.conftest import STANDING, Stage, Standing, pools

WORKER = STANDING
OPTIONS = {"on_conflict": "fail", "backoff": Backoff()}
SENDER = """
import json, sys
import celery_redlock
from celery import Celery
broker, name, key = json.loads(sys.argv[1])
client = Celery(broker=broker)
print(client.send_task(name, (key,), lock={"on_conflict": "fail"}).id)
"""


@pytest.mark.parametrize("has_task", [True, False])
def test_a_send_by_name_carries_the_options_of_its_call(
    stage: Stage, key: str, has_task: bool
) -> None:
    conf, name = stage.app.conf, stage.tasks.work.name
    other = Celery(broker=conf.broker_url, backend=conf.result_backend, set_as_default=False)
    app = stage.app if has_task else other
    by_signature = app.signature(name, (key,)).set(lock=OPTIONS)
    with stage.tasks.work.lock_for(key, wait=60):
        for sent in (app.send_task(name, (key,), lock=OPTIONS), by_signature.apply_async()):
            with pytest.raises(LockTaken):
                sent.get(timeout=60)
    other.close()


def test_a_process_without_a_locked_task_carries_the_options_of_its_call(
    stage: Stage, key: str
) -> None:
    known = [stage.app.conf.broker_url, stage.tasks.work.name, key]
    command = [sys.executable, "-c", SENDER, json.dumps(known)]
    with stage.tasks.work.lock_for(key, wait=60):
        done = fork_server.run(command, check=True, timeout=60)
        with pytest.raises(LockTaken):
            stage.app.AsyncResult(done.stdout.strip()).get(timeout=60)


@pytest.mark.parametrize("wrong", [{"tll": 3}, {"ttl": -1}, 3, [("ttl", 9)]], ids=str)
def test_a_send_by_name_with_a_wrong_option_fails_when_it_runs(
    stage: Stage, key: str, wrong: Any
) -> None:
    sent = stage.app.send_task(stage.tasks.work.name, (key,), lock=wrong)
    with pytest.raises(SettingsError, match="call: lock="):
        sent.get(timeout=60)


@pytest.mark.parametrize("pool", pools("solo", every=["solo"]))
def test_a_worker_says_that_a_task_takes_no_lock_which_options_of_one_came_for(
    of_pool: Standing,
) -> None:
    name = of_pool.stage.tasks.clock.name
    for _ in range(2):
        assert of_pool.stage.app.send_task(name, lock={"ttl": 9}).get(timeout=60)
    assert of_pool.workers[0].output().count(f"{name} takes no lock") == 1


def test_a_send_by_name_says_that_it_is_not_deduplicated(
    stage: Stage, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent = stage.app.send_task(stage.tasks.work.name, (key,), lock={"unique_for": 60})
    assert "a call by name has no key; use send_unique" in caplog.text
    assert sent.get(timeout=60) == 0


def test_a_deduplicated_send_by_name_keeps_its_options_beside_its_window(
    stage: Stage, key: str
) -> None:
    task, pattern = stage.tasks.once_early, f"*:unique:*:{key}"
    how = {"resource": f"u:{key}", "unique_for": 60, "lock": OPTIONS}
    with task.lock_for(key, wait=60):
        sent = send_unique(stage.app, task.name, (key,), **how)
        with pytest.raises(LockTaken):
            sent.get(timeout=60)
    eventually(lambda: not any(node.client().keys(pattern) for node in stage.nodes))
