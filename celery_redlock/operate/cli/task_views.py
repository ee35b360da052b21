"""One task, and who waits for a lock, as tables and as data for JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery.states import PENDING

from celery_redlock.errors import describe_holder
from celery_redlock.lock.held_locks import Sight
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.waiting_processes import WaitingProcess, WaitingSight, look_at_waiting
from celery_redlock.operate.cli.lock_views import holder_text
from celery_redlock.operate.cli.render import (
    AdaptiveTable,
    format_duration,
    print_line,
    seconds_since,
)
from celery_redlock.operate.control import Holder, in_iso
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.reporting import DEFERRED

REPLY_TIMEOUT = 1.0  # seconds in which a worker must answer


@dataclass(frozen=True)
class WaitersView:
    """The messages that wait for a lock, and the processes. workers: the workers that answered.

    waiting: rows of `operate.control.redlock_waiting`, each with its worker. registered: the
    processes, as the nodes know them; also those that do not answer.
    """

    workers: Sequence[str]
    waiting: Sequence[dict[str, Any]]
    registered: WaitingSight

    @classmethod
    def ask(cls, app: Any) -> WaitersView:
        """Ask the workers and the nodes; no worker answers if the broker is down."""
        try:
            replies = app.control.broadcast("redlock_waiting", reply=True, timeout=REPLY_TIMEOUT)
        except Exception as error:  # each transport has its own
            print_line(f"the workers cannot be asked who waits: {error}", err=True)
            replies = None
        by_worker = {worker: rows for reply in replies or () for worker, rows in reply.items()}
        waiting = [
            {**row, "worker": worker}
            for worker, rows in by_worker.items()
            if isinstance(rows, list)  # a worker without this package answers with an error
            for row in rows
        ]
        waiting.sort(key=lambda row: str(row["since"]))
        return cls(sorted(by_worker), waiting, look_at_waiting(redlock_of(app)))

    def for_resource(self, resource: str) -> WaitersView:
        """Return who waits for one resource."""
        waiting = [row for row in self.waiting if resource in row["resources"]]
        return WaitersView(self.workers, waiting, _only(self.registered, [resource]))

    def for_task(self, task_id: str) -> WaitersView:
        """Return the waiting messages of one task, and the processes that wait for the same."""
        waiting = [row for row in self.waiting if row["task_id"] == task_id]
        resources = {resource for row in waiting for resource in row["resources"]}
        return WaitersView(self.workers, waiting, _only(self.registered, resources))

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self.waiting and not self.registered.processes

    def process_table(self) -> AdaptiveTable:
        """Return a table with a row for each process and resource, in order."""
        heads = ("RESOURCE", "RANK", "PROCESS", "PID", "WAITED", "NODES")
        rows = [
            (
                one.resource, str(one.rank), one.name, "" if one.pid is None else str(one.pid),
                format_duration(seconds_since(since)) if (since := in_iso(one.since)) else "",
                f"{len(one.nodes)} of {self.registered.asked}",
            )
            for one in self.registered.processes
        ]  # fmt: skip
        return AdaptiveTable(heads, rows, "No processes are registered as waiters.")

    def table(self) -> AdaptiveTable:
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
        return AdaptiveTable(heads, rows, "No tasks wait for a lock.")

    def note(self) -> list[str]:
        """Return a line for whatever is not known: of workers, and of keys on the nodes."""
        lines = []
        if not self.workers:
            lines.append("no worker answered: what waits in the broker is not known")
        names = dict.fromkeys(one.name for one in self.registered.processes)
        lines += [
            f"{name} did not answer: the messages that wait in it are not shown"
            for name in names
            if "@" in name and name not in self.workers  # a worker's name; no host has an "@"
        ]
        for resource, nodes in self.registered.wrong_type.items():
            text = f"no waiter for {resource} can register on {', '.join(nodes)}"
            lines.append(f"{text}: its key there is of another type")
        return lines

    def data(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        registered = self.registered
        return {
            "workers": self.workers,
            "waiting": self.waiting,
            "processes": [_process_data(one) for one in registered.processes],
            "wrong_type": registered.wrong_type,
            "failing": registered.failing,
        }


def _only(registered: WaitingSight, resources: Collection[str]) -> WaitingSight:
    """Return the processes that wait for these resources."""
    processes = tuple(one for one in registered.processes if one.resource in resources)
    wrong = {name: nodes for name, nodes in registered.wrong_type.items() if name in resources}
    return replace(registered, processes=processes, wrong_type=wrong)


def _process_data(process: WaitingProcess) -> dict[str, Any]:
    return {
        "resource": process.resource,
        "rank": process.rank,
        "name": process.name,
        "pid": process.pid,
        "waiter": process.waiter,
        "since": in_iso(process.since),
        "nodes": process.nodes,
    }


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
        held = [lock for lock in sight.locks if Holder.of(lock.holder).task_id == task_id]
        if held:
            name = Holder.of(held[0].holder).task
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
            holder=_holders_of([resource], sight) or describe_holder(holder),
            next_try=info.get("next_try"),
        )

    def table(self) -> AdaptiveTable:
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
        return AdaptiveTable(tuple(shown), [tuple(shown.values())], "", expanded=True)


def _stored_state(app: Any, task_id: str) -> tuple[str, dict[str, Any]]:
    """Return a task's state and info from its result backend; "" and {} if it has none."""
    try:
        meta = app.backend.get_task_meta(task_id, cache=False)
    except NotImplementedError:  # no result backend is configured
        return "", {}
    except Exception as error:  # each backend has its own
        print_line(f"the result backend cannot be queried: {error}", err=True)
        return "", {}
    state, info = str(meta["status"]), meta.get("result")
    return "" if state == PENDING else state, info if isinstance(info, dict) else {}


def _holders_of(resources: Sequence[str], sight: Sight) -> str:
    holders = [holder_text(one) for one in sight.locks if one.held and one.resource in resources]
    return ", ".join(dict.fromkeys(holders))
