"""What a worker answers to operators: the locks that it holds, and the messages that wait in it.

`celery inspect redlock_held` and `celery inspect redlock_waiting`, or `app.control.broadcast`.
Source: celery.worker.control: a registered function answers in the worker's main process. It reads
the locks of its children from the memory that it shares with them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from celery_redlock.errors import RUN
from celery_redlock.lock.model.keys import parts_of
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.children.forks import held_by_children
from celery_redlock.tasks.delivery.header import LockHeader
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.waiting.room import waiters_of


@dataclass(frozen=True)
class Holder:
    """The holder of a lock. task_id, task, worker: "" if the holder is no task."""

    label: str
    task_id: str = ""
    task: str = ""
    worker: str = ""

    @classmethod
    def of(cls, label: str) -> Holder:
        """Parse the label in a lock's value, as the nodes store it."""
        found = RUN.fullmatch(label)
        return cls(label) if found is None else cls(label, **found.groupdict(default=""))


def in_iso(seconds: float | None) -> str | None:
    """Return a moment, in seconds since 1970, as ISO 8601 in UTC; None if out of range."""
    try:
        return (
            None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat()
        )
    except (ValueError, OverflowError, OSError):  # another program wrote the value
        return None


@dataclass(frozen=True)
class HeldLock:
    """A lock that a worker holds. since: seconds since 1970."""

    resource: str
    holder: Holder
    since: float | None


def held_locks_of(app: Any) -> list[HeldLock]:
    """Return the locks that this worker and its pool's children hold."""
    found = {(entry.resource, entry.value) for entry in held_by_children()}
    session = redlock_of(app).session
    for acquisition in session.watchdog.watched:
        if acquisition.held(session.clock.now()):
            found |= {(lease.key.resource, lease.value) for lease in acquisition.key_leases}
    held = [(resource, parts_of(value)) for resource, value in sorted(found)]
    return [HeldLock(resource, Holder.of(label), since) for resource, (label, since, _) in held]


def redlock_held(state: Any) -> list[dict[str, Any]]:
    """Return the locks that this worker holds: resource, holder, since."""
    return [{**asdict(held), "since": in_iso(held.since)} for held in held_locks_of(state.app)]


def redlock_waiting(state: Any) -> list[dict[str, Any]]:
    """Return the messages that wait here for a lock, in order of their first deferral."""
    now = SystemClock().now()
    return [
        {
            "resources": list(header.wait.resources),
            "reason": header.wait.reason or "the lock is taken",
            "task_id": waiting.request.id,
            "task": waiting.request.name,
            "since": header.deferral.since,
            "deferrals": header.deferral.count,
            "tries_in": max(0.0, waiting.eta - now),
        }
        for waiting in waiters_of(state.consumer)
        if (header := LockHeader.of(waiting.request._context)).wait is not None
    ]
