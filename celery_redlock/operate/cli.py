"""`celery -A shop redlock ...`: arguments and printing.

Celery loads this by its entry points `celery.commands` before it loads the app, so that an app
which never imports the package has its `redlock_tasks` locked in every process of Celery's own.
What is asked of the nodes needs no worker; who waits is known to the workers alone, which are asked
by Celery's remote control.
"""

from __future__ import annotations

import getpass
import itertools
import json
import math
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from celery_redlock.errors import SettingsError
from celery_redlock.lock.clock import SystemClock
from celery_redlock.lock.inspection import (
    NodeStatus,
    Sight,
    Standing,
    ask_nodes,
    break_lock,
    look_at_locks,
    look_at_nodes,
    look_at_terms,
    terms_of,
    trust_nodes,
)
from celery_redlock.lock.redlock import Redlock
from celery_redlock.operate.control import Holder, in_iso
from celery_redlock.operate.lints import ERROR, Lint, facts_of, lint
from celery_redlock.tasks.runtime import redlock_of
from celery_redlock.tasks.settings import CELERYS, did_you_mean
from celery_redlock.tasks.task import LockedTask, install

ANSWERS_IN = 1.0  # s that workers have to say who waits
WIDE = 300  # columns where nobody looks, so that no line of a pipe is cut

as_json = click.option("--json", "as_json", is_flag=True, help="For programs.")


class Told(click.Group):
    """Commands that say what is wrong with the settings in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            named = ctx.find_root().params.get("app") is not None
            way_out = "" if named else ". No app is named: celery -A shop redlock ..."
            raise _refused(f"{error}{way_out}") from None


@click.group(cls=Told)
def redlock(**_: Any) -> None:
    """Locks of tasks: who holds them, who waits, what holds for them, and what is wrong."""


# what there is to see


@redlock.command()
@as_json
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the nodes: whether they answer and vote, and how they are set up; 1 without a quorum."""
    view = View.of(_redlock(ctx))
    if as_json:
        _print_json(view.nodes_as_data())
    else:
        _print(view.nodes_as_table(), view.quorum_as_text())
    if view.voting < view.needed:
        ctx.exit(1)


@redlock.command()
@as_json
@click.pass_context
def locks(ctx: click.Context, as_json: bool) -> None:
    """Show every lock that stands on the nodes: its holder, since when, and its votes."""
    sight = look_at_locks(_redlock(ctx))
    if as_json:
        _print_json({"locks": _locks_as_data(sight.locks), "failing": dict(sight.failing)})
    else:
        _print(_locks_as_table(sight.locks), *_failing_as_text(sight))


@redlock.command()
@as_json
@click.pass_context
def waiters(ctx: click.Context, as_json: bool) -> None:
    """Show the messages that wait for a lock, as the workers tell; without one, none is known."""
    app = _loaded(ctx)
    waiting = Waiters.ask(app, look_at_locks(redlock_of(app)))
    if as_json:
        _print_json(asdict(waiting))
    else:
        _print(waiting.as_table(), *waiting.as_text())


@redlock.command()
@click.argument("resource")
@as_json
@click.pass_context
def show(ctx: click.Context, resource: str, as_json: bool) -> None:
    """Show who holds RESOURCE, node by node, and who waits for it."""
    app = _loaded(ctx)
    sight = look_at_locks(redlock_of(app), resource)
    waiting = Waiters.ask(app, sight).of(resource)
    if as_json:
        found = {"locks": _locks_as_data(sight.locks), "failing": dict(sight.failing)}
        _print_json({"resource": resource, **found, "waiters": asdict(waiting)})
        return
    for lock in sight.locks:
        _print(f"{_name_of(lock)}: {_who(lock)}", _votes_as_table(lock, sight))
    none = () if sight.locks else (f"no lock stands on {resource}",)
    _print(*none, waiting.as_table(), *waiting.as_text(), *_failing_as_text(sight))


