"""What a worker's start and `doctor` report of an app: its lints, and what is left to decide.

Not here: the lints themselves (`lints.py`).
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from celery_redlock import anchors
from celery_redlock.errors import SettingsError
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.operate.lints import ADVICE, ERROR, Lint, lint, listed, locking, queue_of_task
from celery_redlock.tasks.arguments import BEHIND_A_DECORATOR
from celery_redlock.tasks.declaration import ENTRY, config_of
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.recovery.survey import has_leases
from celery_redlock.tasks.recovery.tags import always_locks
from celery_redlock.tasks.settings.levels import time_limit_of, visibility_timeout
from celery_redlock.tasks.startup import locked_tasks
from celery_redlock.tasks.task import LockedTask

logger = logging.getLogger(__name__)

_reported: weakref.WeakSet[Any] = weakref.WeakSet()  # apps whose worker has logged its lints


def report_lints(sender: Any = None, **_: Any) -> None:
    """Log errors and warnings, once an app: a consumer is ready again after each reconnection."""
    app = sender.app
    if app in _reported:
        return
    _reported.add(app)
    try:
        if not (locked_tasks(app) and settings_of(app).nodes):
            return
        found = lint(app)
        unset = left_open(app)
    except SettingsError:
        return  # the check of the nodes reports it
    for one in found:
        if one.level != ADVICE:
            level = logging.ERROR if one.level == ERROR else logging.WARNING
            text = anchors.see(str(one), anchors.DOCTOR_REPORTS)
            logger.log(level, "%s", text, extra={"event": "lint"})
    for one in unset:
        logger.info("%s", one, extra={"event": "left_open"})


def left_open(app: Any) -> tuple[Lint, ...]:
    """Return what the defaults leave to the user to decide: at most one line each, as advice."""
    found: list[Lint] = []
    settings = settings_of(app)
    tasks = locking(app)
    visibility = visibility_timeout(app.conf)
    keep_locks = [parse_address(one, "app", "nodes").keeps_locks for one in settings.nodes]
    if tasks and settings.restart_guard != "strict" and keep_locks == [False]:
        hint = (
            "if it restarts without its data, a lock that is held is free, and two tasks can run "
            "together: name three nodes, or set redlock_restart_guard='strict'"
        )
        found.append(Lint(ADVICE, "app: redlock_nodes", "1 node", hint))
    if unbounded := [task.name for task in tasks if _is_unbounded(task)]:
        hint = (
            f"{listed(unbounded)}: a hung body keeps its lock forever, and messages wait behind "
            "it forever: set lock_max_hold or a time_limit, or lock_max_wait"
        )
        found.append(Lint(ADVICE, "max_wait, max_hold", "None", hint))
    if wrapped := [task.name for task in tasks if config_of(task).arrivals is not None]:
        hint = f"{listed(wrapped)}: {BEHIND_A_DECORATOR}"
        found.append(Lint(ADVICE, "task: decorator", "functools.wraps", hint))
    late = [task.name for task in tasks if task.acks_late]
    if late and settings.recovery and has_leases(app):  # after seconds, but for these
        late = [task.name for task in tasks if task.acks_late and not _is_recovered(task)]
    if late and visibility is not None:
        hint = (
            f"{listed(late)}: after a worker is killed, the broker delivers its messages again "
            f"after {visibility:g} s: lower it, unless a body without a lock or an eta is longer"
        )
        setting = "app: broker_transport_options: visibility_timeout"
        found.append(Lint(ADVICE, setting, f"{visibility:g}", hint))
    adopted = [one for one in tasks if ENTRY in vars(type(one)) and config_of(one).may_be_unique]
    if adopted:
        hint = (
            f"{listed([task.name for task in adopted])}: a process that sends them imports "
            "celery_redlock and calls app.finalize(), otherwise its calls are not deduplicated"
        )
        found.append(Lint(ADVICE, "app: redlock_tasks", "unique_for or debounce", hint))
    return tuple(found)


def _is_recovered(task: LockedTask) -> bool:
    """Return whether each run of a task holds a lock, so that workers move its messages."""
    try:
        return always_locks(config_of(task).options_for(queue_of_task(task)))
    except SettingsError:  # `lint` tells of it
        return True


def _is_unbounded(task: LockedTask) -> bool:
    """Return whether neither an option nor a time limit ends a body, or the wait for its lock."""
    try:
        options = config_of(task).options_for(queue_of_task(task))
    except SettingsError:  # `lint` tells of it
        return False
    waits = options.on_conflict not in ("skip", "fail")
    return waits and {time_limit_of(task), options.max_wait, options.max_hold} == {None}
