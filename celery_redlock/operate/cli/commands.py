"""The commands of `celery redlock`, each with what only that command does.

They read (`status`, `locks`, `waiters`, `claims`, `show`), change something (`break`, `trust`,
`setup`), or are about settings (`options`, `doctor`). What they show is in `views.py`. The others
have modules of their own.
"""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import click
from redis import RedisError

from celery_redlock import anchors
from celery_redlock.label import escaped
from celery_redlock.lock.claims import delete_claim
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.engine.events import EVICTS_LOCKS, LEAVES_WITH_SLOT
from celery_redlock.lock.inspection import break_lock, break_rate
from celery_redlock.lock.node_status import (
    compare_shared_settings,
    missing_rights,
    shared_settings_of,
)
from celery_redlock.lock.reports import BreakReport, BrokenLock, LockReport, NodeList, RateReport
from celery_redlock.lock.server.admin import PATIENCE, trust_nodes
from celery_redlock.lock.server.error_hints import with_hint
from celery_redlock.operate.cli import views
from celery_redlock.operate.cli.group import (
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
from celery_redlock.operate.cli.listing import Listing, list_command, nothing_to_end
from celery_redlock.operate.cli.stranded import RecoveryTime
from celery_redlock.operate.cli.task_view import TaskView, nothing_found
from celery_redlock.operate.cli.views import (
    WaitersView,
    ask_workers,
    lock_name,
    quorum_line,
)
from celery_redlock.operate.control import redlock_settings, shared_by
from celery_redlock.operate.lints import ADVICE, ERROR, WARNING, Lint, lint
from celery_redlock.operate.start_report import left_open
from celery_redlock.tasks.declaration import ENTRY
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.app import CELERY_PREFIX, did_you_mean
from celery_redlock.tasks.startup import locked_tasks

UNTIL_ALIKE = anchors.see(
    "until all clients use the same, two tasks may hold one lock", anchors.SETTINGS_DIFFER
)


@redlock.command()
@as_json
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the lock nodes, and whether each of them votes.

    The exit status is 1 without a quorum.
    """
    nodes = redlock_of(app_from(ctx)).status()
    line = quorum_line(nodes)
    line = line if nodes.has_quorum else anchors.see(line, anchors.NO_QUORUM)
    print_result(as_json, as_data(nodes), views.node_table(nodes), line)
    if not nodes.has_quorum:
        ctx.exit(1)


@redlock.command()
@click.argument("pattern", default="*", callback=named)
@list_command
def locks(app: Any, pattern: str) -> Listing:
    """Show locks with their holders, and the used starts of rates.

    PATTERN, such as "stock:*", selects resources. The exit status is 2 if too few nodes answer for
    all locks to be known.
    """
    sight = views.locks_like(pattern, redlock_of(app).locks())
    none = "No locks are held." if pattern == "*" else f"No lock is held on {pattern}."
    return Listing(as_data(sight), views.lock_tables(sight, none), sight)


@redlock.command()
@click.argument("pattern", default="*", callback=named)
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
@click.argument("name", callback=named, metavar="RESOURCE|TASK_ID")
@list_command
def show(app: Any, name: str) -> Listing:
    """Show who holds a resource and who waits, or where a task stands.

    The first 8 characters of a task id are enough, if it holds, waits or has a claim.
    The exit status is 2 if too few nodes answer for that to be known, or no worker.
    """
    made = redlock_of(app)
    sight = made.locks()
    everyone = WaitersView.ask(app)
    waiting = everyone.for_resource(name)
    task = None
    shown = sight.of([name])
    if not (shown.locks or shown.rates or waiting.waiting or waiting.registered.processes):
        if views.may_begin_id(name):  # else no key of a claim is read
            ids = [lock.holder.task_id for lock in sight.locks]
            ids += [row["task_id"] for row in everyone.waiting]
            ids += [one.task_id for one in made.claims().claims]
            name = views.whole_id(name, ids)
        task = TaskView.find(app, name, sight, everyone)
    if task is not None:
        shown = sight.of(task.resources)
        waiting = everyone.for_task(name)
    locks = shown.locks
    is_found = locks or shown.rates or waiting.waiting or waiting.registered.processes
    tables = views.lock_tables(shown)[not locks :]  # without the table of no locks
    if task is not None:
        parts: list[str | Table] = [task.table(), *tables]
    elif is_found or not sight.is_known:
        none = f"No lock is held on {name}." if sight.is_known else views.LOCKS_UNKNOWN
        votes = [views.vote_table(sight, locks)] if locks else []
        parts = [*([] if locks else [none]), *tables, *votes, *waiting.tables(name)]
    else:
        parts = [*nothing_found(app, name, everyone.is_known)]
    data = {"resource": name, "task": as_data(task), **as_data(shown), "waiters": waiting.data()}
    if task is not None:
        return Listing(data, parts, sight)
    parts += waiting.notes()
    failing = waiting.registered.failing
    return Listing(data, parts, sight, failing=failing, is_known=everyone.is_known)


@redlock.command()
@click.argument("pattern", default="*", callback=named)
@list_command
def claims(app: Any, pattern: str) -> Listing:
    """Show the claims of deduplicated calls.

    PATTERN, such as "stock:*", selects resources. While a claim stands, a send of the same is a
    duplicate. `break --claim` ends it. The exit status is 2 if too few nodes answer.
    """
    sight = redlock_of(app).claims(pattern)
    return Listing(as_data(sight), [views.claim_table(sight)], sight)


@redlock.command("break")
@click.argument("resource", callback=named)
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
    made = redlock_of(app)
    if claim:
        if permit is not None:
            raise command_error("--permit is of a lock, and --claim of a send: give one of them")
        _end_claims(ctx, made, resource, yes, as_json)
        return
    sight = made.locks(resource)
    found = [lock for lock in sight.locks if permit in (None, lock.permit) and lock.value]
    rates = sight.rates if permit is None else ()
    if not found and not rates:
        raise nothing_to_end(sight, f"no lock is held on {resource}", views.LOCKS_UNKNOWN)
    if not yes:
        _confirm_break(found, rates, err=as_json)
    ended = tuple(break_lock(made.session, lock) for lock in found)
    given_back = tuple(break_rate(made.session, rate) for rate in rates)
    broken = BreakReport(resource, ended, given_back, sight.needed)
    lines = [*map(views.broken_line, broken.locks), *map(views.freed_line, broken.rates)]
    print_result(as_json, as_data(broken), *lines)
    for one in broken.locks:  # after the lines above: a broker may be silent for the whole deadline
        _send_broken(app, one)
    if not broken.is_complete:
        ctx.exit(1)


def _confirm_break(locks: Sequence[LockReport], rates: Sequence[RateReport], *, err: bool) -> None:
    print_all(*(f"{lock.holder} loses {lock_name(lock)}" for lock in locks), err=err)
    for rate in rates:
        print_all(f"{rate.resource} ({rate.rate}) gets {rate.used} used starts back", err=err)
    question = "Its body goes on until its next renewal. Break it?"
    if not locks:
        question = "More bodies may start than the rate says. Give them back?"
    click.confirm(question, abort=True, err=err)


def _send_broken(app: Any, broken: BrokenLock) -> None:
    """Send `task-lock-broken` to monitors; without a broker the lock is broken all the same."""
    resource = broken.lock.resource
    holder = broken.lock.holder

    def send() -> None:
        by = f"{getpass.getuser()}@{socket.gethostname()}"
        result = f"{resource}: its lock is broken by {by}"
        fields = {"resource": resource, "holder": holder.label, "by": by, "result": result}
        with app.events.default_dispatcher() as dispatcher:
            dispatcher.send("task-lock-broken", uuid=holder.task_id, **fields)

    cause = within_deadline(send)[1] if broken.gone_from else ""
    if cause:
        print_all(f"no event is sent: {cause}", err=True)


def _end_claims(ctx: click.Context, made: Redlock, resource: str, yes: bool, as_json: bool) -> None:
    """End the claims on a resource; asks first."""
    sight = made.claims()
    found = [claim for claim in sight.claims if resource in claim.known_as]
    if not found:
        raise nothing_to_end(sight, f"there is no claim on {resource}", views.CLAIMS_UNKNOWN)
    if not yes:
        lines = [f"{one.task}[{one.task_id}] has the claim on {one.resource}" for one in found]
        print_all(*lines, err=as_json)
        text = "Its message still runs, and the next call is not a duplicate. End the claim?"
        click.confirm(text, abort=True, err=as_json)
    ended = [delete_claim(made.session, claim) for claim in found]
    data = {"resource": resource, "claims": as_data(ended)}
    print_result(as_json, data, *map(views.ended_line, ended))
    if any(one.failing and len(one.gone_from) < sight.needed for one in ended):
        ctx.exit(1)


@redlock.command()
@click.argument("nodes", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All nodes.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def trust(ctx: click.Context, nodes: Sequence[str], every: bool, yes: bool, as_json: bool) -> None:
    """Let new or restarted NODES grant locks immediately; asks first.

    Only if no task can still run under a lock that these nodes lost: if they are new, or if no
    worker runs.
    """
    made = redlock_of(app_from(ctx))
    known = [node.name for node in made.session.nodes.all]
    for name in nodes:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
            raise command_error(f"{name} is not a node of this app{hint}")
    chosen = known if every else list(nodes)
    if not chosen:
        raise command_error(f"name the nodes, or --all of them: {', '.join(known)}")
    if not yes:
        holding = [f"{one.holder} holds {lock_name(one)} now" for one in made.locks().locks]
        print_all(*holding, err=as_json)
        text = (
            f"Let {', '.join(chosen)} grant locks immediately? If a task may still run under a "
            "lock that they lost, two tasks can run together."
        )
        click.confirm(escaped(text), abort=True, err=as_json)
    trusted, failing = trust_nodes(made.session.nodes, chosen, made.prefix)
    lines = [
        f"{node} grants locks from now on{name and f'; it has the key {name}'}"
        for node, name in trusted.items()
    ]
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
    made = redlock_of(app_from(ctx))
    node = made.session.nodes.all[0]
    statements = node.address.setup_sql(made.prefix)
    if not statements:
        raise command_error("redlock_nodes names Redis nodes, which need no setup")
    if sql:
        data = json.dumps({"node": node.name, "sql": statements}, indent=2)
        click.echo(data if as_json else statements)
        return
    try:
        did = node.address.create_schema(made.prefix)
    except RedisError as error:
        raise command_error(f"{node.name}: {with_hint(str(error))}") from None
    is_new = did in ("new", "trusted")
    shown = {"node": node.name, "created": is_new, "moved": did == "moved"}
    if is_new:
        shown["trusted"] = did == "trusted"
    print_result(as_json, shown, f"{node.name} has the schema redlock {views.DONE_BY_SETUP[did]}")


@redlock.command()
@click.argument("task", callback=named)
@click.option("--queue", callback=named, help="In this queue, not that of the task's own routing.")
@as_json
@click.pass_context
def options(ctx: click.Context, task: str, queue: str | None, as_json: bool) -> None:
    """Show the options in force for TASK, and where each is set."""
    app = app_from(ctx)
    tasks = {one.name: one for one in locked_tasks(app)}
    if task not in tasks:
        if task in app.tasks:
            hint = "give it base=LockedTask, or name it in redlock_tasks"
            if task.startswith(CELERY_PREFIX):
                hint = "it is Celery's own, and those cannot be locked"
            raise command_error(f"{task} takes no lock: {hint}")
        raise command_error(f"{task} is not a task of this app{did_you_mean(task, tasks)}")
    effective = tasks[task].lock_options(queue)
    rows = {one.name: {"value": one.value, "from": str(one.source)} for one in effective.options}
    data = {"task": effective.task, "queue": effective.queue, "options": rows}
    head, *lines = str(effective).split("\n")
    entry = vars(type(tasks[task])).get(ENTRY)
    by = f", locked by the entry {entry!r} of redlock_tasks" if entry else ""
    print_result(as_json, data, head + by, *lines)


@redlock.command()
@as_json
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check the settings and the nodes.

    The exit status is 1 for an error, or without a quorum.
    """
    app = app_from(ctx)
    made = redlock_of(app)
    nodes_from = settings_of(app).nodes_from
    nodes = made.status()
    recovery = RecoveryTime.of(app)
    lints = (*_lints_of_nodes(made, nodes), *_lints_of_workers(app), *lint(app), *left_open(app))
    lints += recovery.lints
    up = [node for node in nodes.nodes if not node.error and not node.votes]
    found = {
        "from": nodes_from,
        "nodes": len(nodes.nodes),
        "quorum": nodes.needed,
        "voting": nodes.voting,
        "names": [node.node for node in nodes.nodes],
        "failing": [f"{node}: {cause}" for node, cause in nodes.failing.items()],
        "silent": nodes.silent,
        "new": [node.node for node in up if not node.silent_for and node.role == "master"],
    }
    lines = [quorum_line(nodes)]
    for node in nodes.nodes:
        level = ERROR if node.fails else "ok" if node.votes else WARNING
        lines.append(f"{level:<7}  {node.node} ({nodes_from}): {views.vote_of(node, nodes)}")
    lines += [*recovery.lines, *(f"{one.level:<7}  {one}" for one in lints)]
    lines.append(views.summary_line(nodes, lints))
    data = as_data({"nodes": found, "recovery": recovery, "lints": lints})
    print_result(as_json, data, *lines)
    fails = any(node.fails for node in nodes.nodes)
    if not nodes.has_quorum or fails or any(one.level == ERROR for one in lints):
        ctx.exit(1)


def _lints_of_nodes(redlock: Redlock, status: NodeList) -> Iterator[Lint]:
    """Yield errors for shared settings that differ, and warnings of servers and missing rights."""
    for one in status.nodes:
        if one.policy not in ("", "noeviction"):  # an error of the worker is one here, too
            level = ERROR if one.evicts else WARNING
            yield Lint(level, f"{one.node}: maxmemory-policy", one.policy, EVICTS_LOCKS)
        if one.in_cluster:
            yield Lint(WARNING, f"{one.node}: cluster-enabled", "yes", LEAVES_WITH_SLOT)
    if len(status.nodes) == 2:
        hint = "while one of them is away, no lock is granted: name three"
        yield Lint(ADVICE, "app: redlock_nodes", "2 nodes", hint)
    for server in redlock.session.nodes.all:
        for setting, value, hint in server.address.doubts(PATIENCE):
            level = ADVICE if setting == "rights" else WARNING
            yield Lint(level, f"{server.name}: {setting}", value, hint)
    own = shared_settings_of(redlock.session)
    for settings, nodes in compare_shared_settings(redlock.session).items():
        hint = f"according to {', '.join(nodes)}; this app uses {own}: {UNTIL_ALIKE}"
        yield Lint(ERROR, "other clients", settings, hint)
    for node, rights in missing_rights(redlock.session).items():
        hint = "its user lacks them (ACL SETUSER): see operations/security"
        yield Lint(WARNING, node, " ".join(rights), hint)


def _lints_of_workers(app: Any) -> Iterator[Lint]:
    """Yield the running workers with other shared settings, or other names of nodes."""
    own = shared_by(app)
    by_worker, cause = ask_workers(app, redlock_settings.__name__)
    if cause:
        yield Lint(WARNING, "workers: settings", "unknown", f"no worker can be asked: {cause}")
    for worker, theirs in by_worker.items():
        if theirs.get("prefix") != own["prefix"]:  # a worker without this package, or another's
            continue
        if not theirs.get("is_logged", True):
            hint = "lines of the logger 'celery_redlock' are not written: give it a handler"
            yield Lint(WARNING, f"worker {worker}: logging", "no handler", hint)
        if theirs["settings"] != own["settings"]:
            hint = f"this app uses {own['settings']}: {UNTIL_ALIKE}"
            yield Lint(ERROR, f"worker {worker}: settings", f"({theirs['settings']})", hint)
        elif theirs["nodes"] != own["nodes"]:
            hint = f"this app names {', '.join(own['nodes'])}: are these the same servers?"
            yield Lint(WARNING, f"worker {worker}", ", ".join(theirs["nodes"]), hint)