@redlock.command()
@click.option("--interval", default=2.0, show_default=True, help="S between two looks.")
@click.option("--count", type=int, help="Looks; without it, until Ctrl-C.")
@as_json
@click.pass_context
def top(ctx: click.Context, interval: float, count: int | None, as_json: bool) -> None:
    """Show nodes, locks and waiters, again and again; with --json one line for each look."""
    app = _loaded(ctx)
    looks = _look_again_and_again(app, interval, count)
    if as_json:
        for view, sight, waiting in looks:
            found = {"locks": _locks_as_data(sight.locks), "waiters": asdict(waiting)}
            click.echo(json.dumps({**view.nodes_as_data(), **found}, default=str))
        return
    with Live(console=_console(), auto_refresh=False) as live:
        for view, sight, waiting in looks:
            shown = view.nodes_as_table(), _locks_as_table(sight.locks), waiting.as_table()
            live.update(Group(*shown, *map(_text, waiting.as_text())), refresh=True)


def _look_again_and_again(
    app: Any, interval: float, count: int | None
) -> Iterator[tuple[View, Sight, Waiters]]:
    made, clock = redlock_of(app), SystemClock()
    for number in itertools.count(1):
        sight = look_at_locks(made)
        yield View.of(made), sight, Waiters.ask(app, sight)
        if number == count:
            return
        clock.sleep(interval)


# what an operator does


