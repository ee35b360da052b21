"""The commands of `celery redlock`, each with what only that command does.

They read (`status`, `locks`, `waiters`, `claims`), change something (`break`, `trust`,
`setup`), or are about settings (`options`). What they show is in `views.py`. The others
have modules of their own.
"""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Sequence
from typing import Any

import click
from redis import RedisError

from celery_redlock import anchors
from celery_redlock.label import escaped
from celery_redlock.lock.claims import delete_claim
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.inspection import break_lock, break_rate
from celery_redlock.lock.reports import (
    BreakReport,
    LockReport,
    RateReport,
)
from celery_redlock.lock.server.admin import trust_nodes
from celery_redlock.lock.server.error_hints import with_hint
from celery_redlock.operate.cli import views
from celery_redlock.operate.cli.group import (
    Table,
    app_from,
    as_data,
    as_json,
    command_error,
    non_empty,
    print_all,
    print_result,
    redlock,
    within_deadline,
)
from celery_redlock.operate.cli.listing import Listing, list_command, nothing_to_end
from celery_redlock.operate.cli.views import (
    WaitersView,
    lock_name,
    quorum_line,
)
from celery_redlock.tasks.declaration import ENTRY_ATTRIBUTE
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.settings.app import CELERY_PREFIX, did_you_mean
from celery_redlock.tasks.startup import locked_tasks


