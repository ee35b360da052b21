"""What a worker says when it is asked: the locks that it holds, and who waits in it.

`celery inspect redlock_held` and `celery inspect redlock_waiting`, or `app.control.broadcast`.
Source: celery.worker.control: a function that is registered there answers in the worker's main
process, which knows of its children's locks by the memory that it shares with them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from celery_redlock.errors import RUN
from celery_redlock.lock.model.keys import label_of, since_of
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.children.forks import held_by_children
from celery_redlock.tasks.delivery.header import LockHeader
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.waiting.room import waiters_of


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. task_id, task, worker: "" where it is no task."""

    label: str
    task_id: str = ""
    task: str = ""
    worker: str = ""

    @classmethod
    def of(cls, label: str) -> Holder:
        """Read it from what stands on the nodes."""
        found = RUN.fullmatch(label)
        return cls(label) if found is None else cls(label, **found.groupdict(default=""))


def in_iso(seconds: float | None) -> str | None:
    """Return a moment, s since 1970, as ISO 8601 in UTC; None for one that no calendar has."""
    try:
        return (
            None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat()
        )
    except (ValueError, OverflowError):  # a stranger's number
        return None


@dataclass(frozen=True)
class HeldHere:
    """A lock that a worker holds. since: s since 1970."""

    resource: str
    holder: Holder
    since: float | None


def holds_of(app: Any) -> list[HeldHere]:
    """Return the locks that this worker holds, those of its pool's children too."""
    found = {(entry.resource, entry.value) for entry in held_by_children()}
    session = redlock_of(app).session
    for acquisition in session.watchdog.watched:
        if acquisition.held(session.clock.now()):
            found |= {(one.key.resource, one.value) for one in acquisition.key_leases}
    return [
        HeldHere(resource, Holder.of(label_of(value)), since_of(value))
        for resource, value in sorted(found)
    ]


def redlock_held(state: Any) -> list[dict[str, Any]]:
    """Return the locks that this worker holds: resource, holder, since."""
    return [{**asdict(held), "since": in_iso(held.since)} for held in holds_of(state.app)]


def redlock_waiting(state: Any) -> list[dict[str, Any]]:
    """Return the messages that wait here for a lock, those that wait longest first."""
    now = SystemClock().now()
    return [
        {
            "resources": list(slip.waits_for),
            "reason": slip.reason or "the lock is taken",
            "task_id": waiting.request.id,
            "task": waiting.request.name,
            "since": slip.since,
            "deferrals": slip.deferrals,
            "tries_in": max(0.0, waiting.eta - now),
        }
        for waiting in waiters_of(state.consumer)
        for slip in (LockHeader.of(waiting.request._context),)
    ]
