"""Commands about settings: options and doctor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from celery_redlock.lock.client import Redlock
from celery_redlock.lock.node_status import look_at_terms, terms_of
from celery_redlock.operate.cli.group import _loaded, redlock
from celery_redlock.operate.cli.inspect import View
from celery_redlock.operate.cli.render import _print_json, _refused, _say, as_json
from celery_redlock.operate.lints.facts import facts_of
from celery_redlock.operate.lints.model import ADVICE, ERROR, WARNING, Lint
from celery_redlock.operate.lints.rules import lint
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.sources import did_you_mean
from celery_redlock.tasks.startup import locked_tasks
from celery_redlock.tasks.task import LockedTask


@redlock.command()
@click.argument("task")
@click.option("--queue", help="In this queue, not in that of the task's own routing.")
@as_json
@click.pass_context
def options(ctx: click.Context, task: str, queue: str | None, as_json: bool) -> None:
    """Show the options in force for TASK, and where each is set."""
    told = _locked(_loaded(ctx), task).lock_options(queue)
    if not as_json:
        for line in str(told).split("\n"):
            _say(line)
        return
    rows = {one.name: {"value": one.value, "from": str(one.source)} for one in told.options}
    _print_json({"task": told.task, "queue": told.queue, "options": rows})


@redlock.command()
@as_json
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check the settings and the nodes.

    The exit status is 1 for an error, or without a quorum.
    """
    app = _loaded(ctx)
    made, settings = redlock_of(app), settings_of(app)
    found = (*_terms_that_differ(made), *lint(facts_of(app)))
    view = View.of(made)
    if as_json:
        nodes = {"from": settings.nodes_from, **view.in_short()}
        _print_json({"nodes": nodes, "lints": [asdict(one) for one in found]})
    else:
        _say(view.quorum_as_text())
        for node in view.nodes:
            level = ERROR if node.error else "ok" if node.votes(view.guard) else WARNING
            _say(f"{level:<7}  {node.node} ({settings.nodes_from}): {view.word_of(node)}")
        for one in found:
            _say(f"{one.level:<7}  {one}")
        if view.voting == len(view.nodes) and all(one.level == ADVICE for one in found):
            _say("No problems found.")
    if view.voting < view.needed or any(one.level == ERROR for one in found):
        ctx.exit(1)


def _terms_that_differ(redlock: Redlock) -> Iterator[Lint]:
    """Give what other clients of these nodes go by, if not what this one does."""
    own = terms_of(redlock)
    for terms, names in look_at_terms(redlock).items():
        hint = (
            f"so say {', '.join(names)}; this app goes by {own}: until all go by the same, two may "
            "hold one lock"
        )
        yield Lint(ERROR, "other clients", terms, hint)


def _locked(app: Any, name: str) -> LockedTask:
    tasks = {task.name: task for task in locked_tasks(app)}
    if name in tasks:
        return tasks[name]
    which = "takes no lock" if name in app.tasks else "is no task here"
    raise _refused(f"{name} {which}{did_you_mean(name, tasks)}")
