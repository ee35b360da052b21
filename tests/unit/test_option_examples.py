"""The examples that the reference shows of each option and setting."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from celery import Celery

from celery_redlock import Backoff, LockedTask
from celery_redlock.tasks.settings.app import APP_SETTING
from celery_redlock.tasks.settings.conf import read_app
from celery_redlock.tasks.settings.options import OPTION, OPTIONS
from docs import option_examples

NODES = ["redis://a", "redis://b", "redis://c"]


def tasks_of(example: str) -> list[Any]:
    """Return the tasks of an example, declared in an app of their own."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = NODES
    known = {
        "shared_task": functools.partial(app.task, shared=False),
        "LockedTask": LockedTask,
        "Backoff": Backoff,
    }
    exec(example, known)
    app.finalize()
    return [task for task in app.tasks.values() if isinstance(task, LockedTask)]


@pytest.mark.parametrize("name", OPTION)
def test_the_example_of_an_option_sets_it_for_each_of_its_tasks(name: str) -> None:
    tasks = tasks_of(option_examples.OPTIONS[name].example)
    assert tasks
    for task in tasks:
        option = task.lock_options(queue="celery")[name]
        assert option.source.name == f"lock_{name}", f"{task.name} does not set {name}"
        assert option.value != OPTION[name].default


@pytest.mark.parametrize("name", APP_SETTING)
def test_the_example_of_a_setting_is_valid_and_not_its_default(name: str) -> None:
    value = eval(option_examples.SETTINGS[name].example, {})
    assert value != APP_SETTING[name].default
    read_app({"redlock_nodes": NODES, f"redlock_{name}": value})


def test_each_option_and_setting_has_an_example_and_existing_relations() -> None:
    assert list(option_examples.OPTIONS) == [option.name for option in OPTIONS]
    assert list(option_examples.SETTINGS) == list(APP_SETTING)
    known = {*OPTION, *(f"redlock_{name}" for name in APP_SETTING)}
    for shown in (*option_examples.OPTIONS.values(), *option_examples.SETTINGS.values()):
        assert set(shown.related) <= known
