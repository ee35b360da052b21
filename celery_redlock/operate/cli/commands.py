"""The commands of `celery redlock`, each with what only that command does.

They read (`status`, `locks`, `waiters`, `show`, `top`), change something (`break`, `trust`), or are
about settings (`options`, `doctor`). What they show, also on the screen of `top`, is in `views.py`.
"""

from __future__ import annotations

import getpass
import json
import math
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click

from celery_redlock.label import escaped
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.inspection import LockReport, break_lock, list_locks
from celery_redlock.lock.node_status import missing_rights, read_shared_settings, shared_settings_of
from celery_redlock.lock.server.admin import trust_nodes
from celery_redlock.operate.cli import views
from celery_redlock.operate.cli.group import (
    EXIT_UNKNOWN,
    Table,
    app_from,
    as_data,
    as_json,
    command_error,
    named,
    print_all,
    print_result,
    redlock,
    within_deadline,
)
from celery_redlock.operate.cli.views import NodesView, WaitersView, failing_lines, lock_name
from celery_redlock.operate.lints import ADVICE, ERROR, WARNING, Lint, left_open, lint
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.app import did_you_mean
from celery_redlock.tasks.startup import locked_tasks


@redlock.command()
@as_json
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the lock nodes, and whether each of them votes.

    The exit status is 1 without a quorum.
    """
    nodes = NodesView.of(redlock_of(app_from(ctx)))
    print_result(as_json, as_data(nodes), nodes.table(), nodes.quorum_line())
    if not nodes.has_quorum:
        ctx.exit(1)


@redlock.command()
@as_json
@click.pass_context
def locks(ctx: click.Context, as_json: bool) -> None:
    """Show all locks: who holds each, since when, and its votes.

    The exit status is 2 if too few nodes answer for all locks to be known.
    """
    sight = list_locks(redlock_of(app_from(ctx)))
    lines = (*failing_lines(sight.failing), *views.unknown_lines(sight))
    print_result(as_json, as_data(sight), views.lock_table(sight), *lines)
    if not sight.is_known:
        ctx.exit(EXIT_UNKNOWN)


@redlock.command()
@as_json
@click.pass_context
def waiters(ctx: click.Context, as_json: bool) -> None:
    """Show the processes that wait for a lock, in order, and their tasks.

    The nodes know the processes. The workers are asked for the tasks. The exit status is 2 if too
    few nodes answer.
    """
    waiting = WaitersView.ask(app_from(ctx))
    processes = waiting.registered
    lines = (*waiting.notes(), *failing_lines(processes.failing), *views.unknown_lines(processes))
    print_result(as_json, waiting.data(), *waiting.tables(), *lines)
    if not processes.is_known:
        ctx.exit(EXIT_UNKNOWN)


@redlock.command()
@click.argument("name", callback=named, metavar="RESOURCE|TASK_ID")
@as_json
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show who holds a resource and who waits, or where a task stands.

    The exit status is 2 if too few nodes answer for that to be known.
    """
    app = app_from(ctx)
    sight, everyone = list_locks(redlock_of(app)), WaitersView.ask(app)
    waiting, task = everyone.for_resource(name), None
    locks = [lock for lock in sight.locks if lock.resource == name]
    if not (locks or waiting.waiting or waiting.registered.processes):
        task = views.TaskView.find(app, name, sight, everyone)
    if task is not None:
        locks = [lock for lock in sight.locks if lock.resource in task.resources]
        waiting = everyone.for_task(name)
    shown, failing = replace(sight, locks=tuple(locks)), sight.failing
    parts: list[str | Table] = [views.lock_table(shown)] if locks else []
    if task is not None:
        parts.insert(0, task.table())
    else:
        none = f"No lock stands on {name}." if sight.is_known else views.LOCKS_UNKNOWN
        parts = [*(parts or [none]), *(views.vote_table(lock, sight) for lock in locks)]
        parts += [*waiting.tables(), *waiting.notes()]
        failing = {**failing, **waiting.registered.failing}
    data = {"resource": name, "task": as_data(task), **as_data(shown), "waiters": waiting.data()}
    print_result(as_json, data, *parts, *failing_lines(failing), *views.unknown_lines(sight))
    if not sight.is_known:
        ctx.exit(EXIT_UNKNOWN)


