"""What a worker refuses at its start: tasks that it would not lock, and the eventlet pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.integration.conftest import ROOT

APP = """
from celery import Celery, shared_task
from celery.exceptions import WorkerShutdown
from celery.signals import worker_ready

app = Celery("shop", broker="memory://")

def stop(**_):
    print("ready", flush=True)
    raise WorkerShutdown

@app.on_after_finalize.connect
def connect(**_):  # so that `stop` is called last
    worker_ready.connect(stop)
"""
FORGOTTEN = """
@app.task(lock_key="stock:{sku}")
def take(sku): ...
"""
OWN = """
from celery_redlock import LockedTask

@app.task(base=LockedTask)
def take(sku): ...
"""
SHARED = OWN.replace("app.task", "shared_task")
BY_SETTING = """
app.conf.redlock_tasks = {"shop.take": {}}

@app.task
def take(sku): ...

try:
    app.finalize()
except Exception:
    print("swallowed")
"""
MISSPELT = """
from celery.signals import celeryd_after_setup

app.conf.redlock_tasks = {"shop.taek": {"key": "stock"}}

@celeryd_after_setup.connect
def stop_last(**_):  # behind the receivers of an app that binds no locked task
    worker_ready.disconnect(stop)
    worker_ready.connect(stop)

@app.task
def take(sku): ...
"""
NODES = 'app.conf.redlock_nodes = ["redis://127.0.0.1:1"]\n'
UNLOCKED = OWN.replace("LockedTask)", "LockedTask, lock_key=False)")
OWN_POOL = """
from celery.concurrency.eventlet import TaskPool
class OwnPool(TaskPool): ...
app.conf.worker_pool = OwnPool
"""
PATCHED = """
import eventlet; eventlet.monkey_patch()
from celery_redlock import Redlock
Redlock(["redis://127.0.0.1:1"])
"""
NO_METRICS = """
import sys
sys.modules["prometheus_client"] = None
app.conf.redlock_metrics = "0.0.0.0:9808"
"""
NO_CONSUMER = """
from celery.worker.consumer import Consumer
del Consumer.apply_eta_task
"""
NO_HOOK = """
import celery._state
del celery._state._get_active_apps
"""
NEWER = """
import celery
celery.__version__ = "99.0.0rc1"
"""


def celery(
    folder: Path, app: str, *arguments: str, package: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Celery. package: whether the process has imported the package when the app begins."""
    (folder / "shop.py").write_text(APP + app)
    command = [sys.executable, "-m", "celery", "-A", "shop", *arguments]
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}
    return fork_server.run(command, cwd=folder, env=env, timeout=240, package=package)


@pytest.mark.parametrize(
    ("app", "said"),
    [
        pytest.param(FORGOTTEN, "task 'shop.take': lock_key='stock:{sku}'", id="a forgotten base"),
        pytest.param("app.finalize()" + FORGOTTEN, "base=LockedTask", id="a late one"),
        pytest.param(OWN, "app: redlock_nodes=None: ", id="no nodes"),
        pytest.param(NO_CONSUMER + NODES + OWN, ".apply_eta_task=missing", id="a worker's name"),
        pytest.param(NO_HOOK + NODES + OWN, "_get_active_apps=missing", id="a name"),
        pytest.param(NO_HOOK + NODES + BY_SETTING, "_active_apps=missing", id="a swallowed error"),
    ],
)
def test_a_worker_does_not_start_if_it_would_not_lock(tmp_path: Path, app: str, said: str) -> None:
    pool = "solo" if "finalize" in app else "prefork"
    ended = celery(tmp_path, app, "worker", "-P", pool, "-c", "1", "-l", "INFO")
    assert ended.returncode != 0
    assert "] ready" not in ended.stderr
    error = ended.stderr.rstrip().splitlines()[-1]
    assert error.startswith("celery_redlock.errors.SettingsError: ")
    assert said in error


