"""What a task's class declares, as one configuration: its lock options, and what its bodies take.

A decorator may wrap a body. Not here: the checks of options (`settings/`), the wrapper around a
body (`wrapping.py`), and tasks that `redlock_tasks` names (`startup.py`).
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from celery_redlock.errors import SettingsError
from celery_redlock.tasks.arguments import Parameters, parameters_of
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.settings.app import leave_out
from celery_redlock.tasks.settings.levels import decides_key
from celery_redlock.tasks.settings.options import OPTION
from celery_redlock.tasks.settings.task_config import (
    TaskLockConfig,
    compile_adopted_config,
    compile_config,
)

_ALMOST_LOCK = re.compile("(?:red)?lock_?", re.IGNORECASE)  # before the name of an option
ENTRY_ATTRIBUTE = (
    "_redlock_entry"  # the name on a class under which its entry of redlock_tasks stands
)

Body = Callable[..., Any]


def refuse_awaitable(task: Any, awaitable: str) -> NoReturn:
    """Raise SettingsError for a task whose body must be awaited. awaitable: as a text."""
    hint = (
        "a locked task cannot be async: use a `def` that calls asyncio.run() or asgiref's "
        f"async_to_sync. {to_leave_out(task)}"
    )
    raise SettingsError(f"task {task.name!r}", "run", awaitable, hint)


def to_leave_out(task: Any) -> str:
    """Return a hint for people: how to run this task without a lock, where it was declared."""
    if ENTRY_ATTRIBUTE in vars(type(task)):
        return f"{leave_out(task.name)} in redlock_tasks"
    return "To run it without a lock, set lock_key=False"


def check_finished(task: Any, result: Any) -> None:
    """Raise SettingsError if a body returned something that is still to be run."""
    if not (inspect.isawaitable(result) or inspect.isasyncgen(result)):
        return
    if isinstance(result, (types.CoroutineType, types.GeneratorType)):
        result.close()  # else Python warns that it was never awaited
    refuse_awaitable(task, f"a {type(result).__name__} that it returned")


def config_of(task: Any) -> TaskLockConfig:
    """Return the configuration that a task declares; made once, as each run asks for it.

    Of an app without nodes it is made at each call, for one that may lock: `settings_of` reads the
    settings anew then. Raises SettingsError each time while the declaration is wrong.
    """
    cls = type(task)
    configs: dict[Any, TaskLockConfig] = cls.__dict__.get("_redlock_configs") or {}
    # a class may be two tasks, by names of instances, and outlive an app, whose id is used again
    cache_key = (task.name, weakref.ref(task.app))
    config = configs.get(cache_key)
    if config is None:
        config = _compile(task)
        if config.app.nodes or not may_lock_anywhere(config):
            of_living_apps = {key: value for key, value in configs.items() if key[1]() is not None}
            cls._redlock_configs = {**of_living_apps, cache_key: config}
    return config


def may_lock_anywhere(config: TaskLockConfig) -> bool:
    """Return whether a run in any queue takes a lock, unless its call says otherwise."""
    queue_options = () if decides_key(config.options) else config.app.queues.values()
    return config.may_lock or any(
        decides_key(options) and options.get("key") is not False for options in queue_options
    )


def _check_misspelt(task: Any) -> None:
    """Raise SettingsError for an attribute whose name is almost that of an option."""
    for attribute, value in vars(type(task)).items():
        prefix = _ALMOST_LOCK.match(attribute)
        option = attribute[prefix.end() :].lower() if prefix else ""
        if (
            attribute == "lock"
            and isinstance(value, Mapping)
            and ENTRY_ATTRIBUTE not in vars(type(task))
        ):
            hint = f"is for a call; at a task write {', '.join(f'lock_{name}=' for name in value)}"
        elif option in OPTION and attribute != f"lock_{option}":
            hint = f"is not an option: did you mean lock_{option}?"
        else:
            continue
        raise SettingsError(f"task {task.name!r}", attribute, repr(value), hint)


def _compile(task: Any) -> TaskLockConfig:
    _check_misspelt(task)
    settings = settings_of(task.app)
    # looked up on the class: the wrapper of autoretry on the instance may hide them
    wrappers = (inspect.getattr_static(type(task), name) for name in ("run", "__call__"))
    bodies = [bound_to(task, wrapper.redlock_body) for wrapper in wrappers if is_wrapper(wrapper)]
    parameters = _parameters_of(task, bodies)
    pattern = type(task).__dict__.get(ENTRY_ATTRIBUTE)
    if pattern is None:
        attributes = {}
        for name in dir(task):
            if name.startswith("lock_"):
                value = inspect.getattr_static(task, name)
                attributes[name] = value.__func__ if isinstance(value, staticmethod) else value
        config = compile_config(settings, task.name, attributes, parameters)
    else:
        config = compile_adopted_config(settings, task.name, pattern, parameters)
    if config.may_lock and any(map(is_async, bodies)):
        refuse_awaitable(task, "async def")
    return config


def _parameters_of(task: Any, bodies: Sequence[Body]) -> Parameters:
    """Return what the `run` of a task takes of a call; a `__call__` of its class is before it."""
    parameters = parameters_of(bodies[0])
    if len(bodies) == 1:
        return parameters
    owner = next(cls for cls in type(task).__mro__ if "__call__" in vars(cls))
    wrappers = (f"{owner.__qualname__}.__call__", *parameters.wrappers)
    return replace(parameters, wrappers=wrappers)


def bound_to(task: Any, attribute: Any) -> Any:
    """Return an attribute of a task's class, bound to the task as Python binds it."""
    bind = getattr(type(attribute), "__get__", None)
    return attribute if bind is None else bind(attribute, task, type(task))


def is_wrapper(body: Any) -> bool:
    """Return whether this is a wrapper, and no body that `functools.wraps` made look like one."""
    return getattr(body, "redlock_wrapper", None) is body


def is_async(function: Any) -> bool:
    """Return whether a function is an `async def`; False for a wrapper of one."""
    while type(function) in (functools.partial, types.MethodType):
        is_partial = type(function) is functools.partial
        function = function.func if is_partial else function.__func__
    flags = function.__code__.co_flags if type(function) is types.FunctionType else 0
    return bool(flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def with_self(body: Any) -> inspect.Signature:
    """Return the signature of a class's function, which loses its first parameter when bound."""
    if not isinstance(body, staticmethod):
        return parameters_of(body).signature
    signature = parameters_of(body.__func__).signature
    name = "self"
    while name in signature.parameters:  # a function without `bind` may have a parameter `self`
        name = f"_{name}"
    first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def dumped(
    task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments as a message has them: a Pydantic model is what Celery dumps it to.

    Source: celery.app.task: `apply_async` of a task with `pydantic=True`, since Celery 5.7.
    """
    dump = getattr(task, "_dump_pydantic_arguments", None)
    return (args, kwargs) if dump is None else dump(args, kwargs)


def refuse_aio_pool(task: Any) -> None:
    """Raise SettingsError in a worker of celery-aio-pool.

    That pool calls bodies in another thread, and keeps there what it knows of a run for the next
    run as well: after a late run its lock would stay, and the next run would take none.
    """
    if sys.modules["celery_aio_pool.pool"].AsyncIOPool.singleton is None:
        return
    hint = (
        f"calls bodies apart from their runs, so that {task.name} cannot be locked: use prefork, "
        f"threads, gevent or solo. {to_leave_out(task)}"
    )
    raise SettingsError("worker", "pool", "celery_aio_pool", hint)
