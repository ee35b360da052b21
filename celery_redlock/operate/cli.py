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
from celery.states import PENDING
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from celery_redlock.errors import SettingsError, abstention_cause, describe_holder
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.held_locks import Sight, Standing, break_lock, look_at_locks
from celery_redlock.lock.node_status import (
    NodeStatus,
    look_at_nodes,
    look_at_shared_settings,
    shared_settings_of,
    trust_nodes,
)
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.operate.control import Holder, in_iso
from celery_redlock.operate.lints import ADVICE, ERROR, WARNING, Lint, facts_of, lint
from celery_redlock.tasks.runtime import redlock_of, settings_of
from celery_redlock.tasks.settings import did_you_mean
from celery_redlock.tasks.states import DEFERRED
from celery_redlock.tasks.task import LockedTask, install, locked_tasks

ANSWERS_IN = 1.0  # s that workers have to say who waits
WIDE = 10_000  # columns where nobody looks, so that no line of a pipe is cut

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


class Told(click.Group):
    """Commands that say what is wrong with the settings in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            named = ctx.find_root().params.get("app") is not None
            hint = "" if named else ". No app is named: celery -A shop redlock ..."
            raise _refused(f"{error}{hint}") from None


@click.group(cls=Told)
def redlock(**_: Any) -> None:
    """Show the locks of tasks, and repair what is wrong with them."""


# what there is to see


@redlock.command()
@as_json
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the lock nodes, and whether each of them votes.

    The exit status is 1 without a quorum.
    """
    view = View.of(_redlock(ctx))
    if as_json:
        _print_json(view.nodes_as_data())
    else:
        _print(view.nodes_as_rows(), view.quorum_as_text())
    if view.voting < view.needed:
        ctx.exit(1)


@redlock.command()
@as_json
@click.pass_context
def locks(ctx: click.Context, as_json: bool) -> None:
    """Show all locks: who holds each, since when, and its votes."""
    sight = look_at_locks(_redlock(ctx))
    if as_json:
        _print_json({"locks": _locks_as_data(sight.locks), "failing": dict(sight.failing)})
    else:
        _print(_locks_as_rows(sight.locks), *_failing_as_text(sight))


@redlock.command()
@as_json
@click.pass_context
def waiters(ctx: click.Context, as_json: bool) -> None:
    """Show the tasks that wait for a lock, and why.

    The workers are asked: without a worker none is known.
    """
    app = _loaded(ctx)
    waiting = Waiters.ask(app)
    if as_json:
        _print_json(asdict(waiting))
    else:
        _print(waiting.as_rows(), *waiting.as_text())


