"""Commands that only read: status, locks, waiters, show, top."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.console import Group
from rich.live import Live

from celery_redlock.lock.held_locks import Sight, look_at_locks
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.operate.cli.group import app_from, redlock, redlock_from
from celery_redlock.operate.cli.lock_views import (
    failing_lines,
    lock_data,
    lock_table,
    locks_data,
    vote_table,
)
from celery_redlock.operate.cli.node_views import NodesView
from celery_redlock.operate.cli.render import (
    as_json,
    new_console,
    plain_text,
    print_all,
    print_json,
)
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
        print_json(nodes.data())
    else:
        print_all(nodes.table(), nodes.quorum_line())
    if not nodes.has_quorum:
        ctx.exit(1)


@redlock.command()
@as_json
@click.pass_context
def locks(ctx: click.Context, as_json: bool) -> None:
    """Show all locks: who holds each, since when, and its votes."""
    sight = look_at_locks(redlock_from(ctx))
    if as_json:
        print_json(locks_data(sight.locks, sight))
    else:
        print_all(lock_table(sight.locks), *failing_lines(sight.failing))


@redlock.command()
@as_json
@click.pass_context
def waiters(ctx: click.Context, as_json: bool) -> None:
    """Show the processes that wait for a lock, in order, and their tasks.

    The nodes know the processes. The workers are asked for the tasks.
    """
    waiting = WaitersView.ask(app_from(ctx))
    if as_json:
        print_json(waiting.data())
    else:
        failing = failing_lines(waiting.registered.failing)
        print_all(waiting.process_table(), waiting.table(), *waiting.note(), *failing)


@redlock.command()
@click.argument("name", metavar="RESOURCE|TASK_ID")
@as_json
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show who holds a resource and who waits, or where a task stands."""
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
    if as_json:
        found = {"task": None if task is None else asdict(task), **locks_data(locks, sight)}
        print_json({"resource": name, **found, "waiters": waiting.data()})
    elif task is not None:
        found_locks = [lock_table(locks)] if locks else []
        print_all(task.table(), *found_locks, *failing_lines(sight.failing))
    else:
        print_all(lock_table(locks) if locks else f"No lock stands on {name}.")
        print_all(*(vote_table(lock, sight) for lock in locks))
        failing = failing_lines({**sight.failing, **waiting.registered.failing})
        print_all(waiting.process_table(), waiting.table(), *waiting.note(), *failing)


@redlock.command()
@click.option("--interval", default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--count", type=int, help="How many looks; until Ctrl-C if not given.")
@as_json
@click.pass_context
def top(ctx: click.Context, interval: float, count: int | None, as_json: bool) -> None:
    """Show nodes, locks, and who waits, again and again.

    With --json each look is one line.
    """
    looks = _look_repeatedly(app_from(ctx), interval, count)
    if as_json:
        for nodes, sight, waiting in looks:
            found = {"locks": [lock_data(one) for one in sight.locks], "waiters": waiting.data()}
            click.echo(json.dumps({**nodes.data(), **found}, default=str))
        return
    with Live(console=new_console(), auto_refresh=False) as live:
        for nodes, sight, waiting in looks:
            who_waits = waiting.process_table(), waiting.table()
            lines = map(plain_text, waiting.note())
            live.update(
                Group(nodes.table(), lock_table(sight.locks), *who_waits, *lines), refresh=True
            )


def _look_repeatedly(
    app: Any, interval: float, count: int | None
) -> Iterator[tuple[NodesView, Sight, WaitersView]]:
    made, clock = redlock_of(app), SystemClock()
    for number in itertools.count(1):
        sight = look_at_locks(made)
        yield NodesView.of(made), sight, WaitersView.ask(app)
        if number == count:
            return
        clock.sleep(interval)