@redlock.command("break")
@click.argument("resource")
@click.option("--permit", type=int, help="Of a semaphore this permit alone; the first one is 0.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def break_(ctx: click.Context, resource: str, permit: int | None, yes: bool, as_json: bool) -> None:
    """Take RESOURCE from its holder, which learns of it at its next renewal; asks first.

    Until then the holder's body goes on, and another one may run beside it. Nobody else's lock is
    touched: who takes RESOURCE while this asks keeps it.
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
    """Vouch for NODES (host:port) that are new or lost their data: they vote at once; asks first.

    Only where no lock can be held that they have forgotten: nothing runs, or all was waited for.
    """
    made = _redlock(ctx)
    known = [node.name for node in made.session.quorum.nodes]
    for name in nodes:
        if name not in known:
            way_out = did_you_mean(name, known) or f"; known are {', '.join(known)}"
            raise _refused(f"{name} is no node of this app{way_out}")
    chosen = known if every else list(nodes)
    if not chosen:
        raise _refused(f"name the nodes, or --all of them: {', '.join(known)}")
    if not yes:
        for lock in look_at_locks(made).locks:
            _say(f"{_who(lock)} holds {_name_of(lock)} now", err=as_json)
        text = f"Can no lock be held now that {', '.join(chosen)} forgot?"
        click.confirm(text, abort=True, err=as_json)
    stands, failing = trust_nodes(made, chosen)
    if as_json:
        _print_json({"trusted": dict(stands), "failing": dict(failing)})
    else:
        for node, name in stands.items():
            _say(f"{node} votes from now on" + (f"; {name} stands there" if name else ""))
        for node, cause in failing.items():
            _say(f"{node} could not be told: {cause}")
    if failing:
        ctx.exit(1)


# what is configured


@redlock.command()
@click.argument("task")
@click.option("--queue", help="As in this queue, instead of the one of the task's own routing.")
@as_json
@click.pass_context
def rules(ctx: click.Context, task: str, queue: str | None, as_json: bool) -> None:
    """Show the options in force for TASK, and where each of them is set."""
    told = _locked(_loaded(ctx), task).lock_rules(queue)
    if not as_json:
        for line in str(told).split("\n"):
            _say(line)
        return
    rows = {rule.name: {"value": rule.value, "from": str(rule.place)} for rule in told.rules}
    _print_json({"task": told.task, "queue": told.queue, "rules": rows})


@redlock.command()
@as_json
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Say what is wrong with the settings, and which nodes vote; 1 for an error or no quorum."""
    app = _loaded(ctx)
    made = redlock_of(app)
    nodes, found = ask_nodes(made), (*_terms_that_differ(made), *lint(facts_of(app)))
    if as_json:
        shown = {**asdict(nodes), "voting": nodes.voting}
        _print_json({"nodes": shown, "lints": [asdict(one) for one in found]})
    else:
        _say(f"{nodes.voting} of {nodes.nodes} nodes vote, {nodes.quorum} needed")
        for failing in nodes.failing:
            _say(f"error    {failing}")
        for node, left in nodes.silent.items():
            _say(f"warning  {node}: silent for {left:.0f} s more (restart guard)")
        for one in found:
            _say(f"{one.level:<7}  {one}")
    if nodes.voting < nodes.quorum or any(one.level == ERROR for one in found):
        ctx.exit(1)


def _terms_that_differ(redlock: Redlock) -> Iterator[Lint]:
    """Give what other clients of these nodes go by, if not what this one does."""
    own = terms_of(redlock)
    for terms, names in look_at_terms(redlock).items():
        way_out = (
            f"so say {', '.join(names)}; this app goes by {own}: until all go by the same, two may "
            "hold one lock"
        )
        yield Lint(ERROR, "other clients", terms, way_out)


@dataclass(frozen=True)
class View:
    """The nodes, as they are shown. guard: the restart guard's word. needed: a quorum."""

    nodes: Sequence[NodeStatus]
    guard: str
    needed: int

    @classmethod
    def of(cls, redlock: Redlock) -> View:
        """Ask them."""
        session = redlock.session
        return cls(look_at_nodes(redlock), session.setup.guard.word, session.quorum.size)

    @property
    def voting(self) -> int:
        """How many vote."""
        return sum(node.votes(self.guard) for node in self.nodes)

    def word_of(self, node: NodeStatus) -> str:
        """Return whether a node votes, in words."""
        if node.error:
            return node.error
        if node.role != "master":
            return f"no vote: it is a {node.role or 'server of an unknown role'}"
        if node.silent_for > 0:
            return f"silent for {node.silent_for:.0f} s more (restart guard)"
        return "votes" if node.votes(self.guard) else "silent at its first lock: see `trust`"

    def quorum_as_text(self) -> str:
        """Return whether locks can be had."""
        return f"{self.voting} of {len(self.nodes)} nodes vote, {self.needed} needed"

    def nodes_as_table(self) -> Table:
        """Return a row a node."""
        table = _table("NODE", "VOTE", "SERVER", "ROLE", "UP", "LATENCY", "CLOCK", "EVICTION")
        for node in self.nodes:
            facts = (
                node.server, node.role, in_words(node.uptime), f"{node.latency * 1000:.1f} ms",
                f"{node.clock:+.3f} s", node.policy,
            )  # fmt: skip
            _add(table, node.node, self.word_of(node), *(() if node.error else facts))
        return table

    def nodes_as_data(self) -> dict[str, Any]:
        """Return the same for programs."""
        nodes = [{**asdict(node), "votes": node.votes(self.guard)} for node in self.nodes]
        return {"guard": self.guard, "needed": self.needed, "voting": self.voting, "nodes": nodes}


@dataclass(frozen=True)
class Waiters:
    """Who waits. workers: those that told of it. noted: runs that the nodes know, by coalesce."""

    workers: Sequence[str]
    waiting: Sequence[dict[str, Any]]
    noted: Sequence[dict[str, Any]]

    @classmethod
    def ask(cls, app: Any, sight: Sight) -> Waiters:
        """Ask the workers; none answers where the broker is away."""
        try:
            replies = app.control.broadcast("redlock_waiting", reply=True, timeout=ANSWERS_IN) or ()
        except Exception as error:  # of each transport its own
            _say(f"the broker cannot be asked who waits: {error}", err=True)
            replies = ()
        told = {worker: rows for reply in replies for worker, rows in reply.items()}
        waiting = [
            {**row, "worker": worker}
            for worker, rows in told.items()
            if isinstance(rows, list)  # a worker without this package says that it does not know
            for row in rows
        ]
        waiting.sort(key=lambda row: str(row["since"]))
        return cls(sorted(told), waiting, [asdict(one) for one in sight.waiting])

    def of(self, resource: str) -> Waiters:
        """Return those that wait for one resource."""
        waiting = [row for row in self.waiting if resource in row["resources"]]
        return Waiters(self.workers, waiting, self.noted)

    def as_table(self) -> Table:
        """Return a row a message."""
        table = _table("WAITS FOR", "TASK", "ID", "WORKER", "WAITED", "DEFERRALS", "TRIES IN")
        for row in self.waiting:
            _add(table,
                ", ".join(row["resources"]), row["task"], row["task_id"], row["worker"],
                in_words(_ago(row["since"])), str(row["deferrals"]), in_words(row["tries_in"]),
            )  # fmt: skip
        return table

    def as_text(self) -> list[str]:
        """Return what the table cannot say."""
        said = [f"{r['run']} waits for {r['resource']} (coalesce)" for r in self.noted]
        if not self.workers:
            said.append("no worker answered: what waits in the broker is not known")
        return said


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


def in_words(seconds: float) -> str:
    """Return a time in the two largest units that it has."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, size, lesser, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {lesser}"
    return f"{whole // 60} min {whole % 60} s"


def _ago(moment: str | None) -> float:
    """Return the s since a moment, ISO 8601."""
    if moment is None:
        return 0.0
    then = datetime.fromisoformat(moment)
    now = datetime.fromtimestamp(SystemClock().wall_us() / 1e6, then.tzinfo)
    return max(0.0, (now - then) / timedelta(seconds=1))


def _name_of(lock: Standing) -> str:
    return f"{lock.resource} (permit {lock.permit})" if lock.permit else lock.resource


def _who(lock: Standing) -> str:
    holder = Holder.of(lock.holder)
    return f"{holder.task}[{holder.task_id}] on {holder.worker}" if holder.task else holder.label


def _locks_as_table(standing: Iterable[Standing]) -> Table:
    table = _table("RESOURCE", "HOLDER", "HELD FOR", "VALID FOR", "VOTES")
    for lock in standing:
        held_for = "" if lock.since is None else in_words(_ago(in_iso(lock.since)))
        valid_for = in_words(lock.valid_for) if lock.held else "not held: no quorum"
        votes = f"{len(lock.votes)}, {lock.needed} needed"
        _add(table, _name_of(lock), _who(lock), held_for, valid_for, votes)
    return table


def _votes_as_table(lock: Standing, sight: Sight) -> Table:
    table = _table("NODE", "ITS KEY STAYS")
    for node, left in lock.votes.items():
        _add(table, node, in_words(left))
    for node, cause in sight.failing.items():
        _add(table, node, cause)
    return table


def _locks_as_data(standing: Iterable[Standing]) -> list[dict[str, Any]]:
    return [
        {
            "resource": lock.resource,
            "permit": lock.permit,
            "holder": asdict(Holder.of(lock.holder)),
            "since": in_iso(lock.since),
            "held_for": None if lock.since is None else _ago(in_iso(lock.since)),
            "held": lock.held,
            "valid_for": _finite(lock.valid_for),
            "votes": {node: _finite(left) for node, left in lock.votes.items()},
            "needed": lock.needed,
        }
        for lock in standing
    ]


def _finite(seconds: float) -> float | None:
    """Return s; None for those without an end, which JSON has no number for."""
    return None if math.isinf(seconds) else seconds


def _failing_as_text(sight: Sight) -> list[str]:
    return [f"{node} is not asked: {cause}" for node, cause in sight.failing.items()]


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(_text, cells))


def _text(cell: str) -> Text:
    return Text(_visible(cell))  # a str is markup, in which a name in brackets would be lost


def _visible(text: str) -> str:
    """Return a line with its control characters spelled out.

    Whoever names a resource, or answers as a node, is not to command the operator's terminal.
    """
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def _say(line: str, *, err: bool = False) -> None:
    click.echo(_visible(line), err=err)


def _refused(why: str) -> click.ClickException:
    return click.ClickException(_visible(why))


def _console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=WIDE)


def _print(*shown: Any) -> None:
    console = _console()
    for one in shown:
        line = isinstance(one, str)
        shown_as = _visible(one) if line else one
        console.print(shown_as, markup=False, highlight=False, soft_wrap=line)


def _print_json(shown: Any) -> None:
    click.echo(json.dumps(shown, indent=2, default=str))


def _redlock(ctx: click.Context) -> Redlock:
    return redlock_of(_loaded(ctx))


def _loaded(ctx: click.Context) -> Any:
    app = ctx.find_root().obj.app
    app.loader.import_default_modules()
    app.finalize()
    install(app)
    return app


def _locked(app: Any, name: str) -> LockedTask:
    tasks = {name: task for name, task in app.tasks.items() if isinstance(task, LockedTask)}
    names = [name for name in tasks if not name.startswith(CELERYS)]
    if name in names:
        return tasks[name]
    which = "takes no lock" if name in app.tasks else "is no task here"
    raise _refused(f"{name} {which}{did_you_mean(name, names)}")
