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
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from celery_redlock.errors import SettingsError
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.settings.options import OPTION
from celery_redlock.tasks.settings.task_config import (
    TaskLockConfig,
    compile_adopted_config,
    compile_config,
)

_ALMOST_LOCK = re.compile("(?:red)?lock_?", re.IGNORECASE)  # before the name of an option
ENTRY = "_redlock_entry"  # the name on a class under which its entry of redlock_tasks stands

Body = Callable[..., Any]


def refuse_awaitable(task: Any, found: str) -> NoReturn:
    """Raise SettingsError for a task whose body must be awaited. found: what is to be awaited."""
    hint = (
        "a locked task cannot be async: use a `def` that calls asyncio.run() or asgiref's "
        "async_to_sync, or set lock_key=False"
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
    # a class may be two tasks, by names of instances, and outlive an app, whose id is used again
    which = (task.name, weakref.ref(task.app))
    config = configs.get(which)
    if config is None:
        config = _compile(task)
        living = {one: made for one, made in configs.items() if one[1]() is not None}
        cls._redlock_configs = {**living, which: config}
    return config


def _refuse_misspelt(task: Any) -> None:
    """Raise SettingsError for an attribute whose name is almost that of an option."""
    for written, value in vars(type(task)).items():
        prefix = _ALMOST_LOCK.match(written)
        option = written[prefix.end() :].lower() if prefix else ""
        if written == "lock" and isinstance(value, Mapping) and ENTRY not in vars(type(task)):
            hint = f"is for a call; at a task write {', '.join(f'lock_{one}=' for one in value)}"
        elif option in OPTION and written != f"lock_{option}":
            hint = f"is not an option: did you mean lock_{option}?"
        else:
            continue
        raise SettingsError(f"task {task.name!r}", written, repr(value), hint)


def _compile(task: Any) -> TaskLockConfig:
    _refuse_misspelt(task)
    settings = settings_of(task.app)
    # looked up on the class: the wrapper of autoretry on the instance may hide them
    wrappers = (inspect.getattr_static(type(task), name) for name in ("run", "__call__"))
    bodies = [bound_to(task, one.redlock_body) for one in wrappers if is_wrapper(one)]
    signature = signature_of(bodies[0])
    pattern = type(task).__dict__.get(ENTRY)
    if pattern is None:
        attributes = {}
        for name in dir(task):
            if name.startswith("lock_"):
                value = inspect.getattr_static(task, name)
                attributes[name] = value.__func__ if isinstance(value, staticmethod) else value
        config = compile_config(settings, task.name, attributes, signature)
    else:
        config = compile_adopted_config(settings, task.name, pattern, signature)
    if config.may_lock and any(map(is_async, bodies)):
        refuse_awaitable(task, "async def")
    return config


def bound_to(task: Any, attribute: Any) -> Any:
    """Return an attribute of a task's class, bound to the task as Python binds it."""
    bind = getattr(type(attribute), "__get__", None)
    return attribute if bind is None else bind(attribute, task, type(task))


def is_wrapper(body: Any) -> bool:
    """Return whether this is a wrapper, and no body that `functools.wraps` made look like one."""
    return getattr(body, "redlock_wrapper", None) is body


def is_async(function: Any) -> bool:
    """Return whether a function is an `async def`; of what wraps one only its result can tell."""
    while type(function) in (functools.partial, types.MethodType):
        is_partial = type(function) is functools.partial
        function = function.func if is_partial else function.__func__
    flags = function.__code__.co_flags if type(function) is types.FunctionType else 0
    return bool(flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def signature_of(function: Body) -> inspect.Signature:
    """Return what a function takes, or its decorator, unless that passes everything on."""
    if type(function) is functools.partial and hasattr(function, "__wrapped__"):
        # as asgiref binds what it wraps: inspect would give the first parameter, too
        function = functools.partial(function.__wrapped__, *function.args, **function.keywords)
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # an object that has a __get__: inspect takes it for a builtin
        return inspect.signature(function)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
        signature = inspect.signature(function)
    return signature


def with_self(body: Any) -> inspect.Signature:
    """Return the signature of a class's function, which loses its first parameter when bound."""
    if not isinstance(body, staticmethod):
        return signature_of(body)
    signature = signature_of(body.__func__)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def refuse_aio_pool(task: Any) -> None:
    """Raise SettingsError in a worker of celery-aio-pool.

    That pool calls bodies in another thread, and keeps there what it knows of a run for the next
    run as well: after a late run its lock would stay, and the next run would take none.
    """
    if sys.modules["celery_aio_pool.pool"].AsyncIOPool.singleton is None:
        return
    hint = (
        f"calls bodies apart from their runs, so that {task.name} cannot be locked: use prefork, "
        "threads, gevent or solo, or lock_key=False"
    )
    raise SettingsError("worker", "pool", "celery_aio_pool", hint)
