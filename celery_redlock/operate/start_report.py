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
from celery_redlock.operate.lints import ADVICE, ERROR, Lint, lint, listed, locking
from celery_redlock.tasks.arguments import BEHIND_A_DECORATOR
from celery_redlock.tasks.declaration import ENTRY, config_of
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.startup import locked_tasks

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
    keep_locks = [parse_address(one, "app", "nodes").keeps_locks for one in settings.nodes]
    if tasks and settings.restart_guard != "strict" and keep_locks == [False]:
        hint = (
            "if it restarts without its data, a lock that is held is free, and two tasks can run "
            "together: name three nodes, or set redlock_restart_guard='strict'"
        )
        found.append(Lint(ADVICE, "app: redlock_nodes", "1 node", hint))
    if wrapped := [task.name for task in tasks if config_of(task).arrivals is not None]:
        hint = f"{listed(wrapped)}: {BEHIND_A_DECORATOR}"
        found.append(Lint(ADVICE, "task: decorator", "functools.wraps", hint))
    adopted = [one for one in tasks if ENTRY in vars(type(one)) and config_of(one).may_be_unique]
    if adopted:
        hint = (
            f"{listed([task.name for task in adopted])}: a process that sends them imports "
            "celery_redlock and calls app.finalize(), otherwise its calls are not deduplicated"
        )
        found.append(Lint(ADVICE, "app: redlock_tasks", "unique_for or debounce", hint))
    return tuple(found)
