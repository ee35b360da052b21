"""The names of Celery, kombu, billiard and redis-py that are not theirs to promise.

A name is private if it begins with an underscore, is in a module that their reference leaves out,
or is overridden or replaced here. On these lists are those without which a task would run without
its lock, a worker would lose messages, or no lock could be acquired: a version that lacks one gives
a SettingsError. The package imports this module first, and an import looks for `ANYWHERE` alone; a
worker looks for `IN_WORKERS` at its start, and a beat for `IN_BEAT`.

For all other private names the package has something else to do, which `find` names or `getattr`;
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
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# the oldest and the newest version of each package with which the tests were run
TESTED = {
    "celery": ("5.6", "5.7"),
    "kombu": ("5.6", "5.7"),
    "billiard": ("4.3", "4.3"),
    "redis": ("5.0", "8.1"),
}


@dataclass(frozen=True)
class PrivateName:
    """A name that the package relies on, at least with the versions in `TESTED`.

    path: "module:owner.name". An attribute that only code of its owner has counts, too: a class
    sets it on its instances, or a function reads it. why: "relies on it to ...". parameters: those
    that it must have, without `self`; after a last "..." there may be more that are optional.
    """

    path: str
    why: str
    parameters: str | None = None


_REQUEST = "celery.worker.request:Request"
_UNLOCKED = "lock the tasks of `redlock_tasks`, which would run without"
_KEEP = "keep a message that was refused its lock, which would be acknowledged"
_ELSEWHERE = "leave a message to the run that another worker has begun, which would be acknowledged"
_GIVE_BACK = "give a message back at a shutdown, which would be acknowledged"
_TALK = "talk to a lock node within a time"

ANYWHERE = (
    PrivateName("celery._state:connect_on_app_finalize", _UNLOCKED, "callback"),
    PrivateName("celery._state:_get_active_apps", _UNLOCKED, ""),
    PrivateName("celery.app.base:Celery._tasks", _UNLOCKED),
    PrivateName("celery.app.task:Task.apply", _UNLOCKED, "args, kwargs, ..."),
    PrivateName("celery.app.base:Celery.finalize.send", "refuse tasks that cannot be locked"),
    PrivateName("redis.connection:AbstractConnection._sock", _TALK),
    PrivateName("redis.connection:DefaultParser", _TALK),
)
IN_WORKERS = (
    PrivateName(f"{_REQUEST}._context", "see which message a run is of, and what it carries"),
    PrivateName(f"{_REQUEST}._eta", "let a deferred message wait, which would run at once"),
    PrivateName(f"{_REQUEST}.on_failure", _KEEP, "exc_info, ..."),
    PrivateName(f"{_REQUEST}._apply_result", "kill no child that runs another message"),
    PrivateName(f"{_REQUEST}.revoked", _ELSEWHERE, ""),
    PrivateName(f"{_REQUEST}.revoked._announce_revoked", _ELSEWHERE),
    PrivateName(f"{_REQUEST}.revoked.maybe_expire", _ELSEWHERE),
    PrivateName(f"{_REQUEST}._announce_revoked", _ELSEWHERE, "reason, terminated, signum, expired"),
    PrivateName(f"{_REQUEST}.maybe_expire", _ELSEWHERE, ""),
    PrivateName(f"{_REQUEST}.on_timeout", _GIVE_BACK, "soft, timeout"),
    PrivateName(f"{_REQUEST}.cancel", _GIVE_BACK, "pool, signal, ..."),
    PrivateName(f"{_REQUEST}._on_ack", _GIVE_BACK),
    PrivateName(
        "celery.worker.consumer.consumer:Consumer.apply_eta_task",
        "dispatch a message that waits in a worker's memory, which would stay there",
        "task",
    ),
)
IN_BEAT = (
    PrivateName(
        "celery.beat:Scheduler.apply_async", "send nothing beside another beat",
        "entry, producer, advance, ...",
    ),
)  # fmt: skip


def find(path: str, otherwise: Any) -> Any:
    """Return what a name stands for that a version need not have: "module:name"; else otherwise."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return otherwise


def check(names: tuple[PrivateName, ...]) -> None:
    """Raise SettingsError for the first required name that is missing or takes other parameters."""
    for one in names:
        found = difference(one)
        if found is not None:
            package = re.split("[.:]", one.path)[0]
            versions = " to ".join(dict.fromkeys(TESTED[package]))
            must = f"must be ({one.parameters}). " if found != MISSING else ""
            hint = (
                f"{must}celery_redlock relies on it to {one.why}. It works with {package} "
                f"{versions}: install one of these, or a newer celery_redlock"
            )
            version = getattr(sys.modules.get(package), "__version__", "without a version")
            raise SettingsError(f"{package} {version}", one.path.replace(":", "."), found, hint)


def difference(one: PrivateName) -> str | None:
    """Return what is found instead of a name: `MISSING`, or other parameters; None if it fits."""
    module, _, path = one.path.partition(":")
    *owners, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = inspect.getattr_static(owner, each)
    except (ImportError, AttributeError):
        return MISSING
    found = inspect.getattr_static(owner, name, MISSING)
    if found is MISSING:
        return None if owners and name in _names_in(owner) else MISSING
    return None if one.parameters is None else _other_parameters(found, one.parameters)


def _other_parameters(found: Any, parameters: str) -> str | None:
    try:
        given = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return "no function"
    given = [each for each in given if each.name != "self"]
    names = [each.name for each in given]
    wanted = parameters.split(", ") if parameters else []
    if wanted[-1:] == ["..."]:
        wanted.pop()
        others = given[len(wanted) :]
        are_optional = all(each.default is not each.empty or each.kind in _ANY for each in others)
        fits = names[: len(wanted)] == wanted and are_optional
    else:
        fits = names == wanted
    return None if fits else f"({', '.join(names)})"


def _names_in(owner: Any) -> set[str]:
    """Return the names of attributes in the code of a function, or of a class and its bases."""
    classes = owner.__mro__ if isinstance(owner, type) else ()
    functions = [one for cls in classes for one in vars(cls).values()] if classes else [owner]
    codes = [getattr(one, "__code__", None) for one in functions]
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
    newest = TESTED["celery"][1]
    if not _has_warned and _minor(version) > _minor(newest):
        _has_warned = True
        logger.warning(
            "Celery %s is newer than %s, the newest that this celery_redlock was tested with",
            version, newest, extra={"event": "celery_untested"},
        )  # fmt: skip


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


check(ANYWHERE)
