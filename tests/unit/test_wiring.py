"""What is connected to Celery is what the list of the wiring names, all of it and no more."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, signals
from celery.utils.dispatch import Signal

import celery_redlock
import celery_redlock_entry
from celery_redlock import wiring
from celery_redlock.operate.cli import redlock
from celery_redlock.tasks.unique import send
from tests import fork_server
from tests.sources import ONE_PROCESS, nodes_of

PACKAGE = Path(celery_redlock.__file__).parent
SIGNALS = {name: one for name, one in vars(signals).items() if isinstance(one, Signal)}
# A new process: in this one other tests have connected receivers, and have run tasks.
REGISTERED = """
import importlib, json, weakref
import celery_redlock
from celery import Celery, Task, _state, signals
from celery.utils.dispatch import Signal
from celery.worker.control import Panel
from celery_redlock import LockedTask, signals as public
from celery_redlock.lock.engine.events import Events

def name_of(function):
    if isinstance(function, weakref.ReferenceType):
        function = function()
    return f"{function.__module__}:{function.__qualname__}"

def in_order(module):
    found = {n: one for n, one in vars(module).items() if isinstance(one, Signal)}
    return {n: [name_of(r) for _, r in one.receivers] for n, one in found.items()}

def registered():
    return {
        "signals": in_order(signals),
        "public": in_order(public),
        "finalizers": sorted(map(name_of, _state._on_app_finalizers)),
        "commands": {n: name_of(c) for n, c in Panel.data.items() if n in Panel.meta},
        "hooks": [id(Events.wants), id(Events.send), id(Events.on_loss)],
    }

def with_a_task(base):
    app = Celery("shop", broker="memory://", set_as_current=False)

    @app.task(base=base, shared=False)
    def order(): ...

    app.finalize()
    return registered()

found = [with_a_task(Task), with_a_task(LockedTask)]
importlib.reload(celery_redlock)
print(json.dumps([*found, with_a_task(LockedTask)]))
"""

TWO_THREADS = """
import threading
from celery import Celery, signals
from celery_redlock import LockedTask

connects, goes_on, seen = threading.Event(), threading.Event(), {}
connect = signals.task_postrun.connect

def slow_connect(*args, **options):
    connects.set()
    assert goes_on.wait(120)
    return connect(*args, **options)

def settle(): ...

def declare(name):
    app = Celery(name, broker="memory://", set_as_current=False)
    app.task(base=LockedTask, shared=False, name=name)(settle)
    app.finalize()
    seen[name] = len(signals.task_postrun.receivers)

signals.task_postrun.connect = slow_connect
threads = [threading.Thread(target=declare, args=(name,)) for name in ("shop", "store")]
threads[0].start()
assert connects.wait(120)
threads[1].start()
threads[1].join(0.5)
goes_on.set()
for thread in threads:
    thread.join()
