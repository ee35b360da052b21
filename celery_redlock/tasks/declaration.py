"""What a task's class declares: its lock options and bodies, as one configuration."""

from __future__ import annotations

import inspect
import types
from typing import Any, NoReturn

from celery_redlock.errors import SettingsError
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.settings.task_config import (
    TaskLockConfig,
    compile_adopted_config,
    compile_config,
)
from celery_redlock.tasks.signatures import bodies_of, is_async, signature_of

ENTRY = "_redlock_entry"  # the name on a class under which its entry of redlock_tasks stands


def refuse_awaitable(task: Any, found: str) -> NoReturn:
    """Raise SettingsError for a task whose body must be awaited. found: what is to be awaited."""
    hint = (
        "whoever awaits it would do so without its lock, and Celery does not: take a `def` that "
        "runs it to its end, as by asyncio.run or asgiref's async_to_sync, or lock_key=False"
    )
    raise SettingsError(f"task {task.name!r}", "run", found, hint)


def check_finished(task: Any, result: Any) -> None:
    """Raise SettingsError if a body returned something that is still to be run."""
    if not (inspect.isawaitable(result) or inspect.isasyncgen(result)):
        return
    if isinstance(result, (types.CoroutineType, types.GeneratorType)):
        result.close()  # else Python warns that it was never awaited
    refuse_awaitable(task, f"a {type(result).__name__} that it returned")


def config_of(task: Any) -> TaskLockConfig:
    """Return what a task's declaration means; made once, for it is looked up at each run.

    Raises SettingsError each time while the declaration is wrong.
    """
    cls = type(task)
    configs: dict[Any, TaskLockConfig] = cls.__dict__.get("_redlock_configs") or {}
    which = (task.name, id(task.app))  # a class may be two tasks, by names set on instances
    config = configs.get(which)
    if config is None:
        config = _compile(task)
        cls._redlock_configs = {**configs, which: config}
    return config


def _compile(task: Any) -> TaskLockConfig:
    settings, bodies = settings_of(task.app), bodies_of(task)
    signature = signature_of(bodies[0])
    pattern = type(task).__dict__.get(ENTRY)
    if pattern is None:
        attributes, others = _declared(task)
        config = compile_config(settings, task.name, attributes, signature, others)
    else:
        config = compile_adopted_config(settings, task.name, pattern, signature)
    if config.may_lock and any(map(is_async, bodies)):
        refuse_awaitable(task, "async def")
    return config


def _declared(task: Any) -> tuple[dict[str, Any], list[str]]:
    """Return a task's lock_* attributes, and the names of those that are no options."""
    names = [name for name in dir(task) if name.startswith("lock_")]
    found = {name: inspect.getattr_static(task, name) for name in names}
    others = [n for n, v in found.items() if isinstance(v, (property, classmethod))]
    attributes = {
        name: value.__func__ if isinstance(value, staticmethod) else value
        for name, value in found.items()
    }
    return attributes, others