@pytest.mark.parametrize("program", [("-m", "celery"), (str(Path(sys.prefix, "bin", "celery")),)])
def test_a_wrong_key_ends_the_start_with_one_line(tmp_path: Path, program: tuple[str, ...]) -> None:
    (tmp_path / "shop.py").write_text(
        APP + NODES + OWN.replace("base=LockedTask", "base=LockedTask, lock_key='stock:{skus}'")
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *program, "-A", "shop", "worker", "-P", "solo"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("celery_redlock.errors.SettingsError: task 'shop.")
    assert "lock_key='stock:{skus}'" in line


def test_another_program_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        APP + NODES + OWN.replace("base=LockedTask", "base=LockedTask, lock_key='stock:{skus}'")
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", "import shop; shop.app.finalize()"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert "Traceback (most recent call last)" in ended.stderr


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_a_worker_does_not_start_if_its_metrics_lack_their_package(
    tmp_path: Path, pool: str
) -> None:
    app = NODES + OWN + NO_METRICS
    ended = celery(tmp_path, app, "worker", "-P", pool, "-c", "1", "-l", "INFO")
    assert ended.returncode != 0
    assert "] ready" not in ended.stderr
    said = ended.stderr.rstrip().splitlines()[-1]
    assert "SettingsError: app: redlock_metrics='0.0.0.0:9808': " in said
    assert "pip install 'prometheus-client>=0.21'" in said


def test_a_worker_does_not_start_if_celery_tells_of_no_app_that_finalizes(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import celery.app.builtins, celery._state\ndel celery._state.connect_on_app_finalize"
    )
    ended = celery(tmp_path, NODES + BY_SETTING, "worker", "-P", "solo", "-l", "INFO")
    assert ended.returncode != 0
    assert "] ready" not in ended.stderr
    assert "_state.connect_on_app_finalize=missing" in ended.stderr.rstrip().splitlines()[-1]
    assert celery(tmp_path, "", "worker", "-P", "solo", "-l", "INFO").returncode == 0


def test_the_doctor_finds_a_forgotten_base(tmp_path: Path) -> None:
    for app in (FORGOTTEN, "app.finalize()" + FORGOTTEN):
        ended = celery(tmp_path, app, "redlock", "doctor")
        assert ended.returncode == 1
        assert ended.stderr.startswith("Error: ")
        assert "task 'shop.take': lock_key='stock:{sku}'" in ended.stderr


def test_a_worker_without_nodes_runs_all_but_the_locked_tasks_that_are_shared(
    tmp_path: Path,
) -> None:
    command = ("worker", "-P", "prefork", "-c", "1", "-l", "INFO")
    ended = celery(tmp_path, SHARED, *command, package=True)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "redlock" in line]
    assert "] ready" in ended.stderr
    (line,) = [line for line in lines if "WARNING" in line or "ERROR" in line]
    assert "WARNING" in line
    assert "no lock can be acquired: app: redlock_nodes=None" in line


@pytest.mark.parametrize("others", ["", OWN.replace("take", "count")], ids=["alone", "beside one"])
def test_a_worker_warns_of_a_misspelt_name_also_if_it_locks_nothing(
    tmp_path: Path, others: str
) -> None:
    done = celery(tmp_path, NODES + MISSPELT + others, "worker", "-P", "solo", "-l", "WARNING")
    assert "] ready" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "redlock_tasks" in line]
    assert ": WARNING/" in line
    hint = "'shop.taek': is not a task of this worker; did you mean 'shop.take'?"
    assert f"app: redlock_tasks={hint}" in line


def test_the_line_of_nodes_that_fail_names_one_passage(tmp_path: Path) -> None:
    done = celery(tmp_path, NODES + OWN, "worker", "-P", "solo", "-l", "WARNING")
    (line,) = [line for line in done.stderr.splitlines() if "lock nodes answer" in line]
    assert line.endswith("Connection refused. See `celery redlock explain no-quorum`")


def test_celerys_inspect_knows_our_commands_by_name_alone(tmp_path: Path) -> None:
    asked = celery(tmp_path, "", "inspect", "-t", "0.1", "redlock_held")
    assert "No nodes replied" in asked.stderr
    listed = celery(tmp_path, "", "inspect", "--list")
    assert "active_queues" in listed.stdout
    assert "redlock" not in listed.stdout


@pytest.mark.parametrize(
    ("app", "count"), [(NODES + OWN, 1), ("", 0)], ids=["a locked task", "none"]
)
def test_a_worker_with_locked_tasks_says_once_that_celery_is_newer_than_what_was_tested(
    tmp_path: Path, app: str, count: int
) -> None:
    done = celery(tmp_path, NEWER + app, "worker", "--pool=solo", "--loglevel=WARNING")
    assert "ready" in done.stderr
    assert done.stderr.count("Celery 99.0.0rc1 is newer than 5.7") == count, done.stderr


@pytest.mark.parametrize(
    ("app", "pool"),
    [(NODES + OWN, ("-P", "eventlet")), (NODES + OWN + OWN_POOL, ())],
    ids=["by name", "a class made of it"],
)
def test_a_worker_of_eventlet_with_locked_tasks_does_not_start(
    tmp_path: Path, app: str, pool: tuple[str, ...]
) -> None:
    ended = celery(tmp_path, app, "worker", "-c", "1", *pool)
    assert ended.returncode not in (0, None)
    assert "] ready" not in ended.stderr
    said = ended.stderr.rstrip().splitlines()[-1]
    assert "worker: worker_pool=eventlet: eventlet cannot run locked tasks" in said
    assert "shop.take" in said
    assert "-P gevent" in said


@pytest.mark.parametrize("app", [NODES + UNLOCKED, pytest.param("", marks=pytest.mark.slow)])
def test_a_worker_of_eventlet_that_has_nothing_to_lock_starts(tmp_path: Path, app: str) -> None:
    ended = celery(tmp_path, app, "worker", "-c", "1", "-P", "eventlet")
    assert "] ready" in ended.stderr, ended.stderr
    assert ended.returncode == 0, ended.stderr


def test_a_redlock_is_refused_in_a_process_that_eventlet_has_patched() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PATCHED]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = ended.stderr.rstrip().splitlines()[-1]
    assert ended.returncode == 1
    assert "SettingsError: Redlock: monkey_patch=eventlet:" in said
    assert "gevent" in said