assert seen["store"] == seen["shop"] > 0, seen
"""


FORKED = pytest.mark.xdist_group("fork server")


def name_of(function: Any) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def ours(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("celery_redlock")]


@pytest.fixture(scope="module")
def registered() -> list[dict[str, Any]]:
    """Return what is registered in a new process: before and after the first locked task, later."""
    command = [sys.executable, "-c", REGISTERED]
    done = fork_server.run(command, check=True, timeout=120, package=False)
    return list(json.loads(done.stdout))


@FORKED
def test_each_signal_has_the_receivers_of_the_list_and_no_other_one(
    registered: list[dict[str, Any]],
) -> None:
    listed: dict[str, list[str]] = {name: [] for name in SIGNALS}
    of_signal = {id(signal): name for name, signal in SIGNALS.items()}
    for one in wiring.RECEIVERS:
        listed[of_signal[id(one.signal)]].append(name_of(one.function))
    listed["worker_init"] = [name_of(celery_redlock_entry.look_at_worker)]
    found = {name: sorted(ours(names)) for name, names in registered[1]["signals"].items()}
    assert found == {name: sorted(names) for name, names in listed.items()}


@FORKED
def test_without_a_locked_task_nothing_is_connected_but_two_hooks_and_what_carries_options(
    registered: list[dict[str, Any]],
) -> None:
    found = {name: names for name, names in registered[0]["signals"].items() if ours(names)}
    assert {name: ours(names) for name, names in found.items()} == {
        "worker_init": [name_of(celery_redlock_entry.look_at_worker)],
        "before_task_publish": [name_of(send.carry_options)],
    }
    assert not ours(list(registered[0]["commands"].values()))


@FORKED
def test_what_is_first_is_first_in_line(registered: list[dict[str, Any]]) -> None:
    first = [one for one in wiring.RECEIVERS if one.first]
    assert len(first) == len({id(one.signal) for one in first}) == 2
    for one in first:
        (name,) = [name for name, signal in SIGNALS.items() if signal is one.signal]
        assert registered[1]["signals"][name][0] == name_of(one.function)


@FORKED
def test_finalizers_and_commands_are_those_of_the_list(registered: list[dict[str, Any]]) -> None:
    finalizers = [name_of(celery_redlock_entry.look_at_app)]
    assert [ours(one["finalizers"]) for one in registered] == [finalizers] * 3
    commands = {one.__name__: name_of(one) for one in wiring.INSPECT_COMMANDS}
    found = registered[1]["commands"]
    assert {name: one for name, one in found.items() if ours([one])} == commands
    assert set(commands) == set(celery_redlock_entry.INSPECT_COMMANDS)


def test_the_command_says_the_same_before_it_is_imported() -> None:
    assert celery_redlock_entry.redlock.help == redlock.help


@FORKED
def test_nothing_is_connected_to_the_public_signals(registered: list[dict[str, Any]]) -> None:
    assert len(registered[1]["public"]) == 12
    assert not any(registered[1]["public"].values())


@FORKED
def test_a_second_import_connects_nothing_twice(registered: list[dict[str, Any]]) -> None:
    _, first, second = registered
    assert second == first


@FORKED
def test_a_thread_that_binds_a_locked_task_finds_all_connected() -> None:
    fork_server.run([sys.executable, "-c", TWO_THREADS], check=True, timeout=120, package=False)


def test_a_worker_gets_the_steps_of_the_list() -> None:
    app = Celery("steps", broker="memory://", set_as_current=False)
    before = {name: set(app.steps[name]) for name in ("worker", "consumer")}
    for _ in range(2):  # as a second worker of the process
        wiring.add_steps(SimpleNamespace(app=app))
    added = {(name, step) for name, old in before.items() for step in app.steps[name] - old}
    assert added == set(wiring.STEPS)
    assert set(app.steps) == {"worker", "consumer"}


def modules_that_use(*names: str) -> set[str]:
    """Return the modules in which one of these is an attribute, or is imported."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = str(path.relative_to(PACKAGE))
        for node in nodes_of(path):
            imported = [one.name for one in node.names] if isinstance(node, ast.ImportFrom) else []
            if getattr(node, "attr", None) in names or set(imported) & set(names):
                found.add(module)
    # the test support is imported by tests alone
    return {module for module in found if not module.startswith("testing/")}


@ONE_PROCESS
def test_nothing_else_connects_to_celery() -> None:
    on_demand = {"operate/metrics.py", "operate/tracing.py", "operate/drill/worker.py"}
    # the lock's floor imports no Celery, and connects to nodes
    connecting = {one for one in modules_that_use("connect") if not one.startswith("lock/")}
    assert connecting == {"wiring.py", *on_demand}
    registering = ("connect_on_app_finalize", "inspect_command", "control_command", "steps")
    assert modules_that_use(*registering) == {"wiring.py", "operate/drill/worker.py"}
    at_fork = {"lock/platform/forks.py", "tasks/children/reaper.py"}
    assert modules_that_use("register_at_fork") == at_fork
    named = set(re.findall(r"`(\w+/[\w/]+\.py)`", wiring.__doc__ or ""))
    assert named == on_demand | at_fork
