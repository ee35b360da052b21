"""The command `uninstall`: removes what the package leaves on nodes and broker.

It lists all of it first, and removes nothing while somebody uses it. What expires by itself is only
listed. Not here: what is on the nodes, and how it is removed (`lock/removal.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click
from redis import RedisError

from celery_redlock.errors import counted, first_names
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.removal import (
    GOES,
    STAYS,
    KeyGroup,
    is_schema,
    list_keys,
    remove_from_nodes,
    uses_of_schema,
)
from celery_redlock.lock.server.error_hints import with_hint
from celery_redlock.operate.cli.group import (
    Table,
    app_from,
    as_data,
    as_json,
    print_all,
    print_result,
    redlock,
)
from celery_redlock.operate.cli.views import ask_workers
from celery_redlock.operate.control import redlock_settings
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.recovery.survey import (
    DEAD,
    SILENT,
    LeaseReport,
    Survey,
    open_survey,
)

BROKER = "broker"
SCHEMA = "schema redlock"
# Source: kombu.pidbox: the answer of a worker that has no such command
WITHOUT_PACKAGE = {"error": repr(KeyError(redlock_settings.__name__))}


@dataclass(frozen=True)
class Remains:
    """What an app has on its nodes and its broker.

    keys: of each server. reasons: why nothing may be removed now, a line each. notes: what an
    operator should know. leases: the dead worker leases, with the last beat of one that is not yet
    declared dead.
    """

    keys: tuple[KeyGroup, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    leases: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, app: Any, *, err: bool) -> Remains:
        """Ask workers, nodes and broker. err: print to stderr what it waits for."""
        workers = cls(reasons=tuple(_reasons_of_workers(app)))
        parts = (workers, _on_nodes(app), _on_broker(app, err=err))
        return cls(
            tuple(group for part in parts for group in part.keys),
            tuple(reason for part in parts for reason in part.reasons),
            tuple(note for part in parts for note in part.notes),
            {lease: beat for part in parts for lease, beat in part.leases.items()},
        )

    @property
    def is_removable(self) -> bool:
        """Whether there is something to remove."""
        return any(group.fate == GOES for group in self.keys)

    def table(self) -> Table:
        rows = [
            (
                group.place, group.what, str(group.count),
                f"{group.fate} by {group.until}" if group.until else group.fate,
            )
            for group in self.keys
        ]  # fmt: skip
        return Table(("PLACE", "WHAT", "KEYS", "FATE"), rows, "Nothing of this prefix is left.")

    def data(self, *, dry_run: bool, removed: bool) -> dict[str, Any]:
        """Return all for JSON. removed: whether what goes is gone."""
        found = {"keys": self.keys, "reasons": self.reasons, "notes": self.notes}
        return {"dry_run": dry_run, "removed": removed, **as_data(found)}


def _reasons_of_workers(app: Any) -> Iterator[str]:
    """Yield the workers that answer and have the package, unless their prefix is another."""
    by_worker, cause = ask_workers(app, redlock_settings.__name__)
    if cause:
        yield f"no worker can be asked whether it runs: {cause}"
    prefix = settings_of(app).prefix
    for worker, answer in sorted(by_worker.items()):
        if answer != WITHOUT_PACKAGE and answer.get("prefix", prefix) == prefix:
            yield f"{worker} runs with this package"


def _on_nodes(app: Any) -> Remains:
    session = redlock_of(app).session
    uses: Sequence[str] | None = ()
    if is_schema(session):
        name = session.nodes.all[0].name
        try:
            uses = uses_of_schema(session)
        except RedisError as error:
            return Remains(reasons=(f"{name} cannot be asked: {with_hint(str(error))}",))
        if uses is None:
            return Remains()
    by_node, failures = list_keys(session)
    keys = [group for found in by_node.values() for group in found.groups]
    if is_schema(session):
        keys = [replace(group, fate=GOES) if group.fate == STAYS else group for group in keys]
        keys.append(KeyGroup(session.nodes.all[0].name, SCHEMA, 1, GOES))
    locked = {name: node for node, found in by_node.items() for name in found.locked}
    heard = {name: node for node, found in by_node.items() for name in found.listening}
    reasons = [f"{node} cannot be asked: {cause}" for node, cause in failures.items()]
    if locked:
        reasons.append(f"locks are held: {first_names(sorted(locked))}")
    if heard:
        reasons.append(f"clients wait for locks: {first_names(sorted(heard))}")
    return Remains(tuple(keys), (*reasons, *(uses or ())))


def _on_broker(app: Any, *, err: bool) -> Remains:
    try:
        with open_survey(app) as survey:
            return Remains() if survey is None else _leases_on(survey, err=err)
    except RedisError as error:
        return Remains(reasons=(f"the broker cannot be asked: {error}",))


def _leases_on(survey: Survey, *, err: bool) -> Remains:
    """Return the worker leases; those that are silent are proved dead first."""
    reports = [report for report in survey.leases() if report.lease]
    silent = [report.lease for report in reports if report.state == SILENT]
    if silent:
        print_all("waits until it is sure that no beat comes from silent workers", err=err)
    dead = survey.proved_dead(SystemClock(), silent) if silent else {}
    dead |= {report.lease: "" for report in reports if report.state == DEAD}
    reasons = [
        f"the worker lease of {_worker_of(report)} is alive"
        for report in reports
        if report.lease not in dead
    ]
    notes = [
        f"{counted(report.messages, 'message')} of {_worker_of(report)} are unacknowledged: first "
        "run `recover`, or they come back after the visibility timeout"
        for report in reports
        if report.messages and report.lease in dead
    ]
    keys = (KeyGroup(BROKER, "worker leases", len(dead), GOES),) if dead else ()
    return Remains(keys, tuple(reasons), tuple(notes), dead)


def _worker_of(report: LeaseReport) -> str:
    return report.worker or "a worker"


def forget_leases(app: Any, leases: Mapping[str, str]) -> str:
    """Forget dead worker leases; return why they stay, "" if they do not.

    leases: as in `Remains`. One that has beaten since stays.
    """
    try:
        with open_survey(app) as survey:
            if survey is not None:
                for lease, beat in leases.items():
                    if not beat or survey.ledger.declare_dead(lease, beat):
                        survey.ledger.forget(lease)
    except RedisError as error:
        return str(error)
    return ""


def remove_remains(app: Any, remains: Remains) -> list[str]:
    """Remove what goes; return a line for all that stays after all."""
    try:
        reasons, failures = remove_from_nodes(redlock_of(app).session)
    except RedisError as error:
        return [f"the schema is not dropped: {with_hint(str(error))}"]
    left = [*reasons, *(f"{node} was not changed: {cause}" for node, cause in failures.items())]
    if not reasons and remains.leases:
        cause = forget_leases(app, remains.leases)
        left += [f"the broker was not changed: {cause}"] if cause else []
    return left


@redlock.command()
@click.option("--dry-run", is_flag=True, help="List what would go, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def uninstall(ctx: click.Context, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove what the package leaves on nodes and broker; asks first.

    Only if no worker with this package answers or may live, no client is connected, and no lock is
    held. What expires by itself is listed, and stays until then. The exit status is 1 if nothing
    may be removed.
    """
    app = app_from(ctx)
    remains = Remains.of(app, err=as_json)
    print_all(remains.table(), *remains.notes, err=as_json)
    if remains.is_removable and not (dry_run or yes or remains.reasons):
        click.confirm("Remove what goes?", abort=True, err=as_json)
        remains = Remains.of(app, err=as_json)  # the answer may have taken long
    left = list(remains.reasons)
    removes = remains.is_removable and not dry_run and not left
    if removes:
        left = remove_remains(app, remains)
        remains = replace(remains, reasons=tuple(left))
    data = remains.data(dry_run=dry_run, removed=removes and not left)
    label = "not removed" if removes else "refused"
    lines = [f"{label}: {line}" for line in left] or (["removed"] if removes else [])
    print_result(as_json, data, *lines)
    if left and not dry_run:
        ctx.exit(1)
