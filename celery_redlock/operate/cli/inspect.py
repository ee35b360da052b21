"""Commands that look: status, locks, waiters, show, top."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from celery.states import PENDING
from rich.console import Group
from rich.live import Live

from celery_redlock.errors import abstention_cause, describe_holder
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.held_locks import Sight, look_at_locks
from celery_redlock.lock.node_status import NodeStatus, look_at_nodes
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.operate.cli.group import _loaded, _redlock, redlock
from celery_redlock.operate.cli.render import (
    Rows,
    _ago,
    _console,
    _failing_as_text,
    _locks_as_data,
    _locks_as_rows,
    _print,
    _print_json,
    _say,
    _text,
    _votes_as_rows,
    _who,
    as_json,
    in_words,
)
from celery_redlock.operate.control import Holder, in_iso
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.reporting import DEFERRED

ANSWERS_IN = 1.0  # s that workers have to say who waits


@redlock.command()
@as_json
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the lock nodes, and whether each of them votes.

    The exit status is 1 without a quorum.
    """
    view = View.of(_redlock(ctx))
    if as_json:
        _print_json(view.nodes_as_data())
    else:
        _print(view.nodes_as_rows(), view.quorum_as_text())
    if view.voting < view.needed:
        ctx.exit(1)


@redlock.command()
@as_json
@click.pass_context
def locks(ctx: click.Context, as_json: bool) -> None:
    """Show all locks: who holds each, since when, and its votes."""
    sight = look_at_locks(_redlock(ctx))
    if as_json:
        _print_json({"locks": _locks_as_data(sight.locks), "failing": dict(sight.failing)})
    else:
        _print(_locks_as_rows(sight.locks), *_failing_as_text(sight))


@redlock.command()
@as_json
@click.pass_context
def waiters(ctx: click.Context, as_json: bool) -> None:
    """Show the tasks that wait for a lock, and why.

    The workers are asked: without a worker none is known.
    """
    app = _loaded(ctx)
    waiting = Waiters.ask(app)
    if as_json:
        _print_json(asdict(waiting))
    else:
        _print(waiting.as_rows(), *waiting.as_text())


