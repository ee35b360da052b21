"""The names of Celery, kombu, billiard and redis-py that are not theirs to promise, in one list.

A name is private if it begins with an underscore, is in a module that their reference leaves out,
or is overridden or replaced here. The package imports this module first. So a version without a
required name gives a SettingsError, and no task runs unlocked for it. A worker also looks for
`IN_WORKERS`, and a beat for `IN_BEAT`, whose modules no other process imports.
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
    "celery": ("5.5", "5.7"),
    "kombu": ("5.5", "5.7"),
    "billiard": ("4.3", "4.3"),
    "redis": ("5.0", "8.1"),
}


@dataclass(frozen=True)
class PrivateName:
    """A name that the package relies on, at least with the versions in `TESTED`.

    path: "module:owner.name". An attribute that only code of its owner has counts, too: a class
    sets it on its instances, or a function reads it. why: "relies on it to ...". parameters: those
    that it must have, without `self`; after a last "..." there may be more that are optional.
    optional: why it may be missing.
    """

    path: str
    why: str
    parameters: str | None = None
    optional: str = ""


_NATIVE = "kombu.transport.native_delayed_delivery"
_REQUEST = "celery.worker.request:Request"
_CONSUMER = "celery.worker.consumer.consumer:Consumer"
_STRATEGY = "celery.worker.strategy:default"
_SEE_MESSAGE = "see what the main process knows of a message"
_END_RUN = "tell a run that ends from one that is handed back"
_ELSEWHERE = "revoke or expire no message that runs elsewhere"
_ADOPT = "lock the tasks of `redlock_tasks`"
_DELAY = "send a deferral through RabbitMQ's delayed queues"
_SURVIVE = "survive a restart of the broker"
_TIMES = "read the times of a message"
_REDIS, _AT_HEAD = "kombu.transport.redis:Channel", "let a worker take a refused message next"
_READ = "read what a node says within a time"
_SLOWER = "a deferral only takes longer"

ANYWHERE = (
    # the tasks of an app, and the current one
    PrivateName("celery._state:connect_on_app_finalize", "check an app's tasks", "callback"),
    PrivateName("celery._state:_get_active_apps", "check an app that has finalized before", ""),
    PrivateName("celery._state:get_current_task", "find the current lock", ""),
    PrivateName("celery._state:get_current_worker_task", "find the current lock", ""),
    PrivateName("celery._state:_task_stack", "switch locks off in tests", optional="for tests"),
    PrivateName("celery.local:Proxy._get_current_object", "find the app of a child", ""),
    PrivateName("celery.local:maybe_evaluate", "find the locked tasks of an app", "obj"),
    PrivateName("celery.app.base:Celery._finalize_mutex", "check an app at the right time"),
    PrivateName("celery.app.base:Celery.finalize.send", "check an app at the right time"),
    PrivateName("celery.app.base:Celery._pending", "find the locked tasks of an app"),
    PrivateName("celery.app.base:Celery._tasks", _ADOPT),
    PrivateName("celery.app.annotations:resolve_all", _ADOPT, "anno, task"),
    PrivateName("celery.app.autoretry:add_autoretry_behaviour", _ADOPT, "task, ..."),
    PrivateName("celery.app.autoretry:add_autoretry_behaviour._orig_run", _ADOPT),
    PrivateName("celery.app.task:Task._get_exec_options", "find the queue of a send", ""),
    # runs and their results
    PrivateName("celery.app.trace:ExceptionInfo", "describe a deferral quickly", optional=_SLOWER),
    PrivateName("celery.backends.base:DisabledBackend", "find out whether results are stored"),
    PrivateName(
        "celery.backends.redis:RedisBackend.on_connection_error",
        "end the wait for a result backend",
        "max_retries, exc, intervals, retries",
        optional="redis-py may be older than what Celery asks for",
    ),
    PrivateName("celery.concurrency:get_implementation", "see which pool a worker has", "cls"),
    PrivateName("celery.utils:uuid", "name a message before its send", "..."),
    PrivateName("celery.utils.dispatch:Signal", "send the public signals"),
    PrivateName("celery.utils.functional:noop", "leave a message with the broker"),
    PrivateName("celery.utils.imports:symbol_by_name", "load a class of requests", "name, ..."),
    PrivateName("celery.utils.quorum_queues:detect_quorum_queues", _DELAY, "app, driver_type"),
    PrivateName("celery.utils.time:maybe_iso8601", _TIMES, "dt"),
    PrivateName("celery.utils.time:maybe_make_aware", _TIMES, "dt, tz, ..."),
    PrivateName("billiard.einfo:ExceptionInfo", "describe a deferral quickly"),
    PrivateName("billiard.einfo:ExceptionWithTraceback", "read the error of a run"),
    PrivateName("billiard.exceptions:TimeLimitExceeded", _END_RUN),
    PrivateName("billiard.pool:SIG_SOFT_TIMEOUT", "send a message whole under a time limit"),
    PrivateName("billiard.pool:soft_timeout_sighandler", "send a message whole under a time limit"),
    PrivateName("billiard.process:current_process", "count in each process", ""),
    PrivateName(f"{_NATIVE}:MAX_LEVEL", _DELAY),
    PrivateName(f"{_NATIVE}:calculate_routing_key", _DELAY, "countdown, routing_key"),
    PrivateName(f"{_NATIVE}:level_name", _DELAY, "level, ..."),
    PrivateName("kombu.utils.json:dumps", _AT_HEAD, "s, ..."),
    # the connections to the lock nodes
    PrivateName("redis.connection:AbstractConnection._sock", "write to a node without a thread"),
    PrivateName("redis.connection:DefaultParser", _READ),
    PrivateName("redis.connection:parse_url", "read the address of a node", "url"),
    PrivateName("redis.connection:to_bool", "read the address of a node", "value"),
    PrivateName(
        "redis.sentinel:Sentinel._force_master_ip", "find a primary", optional="redis-py 5 has none"
    ),
    # a message in a worker, by a module that `celery.worker.control` imports anyway
    PrivateName(f"{_REQUEST}._context", _SEE_MESSAGE),
    PrivateName(f"{_REQUEST}._request_dict", _SEE_MESSAGE),
    PrivateName(f"{_REQUEST}._eta", "set the ETA of a message"),
    PrivateName(f"{_REQUEST}._eta_timer_entry", "cancel Celery's timer", optional="since 5.7"),
    PrivateName(f"{_REQUEST}._on_ack", "leave a message with the broker"),
    PrivateName(f"{_REQUEST}._already_revoked", "revoke a message once"),
    PrivateName(f"{_REQUEST}._already_cancelled", "leave a message with the broker"),
    PrivateName(f"{_REQUEST}._apply_result", "let a message wait that was in the pool"),
    PrivateName(f"{_REQUEST}._announce_revoked", _ELSEWHERE, "reason, terminated, signum, expired"),
    PrivateName(f"{_REQUEST}.revoked._announce_revoked", _ELSEWHERE),
    PrivateName(f"{_REQUEST}.revoked.maybe_expire", _ELSEWHERE),
    PrivateName(f"{_REQUEST}.maybe_expire", _ELSEWHERE, ""),
    PrivateName(f"{_REQUEST}.revoked", _ELSEWHERE, ""),
    PrivateName(f"{_REQUEST}.reject", _END_RUN, "requeue"),
    PrivateName(f"{_REQUEST}.on_failure", _END_RUN, "exc_info, ..."),
    PrivateName(f"{_REQUEST}.on_timeout", _END_RUN, "soft, timeout"),
    PrivateName(f"{_REQUEST}.terminate", _END_RUN, "pool, signal"),
    PrivateName(f"{_REQUEST}.cancel", _END_RUN, "pool, signal, ..."),
)
IN_WORKERS = (
    PrivateName("kombu.entity:Queue.consume.basic_consume", "record the queue of a message"),
    PrivateName(f"{_CONSUMER}.apply_eta_task", "let a message wait for its lock", "task"),
    PrivateName(f"{_CONSUMER}._limit_task", "keep a rate limit", "request, bucket, tokens"),
    PrivateName(f"{_CONSUMER}._limit_post_eta", "keep a rate limit", "request, bucket, tokens"),
    PrivateName(f"{_CONSUMER}._limit_move_to_pool", "keep a rate limit", "request"),
    PrivateName(f"{_CONSUMER}.connection_for_read", _SURVIVE, "heartbeat"),
    PrivateName(f"{_CONSUMER}.connect.connection_for_read", _SURVIVE),
    PrivateName("kombu.connection:Connection.close", _SURVIVE, ""),
    PrivateName(f"{_STRATEGY}.apply_eta_task", "let a message wait for its lock"),
    PrivateName(f"{_STRATEGY}._limit_post_eta", "keep a rate limit"),
    PrivateName(f"{_REDIS}._put", _AT_HEAD, "queue, message, ..."),
    PrivateName(f"{_REDIS}._q_for_pri", _AT_HEAD, "queue, pri"),
    PrivateName(f"{_REDIS}._get_message_priority", _AT_HEAD, "message, reverse"),
    PrivateName(f"{_REDIS}._expires", _AT_HEAD, optional="since kombu 5.7"),
)
_INNER = "wrap another scheduler"
IN_BEAT = (
    PrivateName("celery.beat:PersistentScheduler._store", "save nothing after a lost lock"),
    PrivateName("celery.beat:Scheduler.apply_async", _INNER, "entry, producer, advance, ..."),
    PrivateName("celery.beat:Scheduler.producer", _INNER),
    PrivateName("celery.beat:Scheduler.sync", _INNER, ""),
    PrivateName("celery.utils.imports:load_extension_class_names", _INNER, "namespace"),
    PrivateName("kombu.messaging:Producer.publish", "retry no publish after a lost lock"),
)


def check(names: tuple[PrivateName, ...]) -> None:
    """Raise SettingsError for the first required name that is missing or takes other parameters."""
    for one in names:
        found = None if one.optional else _difference(one)
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


def _difference(one: PrivateName) -> str | None:
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
    names, wanted = [each.name for each in given], parameters.split(", ") if parameters else []
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