def finite(_: click.Context, param: click.Parameter, value: float) -> float:
    """Return an option's number; refuses NaN, which passes each range."""
    if not math.isfinite(value):
        raise click.BadParameter("give a finite number.", param=param)
    return value


@redlock.command()
@click.option(
    "--interval", type=click.FloatRange(0.0, 3600.0, min_open=True), callback=finite, default=2.0,
    show_default=True, help="Seconds between two looks.",
)  # fmt: skip
@click.option("--count", type=click.IntRange(1), help="How many looks; until `q` if not given.")
@as_json
@click.pass_context
def top(ctx: click.Context, interval: float, count: int | None, as_json: bool) -> None:
    """Show nodes, locks, and who waits, again and again; `q` ends it.

    With --json each look is one line.
    """
    looks = views.look_repeatedly(app_from(ctx), interval, count)
    if as_json:
        for look in looks:
            click.echo(json.dumps(look.data(), default=str))
    elif sys.stdin.isatty() and sys.stdout.isatty():
        views.show_live(looks)
    else:
        for look in looks:
            print_all(*look.tables(), *look.notes())


@redlock.command("break")
@click.argument("resource", callback=named)
@click.option("--permit", type=click.IntRange(0), help="Only this permit, from 0 on.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def break_(ctx: click.Context, resource: str, permit: int | None, yes: bool, as_json: bool) -> None:
    """Take RESOURCE from its holder; asks first.

    The holder learns of it at its next renewal. Until then its body goes on, and another one may
    run beside it. A lock that is taken while this asks is not touched.
    """
    app = app_from(ctx)
    made = redlock_of(app)
    sight = list_locks(made, resource)
    found = [lock for lock in sight.locks if permit in (None, lock.permit) and lock.value]
    if not found:
        rest = "; ".join(failing_lines(sight.failing))
        raise command_error(f"no lock stands on {resource}{rest and f' ({rest})'}")
    if not yes:
        print_all(*(f"{lock.holder} loses {lock_name(lock)}" for lock in found), err=as_json)
        click.confirm("Its body goes on until its next renewal. Break it?", abort=True, err=as_json)
    broken = []
    for lock in found:
        deleted, failing = break_lock(made, lock)
        gone_from = [node for node, gone in deleted.items() if gone]
        broken.append(BrokenLock(lock, gone_from, failing))
    records = [{**as_data(one.lock), **as_data(one)} for one in broken]
    data = {"resource": resource, "broken": records}
    print_result(as_json, data, *(one.text() for one in broken))
    for one in broken:  # after the lines above: a broker may be silent for the whole deadline
        one.send_event(app)
    if any(one.failing and len(one.gone_from) < one.lock.needed for one in broken):
        ctx.exit(1)


@dataclass(frozen=True)
class BrokenLock:
    """The result of breaking a lock.

    gone_from: the nodes that have deleted the key. failing: by node, why it could not be reached.
    """

    lock: LockReport = field(repr=False)
    gone_from: Sequence[str]
    failing: Mapping[str, str]

    def send_event(self, app: Any) -> None:
        """Send `task-lock-broken` to monitors; without a broker the lock is broken all the same."""
        resource, holder = self.lock.resource, self.lock.holder

        def send() -> None:
            by = f"{getpass.getuser()}@{socket.gethostname()}"
            result = f"{resource}: its lock is broken by {by}"
            fields = {"resource": resource, "holder": holder.label, "by": by, "result": result}
            with app.events.default_dispatcher() as dispatcher:
                dispatcher.send("task-lock-broken", uuid=holder.task_id, **fields)

        cause = within_deadline(send)[1] if self.gone_from else ""
        if cause:
            print_all(f"no event is sent: {cause}", err=True)

    def text(self) -> str:
        name = lock_name(self.lock)
        if not self.gone_from and not self.failing:
            return f"{name} was over before: nothing was broken"
        text = f"{name} is broken on {', '.join(self.gone_from)}; {self.lock.holder} had it"
        rest = "; ".join(f"{node} could not be told: {why}" for node, why in self.failing.items())
        return f"{text}. {rest}" if rest else text


@redlock.command()
@click.argument("nodes", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All nodes.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def trust(ctx: click.Context, nodes: Sequence[str], every: bool, yes: bool, as_json: bool) -> None:
    """Let new or restarted NODES grant locks at once; asks first.

    Only if no task can still run under a lock that these nodes lost: on a new cluster, or if no
    worker runs.
    """
    made = redlock_of(app_from(ctx))
    known = [node.name for node in made.session.nodes.all]
    for name in nodes:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
            raise command_error(f"{name} is no node of this app{hint}")
    chosen = known if every else list(nodes)
    if not chosen:
        raise command_error(f"name the nodes, or --all of them: {', '.join(known)}")
    if not yes:
        holding = [f"{one.holder} holds {lock_name(one)} now" for one in list_locks(made).locks]
        print_all(*holding, err=as_json)
        text = (
            f"Let {', '.join(chosen)} grant locks at once? If a task may still run under a lock "
            "that they lost, two tasks can run together."
        )
        click.confirm(escaped(text), abort=True, err=as_json)
    trusted, failing = trust_nodes(made.session.nodes, chosen, made.prefix)
    lines = [
        f"{node} grants locks from now on{name and f'; it has the key {name}'}"
        for node, name in trusted.items()
    ]
    lines += [f"{node} could not be told: {cause}" for node, cause in failing.items()]
    print_result(as_json, {"trusted": dict(trusted), "failing": dict(failing)}, *lines)
    if failing:
        ctx.exit(1)


@redlock.command()
@click.argument("task", callback=named)
@click.option(
    "--queue", callback=named, help="In this queue, not in that of the task's own routing."
)
@as_json
@click.pass_context
def options(ctx: click.Context, task: str, queue: str | None, as_json: bool) -> None:
    """Show the options in force for TASK, and where each is set."""
    app = app_from(ctx)
    tasks = {one.name: one for one in locked_tasks(app)}
    if task not in tasks:
        which = "takes no lock" if task in app.tasks else "is no task here"
        raise command_error(f"{task} {which}{did_you_mean(task, tasks)}")
    effective = tasks[task].lock_options(queue)
    rows = {one.name: {"value": one.value, "from": str(one.source)} for one in effective.options}
    data = {"task": effective.task, "queue": effective.queue, "options": rows}
    print_result(as_json, data, *str(effective).split("\n"))


@redlock.command()
@as_json
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check the settings and the nodes.

    The exit status is 1 for an error, or without a quorum.
    """
    app = app_from(ctx)
    made, nodes_from = redlock_of(app), settings_of(app).nodes_from
    lints = (*_lints_of_nodes(made), *lint(app), *left_open(app))
    nodes = NodesView.of(made)
    up = [node for node in nodes.nodes if not node.error and not node.votes]
    found = {
        "from": nodes_from,
        "nodes": len(nodes.nodes),
        "quorum": nodes.needed,
        "voting": nodes.voting,
        "names": [node.node for node in nodes.nodes],
        "failing": [f"{node.node}: {node.error}" for node in nodes.nodes if node.error],
        "silent": {node.node: node.silent_for for node in up if node.silent_for > 0},
        "new": [node.node for node in up if not node.silent_for and node.role == "master"],
    }
    lines = [nodes.quorum_line()]
    for node in nodes.nodes:
        level = ERROR if node.error else "ok" if node.votes else WARNING
        lines.append(f"{level:<7}  {node.node} ({nodes_from}): {nodes.vote_of(node)}")
    lines += [f"{one.level:<7}  {one}" for one in lints]
    if nodes.voting == len(nodes.nodes) and all(one.level == ADVICE for one in lints):
        lines.append("No problems found.")
    print_result(as_json, {"nodes": found, "lints": as_data(lints)}, *lines)
    if not nodes.has_quorum or any(one.level == ERROR for one in lints):
        ctx.exit(1)


def _lints_of_nodes(redlock: Redlock) -> Iterator[Lint]:
    """Yield errors for shared settings that differ, and warnings for missing rights."""
    own = shared_settings_of(redlock)
    for settings, nodes in read_shared_settings(redlock).items():
        hint = (
            f"according to {', '.join(nodes)}; this app uses {own}: until all clients use the "
            "same, two tasks may hold one lock"
        )
        yield Lint(ERROR, "other clients", settings, hint)
    for node, rights in missing_rights(redlock).items():
        hint = "its user lacks them (ACL SETUSER): the page operations/security says what for"
        yield Lint(WARNING, node, " ".join(rights), hint)
