"""What the commands show of nodes, locks, waiting processes and tasks: as tables, lines and JSON.

The queries to the nodes are in `lock/`; the workers are asked here. Not here: the screen of `top`
(`top.py`), and one task as `show` shows it (`show.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from celery_redlock import anchors
from celery_redlock.errors import abstention_cause, counted
from celery_redlock.lock.engine.events import EVICTS_LOCKS
from celery_redlock.lock.model.keys import RUN_PREFIX
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
from celery_redlock.lock.server.error_hints import passage_of
from celery_redlock.operate.cli.group import (
    SHORT_ID_LENGTH,
    Table,
    as_data,
    command_error,
    format_duration,
    within_deadline,
)
from celery_redlock.operate.cli.stranded import MessagesLint, StrandedView
from celery_redlock.operate.lints import ADVICE, ERROR, WARNING, Lint
from celery_redlock.tasks.per_app import redlock_of

LOCK_HEADS = ("RESOURCE", "HOLDER", "ID", "WORKER", "HELD FOR", "RENEWED", "VALID FOR", "VOTES")
LOCKS_UNKNOWN = "Which locks are held is unknown."
CLAIMS_UNKNOWN = "Which claims exist is unknown."
PROCESSES_UNKNOWN = "Which processes wait is unknown."
SETUP_RESULTS = {  # by the result of `Address.create_schema`
    "trusted": "now, and grants locks",
    "new": "now. Clients were connected, whose locks it does not know: it grants locks after a "
    "grace period",
    "moved": "of an earlier release no more: it was moved in place, and grants locks",
    "there": "already",
}
TASKS_UNKNOWN = "Which tasks wait is unknown."
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


def eviction_lines(nodes: NodeList) -> list[str]:
    """Return a line for each node that may delete held locks, as a worker logs it."""
    return [
        anchors.see(
            f"{node.node} has maxmemory-policy {node.policy}: {EVICTS_LOCKS}", anchors.NODE_EVICTS
        )
        for node in nodes.nodes
        if node.evicts
    ]


def summary_line(nodes: NodeList, lints: Sequence[Lint]) -> str:
    """Return how many problems there are, and what explains them, as `doctor` ends."""
    not_voting = [node for node in nodes.nodes if not node.votes]
    levels = [finding.level for finding in lints]
    levels += [ERROR if node.fails else WARNING for node in not_voting]
    counts = [counted(levels.count(level), level) for level in (ERROR, WARNING) if level in levels]
    if not counts:
        return "No problems found."
    waits = [not node.fails for node in not_voting]  # a grace period
    codes = list(dict.fromkeys(passage_of(node.error) for node in not_voting if node.fails))
    codes += [anchors.NODE_RESTARTED] * (True in waits)
    reported = [finding for finding in lints if finding.level != ADVICE]
    are_of_messages = [isinstance(finding, MessagesLint) for finding in reported]
    codes += [anchors.MESSAGES_STAY] * (True in are_of_messages)
    codes += [anchors.DOCTOR_REPORTS] * (False in are_of_messages)
    return anchors.see(f"{' and '.join(counts)} found", " and ".join(codes))


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
    """Return the resource of a lock, with its permit, as `break --permit` takes it."""
    has_permits = lock.permit or lock.limit > 1
    return f"{lock.resource} (permit {lock.permit})" if has_permits else lock.resource


def _like(pattern: str, resources: Iterable[str]) -> set[str]:
    """Return the resources that a pattern of the shell, as "stock:*", selects."""
    return {
        resource for resource in resources if resource == pattern or fnmatchcase(resource, pattern)
    }


def locks_like(pattern: str, lock_list: LockList) -> LockList:
    """Return the locks and rates of the resources that a pattern selects."""
    names = {lock.resource for lock in lock_list.locks} | {
        rate.resource for rate in lock_list.rates
    }
    return lock_list.of(_like(pattern, names))


def lock_tables(lock_list: LockList, empty_text: str = "No locks are held.") -> list[Table]:
    """Return a table of the locks, and one of the rates if any is used. empty_text: of no locks."""
    rows = []
    heads = [*LOCK_HEADS]
    is_semaphore = any(lock.limit > 1 for lock in lock_list.locks)
    not_held = "not held: no quorum" if lock_list.is_known else "unknown: no quorum answers"
    for lock in lock_list.locks:
        held_for = "" if lock.held_for is None else format_duration(lock.held_for)
        valid_for = format_duration(lock.valid_for) if lock.held else not_held
        renewed_ago = lock.since_renewal
        renewed = "" if renewed_ago is None else f"{format_duration(renewed_ago)} ago"
        votes = f"{len(lock.votes)}, {lock.needed} needed"
        holder = lock.holder
        names = (holder.task or holder.label, holder.task_id, holder.worker)
        row = [lock_name(lock), *names, held_for, renewed, valid_for, votes]
        row += [f"{lock.used} of {lock.limit}" if lock.limit > 1 else ""] * is_semaphore
        rows.append(row)
    heads += ["PERMITS"] * is_semaphore
    empty_text = empty_text if lock_list.is_known else LOCKS_UNKNOWN
    spare = ("VOTES", "RENEWED", "WORKER", "ID", "VALID FOR")
    locks = Table(heads, rows, empty_text, spare=spare)
    return [locks, *([rate_table(lock_list.rates)] if lock_list.rates else [])]


def used_tables(lock_list: LockList) -> list[Table]:
    """Return the tables of `lock_tables` that have rows."""
    return [table for table in lock_tables(lock_list) if table.rows]


def lock_notes(lock_list: LockList) -> list[str]:
    """Return what explains rows of the locks that no task has asked for by name."""
    if any(lock.resource.startswith(RUN_PREFIX) for lock in lock_list.locks):
        name = f"{RUN_PREFIX}<task id>"
        return [f"{name}: keeps a second delivery of the message from running beside the first"]
    return []


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


def vote_table(lock_list: LockList, locks: Sequence[LockReport]) -> Table:
    """Return a table of the nodes that have the keys of locks, and of those that failed."""
    rows = [
        (lock_name(lock), node, format_duration(expires_in))
        for lock in locks
        for node, expires_in in lock.votes.items()
    ]
    rows += [("", node, cause) for node, cause in lock_list.failing.items()]
    heads = ("RESOURCE", "NODE", "KEY EXPIRES IN")
    first_column = 0 if len(locks) > 1 else 1  # of one lock its name stands above
    return Table(heads[first_column:], [row[first_column:] for row in rows], "")


def claim_table(claim_list: ClaimList) -> Table:
    rows = []
    for claim in claim_list.claims:
        expires_in = format_duration(claim.expires_in) if claim.counts else "no quorum has it"
        votes = f"{len(claim.votes)}, {claim.needed} needed"
        state = "sent" if claim.is_sent else "not confirmed"
        rows.append((claim.resource, claim.task, claim.task_id, state, expires_in, votes))
    heads = ("RESOURCE", "TASK", "ID", "STATE", "EXPIRES IN", "VOTES")
    return Table(heads, rows, "There are no claims." if claim_list.is_known else CLAIMS_UNKNOWN)


def broken_line(broken: BrokenLock) -> str:
    name = lock_name(broken.lock)
    if not broken.gone_from and not broken.failing:
        return f"{name} ended before: nothing was broken"
    text = f"{name} is broken on {', '.join(broken.gone_from)}; its holder was {broken.lock.holder}"
    return _with_untold(text, broken.failing)


def freed_line(freed: FreedRate) -> str:
    rate = freed.rate
    count = max(freed.starts_from.values(), default=0)
    on = ", ".join(freed.starts_from) or "no node"
    text = f"{count} starts of {rate.resource} ({rate.rate}) are given back on {on}"
    return _with_untold(text, freed.failing)


def ended_line(ended: EndedClaim) -> str:
    claim = ended.claim
    on = ", ".join(ended.gone_from) or "no node"
    text = f"the claim of {claim.task}[{claim.task_id}] on {claim.resource} is ended on {on}"
    return _with_untold(text, ended.failing)


def _with_untold(text: str, failing: Mapping[str, str]) -> str:
    failures = "; ".join(f"{node} was not changed: {why}" for node, why in failing.items())
    return f"{text}. {failures}" if failures else text


def ask_workers(app: Any, command: str) -> tuple[dict[str, Any], str]:
    """Return each worker's answer to a remote control command, and why none could be asked.

    The cause is "" if the broker took the command.
    """
    replies, cause = within_deadline(
        lambda: app.control.broadcast(command, reply=True, timeout=REPLY_TIMEOUT)
    )
    return {worker: answer for reply in replies or () for worker, answer in reply.items()}, cause


def may_begin_id(name: str) -> bool:
    """Return whether a task id may begin with a name, which is a resource otherwise."""
    return (
        re.fullmatch(f"[0-9a-f-]{{{SHORT_ID_LENGTH},}}(?:[.]{{3}})?", name) is not None
    )  # as in a table


def whole_id(name: str, task_ids: Collection[str]) -> str:
    """Return the one known task id that begins with a name, which may begin one."""
    matches = sorted(
        {task_id for task_id in task_ids if task_id.startswith(name.removesuffix("..."))}
    )
    if name in matches or not matches:
        return name
    if len(matches) > 1:
        raise command_error(f"{name} begins several task ids: {', '.join(matches)}")
    return matches[0]


@dataclass(frozen=True)
class WaitersView:
    """The messages that wait for a lock, and the processes. workers: the workers that answered.

    waiting: rows of `operate.control.redlock_waiting`, each with its worker. registered: the
    processes, as the nodes know them. stranded: the messages of workers that are gone. cause: why
    the workers could not be asked.
    """

    workers: Sequence[str]
    waiting: Sequence[dict[str, Any]]
    registered: WaitingList = field(repr=False)
    stranded: StrandedView = field(repr=False)
    cause: str = field(default="", repr=False)

    @classmethod
    def ask(cls, app: Any) -> WaitersView:
        """Ask the nodes and the workers; no worker answers if the broker is down."""
        # before the workers, whose answers take a while: a task that begins meanwhile is shown
        registered = redlock_of(app).waiters()
        by_worker, cause = ask_workers(app, "redlock_waiting")
        waiting = [
            {**row, "worker": worker, "next_start": None}
            for worker, rows in by_worker.items()
            if isinstance(rows, list)  # a worker without this package answers with an error
            for row in rows
        ]
        waiting.sort(key=lambda row: str(row["since"]))
        next_starts = {
            process.resource: process.next_start
            for process in registered.processes
            if process.waits_for == "rate"
        }
        for row in waiting:
            if row.get("rate"):  # an older worker does not say it
                row["next_start"] = next_starts.get(row["resource"])
        stranded = StrandedView.ask(app, cause)
        return cls(sorted(by_worker), waiting, registered, stranded, cause)

    @property
    def is_known(self) -> bool:
        """Whether all waiting processes and messages are known."""
        return self.registered.is_known and bool(self.workers)

    def like(self, pattern: str) -> WaitersView:
        """Return what waits for the resources that a pattern selects."""
        waiting = [row for row in self.waiting if _like(pattern, row["resources"])]
        processes = self.registered.processes
        wrong_type = self.registered.wrong_type
        return self._only(
            waiting, _like(pattern, [*wrong_type, *(process.resource for process in processes)])
        )

    def for_resource(self, resource: str) -> WaitersView:
        return self._only([row for row in self.waiting if resource in row["resources"]], [resource])

    def for_task(self, task_id: str) -> WaitersView:
        """Return the waiting messages of one task, and the processes that wait for the same."""
        waiting = [row for row in self.waiting if row["task_id"] == task_id]
        return self._only(waiting, {resource for row in waiting for resource in row["resources"]})

    def _only(self, waiting: Sequence[dict[str, Any]], resources: Collection[str]) -> WaitersView:
        registered = self.registered
        processes = tuple(
            process for process in registered.processes if process.resource in resources
        )
        wrong = {name: nodes for name, nodes in registered.wrong_type.items() if name in resources}
        asked_nodes = registered.asked
        quorum = registered.needed
        selected = WaitingList(processes, wrong, registered.failing, asked_nodes, quorum)
        return replace(self, waiting=waiting, registered=selected)

    def tables(self, resource: str = "") -> tuple[Table, ...]:
        """Return the tables of processes, of waiting tasks, and of stranded messages.

        resource: the one resource that is shown; "" for all.
        """
        suffix = resource and f" for {resource}"
        stranded = self.stranded.tables()
        if not (self.registered.processes or self.waiting) and self.is_known:
            return Table((), (), f"Nothing waits{suffix}."), *stranded
        node_count = self.registered.asked
        is_known = self.registered.is_known
        heads: Sequence[str] = ("RESOURCE", "RANK", "PROCESS", "PID", "WAITED", "NODES", "STATE")
        rows: Sequence[Sequence[str]] = [
            (
                process.resource,
                str(process.rank),
                process.name,
                "" if process.pid is None else str(process.pid),
                _waited(process.since) if process.since else "",
                f"{len(process.nodes)} of {node_count}",
                _state_of(process),
            )
            for process in self.registered.processes
        ]
        empty_text = f"No process waits{suffix}." if is_known else PROCESSES_UNKNOWN
        processes = Table(heads, rows, empty_text, spare=("PID", "NODES", "RANK"))
        heads = ("WAITS FOR", "TASK", "ID", "WORKER", "WAITED", "DEFERRALS", "TRIES IN", "WHY")
        rows = [
            (
                ", ".join(row["resources"]), row["task"], row["task_id"], row["worker"],
                _waited(row["since"]), str(row["deferrals"]),
                _next_try(row), _reason_of(row),
            )
            for row in self.waiting
        ]  # fmt: skip
        empty_text = f"No task waits{suffix}." if self.workers else TASKS_UNKNOWN
        spare = ("DEFERRALS", "WORKER", "ID", "TRIES IN")
        return processes, Table(heads, rows, empty_text, spare=spare), *stranded

    def notes(self) -> list[str]:
        lines = []
        if self.cause:
            lines.append(f"the workers cannot be asked who waits: {self.cause}")
        elif not self.workers:
            lines.append("no worker answered: tasks that wait in the broker are not listed")
        listens = {process.name: process.listens for process in self.registered.processes}
        for name, is_there in listens.items():
            if "@" not in name or name in self.workers:  # a worker's name; no host has an "@"
                continue
            text = "did not answer: the messages that wait in it are not shown"
            if not is_there:
                text = f"is gone: {self.stranded.redelivery_text(name)}"
            lines.append(f"{name} {text}")
        for resource, nodes in self.registered.wrong_type.items():
            text = f"no waiter for {resource} can register on {', '.join(nodes)}"
            lines.append(f"{text}: its key there is of another type")
        return lines if self.cause else [*lines, *self.stranded.notes()]

    def data(self) -> dict[str, Any]:
        stranded = self.stranded.data()
        return {**as_data(self), **as_data(self.registered), "stranded": stranded}


def _state_of(process: WaitingProcess) -> str:
    if not process.listens:
        return "gone"
    if process.waits_for == "lock":
        return "waits"
    next_start = process.next_start and f", free in {_seconds_until(process.next_start)}"
    return f"waits for a start{next_start or ''}"


def _next_try(row: Mapping[str, Any]) -> str:
    """Return when a message tries next; of a known next start of its rate the reason says it."""
    if row["next_start"] or not row["tries_in"]:
        return ""
    return format_duration(row["tries_in"])


def _reason_of(row: Mapping[str, Any]) -> str:
    next_start = row["next_start"] and f", next start in {_seconds_until(row['next_start'])}"
    return f"{row['reason']}{next_start or ''}"


def _seconds_until(moment: str) -> str:
    """Return how long it is until a moment, in ISO 8601; a past one is now."""
    remaining = datetime.fromisoformat(moment).timestamp() - SystemClock().wall_us() / 1e6
    return format_duration(max(0.0, remaining))


def _waited(moment: str | None) -> str:
    """Return how long something waits. moment: in ISO 8601; None and a future one are now."""
    if moment is None:
        return format_duration(0.0)
    seconds = SystemClock().wall_us() / 1e6 - datetime.fromisoformat(moment).timestamp()
    return format_duration(max(0.0, seconds))
