"""What `show` tells of one task: where it stands, by its id.

Locks and waiting messages are read by others; the result backend is asked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from celery.states import PENDING, READY_STATES

from celery_redlock import anchors
from celery_redlock.lock.node_status import in_iso
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.reports import LockList, LockReport
from celery_redlock.operate.cli.group import Table, format_duration, print_all, within_deadline
from celery_redlock.operate.cli.views import WaitersView
from celery_redlock.tasks.reporting import DEFERRED, DisabledBackend

NO_BACKEND = "Without a result backend the state of a task that has ended is not known."
PENDING_TASK = "A task with this id may be queued, lost with its worker, or not exist."
ONLY_SEEN = "Give the whole id of a task that is queued or has ended."
_ID = re.compile(r"[0-9a-f]{8}[0-9a-f-]*")
WHOLE_ID = 36  # characters of Celery's ids


@dataclass(frozen=True)
class TaskView:
    """One task. state: from the result backend if it has one.

    resources: that it holds or waits for. holder: of what it waits for. reason: why it
    waits, or since when a holder has not renewed. next_try: ISO 8601.
    """

    task_id: str
    task: str
    state: str
    resources: Sequence[str] = ()
    holds: bool = False
    holder: str = ""
    reason: str = ""
    next_try: str | None = None

    @classmethod
    def find(cls, app: Any, task_id: str, sight: LockList, waiters: WaitersView) -> TaskView | None:
        """Return what nodes, workers and result backend know of a task; None if that is nothing."""
        state, info = _stored_state(app, task_id)
        held = [lock for lock in sight.locks if lock.holder.task_id == task_id]
        if held:
            name = held[0].holder.task
            resources = tuple(dict.fromkeys(lock.resource for lock in held))
            state = state if state and state != DEFERRED else "STARTED"
            late = next(filter(None, map(_late, held)), "")
            if late:
                late = "; ".join(filter(None, (late, waiters.stranded.place_of(app, task_id)[1])))
            return cls(task_id, name, state, resources, holds=True, reason=late)
        for row in waiters.for_task(task_id).waiting:  # its worker knows more than the backend
            resources = tuple(row["resources"])
            holder = _holders_of(resources, sight)
            next_try = in_iso(SystemClock().wall_us() / 1e6 + row["tries_in"])
            fields = {"holder": holder, "reason": row["reason"], "next_try": next_try}
            return cls(task_id, row["task"], DEFERRED, resources, **fields)
        is_over = state in READY_STATES
        name, place = ("", "") if is_over else waiters.stranded.place_of(app, task_id)
        if state == DEFERRED:  # as of its last deferral
            resource = str(info.get("resource", ""))
            after = waiters.stranded.visibility
            when = "" if after is None else f", within its visibility_timeout of {after:g} s"
            reason = f"no worker that answers has its message: the broker delivers it again{when}"
            reason = place or reason
            holder = _holders_of([resource], sight)
            next_try = str(info.get("next_try") or "")
            if next_try < str(in_iso(SystemClock().wall_us() / 1e6)):  # of a worker that has died
                next_try = ""
            fields = {"holder": holder, "reason": reason, "next_try": next_try or None}
            return cls(task_id, name, state, (resource,), **fields)
        if not (state or place):
            return None
        return cls(task_id, name, state or PENDING, reason=place)

    def table(self) -> Table:
        """Return a table of one row, a fact a line."""
        name = self.task and f"{self.task}[{self.task_id}]"
        why = self.reason
        why = anchors.see(why, anchors.NO_QUORUM) if why.startswith("no quorum") else why
        facts = {
            "TASK": name or self.task_id,
            "STATE": self.state,
            "HOLDS" if self.holds else "WAITS FOR": ", ".join(self.resources),
            "HELD BY": self.holder,
            "RENEWED" if self.holds else "WHY": why,
            "NEXT TRY": _moment(self.next_try) if self.next_try else "",
        }
        shown = {head: fact for head, fact in facts.items() if fact}
        return Table(tuple(shown), [tuple(shown.values())], "", expanded=True)


def nothing_found(app: Any, name: str, is_known: bool) -> list[str]:
    """Return lines for a name that is neither a known resource nor a known task.

    is_known: whether a task that waits would be known.
    """
    rest = NO_BACKEND if isinstance(app.backend, DisabledBackend) else PENDING_TASK
    if not _ID.fullmatch(name):
        return [f"No lock is held on {name}.", rest]
    waits = " or waits" if is_known else ""
    none = f"No task with the id {name} holds a lock{waits}."
    return [none, rest if len(name) >= WHOLE_ID else ONLY_SEEN]


def _stored_state(app: Any, task_id: str) -> tuple[str, dict[str, Any]]:
    """Return a task's state and info from its result backend; "" and {} if it has none."""

    def ask() -> Mapping[str, Any] | None:
        backend = app.backend
        off = isinstance(backend, DisabledBackend)
        return None if off else backend.get_task_meta(task_id, cache=False)

    meta, cause = within_deadline(ask)
    if cause:
        print_all(f"the result backend cannot be queried: {cause}", err=True)
    if meta is None:
        return "", {}
    state = str(meta["status"])
    info = meta.get("result")
    return "" if state == PENDING else state, info if isinstance(info, dict) else {}


def _holders_of(resources: Sequence[str], sight: LockList) -> str:
    found = [one for one in sight.locks if one.held and one.resource in resources]
    return ", ".join(dict.fromkeys(map(_holder_of, found)))


def _holder_of(lock: LockReport) -> str:
    """Return the holder; of one that may have died, also when the lock expires."""
    late = _late(lock)
    return f"{lock.holder}, {late}" if late else str(lock.holder)


def _late(lock: LockReport) -> str:
    """Return since when a lock was not renewed, and what that may mean; "" if it is not late."""
    if not (lock.held and lock.is_late):
        return ""
    since = format_duration(lock.since_renewal or 0.0)
    left = format_duration(lock.valid_for)
    who = "worker" if lock.holder.worker else "process"
    return f"not renewed for {since}: its {who} may be dead; expires in {left}"


def _moment(text: str) -> str:
    """Return a moment in ISO 8601 as people read it: in how long, and when."""
    at = datetime.fromisoformat(text).astimezone(UTC)
    left = max(0.0, at.timestamp() - SystemClock().wall_us() / 1e6)
    day = f"{at:%Y-%m-%d} " if left >= 86400 else ""
    return f"in {format_duration(left)} ({day}{at:%H:%M:%S} UTC)"
