"""Commands that act: break and trust."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from celery_redlock.lock.client import Redlock
from celery_redlock.lock.held_locks import Standing, break_lock, look_at_locks
from celery_redlock.lock.node_status import trust_nodes
from celery_redlock.operate.cli.group import _loaded, _redlock, redlock
from celery_redlock.operate.cli.render import (
    _failing_as_text,
    _locks_as_data,
    _name_of,
    _print,
    _print_json,
    _refused,
    _say,
    _visible,
    _who,
    as_json,
)
from celery_redlock.operate.control import Holder
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.settings.sources import did_you_mean


@redlock.command("break")
@click.argument("resource")
@click.option("--permit", type=int, help="Only this permit of a semaphore, from 0 on.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def break_(ctx: click.Context, resource: str, permit: int | None, yes: bool, as_json: bool) -> None:
    """Take RESOURCE from its holder; asks first.

    The holder learns of it at its next renewal. Until then its body goes on, and another one may
    run beside it. A lock that is taken while this asks is not touched.
    """
    app = _loaded(ctx)
    made = redlock_of(app)
    sight = look_at_locks(made, resource)
    found = [lock for lock in sight.locks if permit in (None, lock.permit) and lock.value]
    if not found:
        rest = "; ".join(_failing_as_text(sight))
        raise _refused(f"no lock stands on {resource}{rest and f' ({rest})'}")
    if not yes:
        for lock in found:
            _say(f"{_who(lock)} loses {_name_of(lock)}", err=as_json)
        click.confirm("Its body goes on until its next renewal. Break it?", abort=True, err=as_json)
    broken = [Broken.of(made, lock) for lock in found]
    for one in broken:
        one.send_event(app)
    if as_json:
        _print_json({"resource": resource, "broken": [one.as_data() for one in broken]})
    else:
        _print(*(one.as_text() for one in broken))
    if any(one.failing and len(one.gone) < one.lock.needed for one in broken):
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
    made = _redlock(ctx)
    known = [node.name for node in made.session.node_set.nodes]
    for name in nodes:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
            raise _refused(f"{name} is no node of this app{hint}")
    chosen = known if every else list(nodes)
    if not chosen:
        raise _refused(f"name the nodes, or --all of them: {', '.join(known)}")
    if not yes:
        for lock in look_at_locks(made).locks:
            _say(f"{_who(lock)} holds {_name_of(lock)} now", err=as_json)
        text = (
            f"Let {', '.join(chosen)} grant locks at once? If a task may still run under a lock "
            "that they lost, two tasks can run together."
        )
        click.confirm(_visible(text), abort=True, err=as_json)
    stands, failing = trust_nodes(made, chosen)
    if as_json:
        _print_json({"trusted": dict(stands), "failing": dict(failing)})
    else:
        for node, name in stands.items():
            _say(f"{node} grants locks from now on" + (f"; {name} stands there" if name else ""))
        for node, cause in failing.items():
            _say(f"{node} could not be told: {cause}")
    if failing:
        ctx.exit(1)


@dataclass(frozen=True)
class Broken:
    """A lock that was broken. gone: nodes from which it was taken. failing: not told, and why."""

    lock: Standing
    gone: Sequence[str]
    failing: dict[str, str]

    @classmethod
    def of(cls, redlock: Redlock, lock: Standing) -> Broken:
        """Break it."""
        stood, failing = break_lock(redlock, lock)
        return cls(lock, [node for node, gone in stood.items() if gone], dict(failing))

    def send_event(self, app: Any) -> None:
        """Tell monitors; a broker that is away keeps nobody from breaking a lock."""
        holder = Holder.of(self.lock.holder)
        fields = {"resource": self.lock.resource, "holder": self.lock.holder}
        if not self.gone:
            return
        try:
            by = f"{getpass.getuser()}@{socket.gethostname()}"
            fields["result"] = f"{self.lock.resource}: its lock is broken by {by}"
            with app.events.default_dispatcher() as dispatcher:
                dispatcher.send("task-lock-broken", uuid=holder.task_id, by=by, **fields)
        except Exception as error:  # of each transport its own, or a user without a name
            _say(f"no event is sent: {error}", err=True)

    def as_text(self) -> str:
        """Return what came of it."""
        if not self.gone and not self.failing:
            return f"{_name_of(self.lock)} was over before: nothing was broken"
        gone = ", ".join(self.gone)
        text = f"{_name_of(self.lock)} is broken on {gone}; {_who(self.lock)} had it"
        rest = "; ".join(f"{node} could not be told: {why}" for node, why in self.failing.items())
        return f"{text}. {rest}" if rest else text

    def as_data(self) -> dict[str, Any]:
        """Return the same for programs."""
        (lock,) = _locks_as_data([self.lock])
        return {**lock, "gone_from": list(self.gone), "failing": self.failing}
