"""The command `show`: the state of one resource, or of one task by its id.

`views.py` reads locks and waiting messages; the result backend is queried here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import click
from celery.states import PENDING, READY_STATES

from celery_redlock import anchors
from celery_redlock.lock.node_status import in_iso
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.reports import ClaimList, ClaimReport, LockList, LockReport
from celery_redlock.operate.cli import views
from celery_redlock.operate.cli.group import (
    Table,
    as_data,
    format_duration,
    non_empty,
    print_all,
    redlock,
    within_deadline,
)
from celery_redlock.operate.cli.listing import Listing, list_command
from celery_redlock.operate.cli.stranded import MessagePlace
from celery_redlock.operate.cli.views import WaitersView, lock_name
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.reporting import DEFERRED, DisabledBackend

NO_BACKEND = "Without a result backend the state of a task that has ended is not known."
PENDING_TASK = "A task with this id may be queued, lost with its worker, or not exist."
PENDING_NAME = "If it is the id of a task, that task may be queued, lost, or not exist."
WHOLE_ID_HINT = "Give the whole id of a task that is queued or has ended."
_ID = re.compile(r"[0-9a-f]{8}[0-9a-f-]*")
TASK_ID_LENGTH = 36  # characters of Celery's ids


@dataclass(frozen=True)
class TaskView:
    """One task. state: from the result backend if it has one.

    resources: that it holds or waits for. holder: of what it waits for. reason: why it
    waits, or since when a holder has not renewed. next_try: in ISO 8601; of a rate its next start.
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
    def find(
        cls, app: Any, task_id: str, lock_list: LockList, waiters: WaitersView, claims: ClaimList
    ) -> TaskView | None:
        """Return what nodes, workers and result backend know of a task; None if that is nothing."""
        state, info = _stored_state(app, task_id)
        held = [lock for lock in lock_list.locks if lock.holder.task_id == task_id]
        if held:
            return cls._of_holder(app, task_id, state, held, waiters)
        row = next(iter(waiters.for_task(task_id).waiting), None)
        if row is not None:  # its worker knows more than the backend
            return cls._of_waiting(row, task_id, lock_list)
        stranded = waiters.stranded
        has_ended = state in READY_STATES
        place = MessagePlace() if has_ended else stranded.place_of(app, task_id)
        if state == DEFERRED:
            reason = place.text or stranded.untaken_text(place)
            return cls._of_deferred(info, task_id, place.task, reason, lock_list)
        claim = next((one for one in claims.claims if one.task_id == task_id and one.counts), None)
        if not (state or place.text or claim):
            return None
        reason = "; ".join(filter(None, (place.text, _claim_text(claim) if claim else "")))
        name = place.task or (claim.task if claim else "")
        return cls(task_id, name, state or PENDING, reason=reason, next_try=_future(place.eta))

    @classmethod
    def _of_holder(
        cls, app: Any, task_id: str, state: str, locks: Sequence[LockReport], waiters: WaitersView
    ) -> TaskView:
        """Return the view of a task that holds locks. state: "" if no backend knows it."""
        resources = tuple(dict.fromkeys(lock.resource for lock in locks))
        late = next(filter(None, map(_late, locks)), "")
        if late:
            place = waiters.stranded.place_of(app, task_id)
            late = f"{late}; {place.text}" if place.text else late
        is_stale = state in ("", DEFERRED)  # the backend has the state before this run
        shown_state = "STARTED" if is_stale else state
        return cls(task_id, locks[0].holder.task, shown_state, resources, holds=True, reason=late)

    @classmethod
    def _of_waiting(cls, row: Mapping[str, Any], task_id: str, lock_list: LockList) -> TaskView:
        """Return the view of a task whose message waits in a worker. row: of `WaitersView`."""
        resources = tuple(row["resources"])
        tries_in = row["tries_in"]  # 0: behind another message, or just about to try
        tries_at = in_iso(SystemClock().wall_us() / 1e6 + tries_in) if tries_in else None
        return cls(
            task_id,
            row["task"],
            DEFERRED,
            resources,
            holder=_holders_of(resources, lock_list),
            reason=row["reason"],
            next_try=row["next_start"] or tries_at,
        )

    @classmethod
    def _of_deferred(
        cls, info: Mapping[str, Any], task_id: str, name: str, reason: str, lock_list: LockList
    ) -> TaskView:
        """Return the view of a deferred task that no worker reports. info: of its last deferral."""
        resource = str(info.get("resource", ""))
        next_try = str(info.get("next_start") or info.get("next_try") or "")
        return cls(
            task_id,
            name,
            DEFERRED,
            (resource,),
            holder=_holders_of([resource], lock_list),
            reason=reason,
            next_try=_future(next_try),  # if it is past, its worker has died
        )

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
        present = {head: fact for head, fact in facts.items() if fact}
        return Table(tuple(present), [tuple(present.values())], "", expanded=True)


