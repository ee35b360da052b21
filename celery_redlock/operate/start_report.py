"""What a worker's start and `doctor` report of an app: its lints, and the open decisions.

Not here: the lints themselves (`lints.py`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from celery import Task

from celery_redlock import anchors
from celery_redlock.errors import SettingsError
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.operate.lints import ADVICE, ERROR, Lint, format_names, lint, locking_tasks
from celery_redlock.operate.pass_through import changing_call
from celery_redlock.tasks.arguments import BEHIND_A_DECORATOR
from celery_redlock.tasks.declaration import ENTRY_ATTRIBUTE, config_of
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.startup import locks_tasks
from celery_redlock.tasks.task import LockedTask

logger = logging.getLogger(__name__)

_reported: weakref.WeakSet[Any] = weakref.WeakSet()  # apps whose worker has logged its lints


def report_lints(sender: Any = None, **_: Any) -> None:
    """Log errors and warnings once for each app; each reconnection sends the signal again."""
    app = sender.app
    if app in _reported:
        return
    _reported.add(app)
    try:
        # an entry of `redlock_tasks` with a wrong name may be all that was to lock a task
        if not (locks_tasks(app) and settings_of(app).nodes):
            return
        lints = lint(app)
        decisions = open_decisions(app)
    except SettingsError:
        return  # the check of the nodes reports it
    for finding in lints:
        if finding.level != ADVICE:
            level = logging.ERROR if finding.level == ERROR else logging.WARNING
            text = anchors.see(str(finding), anchors.DOCTOR_REPORTS)
            logger.log(level, "%s", text, extra={"event": "lint"})
    for decision in decisions:
        logger.info("%s", decision, extra={"event": "left_open"})


def open_decisions(app: Any) -> tuple[Lint, ...]:
    """Return as advice the decisions that the defaults leave to the user."""
    advice: list[Lint] = []
    settings = settings_of(app)
    tasks = locking_tasks(app)
    keep_locks = [parse_address(url, "app", "nodes").keeps_locks for url in settings.nodes]
    if tasks and settings.restart_guard != "strict" and keep_locks == [False]:
        hint = (
            "if it restarts without its data, a lock that is held is free, and two tasks can run "
            "together: name three nodes, or set redlock_restart_guard='strict'"
        )
        advice.append(Lint(ADVICE, "app: redlock_nodes", "1 node", hint))
    advice.extend(_wrapped_bodies(tasks))
    adopted = [
        task.name
        for task in tasks
        if ENTRY_ATTRIBUTE in vars(type(task)) and config_of(task).may_be_unique
    ]
    if adopted:
        hint = (
            f"{format_names(adopted)}: a process that sends them imports "
            "celery_redlock and calls app.finalize(), otherwise its calls are not deduplicated"
        )
        advice.append(Lint(ADVICE, "app: redlock_tasks", "unique_for or debounce", hint))
    return tuple(advice)


def _wrapped_bodies(tasks: Sequence[LockedTask]) -> Iterator[Lint]:
    """Yield advice on bodies behind decorators, and behind each `__call__` that is like one."""
    names_by_wrapper: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        task_class = type(task)
        wrappers = config_of(task).parameters.wrappers
        has_call = task_class.__call__ is not Task.__call__
        if len(wrappers) > has_call:
            names_by_wrapper.setdefault(("decorator", "functools.wraps"), []).append(task.name)
        if has_call and (call := changing_call(task_class)):
            names_by_wrapper.setdefault(("__call__", call), []).append(task.name)
    for (kind, wrapper), names in names_by_wrapper.items():
        hint = f"{format_names(names)}: {BEHIND_A_DECORATOR}"
        yield Lint(ADVICE, f"task: {kind}", wrapper, hint)
