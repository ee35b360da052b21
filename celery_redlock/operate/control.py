"""The remote control commands of a worker: its locks, its waiting messages, its settings.

`celery inspect redlock_held`, `redlock_waiting`, `redlock_settings`, or `app.control.broadcast`
calls them. Source: celery.worker.control: a registered function runs in the worker's main process.
It reads the locks of the pool's children from the memory that it shares with them.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from celery_redlock.label import Holder
from celery_redlock.lock.model.keys import parts_of
from celery_redlock.lock.node_status import in_iso, shared_settings_of
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.children.reaper import held_by_worker
from celery_redlock.tasks.delivery.delivery import header_of
from celery_redlock.tasks.delivery.header import Deferral
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.waiting.room import waiters_of


def held_locks_of(app: Any) -> list[dict[str, Any]]:
    """Return the locks that this worker and its pool's children hold. since: ISO 8601."""
    return [
        {"resource": resource, "holder": asdict(Holder.of(label)), "since": in_iso(acquired_at)}
        for resource, value in sorted(held_by_worker(redlock_of(app).session))
        for label, acquired_at, *_ in [parts_of(value)]
    ]


def redlock_held(state: Any) -> list[dict[str, Any]]:
    """Return the locks that this worker holds: resource, holder, since."""
    return held_locks_of(state.app)


def _reason_of(deferral: Deferral) -> str:
    """Return for people why the last try of a message was refused."""
    if not deferral.is_taken:
        return deferral.why
    if deferral.rate:
        return f"rate of {deferral.resource}: {deferral.rate}"
    one_of_several = f" of {deferral.resource}" if len(deferral.resources) > 1 else ""
    return f"the lock{one_of_several} was taken"


def redlock_waiting(state: Any) -> list[dict[str, Any]]:
    """Return the messages that wait here for a lock, by priority, then by first deferral."""
    now = SystemClock().now()
    return [
        {
            "resources": list(deferral.resources),
            "resource": deferral.resource,
            "rate": deferral.rate,
            "reason": _reason_of(deferral),
            "task_id": waiting.request.id,
            "task": waiting.request.name,
            "since": in_iso(deferral.since or None),
            "deferrals": deferral.count,
            "tries_in": max(0.0, waiting.eta - now),
        }
        for waiting in waiters_of(state.consumer)
        for deferral in [header_of(waiting.request._context).deferral]
    ]


def is_logged() -> bool:
    """Return whether log lines of the package reach a handler of this process.

    They do not if the application configures neither the package's logger nor the root logger, or
    if its `dictConfig` disables the existing loggers.
    """
    package_logger = logging.getLogger(__name__)
    return package_logger.hasHandlers() and not package_logger.disabled


def prefix_settings_of(app: Any) -> dict[str, Any]:
    """Return the settings that all clients of a prefix must share, and the names of the nodes."""
    session = redlock_of(app).session
    names = sorted(node.name for node in session.nodes.all)
    shared = shared_settings_of(session)
    return {"prefix": session.options.prefix, "settings": shared, "nodes": names}


def redlock_settings(state: Any) -> dict[str, Any]:
    """Return the settings of `prefix_settings_of`, and whether the worker's lines are logged."""
    return {**prefix_settings_of(state.app), "is_logged": is_logged()}
