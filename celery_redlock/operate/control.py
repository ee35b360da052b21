"""What a worker answers to operators: the locks that it holds, and the messages that wait in it.

`celery inspect redlock_held` and `celery inspect redlock_waiting`, or `app.control.broadcast`.
Source: celery.worker.control: a registered function answers in the worker's main process. It reads
the locks of its children from the memory that it shares with them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from celery_redlock.label import Holder
from celery_redlock.lock.model.keys import parts_of
from celery_redlock.lock.node_status import in_iso
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.children.reaper import held_by_children
from celery_redlock.tasks.delivery.delivery import LockHeader
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
        for label, since, _ in [parts_of(value)]
    ]


def redlock_held(state: Any) -> list[dict[str, Any]]:
    """Return the locks that this worker holds: resource, holder, since."""
    return held_locks_of(state.app)


def redlock_waiting(state: Any) -> list[dict[str, Any]]:
    """Return the messages that wait here for a lock, by priority, then by first deferral."""
    now = SystemClock().now()
    return [
        {
            "resources": list(deferral.resources),
            "reason": "the lock is taken" if deferral.is_taken else deferral.why,
            "task_id": waiting.request.id,
            "task": waiting.request.name,
            "since": in_iso(deferral.since),
            "deferrals": deferral.count,
            "tries_in": max(0.0, waiting.eta - now),
        }
        for waiting in waiters_of(state.consumer)
        for deferral in [LockHeader.of(waiting.request._context).deferral]
    ]