@redlock.command()
@click.argument("name", callback=non_empty, metavar="RESOURCE|TASK_ID")
@list_command
def show(app: Any, name: str) -> Listing:
    """Show who holds a resource and who waits, or where a task stands.

    The first 8 characters of a task id are enough, if it holds, waits or has a claim, or if a
    worker has its message.
    The exit status is 2 if too few nodes answer for that to be known, or no worker.
    """
    client = redlock_of(app)
    lock_list = client.locks()
    waiters = WaitersView.ask(app)
    locks = lock_list.of([name])
    waiting = waiters.for_resource(name)
    registered = waiting.registered
    all_claims = client.claims()
    claims = replace(
        all_claims, claims=tuple(one for one in all_claims.claims if name in one.known_as)
    )
    is_waited_for = bool(waiting.waiting or registered.processes)
    is_resource = bool(locks.locks or locks.rates or claims.claims) or is_waited_for
    if not is_resource:
        if views.may_begin_id(name):
            name = views.whole_id(name, _known_task_ids(all_claims, lock_list, waiters))
            if len(name) < TASK_ID_LENGTH:  # as of a message whose worker is gone
                start = name.removesuffix("...")
                name = views.whole_id(name, waiters.stranded.ids_beginning(app, start))
        task = TaskView.find(app, name, lock_list, waiters, all_claims)
        if task is not None:
            return _task_listing(name, task, lock_list, waiters, all_claims)
    if is_resource or not lock_list.is_known:
        parts = _resource_parts(app, name, lock_list, claims, waiting)
    else:
        parts = [*nothing_found(app, name, waiters.is_known)]
    data = {
        "resource": name,
        "task": None,
        **as_data(locks),
        "claims": as_data(claims.claims),
        "waiters": waiting.data(),
    }
    return Listing(
        data, [*parts, *waiting.notes()], lock_list, registered.failing, waiters.is_known
    )


def _known_task_ids(claims: ClaimList, lock_list: LockList, waiters: WaitersView) -> list[str]:
    """Return the ids of the tasks that hold a lock, wait or have a claim."""
    ids = [lock.holder.task_id for lock in lock_list.locks]
    ids += [row["task_id"] for row in waiters.waiting]
    return ids + [claim.task_id for claim in claims.claims]


def _task_listing(
    task_id: str, task: TaskView, lock_list: LockList, waiters: WaitersView, claims: ClaimList
) -> Listing:
    """Return what `show` prints of a task: its row, and the locks and rates of its resources."""
    locks = lock_list.of(task.resources)
    waiting = waiters.for_task(task_id)
    data = {
        "resource": task_id,
        "task": as_data(task),
        **as_data(locks),
        "claims": as_data([one for one in claims.claims if one.task_id == task_id]),
        "waiters": waiting.data(),
    }
    return Listing(data, [task.table(), *views.used_tables(locks)], lock_list)


def _resource_parts(
    app: Any, name: str, lock_list: LockList, claims: ClaimList, waiting: WaitersView
) -> list[str | Table]:
    """Return what `show` prints of a resource: locks, rates, claims, votes, waiting messages."""
    locks = lock_list.of([name])
    parts: list[str | Table] = []
    if not locks.locks:
        is_known = lock_list.is_known
        parts.append(f"No lock is held on {name}." if is_known else views.LOCKS_UNKNOWN)
    parts += views.used_tables(locks)
    for lock in locks.locks:
        late = _late(lock)
        if not late:
            continue
        task_id = lock.holder.task_id if len(locks.locks) == 1 else ""  # each is a query
        place = waiting.stranded.place_of(app, task_id) if task_id else MessagePlace()
        parts.append("; ".join(filter(None, (f"{lock_name(lock)}: {late}", place.text))))
    if claims.claims:
        parts.append(views.claim_table(claims))
    if locks.locks:
        parts.append(views.vote_table(lock_list, locks.locks))
    return [*parts, *waiting.tables(name)]


def nothing_found(app: Any, name: str, is_known: bool) -> list[str]:
    """Return lines for a name that is neither a known resource nor a known task.

    is_known: whether a task that waits would be known.
    """
    has_backend = not isinstance(app.backend, DisabledBackend)
    if not _ID.fullmatch(name):
        return [f"No lock is held on {name}.", PENDING_NAME if has_backend else NO_BACKEND]
    hint = PENDING_TASK if has_backend else NO_BACKEND
    waits = " or waits" if is_known else ""
    text = f"No task with the id {name} holds a lock{waits}."
    return [text, hint if len(name) >= TASK_ID_LENGTH else WHOLE_ID_HINT]


def _claim_text(claim: ClaimReport) -> str:
    """Return what a claim means for later calls, of a task that it belongs to."""
    duration = format_duration(claim.expires_in)
    after = "a later call is its duplicate, or replaces it"
    return f"its call has the claim on {claim.resource}: for {duration} {after}"


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


def _holders_of(resources: Sequence[str], lock_list: LockList) -> str:
    locks = [lock for lock in lock_list.locks if lock.held and lock.resource in resources]
    return ", ".join(dict.fromkeys(map(_holder_of, locks)))


def _holder_of(lock: LockReport) -> str:
    """Return the holder; of one that may have died, also when the lock expires."""
    late = _late(lock)
    return f"{lock.holder}, {late}" if late else str(lock.holder)


def _late(lock: LockReport) -> str:
    """Return since when a lock was not renewed, and what that may mean; "" if it is not late."""
    if not (lock.held and lock.is_late):
        return ""
    age = format_duration(lock.since_renewal or 0.0)
    remaining = format_duration(lock.valid_for)
    holder_kind = "worker" if lock.holder.worker else "process"
    return f"not renewed for {age}: its {holder_kind} may be dead; expires in {remaining}"


def _future(moment: str) -> str | None:
    """Return a moment in ISO 8601 and UTC; None if it is past, or no moment."""
    try:
        at = datetime.fromisoformat(moment)
    except ValueError:  # another program wrote the message
        return None
    seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    return in_iso(seconds) if seconds > SystemClock().wall_us() / 1e6 else None


def _moment(text: str) -> str:
    """Return a moment in ISO 8601 as people read it: in how long, and when."""
    at = datetime.fromisoformat(text).astimezone(UTC)
    remaining = max(0.0, at.timestamp() - SystemClock().wall_us() / 1e6)
    day = f"{at:%Y-%m-%d} " if remaining >= 86400 else ""
    return f"in {format_duration(remaining)} ({day}{at:%H:%M:%S} UTC)"
