"""Refuses errors when an app finalizes, and logs lints when a worker starts."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from celery_redlock import anchors
from celery_redlock.errors import SettingsError
from celery_redlock.operate.lints.app_rules import lint_queues
from celery_redlock.operate.lints.facts import declared_queues, facts_of
from celery_redlock.operate.lints.model import ADVICE, ERROR
from celery_redlock.operate.lints.rules import left_open, lint
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.startup import locked_tasks, locks_tasks

logger = logging.getLogger(__name__)


def refuse_errors(app: Any) -> None:
    """Raise SettingsError for the first error in the names of `redlock_queues`.

    Without locked tasks the setting is not looked at.
    """
    patterns, conf = app.conf.get("redlock_queues"), app.conf
    if isinstance(patterns, Mapping) and locks_tasks(app):
        creates = bool(conf.task_create_missing_queues)
        for one in lint_queues(map(str, patterns), declared_queues(conf), creates=creates):
            if one.level == ERROR:
                raise SettingsError("app", "redlock_queues", one.value, one.hint)


_reported: weakref.WeakSet[Any] = weakref.WeakSet()  # apps whose worker has logged its lints


def report_lints(sender: Any = None, **_: Any) -> None:
    """Log errors and warnings, once an app: a consumer is ready again after each reconnection."""
    app = sender.app
    if app in _reported:
        return
    _reported.add(app)
    if not locked_tasks(app):
        return
    try:
        if not settings_of(app).nodes:
            return
        facts = facts_of(app)
        found, unset = lint(facts), left_open(facts)
    except SettingsError:
        return  # the check of the nodes reports it
    for one in found:
        if one.level != ADVICE:
            level = logging.ERROR if one.level == ERROR else logging.WARNING
            text = anchors.see(str(one), anchors.DOCTOR_REPORTS)
            logger.log(level, "%s", text, extra={"event": "lint"})
    for one in unset:
        logger.info("%s", one, extra={"event": "left_open"})