@redlock.command()
@click.argument("name", metavar="RESOURCE|TASK_ID")
@as_json
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show who holds a resource and who waits, or where a task stands."""
    app = _loaded(ctx)
    sight = look_at_locks(redlock_of(app))
    all_ = Waiters.ask(app)
    waiting = all_.of(name)
    locks = [lock for lock in sight.locks if lock.resource == name]
    task = None
    if not locks and not waiting.waiting:
        task = OneTask.find(app, name, sight, all_)
    if task is not None:
        locks = [lock for lock in sight.locks if lock.resource in task.resources]
        waiting = all_.of_task(name)
    if as_json:
        found = {"locks": _locks_as_data(locks), "failing": dict(sight.failing)}
        shown = None if task is None else asdict(task)
        _print_json({"resource": name, "task": shown, **found, "waiters": asdict(waiting)})
        return
    if task is not None:
        _print(task.as_rows())
        _print(*(_locks_as_rows(locks),) if locks else (), *_failing_as_text(sight))
        return
    _print(_locks_as_rows(locks) if locks else f"No lock stands on {name}.")
    _print(*(_votes_as_rows(lock, sight) for lock in locks))
    _print(waiting.as_rows(), *waiting.as_text(), *_failing_as_text(sight))


@redlock.command()
@click.option("--interval", default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--count", type=int, help="How many looks; until Ctrl-C if not given.")
@as_json
@click.pass_context
def top(ctx: click.Context, interval: float, count: int | None, as_json: bool) -> None:
    """Show nodes, locks and waiting tasks, again and again.

    With --json each look is one line.
    """
    app = _loaded(ctx)
    looks = _look_again_and_again(app, interval, count)
    if as_json:
        for view, sight, waiting in looks:
            found = {"locks": _locks_as_data(sight.locks), "waiters": asdict(waiting)}
            click.echo(json.dumps({**view.nodes_as_data(), **found}, default=str))
        return
    with Live(console=_console(), auto_refresh=False) as live:
        for view, sight, waiting in looks:
            shown = view.nodes_as_rows(), _locks_as_rows(sight.locks), waiting.as_rows()
            live.update(Group(*shown, *map(_text, waiting.as_text())), refresh=True)


def _look_again_and_again(
    app: Any, interval: float, count: int | None
) -> Iterator[tuple[View, Sight, Waiters]]:
    made, clock = redlock_of(app), SystemClock()
    for number in itertools.count(1):
        sight = look_at_locks(made)
        yield View.of(made), sight, Waiters.ask(app)
        if number == count:
            return
        clock.sleep(interval)


# what an operator does


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


# what is configured


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
    rows = {one.name: {"value": one.value, "from": str(one.place)} for one in told.options}
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
    own = shared_settings_of(redlock)
    for terms, names in look_at_shared_settings(redlock).items():
        hint = (
            f"so say {', '.join(names)}; this app goes by {own}: until all go by the same, two may "
            "hold one lock"
        )
        yield Lint(ERROR, "other clients", terms, hint)


@dataclass(frozen=True)
class View:
    """The nodes, as they are shown. guard: the restart guard's word. needed: a quorum.

    silence: s for which a new node grants no lock.
    """

    nodes: Sequence[NodeStatus]
    guard: str
    needed: int
    silence: float

    @classmethod
    def of(cls, redlock: Redlock) -> View:
        """Ask them."""
        session = redlock.session
        guard = session.options.guard
        return cls(look_at_nodes(redlock), guard.word, session.node_set.size, guard.grace_period)

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
            return abstention_cause(node.silent_for)
        if node.votes(self.guard):
            return "votes"
        return f"new: will grant no lock for {self.silence:.0f} s from its first use; see `trust`"

    def quorum_as_text(self) -> str:
        """Return whether locks can be had."""
        return f"{self.voting} of {len(self.nodes)} nodes vote, {self.needed} needed"

    def nodes_as_rows(self) -> Rows:
        """Return a row a node."""
        rows = [
            (
                node.node, self.word_of(node), node.server, node.role, in_words(node.uptime),
                f"{node.latency * 1000:.1f} ms", f"{node.clock:+.3f} s", node.policy,
            )
            if not node.error else (node.node, node.error)
            for node in self.nodes
        ]  # fmt: skip
        heads = ("NODE", "VOTE", "SERVER", "ROLE", "UP", "LATENCY", "CLOCK", "EVICTION")
        return Rows(heads, rows, "No nodes are named.")

    def nodes_as_data(self) -> dict[str, Any]:
        """Return the same for programs."""
        nodes = [{**asdict(node), "votes": node.votes(self.guard)} for node in self.nodes]
        return {"guard": self.guard, "needed": self.needed, "voting": self.voting, "nodes": nodes}

    def in_short(self) -> dict[str, Any]:
        """Return for programs which nodes do not vote, and why. new: nobody has used them yet."""
        up = [node for node in self.nodes if not node.error and not node.votes(self.guard)]
        return {
            "nodes": len(self.nodes),
            "quorum": self.needed,
            "voting": self.voting,
            "names": [node.node for node in self.nodes],
            "failing": [f"{node.node}: {node.error}" for node in self.nodes if node.error],
            "silent": {node.node: node.silent_for for node in up if node.silent_for > 0},
            "new": [node.node for node in up if not node.silent_for and node.role == "master"],
        }


@dataclass(frozen=True)
class OneTask:
    """Where one task stands. state: as the result backend says, where it knows.

    resources: that it holds, or waits for. holds: whether it holds them. holder: of what it waits
    for. reason: why it waits. next_try: a moment, ISO 8601.
    """

    task_id: str
    task: str
    state: str
    resources: Sequence[str] = ()
    holds: bool = False
    holder: str = ""
    reason: str = ""
    next_try: str | None = None

    @classmethod
    def find(cls, app: Any, task_id: str, sight: Sight, waiters: Waiters) -> OneTask | None:
        """Return what nodes, workers and result backend know of a task; None if it is nothing."""
        state, info = _state_of(app, task_id)
        held = [lock for lock in sight.locks if Holder.of(lock.holder).task_id == task_id]
        if held:
            name, known = Holder.of(held[0].holder).task, state and state != DEFERRED
            resources = tuple(dict.fromkeys(lock.resource for lock in held))
            return cls(task_id, name, state if known else "STARTED", resources, holds=True)
        for row in waiters.of_task(task_id).waiting:
            resources, tries_at = tuple(row["resources"]), SystemClock().wall_us() / 1e6
            tries_at += row["tries_in"]
            said = (_holder_of(resources, sight), row["reason"], in_iso(tries_at))
            return cls(task_id, row["task"], DEFERRED, resources, False, *said)
        if state != DEFERRED:
            return cls(task_id, "", state) if state else None
        resource, holder = str(info.get("resource", "")), str(info.get("holder", ""))
        said = (_holder_of([resource], sight) or describe_holder(holder), "", info.get("next_try"))
        return cls(task_id, "", DEFERRED, (resource,), False, *said)

    def as_rows(self) -> Rows:
        """Return it for people, one thing a line."""
        name = self.task and f"{self.task}[{self.task_id}]"
        facts = {
            "TASK": name or self.task_id,
            "STATE": self.state,
            "HOLDS" if self.holds else "WAITS FOR": ", ".join(self.resources) or "nothing",
            "HELD BY": self.holder,
            "WHY": self.reason,
            "NEXT TRY": self.next_try or "",
        }
        shown = {head: fact for head, fact in facts.items() if fact}
        return Rows(tuple(shown), [tuple(shown.values())], "", below=True)


def _state_of(app: Any, task_id: str) -> tuple[str, dict[str, Any]]:
    """Return a task's state and info, as its result backend says; "" where that knows nothing."""
    try:
        meta = app.backend.get_task_meta(task_id, cache=False)
    except Exception as error:  # of each backend its own; NotImplementedError where there is none
        if not isinstance(error, NotImplementedError):
            _say(f"the result backend cannot be asked: {error}", err=True)
        return "", {}
    state, info = str(meta["status"]), meta.get("result")
    return "" if state == PENDING else state, info if isinstance(info, dict) else {}


