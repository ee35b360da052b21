"""The private names of Celery, kombu, billiard and redis-py that the package requires.

A name is private if it begins with an underscore, is in a module that their reference leaves out,
or is overridden or replaced here. Without one of the names listed here, a task would run without
its lock, a worker would lose messages, or no lock could be acquired. So a version that lacks one is
refused with a SettingsError. So is a version older than the package requires. The package imports
this module first; the import checks `ANYWHERE`. A worker checks `IN_WORKERS` at its start, and a
beat `IN_BEAT`.

For each other private name the package has a fallback, by `find` or `getattr`;
tests/celery_names.py lists them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any

from celery_redlock.errors import SettingsError

logger = logging.getLogger(__name__)

MISSING = "missing"
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# the oldest and the newest version of each package with which the tests were run
TESTED_VERSIONS = {
    "celery": ("5.6", "5.7"),
    "kombu": ("5.6", "5.7"),
    "billiard": ("4.3", "4.3"),
    "redis": ("5.0", "8.1"),
}
REQUIRED = ("celery", "redis")  # by the wheel; an installer may be told to leave that out


@dataclass(frozen=True)
class PrivateName:
    """A private name that the package requires.

    path: "module:owner.name". The name is present, too, if only the code of the owner contains it:
    a class sets it on its instances, or a function reads it. purpose: completes "celery_redlock
    relies on it to ...". parameters: the parameters that it must have, without `self`; after a last
    "..." it may have further optional ones.
    """

    path: str
    purpose: str
    parameters: str | None = None


_REQUEST = "celery.worker.request:Request"
_LOCK_TASKS = "lock the tasks of `redlock_tasks`, which would run without"
_KEEP_REFUSED = "keep a message that was refused its lock, which would be acknowledged"
_LEAVE_TO_OTHER_WORKER = (
    "leave a message to the run that another worker has begun, which would be acknowledged"
)
_RETURN_AT_SHUTDOWN = "give a message back at a shutdown, which would be acknowledged"
_NODE_TIMEOUT = "talk to a lock node within a time"

ANYWHERE = (
    PrivateName("celery._state:connect_on_app_finalize", _LOCK_TASKS, "callback"),
    PrivateName("celery._state:_get_active_apps", _LOCK_TASKS, ""),
    PrivateName("celery.app.base:Celery._tasks", _LOCK_TASKS),
    PrivateName("celery.app.task:Task.apply", _LOCK_TASKS, "args, kwargs, ..."),
    PrivateName("celery.app.base:Celery.finalize.send", "refuse tasks that cannot be locked"),
    PrivateName("redis.connection:AbstractConnection._sock", _NODE_TIMEOUT),
    PrivateName("redis.connection:DefaultParser", _NODE_TIMEOUT),
)
IN_WORKERS = (
    PrivateName(f"{_REQUEST}._context", "see which message a run is of, and what it carries"),
    PrivateName(f"{_REQUEST}._eta", "let a deferred message wait, which would run at once"),
    PrivateName(f"{_REQUEST}.on_failure", _KEEP_REFUSED, "exc_info, ..."),
    PrivateName(f"{_REQUEST}._apply_result", "kill no child that runs another message"),
    PrivateName(f"{_REQUEST}.revoked", _LEAVE_TO_OTHER_WORKER, ""),
    PrivateName(f"{_REQUEST}.revoked._announce_revoked", _LEAVE_TO_OTHER_WORKER),
    PrivateName(f"{_REQUEST}.revoked.maybe_expire", _LEAVE_TO_OTHER_WORKER),
    PrivateName(
        f"{_REQUEST}._announce_revoked",
        _LEAVE_TO_OTHER_WORKER,
        "reason, terminated, signum, expired",
    ),
    PrivateName(f"{_REQUEST}.maybe_expire", _LEAVE_TO_OTHER_WORKER, ""),
    PrivateName(f"{_REQUEST}.on_timeout", _RETURN_AT_SHUTDOWN, "soft, timeout"),
    PrivateName(f"{_REQUEST}.cancel", _RETURN_AT_SHUTDOWN, "pool, signal, ..."),
    PrivateName(f"{_REQUEST}._on_ack", _RETURN_AT_SHUTDOWN),
    PrivateName(
        "celery.worker.consumer.consumer:Consumer.apply_eta_task",
        "dispatch a message that waits in a worker's memory, which would stay there",
        "task",
    ),
    PrivateName(
        "celery.worker.consumer.consumer:Consumer.create_task_handler",
        "hold a message of another release's format, which would run",
        "...",
    ),
)
IN_BEAT = (
    PrivateName(
        "celery.beat:Scheduler.apply_async", "send nothing beside another beat",
        "entry, producer, advance, ...",
    ),
)  # fmt: skip


def find(path: str, default: Any) -> Any:
    """Return the object at "module:name", or the default if this version lacks it."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return default


