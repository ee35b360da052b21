"""What the commands show of nodes, locks, waiting processes and tasks: as tables, lines and JSON.

The queries to the nodes are in `lock/`; workers and the result backend are asked here. A `Look` is
all of it at one moment, for `top`, whose screen is drawn anew until `q` is pressed.
"""

from __future__ import annotations

import itertools
import os
import queue
import select
import shutil
import sys
import termios
import threading
import tty
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import click
from celery.backends.base import DisabledBackend
from celery.states import PENDING

from celery_redlock.errors import abstention_cause
from celery_redlock.label import Holder, escaped
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.inspection import (
    LockList,
    LockReport,
    WaitingList,
    list_locks,
    list_waiting,
)
from celery_redlock.lock.node_status import NodeStatus, in_iso, read_nodes
from celery_redlock.lock.platform.clock import SystemClock
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

LOCKS_UNKNOWN = "Which locks are held cannot be known."
PROCESSES_UNKNOWN = "Which processes wait cannot be known."
TASKS_UNKNOWN = "Which tasks wait cannot be known."
REPLY_TIMEOUT = 1.0  # seconds in which a worker must answer
REDRAW = 0.5  # seconds between two screens, for the clock and the age of the figures
_TOP_LEFT, _TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True)
class NodesView:
    """The status of all nodes. Its fields are those of the documented JSON.

    guard: the setting. needed: size of a quorum. grace_period: seconds, of a new node.
    """

    guard: str
    needed: int
    voting: int
    nodes: Sequence[NodeStatus]
    grace_period: float = field(repr=False)

    @classmethod
    def of(cls, redlock: Redlock) -> NodesView:
        session, nodes = redlock.session, read_nodes(redlock)
        guard, voting = session.options.guard, sum(node.votes for node in nodes)
        return cls(guard.mode, session.nodes.quorum, voting, nodes, guard.grace_period)

    @property
    def has_quorum(self) -> bool:
        return self.voting >= self.needed

    def vote_of(self, node: NodeStatus) -> str:
        if node.error:
            return node.error
        if node.role != "master":
            return f"no vote: it is a {node.role or 'server of an unknown role'}"
        if node.silent_for > 0:
            return abstention_cause(node.silent_for)
        if node.votes:
            return "votes"
        seconds = f"{self.grace_period:.0f} s"
        return f"new: will grant no lock for {seconds} from its first use; see `trust`"

    def quorum_line(self) -> str:
        return f"{self.voting} of {len(self.nodes)} nodes vote, {self.needed} needed"

    def table(self) -> Table:
        rows = [
            (
                node.node, self.vote_of(node), node.server, node.role, format_duration(node.uptime),
                f"{node.latency * 1000:.1f} ms", f"{node.clock:+.3f} s", node.policy,
            )
            if not node.error else (node.node, node.error)
            for node in self.nodes
        ]  # fmt: skip
        heads = ("NODE", "VOTE", "SERVER", "ROLE", "UP", "LATENCY", "CLOCK", "EVICTION")
        return Table(heads, rows, "No nodes are named.")


def lock_name(lock: LockReport) -> str:
    """Return the resource of a lock, with the permit if it is not the first one."""
    return f"{lock.resource} (permit {lock.permit})" if lock.permit else lock.resource


def lock_table(sight: LockList) -> Table:
    rows = []
    for lock in sight.locks:
        held_for = "" if lock.held_for is None else format_duration(lock.held_for)
        valid_for = format_duration(lock.valid_for) if lock.held else "not held: no quorum"
        ago = lock.since_renewal
        renewed = "" if ago is None else f"{format_duration(ago)} ago"
        votes = f"{len(lock.votes)}, {lock.needed} needed"
        holder = lock.holder
        names = (holder.task or holder.label, holder.task_id, holder.worker)
        rows.append((lock_name(lock), *names, held_for, renewed, valid_for, votes))
    heads = ("RESOURCE", "HOLDER", "ID", "WORKER", "HELD FOR", "RENEWED", "VALID FOR", "VOTES")
    return Table(heads, rows, "No locks are held." if sight.is_known else LOCKS_UNKNOWN)


def vote_table(lock: LockReport, sight: LockList) -> Table:
    """Return a table of the nodes that have the key of a lock, and of those that failed."""
    rows = [(node, format_duration(left)) for node, left in lock.votes.items()]
    return Table(("NODE", "KEY EXPIRES IN"), [*rows, *sight.failing.items()], "")


def failing_lines(failing: Mapping[str, str]) -> list[str]:
    """Return a line for each node that could not be queried."""
    return [f"{node} cannot be queried: {cause}" for node, cause in failing.items()]


