"""Commands that only read: status, locks, waiters, show, top."""

from __future__ import annotations

import json
from dataclasses import replace

import click

from celery_redlock.lock.held_locks import look_at_locks
from celery_redlock.operate.cli.group import UNKNOWN, app_from, finite, named, redlock, redlock_from
from celery_redlock.operate.cli.live_view import is_terminal, look_repeatedly, show_live
from celery_redlock.operate.cli.node_views import (
    LOCKS_UNKNOWN,
    NodesView,
    failing_lines,
    lock_table,
    unknown_lines,
    vote_table,
)
from celery_redlock.operate.cli.render import as_data, as_json, print_all, print_json
from celery_redlock.operate.cli.task_views import TaskView, WaitersView
from celery_redlock.tasks.per_app import redlock_of


@redlock.command()
@as_json
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the lock nodes, and whether each of them votes.

    The exit status is 1 without a quorum.
    """
    nodes = NodesView.of(redlock_from(ctx))
    if as_json:
        print_json(as_data(nodes))
    else:
        print_all(nodes.table(), nodes.quorum_line())
    if not nodes.has_quorum:
        ctx.exit(1)


@redlock.command()
@as_json
@click.pass_context
def locks(ctx: click.Context, as_json: bool) -> None:
    """Show all locks: who holds each, since when, and its votes.

    The exit status is 2 if too few nodes answer for all locks to be known.
    """
    sight = look_at_locks(redlock_from(ctx))
    if as_json:
        print_json(as_data(sight))
    else:
        print_all(lock_table(sight), *failing_lines(sight.failing), *unknown_lines(sight))
    if not sight.is_known:
        ctx.exit(UNKNOWN)


@redlock.command()
@as_json
@click.pass_context
def waiters(ctx: click.Context, as_json: bool) -> None:
    """Show the processes that wait for a lock, in order, and their tasks.

    The nodes know the processes. The workers are asked for the tasks. The exit status is 2 if too
    few nodes answer.
    """
    waiting = WaitersView.ask(app_from(ctx))
    if as_json:
        print_json(waiting.data())
    else:
        print_all(waiting.process_table(), waiting.table(), *waiting.note())
        print_all(*failing_lines(waiting.registered.failing), *unknown_lines(waiting.registered))
    if not waiting.registered.is_known:
        ctx.exit(UNKNOWN)


@redlock.command()
@click.argument("name", callback=named, metavar="RESOURCE|TASK_ID")
@as_json
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show who holds a resource and who waits, or where a task stands.

    The exit status is 2 if too few nodes answer for that to be known.
    """
    app = app_from(ctx)
    sight, everyone = look_at_locks(redlock_of(app)), WaitersView.ask(app)
    waiting = everyone.for_resource(name)
    locks = [lock for lock in sight.locks if lock.resource == name]
    task = None
    if not locks and waiting.is_empty:
        task = TaskView.find(app, name, sight, everyone)
    if task is not None:
        locks = [lock for lock in sight.locks if lock.resource in task.resources]
        waiting = everyone.for_task(name)
    shown = replace(sight, locks=tuple(locks))
    if as_json:
        found = {"task": as_data(task), **as_data(shown)}
        print_json({"resource": name, **found, "waiters": waiting.data()})
    elif task is not None:
        found_locks = [lock_table(shown)] if locks else []
        print_all(task.table(), *found_locks)
        print_all(*failing_lines(sight.failing), *unknown_lines(sight))
    else:
        none = f"No lock stands on {name}." if sight.is_known else LOCKS_UNKNOWN
        print_all(lock_table(shown) if locks else none)
        print_all(*(vote_table(lock, sight) for lock in locks))
        failing = failing_lines({**sight.failing, **waiting.registered.failing})
        print_all(waiting.process_table(), waiting.table(), *waiting.note(), *failing)
        print_all(*unknown_lines(sight))
    if not sight.is_known:
        ctx.exit(UNKNOWN)


@redlock.command()
@click.option(
    "--interval",
    type=click.FloatRange(0.0, 3600.0, min_open=True),
    callback=finite,
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--count", type=click.IntRange(1), help="How many looks; until `q` if not given.")
@as_json
@click.pass_context
def top(ctx: click.Context, interval: float, count: int | None, as_json: bool) -> None:
    """Show nodes, locks, and who waits, again and again; `q` ends it.

    With --json each look is one line.
    """
    looks = look_repeatedly(app_from(ctx), interval, count)
    if as_json:
        for look in looks:
            click.echo(json.dumps(look.data(), default=str))
    elif is_terminal():
        show_live(looks)
    else:
        for look in looks:
            print_all(*look.tables(), *look.notes())