def _holder_of(resources: Sequence[str], sight: Sight) -> str:
    holders = [_who(lock) for lock in sight.locks if lock.held and lock.resource in resources]
    return ", ".join(dict.fromkeys(holders))


@dataclass(frozen=True)
class Waiters:
    """Who waits. workers: those that told of it."""

    workers: Sequence[str]
    waiting: Sequence[dict[str, Any]]

    @classmethod
    def ask(cls, app: Any) -> Waiters:
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
        return cls(sorted(told), waiting)

    def of(self, resource: str) -> Waiters:
        """Return those that wait for one resource."""
        waiting = [row for row in self.waiting if resource in row["resources"]]
        return Waiters(self.workers, waiting)

    def of_task(self, task_id: str) -> Waiters:
        """Return what waits of one task."""
        return Waiters(self.workers, [r for r in self.waiting if r["task_id"] == task_id])

    def as_rows(self) -> Rows:
        """Return a row a message."""
        heads = ("WAITS FOR", "TASK", "ID", "WORKER", "WAITED", "DEFERRALS", "TRIES IN", "WHY")
        rows = [
            (
                ", ".join(row["resources"]), row["task"], row["task_id"], row["worker"],
                in_words(_ago(row["since"])), str(row["deferrals"]), in_words(row["tries_in"]),
                row["reason"],
            )
            for row in self.waiting
        ]  # fmt: skip
        return Rows(heads, rows, "No tasks wait for a lock.")

    def as_text(self) -> list[str]:
        """Return what the table cannot say."""
        if self.workers:
            return []
        return ["no worker answered: what waits in the broker is not known"]


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


def _locks_as_rows(standing: Iterable[Standing]) -> Rows:
    rows = []
    for lock in standing:
        holder = Holder.of(lock.holder)
        held_for = "" if lock.since is None else in_words(_ago(in_iso(lock.since)))
        valid_for = in_words(lock.valid_for) if lock.held else "not held: no quorum"
        votes = f"{len(lock.votes)}, {lock.needed} needed"
        who = (holder.task or holder.label, holder.task_id, holder.worker)
        rows.append((_name_of(lock), *who, held_for, valid_for, votes))
    heads = ("RESOURCE", "HOLDER", "ID", "WORKER", "HELD FOR", "VALID FOR", "VOTES")
    return Rows(heads, rows, "No locks are held.")


def _votes_as_rows(lock: Standing, sight: Sight) -> Rows:
    rows = [(node, in_words(left)) for node, left in lock.votes.items()]
    return Rows(("NODE", "ITS KEY STAYS"), [*rows, *sight.failing.items()], "")


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


class Rows:
    """Rows under heads; one cell a line where the terminal is too narrow for whole names and ids.

    none: what is said where there are no rows. below: one cell a line in any case.
    """

    def __init__(
        self,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        none: str,
        *,
        below: bool = False,
    ) -> None:
        self._heads, self._rows, self._none, self._below = heads, rows, none, below

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._rows:
            yield _text(self._none)
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in self._heads:
            table.add_column(head, no_wrap=True)
        for row in self._rows:
            table.add_row(*map(_text, row))
        needed = Measurement.get(console, options.update(max_width=WIDE), table).maximum
        if needed <= options.max_width and not self._below:
            yield table
        else:
            yield from self._one_below_the_other()

    def _one_below_the_other(self) -> Iterator[Text]:
        width = max(map(len, self._heads))
        for number, row in enumerate(self._rows):
            if number:
                yield Text()
            for head, cell in zip(self._heads, row, strict=False):
                if cell:
                    yield Text(f"{head:<{width}}  ", style="bold", overflow="fold") + _text(cell)


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
    tasks = {task.name: task for task in locked_tasks(app)}
    if name in tasks:
        return tasks[name]
    which = "takes no lock" if name in app.tasks else "is no task here"
    raise _refused(f"{name} {which}{did_you_mean(name, tasks)}")
