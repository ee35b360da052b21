"""A task class whose `__call__` gives its arguments to `run` as they came is no decorator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, Task

from celery_redlock import LockedTask
from celery_redlock.operate.lints import Lint
from celery_redlock.operate.start_report import open_decisions

Body = Callable[..., Any]


@contextlib.contextmanager
def app_context() -> Iterator[None]:
    yield


class FlaskTask(Task):
    """As the documentation of Flask has it."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        with app_context():
            return self.run(*args, **kwargs)


class Timed(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().__call__(*args, **kwargs)
        finally:
            print(self.name)
        return result


class Adding(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(object(), *args, **kwargs)


class Dropping(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("tenant", None)
        return self.run(*args, **kwargs)


class Taking(Task):
    def __call__(self, *args: Any, tenant: str = "", **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Elsewhere(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.turned(*args, **kwargs)

    def turned(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*reversed(args), **kwargs)


class AnothersArguments(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = args[1:]
        return self.run(*args, **kwargs)


class AnotherTask(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self = self.app.tasks["another"]
        return self.run(*args, **kwargs)


class TimedAdding(Timed, Adding):
    """The `__call__` of `Timed` calls that of `Adding`."""


def turning(body: Body) -> Body:
    @functools.wraps(body)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        return body(self, *reversed(args), **kwargs)

    return inner


class Decorated(Task):
    @turning
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def called(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.run(*args, **kwargs)


class DecoratedLater(Task):
    __call__ = turning(called)


space: dict[str, Any] = {}
exec("def unread(self, *args, **kwargs): return self.run(*args, **kwargs)", space)


class WithoutSource(Task):
    __call__ = space["unread"]


def count(sku: str) -> None: ...


@functools.wraps(count)
def decorated(*args: Any, **kwargs: Any) -> None:
    count(*args, **kwargs)


def remarks(task_class: type[Task], adopt: bool, body: Body = count) -> list[Lint]:
    """Return what is said of a task of this class; adopt: a setting locks it."""
    app = Celery("shop", set_as_default=False, broker="memory://")
    app.conf.redlock_nodes = ["redis://a", "redis://b", "redis://c"]
    if adopt:
        app.conf.redlock_tasks = {"recount": {}}
        base = task_class
    else:
        base = type("Locked", (task_class, LockedTask), {"abstract": True})
    app.task(base=base, shared=False, name="recount", typing=False)(body)
    app.finalize()
    return [one for one in open_decisions(app) if one.setting.startswith("task: ")]


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("task_class", [FlaskTask, Timed])
def test_a_call_that_passes_all_on_is_no_remark(task_class: type[Task], adopt: bool) -> None:
    assert remarks(task_class, adopt) == []


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize(
    "task_class",
    [
        Adding, Dropping, Taking, Elsewhere, AnothersArguments, AnotherTask, TimedAdding, Decorated,
        DecoratedLater, WithoutSource,
    ],
)  # fmt: skip
def test_another_call_is_named_by_its_class(task_class: type[Task], adopt: bool) -> None:
    (remark,) = remarks(task_class, adopt)
    owner = Adding if task_class is TimedAdding else task_class
    assert (remark.setting, remark.value) == ("task: __call__", f"{owner.__qualname__}.__call__")
    assert remark.hint.startswith("recount: ")
    assert "passes all on" in remark.hint


@pytest.mark.parametrize("task_class", [Task, FlaskTask])
def test_a_decorator_is_named_whatever_the_class_does(task_class: type[Task]) -> None:
    (remark,) = remarks(task_class, True, decorated)
    assert (remark.setting, remark.value) == ("task: decorator", "functools.wraps")