@redlock.command()
@click.argument("name", metavar="RESOURCE|TASK_ID")
@as_json
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show who holds a resource and who waits, or where a task stands."""
    app = _loaded(ctx)
    sight = look_at_locks(redlock_of(app))
    all_ = Waiters.ask(app)
    waiting = all_.of(name)
    locks = [lock for lock in sight.locks if lock.resource == name]
    task = None
    if not locks and not waiting.waiting:
        task = OneTask.find(app, name, sight, all_)
    if task is not None:
        locks = [lock for lock in sight.locks if lock.resource in task.resources]
        waiting = all_.of_task(name)
    if as_json:
        found = {"locks": _locks_as_data(locks), "failing": dict(sight.failing)}
        shown = None if task is None else asdict(task)
        _print_json({"resource": name, "task": shown, **found, "waiters": asdict(waiting)})
        return
    if task is not None:
        _print(task.as_rows())
        _print(*(_locks_as_rows(locks),) if locks else (), *_failing_as_text(sight))
        return
    _print(_locks_as_rows(locks) if locks else f"No lock stands on {name}.")
    _print(*(_votes_as_rows(lock, sight) for lock in locks))
    _print(waiting.as_rows(), *waiting.as_text(), *_failing_as_text(sight))


@redlock.command()
@click.option("--interval", default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--count", type=int, help="How many looks; until Ctrl-C if not given.")
@as_json
@click.pass_context
def top(ctx: click.Context, interval: float, count: int | None, as_json: bool) -> None:
    """Show nodes, locks and waiting tasks, again and again.

    With --json each look is one line.
    """
    app = _loaded(ctx)
    looks = _look_again_and_again(app, interval, count)
    if as_json:
        for view, sight, waiting in looks:
            found = {"locks": _locks_as_data(sight.locks), "waiters": asdict(waiting)}
            click.echo(json.dumps({**view.nodes_as_data(), **found}, default=str))
        return
    with Live(console=_console(), auto_refresh=False) as live:
        for view, sight, waiting in looks:
            shown = view.nodes_as_rows(), _locks_as_rows(sight.locks), waiting.as_rows()
            live.update(Group(*shown, *map(_text, waiting.as_text())), refresh=True)


def _look_again_and_again(
    app: Any, interval: float, count: int | None
) -> Iterator[tuple[View, Sight, Waiters]]:
    made, clock = redlock_of(app), SystemClock()
    for number in itertools.count(1):
        sight = look_at_locks(made)
        yield View.of(made), sight, Waiters.ask(app)
        if number == count:
            return
        clock.sleep(interval)


@dataclass(frozen=True)
class View:
    """The nodes, as they are shown. guard: the restart guard's word. needed: a quorum.

    silence: s for which a new node grants no lock.
    """

    nodes: Sequence[NodeStatus]
    guard: str
    needed: int
    silence: float

    @classmethod
    def of(cls, redlock: Redlock) -> View:
        """Ask them."""
        session = redlock.session
        guard = session.options.guard
        return cls(look_at_nodes(redlock), guard.word, session.node_set.size, guard.grace_period)

    @property
    def voting(self) -> int:
        """How many vote."""
        return sum(node.votes(self.guard) for node in self.nodes)

    def word_of(self, node: NodeStatus) -> str:
        """Return whether a node votes, in words."""
        if node.error:
            return node.error
        if node.role != "master":
            return f"no vote: it is a {node.role or 'server of an unknown role'}"
        if node.silent_for > 0:
            return abstention_cause(node.silent_for)
        if node.votes(self.guard):
            return "votes"
        return f"new: will grant no lock for {self.silence:.0f} s from its first use; see `trust`"

    def quorum_as_text(self) -> str:
        """Return whether locks can be had."""
        return f"{self.voting} of {len(self.nodes)} nodes vote, {self.needed} needed"

    def nodes_as_rows(self) -> Rows:
        """Return a row a node."""
        rows = [
            (
                node.node, self.word_of(node), node.server, node.role, in_words(node.uptime),
                f"{node.latency * 1000:.1f} ms", f"{node.clock:+.3f} s", node.policy,
            )
            if not node.error else (node.node, node.error)
            for node in self.nodes
        ]  # fmt: skip
        heads = ("NODE", "VOTE", "SERVER", "ROLE", "UP", "LATENCY", "CLOCK", "EVICTION")
        return Rows(heads, rows, "No nodes are named.")

    def nodes_as_data(self) -> dict[str, Any]:
        """Return the same for programs."""
        nodes = [{**asdict(node), "votes": node.votes(self.guard)} for node in self.nodes]
        return {"guard": self.guard, "needed": self.needed, "voting": self.voting, "nodes": nodes}

    def in_short(self) -> dict[str, Any]:
        """Return for programs which nodes do not vote, and why. new: nobody has used them yet."""
        up = [node for node in self.nodes if not node.error and not node.votes(self.guard)]
        return {
            "nodes": len(self.nodes),
            "quorum": self.needed,
            "voting": self.voting,
            "names": [node.node for node in self.nodes],
            "failing": [f"{node.node}: {node.error}" for node in self.nodes if node.error],
            "silent": {node.node: node.silent_for for node in up if node.silent_for > 0},
            "new": [node.node for node in up if not node.silent_for and node.role == "master"],
        }


@dataclass(frozen=True)
class OneTask:
    """Where one task stands. state: as the result backend says, where it knows.

    resources: that it holds, or waits for. holds: whether it holds them. holder: of what it waits
    for. reason: why it waits. next_try: a moment, ISO 8601.
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
    def find(cls, app: Any, task_id: str, sight: Sight, waiters: Waiters) -> OneTask | None:
        """Return what nodes, workers and result backend know of a task; None if it is nothing."""
        state, info = _state_of(app, task_id)
        held = [lock for lock in sight.locks if Holder.of(lock.holder).task_id == task_id]
        if held:
            name, known = Holder.of(held[0].holder).task, state and state != DEFERRED
            resources = tuple(dict.fromkeys(lock.resource for lock in held))
            return cls(task_id, name, state if known else "STARTED", resources, holds=True)
        for row in waiters.of_task(task_id).waiting:
            resources, tries_at = tuple(row["resources"]), SystemClock().wall_us() / 1e6
            tries_at += row["tries_in"]
            said = (_holder_of(resources, sight), row["reason"], in_iso(tries_at))
            return cls(task_id, row["task"], DEFERRED, resources, False, *said)
        if state != DEFERRED:
            return cls(task_id, "", state) if state else None
        resource, holder = str(info.get("resource", "")), str(info.get("holder", ""))
        said = (_holder_of([resource], sight) or describe_holder(holder), "", info.get("next_try"))
        return cls(task_id, "", DEFERRED, (resource,), False, *said)

    def as_rows(self) -> Rows:
        """Return it for people, one thing a line."""
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
        return Rows(tuple(shown), [tuple(shown.values())], "", below=True)


