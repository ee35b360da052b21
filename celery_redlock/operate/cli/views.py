"""What the commands show of nodes, locks, waiting processes and tasks: as tables, lines and JSON.

The queries to the nodes are in `lock/`; workers and the result backend are asked here. Not here:
the screen of `top` (`top.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from celery.backends.base import DisabledBackend
from celery.states import PENDING

from celery_redlock.errors import abstention_cause
from celery_redlock.lock.node_status import in_iso
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.reports import (
    BrokenLock,
    ClaimList,
    EndedClaim,
    FreedRate,
    LockList,
    LockReport,
    NodeList,
    NodeStatus,
    RateReport,
    WaitingList,
    WaitingProcess,
)
from celery_redlock.operate.cli.group import (
    Table,
    as_data,
    format_duration,
    print_all,
    within_deadline,
)
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.reporting import DEFERRED
from celery_redlock.tasks.settings.levels import visibility_timeout

LOCK_HEADS = ("RESOURCE", "HOLDER", "ID", "WORKER", "HELD FOR", "RENEWED", "VALID FOR", "VOTES")
LOCKS_UNKNOWN = "Which locks are held is unknown."
CLAIMS_UNKNOWN = "Which claims exist is unknown."
PROCESSES_UNKNOWN = "Which processes wait is unknown."
TASKS_UNKNOWN = "Which tasks wait is unknown."
NO_BACKEND = "Without a result backend the state of a task that has ended is not known."
PENDING_TASK = "If this is a task, it is queued, in a worker that died, or unknown."
REPLY_TIMEOUT = 1.0  # seconds in which a worker must answer


def vote_of(node: NodeStatus, nodes: NodeList) -> str:
    """Return whether a node votes, or why not."""
    if node.error:
        return node.error
    if node.role != "master":
        return f"no vote: it is a {node.role or 'server of an unknown role'}"
    if node.silent_for > 0:
        keeps_locks = node.server.startswith("postgresql")
        return abstention_cause(node.silent_for, keeps_locks=keeps_locks)
    if node.votes:
        return "votes"
    seconds = f"{nodes.grace_period:.0f} s"
    return f"new: will grant no lock for {seconds} from its first use; see `trust`"


def quorum_line(nodes: NodeList) -> str:
    return f"{nodes.voting} of {len(nodes.nodes)} nodes vote, {nodes.needed} needed"


def node_table(nodes: NodeList) -> Table:
    rows = [
        (
            node.node, vote_of(node, nodes), node.server, node.role, format_duration(node.uptime),
            f"{node.latency * 1000:.1f} ms", f"{node.clock:+.3f} s", node.policy,
        )
        if not node.error else (node.node, node.error)
        for node in nodes.nodes
    ]  # fmt: skip
    heads = ("NODE", "VOTE", "SERVER", "ROLE", "UP", "LATENCY", "CLOCK", "EVICTION")
    spare = ("EVICTION", "ROLE", "CLOCK", "UP", "SERVER")
    return Table(heads, rows, "No nodes are named.", spare=spare)


def lock_name(lock: LockReport) -> str:
    """Return the resource of a lock, with the permit if it is not the first one."""
    return f"{lock.resource} (permit {lock.permit})" if lock.permit else lock.resource


def lock_tables(sight: LockList) -> list[Table]:
    """Return a table of the locks, and one of the rates if any is used."""
    rows, heads = [], [*LOCK_HEADS]
    is_semaphore = any(lock.limit > 1 for lock in sight.locks)
    not_held = "not held: no quorum" if sight.is_known else "unknown: no quorum answers"
    for lock in sight.locks:
        held_for = "" if lock.held_for is None else format_duration(lock.held_for)
        valid_for = format_duration(lock.valid_for) if lock.held else not_held
        ago = lock.since_renewal
        renewed = "" if ago is None else f"{format_duration(ago)} ago"
        votes = f"{len(lock.votes)}, {lock.needed} needed"
        holder = lock.holder
        names = (holder.task or holder.label, holder.task_id, holder.worker)
        row = [lock_name(lock), *names, held_for, renewed, valid_for, votes]
        row += [f"{lock.used} of {lock.limit}" if lock.limit > 1 else ""] * is_semaphore
        rows.append(row)
    heads += ["PERMITS"] * is_semaphore
    none = "No locks are held." if sight.is_known else LOCKS_UNKNOWN
    spare = ("VOTES", "RENEWED", "WORKER", "ID", "VALID FOR")
    locks = Table(heads, rows, none, spare=spare)
    return [locks, *([rate_table(sight.rates)] if sight.rates else [])]


def rate_table(rates: Sequence[RateReport]) -> Table:
    rows = [
        (rate.resource, rate.rate, f"{rate.used} of {rate.starts}", _next_start(rate))
        for rate in rates
    ]
    return Table(("RESOURCE", "RATE", "STARTS USED", "NEXT START"), rows, "")


def _next_start(rate: RateReport) -> str:
    if math.isinf(rate.next_start_in):
        return "not known"
    return f"in {format_duration(rate.next_start_in)}" if rate.next_start_in else "now"


def vote_table(lock: LockReport, sight: LockList) -> Table:
    """Return a table of the nodes that have the key of a lock, and of those that failed."""
    rows = [(node, format_duration(left)) for node, left in lock.votes.items()]
    return Table(("NODE", "KEY EXPIRES IN"), [*rows, *sight.failing.items()], "")


def claim_table(sight: ClaimList) -> Table:
    rows = []
    for claim in sight.claims:
        expires_in = format_duration(claim.expires_in) if claim.counts else "no quorum has it"
        votes = f"{len(claim.votes)}, {claim.needed} needed"
        state = "sent" if claim.is_sent else "not confirmed"
        rows.append((claim.resource, claim.task, claim.task_id, state, expires_in, votes))
    heads = ("RESOURCE", "TASK", "ID", "STATE", "EXPIRES IN", "VOTES")
    return Table(heads, rows, "There are no claims." if sight.is_known else CLAIMS_UNKNOWN)


def broken_line(one: BrokenLock) -> str:
    name = lock_name(one.lock)
    if not one.gone_from and not one.failing:
        return f"{name} ended before: nothing was broken"
    text = f"{name} is broken on {', '.join(one.gone_from)}; its holder was {one.lock.holder}"
    return _with_untold(text, one.failing)


def freed_line(one: FreedRate) -> str:
    rate, count = one.rate, max(one.starts_from.values(), default=0)
    on = ", ".join(one.starts_from) or "no node"
    text = f"{count} starts of {rate.resource} ({rate.rate}) are given back on {on}"
    return _with_untold(text, one.failing)


def ended_line(one: EndedClaim) -> str:
    claim, on = one.claim, ", ".join(one.gone_from) or "no node"
    text = f"the claim of {claim.task}[{claim.task_id}] on {claim.resource} is ended on {on}"
    return _with_untold(text, one.failing)


def _with_untold(text: str, failing: Mapping[str, str]) -> str:
    rest = "; ".join(f"{node} was not changed: {why}" for node, why in failing.items())
    return f"{text}. {rest}" if rest else text


def failing_lines(failing: Mapping[str, str]) -> list[str]:
    """Return a line for each node that could not be queried."""
    return [f"{node} cannot be queried: {cause}" for node, cause in failing.items()]


def unknown_lines(sight: LockList | WaitingList | ClaimList) -> list[str]:
    """Return a line if too few nodes answered for the list above to be complete."""
    if sight.is_known:
        return []
    answered = sight.asked - len(sight.failing)
    text = f"{answered} of {sight.asked} nodes answered, {sight.needed} needed"
    return [f"{text}: locks and waiting tasks may be missing here"]


def ask_workers(app: Any, command: str) -> tuple[dict[str, Any], str]:
    """Return what each worker answers to a remote control command, and why none could be asked."""
    replies, cause = within_deadline(
        lambda: app.control.broadcast(command, reply=True, timeout=REPLY_TIMEOUT)
    )
    return {worker: said for reply in replies or () for worker, said in reply.items()}, cause


@dataclass(frozen=True)
class WaitersView:
    """The messages that wait for a lock, and the processes. workers: the workers that answered.

    waiting: rows of `operate.control.redlock_waiting`, each with its worker. registered: the
    processes, as the nodes know them. visibility: of `visibility_timeout`. cause: why the workers
    could not be asked.
    """

    workers: Sequence[str]
    waiting: Sequence[dict[str, Any]]
    registered: WaitingList = field(repr=False)
    visibility: float | None = field(repr=False)
    cause: str = field(default="", repr=False)

    @classmethod
    def ask(cls, app: Any) -> WaitersView:
        """Ask the workers and the nodes; no worker answers if the broker is down."""
        by_worker, cause = ask_workers(app, "redlock_waiting")
        waiting = [
            {**row, "worker": worker, "next_start": None}
            for worker, rows in by_worker.items()
            if isinstance(rows, list)  # a worker without this package answers with an error
            for row in rows
        ]
        waiting.sort(key=lambda row: str(row["since"]))
        registered = redlock_of(app).waiters()
        next_starts = {
            one.resource: one.next_start for one in registered.processes if one.waits_for == "rate"
        }
        for row in waiting:
            if row.get("rate"):  # an older worker does not say it
                row["next_start"] = next_starts.get(row["resource"])
        return cls(sorted(by_worker), waiting, registered, visibility_timeout(app.conf), cause)

    def for_resource(self, resource: str) -> WaitersView:
        return self._only([row for row in self.waiting if resource in row["resources"]], [resource])

    def for_task(self, task_id: str) -> WaitersView:
        """Return the waiting messages of one task, and the processes that wait for the same."""
        waiting = [row for row in self.waiting if row["task_id"] == task_id]
        return self._only(waiting, {resource for row in waiting for resource in row["resources"]})

    def _only(self, waiting: Sequence[dict[str, Any]], resources: Collection[str]) -> WaitersView:
        of_all = self.registered
        processes = tuple(one for one in of_all.processes if one.resource in resources)
        wrong = {name: nodes for name, nodes in of_all.wrong_type.items() if name in resources}
        asked, needed = of_all.asked, of_all.needed
        registered = WaitingList(processes, wrong, of_all.failing, asked, needed)
        return replace(self, waiting=waiting, registered=registered)

    def tables(self, of: str = "") -> tuple[Table, Table]:
        """Return the processes, and the tasks that wait. of: the one resource that is shown."""
        asked, is_known = self.registered.asked, self.registered.is_known
        heads: Sequence[str] = ("RESOURCE", "RANK", "PROCESS", "PID", "WAITED", "NODES", "STATE")
        rows: Sequence[Sequence[str]] = [
            (
                one.resource, str(one.rank), one.name, "" if one.pid is None else str(one.pid),
                _waited(one.since) if one.since else "",
                f"{len(one.nodes)} of {asked}", _state_of(one),
            )
            for one in self.registered.processes
        ]  # fmt: skip
        lock, suffix = of or "a lock", of and f" for {of}"
        none = f"No processes are registered as waiters{suffix}."
        none = none if is_known else PROCESSES_UNKNOWN
        processes = Table(heads, rows, none, spare=("PID", "NODES", "RANK"))
        heads = ("WAITS FOR", "TASK", "ID", "WORKER", "WAITED", "DEFERRALS", "TRIES IN", "WHY")
        rows = [
            (
                ", ".join(row["resources"]), row["task"], row["task_id"], row["worker"],
                _waited(row["since"]), str(row["deferrals"]),
                format_duration(row["tries_in"]) if row["tries_in"] else "", _reason_of(row),
            )
            for row in self.waiting
        ]  # fmt: skip
        none = f"No tasks wait for {lock}." if self.workers else TASKS_UNKNOWN
        spare = ("DEFERRALS", "WORKER", "ID", "TRIES IN")
        return processes, Table(heads, rows, none, spare=spare)

    def notes(self) -> list[str]:
        lines = []
        if self.cause:
            lines.append(f"the workers cannot be asked who waits: {self.cause}")
        elif not self.workers:
            lines.append("no worker answered: tasks that wait in the broker are not listed")
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
        return {**as_data(self), **as_data(self.registered)}


def _state_of(process: WaitingProcess) -> str:
    if not process.listens:
        return "gone"
    if process.waits_for == "lock":
        return "waits"
    soon = process.next_start and f", free in {_seconds_until(process.next_start)}"
    return f"waits for a start{soon or ''}"


def _reason_of(row: Mapping[str, Any]) -> str:
    soon = row["next_start"] and f", next start in {_seconds_until(row['next_start'])}"
    return f"{row['reason']}{soon or ''}"


def _seconds_until(moment: str) -> str:
    """Return how long it is until a moment, in ISO 8601; a past one is now."""
    left = datetime.fromisoformat(moment).timestamp() - SystemClock().wall_us() / 1e6
    return format_duration(max(0.0, left))


def _waited(since: str | None) -> str:
    """Return how long something waits. since: in ISO 8601; None, and a future moment, is now."""
    if since is None:
        return format_duration(0.0)
    past = SystemClock().wall_us() / 1e6 - datetime.fromisoformat(since).timestamp()
    return format_duration(max(0.0, past))


@dataclass(frozen=True)
class TaskView:
    """One task. state: from the result backend if it has one.

    resources: that it holds or waits for. holder: of what it waits for. next_try: ISO 8601.
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
            is_known = state and state != DEFERRED
            return cls(task_id, name, state if is_known else "STARTED", resources, holds=True)
        for row in waiters.for_task(task_id).waiting:  # its worker knows more than the backend
            resources = tuple(row["resources"])
            holder = _holders_of(resources, sight)
            next_try = in_iso(SystemClock().wall_us() / 1e6 + row["tries_in"])
            fields = {"holder": holder, "reason": row["reason"], "next_try": next_try}
            return cls(task_id, row["task"], DEFERRED, resources, **fields)
        if state == DEFERRED:  # as of its last deferral
            resource = str(info.get("resource", ""))
            after = waiters.visibility
            when = "" if after is None else f", within its visibility_timeout of {after:g} s"
            reason = f"no worker that answers has its message: the broker delivers it again{when}"
            holder = _holders_of([resource], sight)
            next_try = str(info.get("next_try") or "")
            if next_try < str(in_iso(SystemClock().wall_us() / 1e6)):  # of a worker that has died
                next_try = ""
            fields = {"holder": holder, "reason": reason, "next_try": next_try or None}
            return cls(task_id, "", state, (resource,), **fields)
        return cls(task_id, "", state) if state else None

    def table(self) -> Table:
        """Return a table of one row, a fact a line."""
        name = self.task and f"{self.task}[{self.task_id}]"
        facts = {
            "TASK": name or self.task_id,
            "STATE": self.state,
            "HOLDS" if self.holds else "WAITS FOR": ", ".join(self.resources),
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
        print_all(f"the result backend cannot be queried: {cause}", err=True)
    if meta is None:
        return "", {}
    state, info = str(meta["status"]), meta.get("result")
    return "" if state == PENDING else state, info if isinstance(info, dict) else {}


def _holders_of(resources: Sequence[str], sight: LockList) -> str:
    found = [one for one in sight.locks if one.held and one.resource in resources]
    return ", ".join(dict.fromkeys(map(_holder_of, found)))


def _holder_of(lock: LockReport) -> str:
    """Return the holder; of one that may have died, also when the lock expires."""
    if not lock.is_late:
        return str(lock.holder)
    since, left = format_duration(lock.since_renewal or 0.0), format_duration(lock.valid_for)
    return f"{lock.holder}, not renewed for {since}: expires in {left}"
