"""What a worker answers to operators: its locks, the messages that wait in it, its settings.

`celery inspect redlock_held`, `redlock_waiting`, `redlock_settings`, or `app.control.broadcast`.
Source: celery.worker.control: a registered function answers in the worker's main process. It reads
the locks of its children from the memory that it shares with them.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from celery_redlock.label import Holder
from celery_redlock.lock.model.keys import parts_of
from celery_redlock.lock.node_status import in_iso, shared_settings_of
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.children.reaper import held_by_children
from celery_redlock.tasks.delivery.delivery import header_of
from celery_redlock.tasks.delivery.header import Deferral
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.waiting.room import waiters_of


def held_locks_of(app: Any) -> list[dict[str, Any]]:
    """Return the locks that this worker and its pool's children hold. since: ISO 8601."""
    found = {(entry.resource, entry.value) for entry in held_by_children()}
    session = redlock_of(app).session
    for acquisition in session.watchdog.watched:
        if acquisition.held(session.clock.now()):
            found |= {(lease.key.resource, lease.value) for lease in acquisition.leases}
    return [
        {"resource": resource, "holder": asdict(Holder.of(label)), "since": in_iso(since)}
        for resource, value in sorted(found)
        for label, since, *_ in [parts_of(value)]
    ]


def redlock_held(state: Any) -> list[dict[str, Any]]:
    """Return the locks that this worker holds: resource, holder, since."""
    return held_locks_of(state.app)


def _reason_of(deferral: Deferral) -> str:
    """Return for people what refused a message at its last try, of all that it needs."""
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
    """Return whether the lines of the package reach a handler of this process.

    Not if an application sets up logging by itself, and names neither our logger nor the root, or
    if its `dictConfig` disables the loggers that exist by then.
    """
    own = logging.getLogger(__name__)
    return own.hasHandlers() and not own.disabled


def shared_by(app: Any) -> dict[str, Any]:
    """Return what all clients of a prefix must share, and the names of the nodes."""
    session = redlock_of(app).session
    names = sorted(node.name for node in session.nodes.all)
    shared = shared_settings_of(session)
    return {"prefix": session.options.prefix, "settings": shared, "nodes": names}


def redlock_settings(state: Any) -> dict[str, Any]:
    """Return what clients of a prefix must share, and whether this worker's lines are logged."""
    return {**shared_by(state.app), "is_logged": is_logged()}
