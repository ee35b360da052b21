"""Commands about settings: options and doctor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from celery_redlock.lock.client import Redlock
from celery_redlock.lock.node_status import (
    look_at_shared_settings,
    missing_rights,
    shared_settings_of,
)
from celery_redlock.operate.cli.group import app_from, named, redlock
from celery_redlock.operate.cli.node_views import NodesView
from celery_redlock.operate.cli.render import (
    as_data,
    as_json,
    command_error,
    print_json,
    print_line,
)
from celery_redlock.operate.lints import ADVICE, ERROR, WARNING, Lint, left_open, lint
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.app import did_you_mean
from celery_redlock.tasks.startup import locked_tasks
from celery_redlock.tasks.task import LockedTask


@redlock.command()
@click.argument("task", callback=named)
@click.option(
    "--queue", callback=named, help="In this queue, not in that of the task's own routing."
)
@as_json
@click.pass_context
def options(ctx: click.Context, task: str, queue: str | None, as_json: bool) -> None:
    """Show the options in force for TASK, and where each is set."""
    effective = _locked_task(app_from(ctx), task).lock_options(queue)
    if not as_json:
        for line in str(effective).split("\n"):
            print_line(line)
        return
    rows = {one.name: {"value": one.value, "from": str(one.source)} for one in effective.options}
    print_json({"task": effective.task, "queue": effective.queue, "options": rows})


@redlock.command()
@as_json
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check the settings and the nodes.

    The exit status is 1 for an error, or without a quorum.
    """
    app = app_from(ctx)
    made, nodes_from = redlock_of(app), settings_of(app).nodes_from
    wrong = (*_differing_settings(made), *_missing_rights(made))
    lints = (*wrong, *lint(app), *left_open(app))
    nodes = NodesView.of(made)
    if as_json:
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
        print_json({"nodes": found, "lints": as_data(lints)})
    else:
        print_line(nodes.quorum_line())
        for node in nodes.nodes:
            level = ERROR if node.error else "ok" if node.votes else WARNING
            print_line(f"{level:<7}  {node.node} ({nodes_from}): {nodes.vote_of(node)}")
        for one in lints:
            print_line(f"{one.level:<7}  {one}")
        if nodes.voting == len(nodes.nodes) and all(one.level == ADVICE for one in lints):
            print_line("No problems found.")
    if not nodes.has_quorum or any(one.level == ERROR for one in lints):
        ctx.exit(1)


def _differing_settings(redlock: Redlock) -> Iterator[Lint]:
    """Yield an error for each shared setting of other clients that differs from this client's."""
    own = shared_settings_of(redlock)
    for settings, nodes in look_at_shared_settings(redlock).items():
        hint = (
            f"according to {', '.join(nodes)}; this app uses {own}: until all clients use the "
            "same, two tasks may hold one lock"
        )
        yield Lint(ERROR, "other clients", settings, hint)


def _missing_rights(redlock: Redlock) -> Iterator[Lint]:
    """Yield a warning for each node whose user lacks rights."""
    for node, rights in missing_rights(redlock).items():
        hint = "its user lacks them (ACL SETUSER): the page operations/security says what for"
        yield Lint(WARNING, node, " ".join(rights), hint)


def _locked_task(app: Any, name: str) -> LockedTask:
    tasks = {task.name: task for task in locked_tasks(app)}
    if name in tasks:
        return tasks[name]
    which = "takes no lock" if name in app.tasks else "is no task here"
    raise command_error(f"{name} {which}{did_you_mean(name, tasks)}")