def unknown_lines(sight: LockList | WaitingList) -> list[str]:
    """Return a line if too few nodes answered for the list above to be complete."""
    if sight.is_known:
        return []
    answered = sight.asked - len(sight.failing)
    text = f"{answered} of {sight.asked} nodes answered, {sight.needed} needed"
    return [f"{text}: what is not listed here may be held, or wait, all the same"]


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
        registered = list_waiting(redlock_of(app))
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
        registered = replace(of_all, processes=processes, wrong_type=wrong)
        return replace(self, waiting=waiting, registered=registered)

    def tables(self) -> tuple[Table, Table]:
        asked, is_known = self.registered.asked, self.registered.is_known
        heads: Sequence[str] = ("RESOURCE", "RANK", "PROCESS", "PID", "WAITED", "NODES", "STATE")
        rows: Sequence[Sequence[str]] = [
            (
                one.resource, str(one.rank), one.name, "" if one.pid is None else str(one.pid),
                _waited(one.since) if one.since else "",
                f"{len(one.nodes)} of {asked}", "waits" if one.listens else "gone",
            )
            for one in self.registered.processes
        ]  # fmt: skip
        none = "No processes are registered as waiters." if is_known else PROCESSES_UNKNOWN
        processes = Table(heads, rows, none)
        heads = ("WAITS FOR", "TASK", "ID", "WORKER", "WAITED", "DEFERRALS", "TRIES IN", "WHY")
        rows = [
            (
                ", ".join(row["resources"]), row["task"], row["task_id"], row["worker"],
                _waited(row["since"]), str(row["deferrals"]),
                format_duration(row["tries_in"]), row["reason"],
            )
            for row in self.waiting
        ]  # fmt: skip
        none = "No tasks wait for a lock." if self.workers else TASKS_UNKNOWN
        return processes, Table(heads, rows, none)

    def notes(self) -> list[str]:
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
        return {**as_data(self), **as_data(self.registered)}


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
            holder = _holders_of([resource], sight) or str(Holder.of(str(info.get("holder", ""))))
            next_try = info.get("next_try")
            return cls(task_id, "", state, (resource,), holder=holder, next_try=next_try)
        return cls(task_id, "", state) if state else None

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
        print_all(f"the result backend cannot be queried: {cause}", err=True)
    if meta is None:
        return "", {}
    state, info = str(meta["status"]), meta.get("result")
    return "" if state == PENDING else state, info if isinstance(info, dict) else {}


def _holders_of(resources: Sequence[str], sight: LockList) -> str:
    holders = [str(one.holder) for one in sight.locks if one.held and one.resource in resources]
    return ", ".join(dict.fromkeys(holders))


@dataclass(frozen=True)
class Look:
    """The state of nodes, locks and waiting tasks at one moment. at: monotonic seconds."""

    nodes: NodesView
    sight: LockList
    waiting: WaitersView
    at: float

    def tables(self) -> tuple[Table, ...]:
        return self.nodes.table(), lock_table(self.sight), *self.waiting.tables()

    def notes(self) -> list[str]:
        return [*unknown_lines(self.sight), *self.waiting.notes()]

    def data(self) -> dict[str, Any]:
        locks = as_data(self.sight)["locks"]
        return {**as_data(self.nodes), "locks": locks, "waiters": self.waiting.data()}

    def screen(self, width: int, height: int) -> list[str]:
        """Return what fits a terminal: each table gets its share of the lines, long cells are cut.

        A table that needs less than its share leaves the rest to those below it.
        """
        lines: list[str] = []
        notes, tables = self.notes()[:3], self.tables()
        for number, table in enumerate(tables):
            share = (height - len(notes) - len(lines)) // (len(tables) - number)
            lines += table.lines(width, max(3, share))
        return [*lines, *(escaped(note)[:width] for note in notes)][:height]


def look_repeatedly(app: Any, interval: float, count: int | None) -> Iterator[Look]:
    """Yield one look after the other. interval: seconds between two. count: None for no end."""
    made, clock = redlock_of(app), SystemClock()
    for number in itertools.count(1):
        sight = list_locks(made)
        yield Look(NodesView.of(made), sight, WaitersView.ask(app), clock.now())
        if number == count:
            return
        clock.sleep(interval)


def show_live(looks: Iterator[Look]) -> None:
    """Draw the newest look until there are no more, or `q` is pressed."""
    # the looks are taken in a thread: a silent node or broker delays neither clock nor key
    taken: queue.SimpleQueue[Look | Exception | None] = queue.SimpleQueue()

    def take() -> None:
        try:
            for look in looks:
                taken.put(look)
            taken.put(None)
        except Exception as error:  # raised in the main thread
            taken.put(error)

    threading.Thread(target=take, daemon=True).start()
    clock, newest, before = SystemClock(), None, termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)  # the terminal hands over each key as it is pressed, and shows none
    try:
        click.echo("\x1b[2J", nl=False)
        while True:
            while not taken.empty():
                found = taken.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    return
                newest = found
                _draw(newest, clock.now())
            _draw(newest, clock.now())
            is_pressed = select.select([sys.stdin], [], [], REDRAW)[0]
            if is_pressed and os.read(sys.stdin.fileno(), 1) in (b"q", b""):
                return
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        click.echo()


def _draw(look: Look | None, now: float) -> None:
    width, height = shutil.get_terminal_size()
    lines = ["asking nodes and workers ..."]
    if look is not None:
        moment = datetime.now().astimezone().strftime("%H:%M:%S")
        age = max(0.0, now - look.at)
        head = f"{moment}  figures {age:.0f} s old  {look.nodes.quorum_line()}  q: quit"
        lines = [head[:width], *look.screen(width, height - 1)]
    text = f"{_TO_END_OF_LINE}\n".join(lines)
    click.echo(f"{_TOP_LEFT}{text}{_TO_END_OF_LINE}{_TO_END_OF_SCREEN}", nl=False)
