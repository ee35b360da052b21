"""Commands that change something: break and trust."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from celery_redlock.errors import escaped
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.held_locks import Standing, break_lock, look_at_locks
from celery_redlock.lock.node_status import trust_nodes
from celery_redlock.operate.cli.group import (
    app_from,
    named,
    redlock,
    redlock_from,
    within_deadline,
)
from celery_redlock.operate.cli.lock_views import failing_lines, holder_text, lock_data, lock_name
from celery_redlock.operate.cli.render import (
    as_json,
    command_error,
    print_all,
    print_json,
    print_line,
)
from celery_redlock.operate.control import Holder
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.settings.sources import did_you_mean


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
            print_line(f"{holder_text(lock)} loses {lock_name(lock)}", err=as_json)
        click.confirm("Its body goes on until its next renewal. Break it?", abort=True, err=as_json)
    broken = [BrokenLock.of(made, lock) for lock in found]
    if as_json:
        print_json({"resource": resource, "broken": [one.data() for one in broken]})
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
            print_line(f"{holder_text(lock)} holds {lock_name(lock)} now", err=as_json)
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
    known = [node.name for node in redlock.session.node_set.nodes]
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

    lock: Standing
    gone_from: Sequence[str]
    failing: dict[str, str]

    @classmethod
    def of(cls, redlock: Redlock, lock: Standing) -> BrokenLock:
        """Break a lock."""
        deleted, failing = break_lock(redlock, lock)
        return cls(lock, [node for node, gone in deleted.items() if gone], dict(failing))

    def send_event(self, app: Any) -> None:
        """Send `task-lock-broken` to monitors; without a broker the lock is broken all the same."""
        if not self.gone_from:
            return
        holder = Holder.of(self.lock.holder)
        fields = {"resource": self.lock.resource, "holder": self.lock.holder}
        try:
            by = f"{getpass.getuser()}@{socket.gethostname()}"
            fields["result"] = f"{self.lock.resource}: its lock is broken by {by}"

            def send() -> None:
                with app.events.default_dispatcher() as dispatcher:
                    dispatcher.send("task-lock-broken", uuid=holder.task_id, by=by, **fields)

            within_deadline(send)
        except Exception as error:  # each transport has its own; or the user has no name
            print_line(f"no event is sent: {error}", err=True)

    def text(self) -> str:
        """Return the result in one line."""
        name = lock_name(self.lock)
        if not self.gone_from and not self.failing:
            return f"{name} was over before: nothing was broken"
        text = f"{name} is broken on {', '.join(self.gone_from)}; {holder_text(self.lock)} had it"
        rest = "; ".join(f"{node} could not be told: {why}" for node, why in self.failing.items())
        return f"{text}. {rest}" if rest else text

    def data(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            **lock_data(self.lock),
            "gone_from": list(self.gone_from),
            "failing": self.failing,
        }
