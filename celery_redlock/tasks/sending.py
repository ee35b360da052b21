"""What a send of a locked task does: one route, its claim, and the options of its call.

All that depends on arguments is done in the app's `send_task`, with what is published. What another
class makes of `apply_async` may publish later, with other arguments, or not at all. Not here: how a
claim is made (`unique/claim.py`), and how it gets into a message (`unique/send.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from celery import Celery, Task

from celery_redlock.errors import SettingsError
from celery_redlock.tasks.declaration import config_of, dumped
from celery_redlock.tasks.delivery.header import HEADER, new_header
from celery_redlock.tasks.delivery.route import route_send, routed_queue
from celery_redlock.tasks.settings.app import CELERY_PREFIX
from celery_redlock.tasks.settings.call import TaskCall
from celery_redlock.tasks.settings.levels import check_outside
from celery_redlock.tasks.settings.options import UNIQUE_BY, TaskLockOptions
from celery_redlock.tasks.settings.task_config import TaskLockConfig
from celery_redlock.tasks.unique.send import (
    check_timing,
    is_awaited,
    options_to_message,
    send_claimed,
    warn_unchecked,
)

# what Celery's `send_task` takes for itself, and no router sees
_SEND_TASK_PARAMETERS = frozenset(inspect.signature(Celery.send_task).parameters) - {"options"} | {
    "ignore_result"
}


def publish_through(app: Any, locked_class: type[Task]) -> None:
    """Have an app's `send_task` publish messages of locked tasks by `publish_or_drop`.

    Celery's `apply_async` calls it with the task as `task_type`.
    """
    replaced = vars(app).get("send_task")
    if getattr(replaced, "redlock", False):
        return

    @functools.wraps(Celery.send_task)
    def send_task(
        name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        # looked up at each send: a test or an agent may replace it
        original = replaced or functools.partial(type(app).send_task, app)
        task = options.get("task_type")
        if more or not isinstance(task, locked_class) or task.name.startswith(CELERY_PREFIX):
            return original(name, args, kwargs, *more, **options)
        return publish_or_drop(task, functools.partial(original, name), args, kwargs, options)

    send_task.redlock = True  # type: ignore[attr-defined]
    app.send_task = send_task


def publish_or_drop(
    task: Any, send: Callable[..., Any], args: Any, kwargs: Any, options: dict[str, Any]
) -> Any:
    """Publish a message of a locked task, unless it is a duplicate.

    send: publishes it. options: its keywords, which are changed. Returns and raises what
    `LockedTask.apply_async` does.
    """
    config = config_of(task)
    call_options = checked_options(config, options)
    unique_options = None
    if not is_awaited(options) and _may_be_unique(config, call_options):
        unique_options = _unique(task, config, args, kwargs, options, call_options)
    options["task_id"] = options.get("task_id") or str(uuid4())
    if call_options:
        write_header(options, call_options)
    send = functools.partial(send, args, kwargs)
    if unique_options is None:
        return send(**options)
    return send_claimed(
        task.app, task.name, *unique_options, options, publish=send, result_of=task.AsyncResult
    )


def _unique(
    task: Any, config: TaskLockConfig, args: Any, kwargs: Any, options: dict[str, Any],
    call_options: Mapping[str, Any],
) -> tuple[tuple[str, ...], TaskLockOptions] | None:  # fmt: skip
    """Return resources and options of a send that is to be deduplicated, else None."""
    queue: str | None = ""
    names_queue = config.may_name_queue(call_options)
    if config.app.queues or names_queue:
        queue, options["router"] = route_send(task, args, kwargs, options, _SEND_TASK_PARAMETERS)
    lock_options = config.options_for(queue or "", call_options)
    if not lock_options.is_unique:
        return None
    if queue is None and names_queue:
        warn_unchecked(task.name, "its exchange chooses the queue, and its key has {queue}")
        return None
    arguments = dumped(task, args or (), kwargs or {})
    call = TaskCall(task, *arguments, queue or "")
    resources = config.resources(lock_options, call)
    if not resources:
        return None
    check_timing(task.app, task.name, options, lock_options)
    return resources, lock_options


def _may_be_unique(config: TaskLockConfig, call_options: Mapping[str, Any]) -> bool:
    return config.may_be_unique or any(map(call_options.get, UNIQUE_BY))


def check_send(task: Any, options: Mapping[str, Any]) -> None:
    """Raise SettingsError for options of a send that are wrong whatever its arguments are.

    options: as of `apply_async`.
    """
    config = config_of(task)
    check_outside(options)
    call_options = checked_options(config, dict(options))
    if is_awaited(options) or not _may_be_unique(config, call_options):
        return
    lock_options = config.options_for(routed_queue(task) or "", call_options)
    if lock_options.is_unique and lock_options.key is not False and not callable(lock_options.key):
        check_timing(task.app, task.name, options, lock_options)


def options_mapping(lock: Any) -> Mapping[str, Any]:
    """Return the options of a call, unchecked; raises SettingsError for what is no mapping."""
    if not isinstance(lock, Mapping):
        hint = 'must map option names to values, as lock={"ttl": 60}'
        raise SettingsError("call", "lock", repr(lock), hint)
    return lock


def checked_options(config: TaskLockConfig, options: dict[str, Any]) -> Mapping[str, Any]:
    """Take the `lock` options of a call out of Celery's, and return them; raises SettingsError."""
    return config.check_call(options_mapping(options.pop("lock"))) if "lock" in options else {}


def write_header(options: dict[str, Any], call_options: Mapping[str, Any]) -> None:
    """Put the checked `lock` options of a call into the header of its message."""
    header = new_header(options_to_message(call_options), options["task_id"])
    options["headers"] = {**(options.get("headers") or {}), HEADER: header}


def queue_needed(task: Any, caller: str, args: Any = (), kwargs: Any = None) -> str:
    """Return the queue to which a task is routed; "" if its lock does not depend on the queue.

    caller: the method of LockedTask that asks. Raises SettingsError if the queue is unknown.
    """
    config = config_of(task)
    queue = routed_queue(task, args, kwargs)
    if queue is None and (config.app.queues or config.may_name_queue({})):
        hint = (
            "is chosen by a function in task_routes or by an exchange, and the lock of "
            f"{task.name} depends on it: name it, as in {caller}(..., queue='celery')"
        )
        raise SettingsError(f"task {task.name!r}", f"{caller}(queue=...)", "None", hint)
    return queue or ""
