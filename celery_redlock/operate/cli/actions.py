"""Commands that change something: break and trust."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from celery_redlock.label import escaped
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.held_locks import LockReport, break_lock, look_at_locks
from celery_redlock.lock.node_status import trust_nodes
from celery_redlock.operate.cli.group import (
    app_from,
    named,
    redlock,
    redlock_from,
    within_deadline,
)
from celery_redlock.operate.cli.node_views import failing_lines, lock_name
from celery_redlock.operate.cli.render import (
    as_data,
    as_json,
    command_error,
    print_all,
    print_json,
    print_line,
)
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.settings.app import did_you_mean


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
    sight = look_at_locks(made, resource)
    found = [lock for lock in sight.locks if permit in (None, lock.permit) and lock.value]
    if not found:
        rest = "; ".join(failing_lines(sight.failing))
        raise command_error(f"no lock stands on {resource}{rest and f' ({rest})'}")
    if not yes:
        for lock in found:
            print_line(f"{lock.holder} loses {lock_name(lock)}", err=as_json)
        click.confirm("Its body goes on until its next renewal. Break it?", abort=True, err=as_json)
    broken = [BrokenLock.of(made, lock) for lock in found]
    if as_json:
        told = [{**as_data(one.lock), **as_data(one)} for one in broken]
        print_json({"resource": resource, "broken": told})
    else:
        print_all(*(one.text() for one in broken))
    for one in broken:  # after the lines above: a broker may be silent for the whole deadline
        one.send_event(app)
    if any(one.failing and len(one.gone_from) < one.lock.needed for one in broken):
        ctx.exit(1)


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
    made = redlock_from(ctx)
    chosen = _chosen_nodes(made, nodes, every)
    if not yes:
        for lock in look_at_locks(made).locks:
            print_line(f"{lock.holder} holds {lock_name(lock)} now", err=as_json)
        text = (
            f"Let {', '.join(chosen)} grant locks at once? If a task may still run under a lock "
            "that they lost, two tasks can run together."
        )
        click.confirm(escaped(text), abort=True, err=as_json)
    trusted, failing = trust_nodes(made, chosen)
    if as_json:
        print_json({"trusted": dict(trusted), "failing": dict(failing)})
    else:
        for node, name in trusted.items():
            also = f"; it has the key {name}" if name else ""
            print_line(f"{node} grants locks from now on{also}")
        for node, cause in failing.items():
            print_line(f"{node} could not be told: {cause}")
    if failing:
        ctx.exit(1)


def _chosen_nodes(redlock: Redlock, named: Sequence[str], every: bool) -> list[str]:
    """Return the names of the nodes to trust; raises ClickException for an unknown or no name."""
    known = [node.name for node in redlock.session.nodes.all]
    for name in named:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
            raise command_error(f"{name} is no node of this app{hint}")
    chosen = known if every else list(named)
    if not chosen:
        raise command_error(f"name the nodes, or --all of them: {', '.join(known)}")
    return chosen


@dataclass(frozen=True)
class BrokenLock:
    """The result of breaking a lock.

    gone_from: the nodes that have deleted the key. failing: by node, why it could not be reached.
    """

    lock: LockReport = field(repr=False)
    gone_from: Sequence[str]
    failing: dict[str, str]

    @classmethod
    def of(cls, redlock: Redlock, lock: LockReport) -> BrokenLock:
        """Break a lock."""
        deleted, failing = break_lock(redlock, lock)
        return cls(lock, [node for node, gone in deleted.items() if gone], dict(failing))

    def send_event(self, app: Any) -> None:
        """Send `task-lock-broken` to monitors; without a broker the lock is broken all the same."""
        if not self.gone_from:
            return
        resource, holder = self.lock.resource, self.lock.holder

        def send() -> None:
            by = f"{getpass.getuser()}@{socket.gethostname()}"
            result = f"{resource}: its lock is broken by {by}"
            fields = {"resource": resource, "holder": holder.label, "by": by, "result": result}
            with app.events.default_dispatcher() as dispatcher:
                dispatcher.send("task-lock-broken", uuid=holder.task_id, **fields)

        _, cause = within_deadline(send)
        if cause:
            print_line(f"no event is sent: {cause}", err=True)

    def text(self) -> str:
        """Return the result in one line."""
        name = lock_name(self.lock)
        if not self.gone_from and not self.failing:
            return f"{name} was over before: nothing was broken"
        text = f"{name} is broken on {', '.join(self.gone_from)}; {self.lock.holder} had it"
        rest = "; ".join(f"{node} could not be told: {why}" for node, why in self.failing.items())
        return f"{text}. {rest}" if rest else text