@redlock.command()
@as_json
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the lock nodes, and whether each of them votes.

    The exit status is 1 without a quorum, or if a node evicts keys.
    """
    nodes = redlock_of(app_from(ctx)).status()
    line = quorum_line(nodes)
    line = line if nodes.has_quorum else anchors.see(line, anchors.NO_QUORUM)
    evicting = views.eviction_lines(nodes)
    print_result(as_json, as_data(nodes), views.node_table(nodes), line, *evicting)
    if evicting or not nodes.has_quorum:
        ctx.exit(1)


@redlock.command()
@click.argument("pattern", default="*", callback=non_empty)
@list_command
def locks(app: Any, pattern: str) -> Listing:
    """Show locks with their holders, and the used starts of rates.

    PATTERN, such as "stock:*", selects resources. The exit status is 2 if too few nodes answer for
    all locks to be known.
    """
    lock_list = views.locks_like(pattern, redlock_of(app).locks())
    empty_text = "No locks are held." if pattern == "*" else f"No lock is held on {pattern}."
    parts: list[str | Table] = [*views.lock_tables(lock_list, empty_text)]
    parts += views.lock_notes(lock_list)
    return Listing(as_data(lock_list), parts, lock_list)


@redlock.command()
@click.argument("pattern", default="*", callback=non_empty)
@list_command
def waiters(app: Any, pattern: str) -> Listing:
    """Show the processes that wait, in order, and their tasks.

    Each waits for a lock, or for a start of a rate. PATTERN, such as "stock:*", selects resources.
    The exit status is 2 if too few nodes answer, or no worker.
    """
    waiting = WaitersView.ask(app).like(pattern)
    tables = waiting.tables("" if pattern == "*" else pattern)
    parts: list[str | Table] = [*tables, *waiting.notes()]
    return Listing(waiting.data(), parts, waiting.registered, is_known=waiting.is_known)


@redlock.command()
@click.argument("pattern", default="*", callback=non_empty)
@list_command
def claims(app: Any, pattern: str) -> Listing:
    """Show the claims of deduplicated calls.

    PATTERN, such as "stock:*", selects resources. While a claim stands, a send of the same is a
    duplicate. `break --claim` ends it. The exit status is 2 if too few nodes answer.
    """
    claim_list = redlock_of(app).claims(pattern)
    return Listing(as_data(claim_list), [views.claim_table(claim_list)], claim_list)


@redlock.command("break")
@click.argument("resource", callback=non_empty)
@click.option("--permit", type=click.IntRange(0), help="Only this permit, from 0 on.")
@click.option("--claim", is_flag=True, help="End the claims of deduplicated calls, not the lock.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def break_(
    ctx: click.Context, resource: str, permit: int | None, claim: bool, yes: bool, as_json: bool
) -> None:
    """Take RESOURCE from its holder; asks first.

    The holder's body goes on until its next renewal, and another one may run beside it. A lock that
    is taken while this asks stays. All starts of a rate are given back.
    """
    app = app_from(ctx)
    client = redlock_of(app)
    if claim:
        if permit is not None:
            raise command_error("--permit is of a lock, and --claim of a send: give one of them")
        _end_claims(ctx, client, resource, yes, as_json)
        return
    lock_list = client.locks(resource)
    locks = [lock for lock in lock_list.locks if permit in (None, lock.permit) and lock.value]
    rates = lock_list.rates if permit is None else ()
    if not locks and not rates:
        raise nothing_to_end(lock_list, f"no lock is held on {resource}", views.LOCKS_UNKNOWN)
    if not yes:
        _confirm_break(locks, rates, err=as_json)
    broken_locks = tuple(break_lock(client.session, lock) for lock in locks)
    given_back = tuple(break_rate(client.session, rate) for rate in rates)
    report = BreakReport(resource, broken_locks, given_back, lock_list.needed)
    lines = [*map(views.broken_line, report.locks), *map(views.freed_line, report.rates)]
    print_result(as_json, as_data(report), *lines)
    # after the lines above: a broker may be silent for the whole deadline
    for broken_lock in report.locks:
        cause = send_broken(app, broken_lock.lock) if broken_lock.gone_from else ""
        if cause:
            print_all(f"no event is sent: {cause}", err=True)
    if not report.is_complete:
        ctx.exit(1)


def _confirm_break(locks: Sequence[LockReport], rates: Sequence[RateReport], *, err: bool) -> None:
    print_all(*(f"{lock.holder} loses {lock_name(lock)}" for lock in locks), err=err)
    for rate in rates:
        print_all(f"{rate.resource} ({rate.rate}) gets {rate.used} used starts back", err=err)
    question = "Its body goes on until its next renewal. Break it?"
    if not locks:
        question = "More bodies may start than the rate says. Give them back?"
    click.confirm(question, abort=True, err=err)


def send_broken(app: Any, lock: LockReport, by: str = "") -> str:
    """Send `task-lock-broken` to monitors; returns why no event is sent, "" if it is.

    Without a broker the lock is broken all the same. by: who broke it, else the process' user.
    """
    resource = lock.resource
    holder = lock.holder

    def send() -> None:
        name = by or f"{getpass.getuser()}@{socket.gethostname()}"
        result = f"{resource}: its lock is broken by {name}"
        fields = {"resource": resource, "holder": holder.label, "by": name, "result": result}
        with app.events.default_dispatcher() as dispatcher:
            dispatcher.send("task-lock-broken", uuid=holder.task_id, **fields)

    return within_deadline(send)[1]


def _end_claims(
    ctx: click.Context, client: Redlock, resource: str, yes: bool, as_json: bool
) -> None:
    """End the claims on a resource; asks first."""
    claim_list = client.claims()
    matching_claims = [claim for claim in claim_list.claims if resource in claim.known_as]
    if not matching_claims:
        raise nothing_to_end(claim_list, f"there is no claim on {resource}", views.CLAIMS_UNKNOWN)
    if not yes:
        lines = [
            f"{claim.task}[{claim.task_id}] has the claim on {claim.resource}"
            for claim in matching_claims
        ]
        print_all(*lines, err=as_json)
        text = "Its message still runs, and the next call is not a duplicate. End the claim?"
        click.confirm(text, abort=True, err=as_json)
    ended_claims = [delete_claim(client.session, claim) for claim in matching_claims]
    data = {"resource": resource, "claims": as_data(ended_claims)}
    print_result(as_json, data, *map(views.ended_line, ended_claims))
    if any(
        ended_claim.failing and len(ended_claim.gone_from) < claim_list.needed
        for ended_claim in ended_claims
    ):
        ctx.exit(1)


@redlock.command()
@click.argument("nodes", nargs=-1)
@click.option("--all", "all_nodes", is_flag=True, help="All nodes.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def trust(
    ctx: click.Context, nodes: Sequence[str], all_nodes: bool, yes: bool, as_json: bool
) -> None:
    """Let new or restarted NODES grant locks immediately; asks first.

    Only if no task can still run under a lock that these nodes lost: if they are new, or if no
    worker runs.
    """
    client = redlock_of(app_from(ctx))
    node_names = [node.name for node in client.session.nodes.all]
    for name in nodes:
        if name not in node_names:
            hint = did_you_mean(name, node_names) or f"; known: {', '.join(node_names)}"
            raise command_error(f"{name} is not a node of this app{hint}")
    chosen_names = node_names if all_nodes else list(nodes)
    if not chosen_names:
        raise command_error(f"name the nodes, or --all of them: {', '.join(node_names)}")
    if not yes:
        holding = [f"{lock.holder} holds {lock_name(lock)} now" for lock in client.locks().locks]
        print_all(*holding, err=as_json)
        text = (
            f"Let {', '.join(chosen_names)} grant locks immediately? If a task may still run "
            "under a lock that they lost, two tasks can run together."
        )
        click.confirm(escaped(text), abort=True, err=as_json)
    trusted, failing = trust_nodes(client.session.nodes, chosen_names, client.prefix)
    lines = []
    for node, resource in trusted.items():
        lock_text = resource and (
            f"; it holds the lock {resource!r}: if its owner still runs, a node that has lost this "
            "lock may now grant it to another one"
        )
        lines.append(f"{node} grants locks from now on{lock_text}")
    lines += [f"{node} was not changed: {cause}" for node, cause in failing.items()]
    print_result(as_json, {"trusted": dict(trusted), "failing": dict(failing)}, *lines)
    if failing:
        ctx.exit(1)


@redlock.command()
@click.option("--sql", is_flag=True, help="Print the statements, for a DBA; do not connect.")
@as_json
@click.pass_context
def setup(ctx: click.Context, sql: bool, as_json: bool) -> None:
    """Create the schema of the PostgreSQL node, or update it.

    It needs the right to create a schema in the database. Redis nodes need no setup.
    """
    client = redlock_of(app_from(ctx))
    node = client.session.nodes.all[0]
    statements = node.address.setup_sql(client.prefix)
    if not statements:
        raise command_error("redlock_nodes names Redis nodes, which need no setup")
    if sql:
        data = json.dumps({"node": node.name, "sql": statements}, indent=2)
        click.echo(data if as_json else statements)
        return
    try:
        outcome = node.address.create_schema(client.prefix)
    except RedisError as error:
        raise command_error(f"{node.name}: {with_hint(str(error))}") from None
    is_new = outcome in ("new", "trusted")
    result = {"node": node.name, "created": is_new, "moved": outcome == "moved"}
    if is_new:
        result["trusted"] = outcome == "trusted"
    print_result(
        as_json, result, f"{node.name} has the schema redlock {views.SETUP_RESULTS[outcome]}"
    )


@redlock.command()
@click.argument("task", callback=non_empty)
@click.option(
    "--queue", callback=non_empty, help="In this queue, not that of the task's own routing."
)
@as_json
@click.pass_context
def options(ctx: click.Context, task: str, queue: str | None, as_json: bool) -> None:
    """Show the options in force for TASK, and where each is set."""
    app = app_from(ctx)
    tasks = {locked_task.name: locked_task for locked_task in locked_tasks(app)}
    if task not in tasks:
        if task in app.tasks:
            hint = "give it base=LockedTask, or name it in redlock_tasks"
            if task.startswith(CELERY_PREFIX):
                hint = "it is Celery's own, and those cannot be locked"
            raise command_error(f"{task} takes no lock: {hint}")
        raise command_error(f"{task} is not a task of this app{did_you_mean(task, tasks)}")
    effective = tasks[task].lock_options(queue)
    rows = {
        option.name: {"value": option.value, "from": str(option.source)}
        for option in effective.options
    }
    data = {"task": effective.task, "queue": effective.queue, "options": rows}
    head, *lines = str(effective).split("\n")
    entry = vars(type(tasks[task])).get(ENTRY_ATTRIBUTE)
    entry_note = f", locked by the entry {entry!r} of redlock_tasks" if entry else ""
    print_result(as_json, data, head + entry_note, *lines)
