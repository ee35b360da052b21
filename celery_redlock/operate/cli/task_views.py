"""One task, and who waits for a lock, as tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from celery.backends.base import DisabledBackend
from celery.states import PENDING

from celery_redlock.label import Holder
from celery_redlock.lock.held_locks import Sight
from celery_redlock.lock.node_status import in_iso
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.waiting_processes import WaitingSight, look_at_waiting
from celery_redlock.operate.cli.group import within_deadline
from celery_redlock.operate.cli.render import (
    Table,
    as_data,
    format_duration,
    print_line,
    seconds_since,
)
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.reporting import DEFERRED
from celery_redlock.tasks.settings.levels import visibility_timeout

PROCESSES_UNKNOWN = "Which processes wait cannot be known."
TASKS_UNKNOWN = "Which tasks wait cannot be known."
REPLY_TIMEOUT = 1.0  # seconds in which a worker must answer


@dataclass(frozen=True)
class WaitersView:
    """The messages that wait for a lock, and the processes. workers: the workers that answered.

    waiting: rows of `operate.control.redlock_waiting`, each with its worker. registered: the
    processes, as the nodes know them; also those that do not answer. visibility: seconds after
    which the broker delivers the messages of a dead worker again; None: at once. cause: why the
    workers could not be asked.
    """

    workers: Sequence[str]
    waiting: Sequence[dict[str, Any]]
    registered: WaitingSight = field(repr=False)
    visibility: float | None = field(repr=False)
    cause: str = field(default="", repr=False)

    @classmethod
    def ask(cls, app: Any) -> WaitersView:
        """Ask the workers and the nodes; no worker answers if the broker is down."""
        replies, cause = within_deadline(
            lambda: app.control.broadcast("redlock_waiting", reply=True, timeout=REPLY_TIMEOUT)
        )
        by_worker = {worker: rows for reply in replies or () for worker, rows in reply.items()}
        waiting = [
            {**row, "worker": worker}
            for worker, rows in by_worker.items()
            if isinstance(rows, list)  # a worker without this package answers with an error
            for row in rows
        ]
        waiting.sort(key=lambda row: str(row["since"]))
        registered = look_at_waiting(redlock_of(app))
        return cls(sorted(by_worker), waiting, registered, visibility_timeout(app.conf), cause)

    def for_resource(self, resource: str) -> WaitersView:
        """Return who waits for one resource."""
        waiting = [row for row in self.waiting if resource in row["resources"]]
        registered = _only(self.registered, [resource])
        return replace(self, waiting=waiting, registered=registered)

    def for_task(self, task_id: str) -> WaitersView:
        """Return the waiting messages of one task, and the processes that wait for the same."""
        waiting = [row for row in self.waiting if row["task_id"] == task_id]
        resources = {resource for row in waiting for resource in row["resources"]}
        return replace(self, waiting=waiting, registered=_only(self.registered, resources))

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self.waiting and not self.registered.processes

    def process_table(self) -> Table:
        """Return a table with a row for each process and resource, in order."""
        heads = ("RESOURCE", "RANK", "PROCESS", "PID", "WAITED", "NODES", "STATE")
        rows = [
            (
                one.resource, str(one.rank), one.name, "" if one.pid is None else str(one.pid),
                format_duration(seconds_since(one.since)) if one.since else "",
                f"{len(one.nodes)} of {self.registered.asked}", "waits" if one.listens else "gone",
            )
            for one in self.registered.processes
        ]  # fmt: skip
        is_known = self.registered.is_known
        none = "No processes are registered as waiters." if is_known else PROCESSES_UNKNOWN
        return Table(heads, rows, none)

    def table(self) -> Table:
        """Return a table with a row for each message."""
        heads = ("WAITS FOR", "TASK", "ID", "WORKER", "WAITED", "DEFERRALS", "TRIES IN", "WHY")
        rows = [
            (
                ", ".join(row["resources"]), row["task"], row["task_id"], row["worker"],
                format_duration(seconds_since(row["since"])), str(row["deferrals"]),
                format_duration(row["tries_in"]), row["reason"],
            )
            for row in self.waiting
        ]  # fmt: skip
        none = "No tasks wait for a lock." if self.workers else TASKS_UNKNOWN
        return Table(heads, rows, none)

    def note(self) -> list[str]:
        """Return a line for whatever is not known: of workers, and of keys on the nodes."""
        lines = []
        if self.cause:
            lines.append(f"the workers cannot be asked who waits: {self.cause}")
        elif not self.workers:
            lines.append("no worker answered: what waits in the broker is not known")
        listens = {one.name: one.listens for one in self.registered.processes}
        for name, is_there in listens.items():
            if "@" not in name or name in self.workers:  # a worker's name; no host has an "@"
                continue
            text = "did not answer: the messages that wait in it are not shown"
            if not is_there:
                after = self.visibility
                when = "now" if after is None else f"within its visibility_timeout of {after:g} s"
                text = f"is gone: the broker delivers the messages that waited in it again, {when}"
            lines.append(f"{name} {text}")
        for resource, nodes in self.registered.wrong_type.items():
            text = f"no waiter for {resource} can register on {', '.join(nodes)}"
            lines.append(f"{text}: its key there is of another type")
        return lines

    def data(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {**as_data(self), **as_data(self.registered)}


def _only(registered: WaitingSight, resources: Collection[str]) -> WaitingSight:
    """Return the processes that wait for these resources."""
    processes = tuple(one for one in registered.processes if one.resource in resources)
    wrong = {name: nodes for name, nodes in registered.wrong_type.items() if name in resources}
    return replace(registered, processes=processes, wrong_type=wrong)


@dataclass(frozen=True)
class TaskView:
    """One task. state: from the result backend if it has one.

    resources: the resources that the task holds or waits for. holds: whether it holds them.
    holder: the holder of what it waits for. reason: why it waits. next_try: ISO 8601.
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
    def find(cls, app: Any, task_id: str, sight: Sight, waiters: WaitersView) -> TaskView | None:
        """Return what nodes, workers and result backend know of a task; None if that is nothing."""
        state, info = _stored_state(app, task_id)
        held = [lock for lock in sight.locks if lock.holder.task_id == task_id]
        if held:
            name = held[0].holder.task
            resources = tuple(dict.fromkeys(lock.resource for lock in held))
            is_known = state and state != DEFERRED
            return cls(task_id, name, state if is_known else "STARTED", resources, holds=True)
        for row in waiters.for_task(task_id).waiting:
            return cls._waiting(row, sight)
        if state == DEFERRED:
            return cls._deferred(task_id, info, sight)
        return cls(task_id, "", state) if state else None

    @classmethod
    def _waiting(cls, row: dict[str, Any], sight: Sight) -> TaskView:
        """Return a task from what its worker says."""
        resources = tuple(row["resources"])
        return cls(
            row["task_id"],
            row["task"],
            DEFERRED,
            resources,
            holder=_holders_of(resources, sight),
            reason=row["reason"],
            next_try=in_iso(SystemClock().wall_us() / 1e6 + row["tries_in"]),
        )

    @classmethod
    def _deferred(cls, task_id: str, info: dict[str, Any], sight: Sight) -> TaskView:
        """Return a task from what the result backend has stored at its last deferral."""
        resource, holder = str(info.get("resource", "")), str(info.get("holder", ""))
        return cls(
            task_id,
            "",
            DEFERRED,
            (resource,),
            holder=_holders_of([resource], sight) or str(Holder.of(holder)),
            next_try=info.get("next_try"),
        )

    def table(self) -> Table:
        """Return a table of one row, a fact a line."""
        name = self.task and f"{self.task}[{self.task_id}]"
        facts = {
            "TASK": name or self.task_id,
            "STATE": self.state,
            "HOLDS" if self.holds else "WAITS FOR": ", ".join(self.resources) or "nothing",
            "HELD BY": self.holder,
            "WHY": self.reason,
            "NEXT TRY": self.next_try or "",
        }
        shown = {head: fact for head, fact in facts.items() if fact}
        return Table(tuple(shown), [tuple(shown.values())], "", expanded=True)


def _stored_state(app: Any, task_id: str) -> tuple[str, dict[str, Any]]:
    """Return a task's state and info from its result backend; "" and {} if it has none."""

    def ask() -> Mapping[str, Any] | None:
        backend = app.backend
        off = isinstance(backend, DisabledBackend)
        return None if off else backend.get_task_meta(task_id, cache=False)

    meta, cause = within_deadline(ask)
    if cause:
        print_line(f"the result backend cannot be queried: {cause}", err=True)
    if meta is None:
        return "", {}
    state, info = str(meta["status"]), meta.get("result")
    return "" if state == PENDING else state, info if isinstance(info, dict) else {}


def _holders_of(resources: Sequence[str], sight: Sight) -> str:
    holders = [str(one.holder) for one in sight.locks if one.held and one.resource in resources]
    return ", ".join(dict.fromkeys(holders))