def _state_of(app: Any, task_id: str) -> tuple[str, dict[str, Any]]:
    """Return a task's state and info, as its result backend says; "" where that knows nothing."""
    try:
        meta = app.backend.get_task_meta(task_id, cache=False)
    except Exception as error:  # of each backend its own; NotImplementedError where there is none
        if not isinstance(error, NotImplementedError):
            _say(f"the result backend cannot be asked: {error}", err=True)
        return "", {}
    state, info = str(meta["status"]), meta.get("result")
    return "" if state == PENDING else state, info if isinstance(info, dict) else {}


def _holder_of(resources: Sequence[str], sight: Sight) -> str:
    holders = [_who(lock) for lock in sight.locks if lock.held and lock.resource in resources]
    return ", ".join(dict.fromkeys(holders))


@dataclass(frozen=True)
class Waiters:
    """Who waits. workers: those that told of it."""

    workers: Sequence[str]
    waiting: Sequence[dict[str, Any]]

    @classmethod
    def ask(cls, app: Any) -> Waiters:
        """Ask the workers; none answers where the broker is away."""
        try:
            replies = app.control.broadcast("redlock_waiting", reply=True, timeout=ANSWERS_IN) or ()
        except Exception as error:  # of each transport its own
            _say(f"the broker cannot be asked who waits: {error}", err=True)
            replies = ()
        told = {worker: rows for reply in replies for worker, rows in reply.items()}
        waiting = [
            {**row, "worker": worker}
            for worker, rows in told.items()
            if isinstance(rows, list)  # a worker without this package says that it does not know
            for row in rows
        ]
        waiting.sort(key=lambda row: str(row["since"]))
        return cls(sorted(told), waiting)

    def of(self, resource: str) -> Waiters:
        """Return those that wait for one resource."""
        waiting = [row for row in self.waiting if resource in row["resources"]]
        return Waiters(self.workers, waiting)

    def of_task(self, task_id: str) -> Waiters:
        """Return what waits of one task."""
        return Waiters(self.workers, [r for r in self.waiting if r["task_id"] == task_id])

    def as_rows(self) -> Rows:
        """Return a row a message."""
        heads = ("WAITS FOR", "TASK", "ID", "WORKER", "WAITED", "DEFERRALS", "TRIES IN", "WHY")
        rows = [
            (
                ", ".join(row["resources"]), row["task"], row["task_id"], row["worker"],
                in_words(_ago(row["since"])), str(row["deferrals"]), in_words(row["tries_in"]),
                row["reason"],
            )
            for row in self.waiting
        ]  # fmt: skip
        return Rows(heads, rows, "No tasks wait for a lock.")

    def as_text(self) -> list[str]:
        """Return what the table cannot say."""
        if self.workers:
            return []
        return ["no worker answered: what waits in the broker is not known"]
