"""A worker with the eventlet pool runs no locked task: it does not start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT

APP = """
from celery import Celery
from celery.exceptions import WorkerShutdown
from celery.signals import worker_ready
from celery_redlock import LockedTask

app = Celery("shop", broker="memory://")
app.conf.redlock_nodes = ["redis://127.0.0.1:1"]

@app.task({options})
def settle(order_id): ...

@app.task
def plain(): ...

if {own}:
    from celery.concurrency.eventlet import TaskPool
    class OwnPool(TaskPool): ...
    app.conf.worker_pool = OwnPool

@worker_ready.connect
def stop(**_):
    print("ready", flush=True)
    raise WorkerShutdown
"""


def start(folder: Path, options: str, pool: str) -> subprocess.CompletedProcess[str]:
    """Run the worker of an app whose task `settle` has these options, until it ends.

    pool: as -P gives it; "own": a class made of eventlet's, in the app's settings.
    """
    (folder / "shop.py").write_text(APP.format(options=options, own=pool == "own"))
    by_name = [] if pool == "own" else ["-P", pool]
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-c", "1", *by_name]
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("pool", ["eventlet", "own"])
def test_a_worker_with_locked_tasks_refuses_to_start(tmp_path: Path, pool: str) -> None:
    ended = start(tmp_path, "base=LockedTask", pool)
    assert ended.returncode not in (0, None)
    assert "] ready" not in ended.stderr
    said = ended.stderr.rstrip().splitlines()[-1]
    assert "worker: worker_pool=eventlet: eventlet cannot run locked tasks" in said
    assert "shop.settle" in said
    assert "-P gevent" in said


@pytest.mark.parametrize(
    ("options", "pool"),
    [
        ("", "eventlet"),
        ("base=LockedTask, lock_key=False", "eventlet"),
        ("base=LockedTask", "gevent"),
    ],
)
def test_any_other_worker_starts(tmp_path: Path, options: str, pool: str) -> None:
    ended = start(tmp_path, options, pool)
    assert "] ready" in ended.stderr, ended.stderr
    assert ended.returncode == 0, ended.stderr


def test_a_redlock_is_refused_in_a_process_that_eventlet_has_patched() -> None:
    script = (
        "import eventlet; eventlet.monkey_patch()\n"
        "from celery_redlock import Redlock\n"
        "Redlock(['redis://127.0.0.1:1'])\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    said = ended.stderr.rstrip().splitlines()[-1]
    assert ended.returncode == 1
    assert "SettingsError: Redlock: monkey_patch=eventlet:" in said
    assert "gevent" in said