def check_oldest() -> None:
    """Raise SettingsError for the first required package that is too old.

    An older one may have all private names, and do something else with them.
    """
    for package in REQUIRED:
        installed = getattr(importlib.import_module(package), "__version__", "")
        oldest = TESTED_VERSIONS[package][0]
        if _minor(installed) and _minor(installed) < _minor(oldest):
            hint = f"must be at least {oldest}: pip install '{package}>={oldest}'"
            raise SettingsError("environment", package, installed, hint)


def check(names: tuple[PrivateName, ...]) -> None:
    """Raise SettingsError for the first required name that is missing or takes other parameters."""
    for name in names:
        mismatch = difference(name)
        if mismatch is not None:
            raise _unsupported(name, mismatch)


def _unsupported(name: PrivateName, mismatch: str) -> SettingsError:
    """Return the error for an installed version that lacks a private name."""
    package = re.split("[.:]", name.path)[0]
    installed = getattr(sys.modules.get(package), "__version__", "without a version")
    tested = " to ".join(dict.fromkeys(TESTED_VERSIONS[package]))
    required = "" if mismatch == MISSING else f"must be ({name.parameters}). "
    hint = (
        f"{required}celery_redlock relies on it to {name.purpose}. It works with {package} "
        f"{tested}: install one of these, or a newer celery_redlock"
    )
    return SettingsError(f"{package} {installed}", name.path.replace(":", "."), mismatch, hint)


def difference(name: PrivateName) -> str | None:
    """Return how a name differs: `MISSING`, or its actual parameters; None if it does not."""
    module, _, path = name.path.partition(":")
    *owners, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for owner_name in owners:
            owner = inspect.getattr_static(owner, owner_name)
    except (ImportError, AttributeError):
        return MISSING
    value = inspect.getattr_static(owner, attribute, MISSING)
    if value is MISSING:
        return None if owners and attribute in _names_in(owner) else MISSING
    return None if name.parameters is None else _parameter_mismatch(value, name.parameters)


def _parameter_mismatch(function: Any, required: str) -> str | None:
    """Return the parameters of a function if they are not the required ones, else None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "no function"
    parameters = [
        parameter for parameter in signature.parameters.values() if parameter.name != "self"
    ]
    names = [parameter.name for parameter in parameters]
    required_names = required.split(", ") if required else []
    if required_names[-1:] == ["..."]:
        required_names.pop()
        count = len(required_names)
        is_match = names[:count] == required_names and all(map(_is_optional, parameters[count:]))
    else:
        is_match = names == required_names
    return None if is_match else f"({', '.join(names)})"


def _is_optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty or parameter.kind in _VARIADIC


def _names_in(owner: Any) -> set[str]:
    """Return the names of attributes in the code of a function, or of a class and its bases."""
    classes = owner.__mro__ if isinstance(owner, type) else ()
    functions = [member for cls in classes for member in vars(cls).values()] if classes else [owner]
    codes = [getattr(function, "__code__", None) for function in functions]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            names.update(code.co_names)
            codes += code.co_consts  # functions within
    return names


_has_warned = False


def warn_if_newer(**_: Any) -> None:
    """Log once a process if its Celery is newer than the newest that was tested."""
    global _has_warned
    version = sys.modules["celery"].__version__
    newest = TESTED_VERSIONS["celery"][1]
    if not _has_warned and _minor(version) > _minor(newest):
        _has_warned = True
        logger.warning(
            "Celery %s is newer than %s, the newest that this celery_redlock was tested with",
            version, newest, extra={"event": "celery_untested"},
        )  # fmt: skip


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


check_oldest()
check(ANYWHERE)
