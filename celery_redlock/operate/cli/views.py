"""What the commands show of nodes, locks, waiting processes and tasks: as tables, lines and JSON.

The queries to the nodes are in `lock/`; the workers are asked here. Not here: the screen of `top`
(`top.py`), and one task as `show` shows it (`task_view.py`).
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
    SHORT_ID,
    Table,
    as_data,
    command_error,
    format_duration,
    within_deadline,
)
from celery_redlock.operate.cli.stranded import StrandedView
from celery_redlock.operate.lints import ADVICE, ERROR, WARNING, Lint
from celery_redlock.tasks.per_app import redlock_of

LOCK_HEADS = ("RESOURCE", "HOLDER", "ID", "WORKER", "HELD FOR", "RENEWED", "VALID FOR", "VOTES")
LOCKS_UNKNOWN = "Which locks are held is unknown."
CLAIMS_UNKNOWN = "Which claims exist is unknown."
PROCESSES_UNKNOWN = "Which processes wait is unknown."
DONE_BY_SETUP = {  # by the result of `Address.create_schema`
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


def summary_line(nodes: NodeList, lints: Sequence[Lint]) -> str:
    """Return how many problems there are, and what explains them, as `doctor` ends."""
    silent = [node for node in nodes.nodes if not node.votes]
    levels = [one.level for one in lints]
    levels += [ERROR if node.fails else WARNING for node in silent]
    counts = [counted(levels.count(one), one) for one in (ERROR, WARNING) if one in levels]
    if not counts:
        return "No problems found."
    waits = [not node.fails for node in silent]  # a grace period
    codes = [anchors.NODE_FAILS] * (False in waits) + [anchors.NODE_RESTARTED] * (True in waits)
    codes += [anchors.DOCTOR_REPORTS] * any(one.level != ADVICE for one in lints)
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
    return {one for one in resources if one == pattern or fnmatchcase(one, pattern)}


def locks_like(pattern: str, sight: LockList) -> LockList:
    """Return the locks and rates of the resources that a pattern selects."""
    names = {lock.resource for lock in sight.locks} | {rate.resource for rate in sight.rates}
    return sight.of(_like(pattern, names))


def lock_tables(sight: LockList, none: str = "No locks are held.") -> list[Table]:
    """Return a table of the locks, and one of the rates if any is used. none: said of no locks."""
    rows = []
    heads = [*LOCK_HEADS]
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
    none = none if sight.is_known else LOCKS_UNKNOWN
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


def vote_table(sight: LockList, locks: Sequence[LockReport]) -> Table:
    """Return a table of the nodes that have the keys of locks, and of those that failed."""
    rows = [
        (lock_name(lock), node, format_duration(left))
        for lock in locks
        for node, left in lock.votes.items()
    ]
    rows += [("", node, cause) for node, cause in sight.failing.items()]
    heads = ("RESOURCE", "NODE", "KEY EXPIRES IN")
    first = 0 if len(locks) > 1 else 1  # of one lock its name stands above
    return Table(heads[first:], [row[first:] for row in rows], "")


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
    rate = one.rate
    count = max(one.starts_from.values(), default=0)
    on = ", ".join(one.starts_from) or "no node"
    text = f"{count} starts of {rate.resource} ({rate.rate}) are given back on {on}"
    return _with_untold(text, one.failing)


def ended_line(one: EndedClaim) -> str:
    claim = one.claim
    on = ", ".join(one.gone_from) or "no node"
    text = f"the claim of {claim.task}[{claim.task_id}] on {claim.resource} is ended on {on}"
    return _with_untold(text, one.failing)


def _with_untold(text: str, failing: Mapping[str, str]) -> str:
    rest = "; ".join(f"{node} was not changed: {why}" for node, why in failing.items())
    return f"{text}. {rest}" if rest else text


def ask_workers(app: Any, command: str) -> tuple[dict[str, Any], str]:
    """Return what each worker answers to a remote control command, and why none could be asked."""
    replies, cause = within_deadline(
        lambda: app.control.broadcast(command, reply=True, timeout=REPLY_TIMEOUT)
    )
    return {worker: said for reply in replies or () for worker, said in reply.items()}, cause


def may_begin_id(name: str) -> bool:
    """Return whether a task id may begin with a name, which is a resource otherwise."""
    return re.fullmatch(f"[0-9a-f-]{{{SHORT_ID},}}(?:[.]{{3}})?", name) is not None  # as in a table


def whole_id(name: str, known: Collection[str]) -> str:
    """Return the one known task id that begins with a name, which may begin one."""
    found = sorted({one for one in known if one.startswith(name.removesuffix("..."))})
    if name in found or not found:
        return name
    if len(found) > 1:
        raise command_error(f"{name} begins several task ids: {', '.join(found)}")
    return found[0]


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
        # before the workers, whose answers are awaited: else a task that begins meanwhile is shown
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
            one.resource: one.next_start for one in registered.processes if one.waits_for == "rate"
        }
        for row in waiting:
            if row.get("rate"):  # an older worker does not say it
                row["next_start"] = next_starts.get(row["resource"])
        stranded = StrandedView.ask(app, cause)
        return cls(sorted(by_worker), waiting, registered, stranded, cause)

    @property
    def is_known(self) -> bool:
        """Whether nobody waits but who is shown."""
        return self.registered.is_known and bool(self.workers)

    def like(self, pattern: str) -> WaitersView:
        """Return what waits for the resources that a pattern selects."""
        waiting = [row for row in self.waiting if _like(pattern, row["resources"])]
        processes = self.registered.processes
        wrong_type = self.registered.wrong_type
        return self._only(waiting, _like(pattern, [*wrong_type, *(p.resource for p in processes)]))

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
        asked = of_all.asked
        needed = of_all.needed
        registered = WaitingList(processes, wrong, of_all.failing, asked, needed)
        return replace(self, waiting=waiting, registered=registered)

    def tables(self, of: str = "") -> tuple[Table, ...]:
        """Return the processes, the tasks that wait, and what lies with workers that are gone.

        of: the one resource that is shown.
        """
        suffix = of and f" for {of}"
        stranded = self.stranded.tables()
        if not (self.registered.processes or self.waiting) and self.is_known:
            return Table((), (), f"Nothing waits{suffix}."), *stranded
        asked = self.registered.asked
        is_known = self.registered.is_known
        heads: Sequence[str] = ("RESOURCE", "RANK", "PROCESS", "PID", "WAITED", "NODES", "STATE")
        rows: Sequence[Sequence[str]] = [
            (
                one.resource, str(one.rank), one.name, "" if one.pid is None else str(one.pid),
                _waited(one.since) if one.since else "",
                f"{len(one.nodes)} of {asked}", _state_of(one),
            )
            for one in self.registered.processes
        ]  # fmt: skip
        none = f"No process waits{suffix}." if is_known else PROCESSES_UNKNOWN
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
        none = f"No task waits{suffix}." if self.workers else TASKS_UNKNOWN
        spare = ("DEFERRALS", "WORKER", "ID", "TRIES IN")
        return processes, Table(heads, rows, none, spare=spare), *stranded

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
                text = f"is gone: {self.stranded.of_gone(name)}"
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
