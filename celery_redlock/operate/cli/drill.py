"""The command `drill`: runs workers of its own on the app's nodes and broker, and strikes them."""

from __future__ import annotations

import random
import re
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from celery_redlock.errors import counted, first_names
from celery_redlock.label import escaped
from celery_redlock.operate.cli.doctor import Examination
from celery_redlock.operate.cli.group import (
    Table,
    app_from,
    as_data,
    as_json,
    command_error,
    format_duration,
    print_all,
    print_result,
    redlock,
)
from celery_redlock.operate.cli.hold import handled_end_signals
from celery_redlock.operate.cli.listing import failing_lines, unknown_lines
from celery_redlock.operate.cli.views import lock_name, quorum_line
from celery_redlock.tasks.per_app import redlock_of

if TYPE_CHECKING:
    from celery_redlock.operate.drill.audit import Audit, Overlap
    from celery_redlock.operate.drill.drill import Drill, DrillReport

SECONDS_IN = {"s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_DRILL = 24 * 3600.0  # seconds
GONE = "its workers, its keys and its queue are gone"
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")


def seconds_of(_: click.Context, param: click.Parameter, value: str) -> float:
    """Return an option's time, as "30s" or "2m", in seconds."""
    found = _TIME.fullmatch(value.strip())
    seconds = float(found[1]) * SECONDS_IN[found[2]] if found is not None else 0.0
    if not 10.0 <= seconds <= LONGEST_DRILL:
        raise click.BadParameter("give a time from 10s to 24h, as 30s or 2m.", param=param)
    return seconds


@redlock.command()
@click.option(
    "--for", "seconds", default="2m", show_default=True, callback=seconds_of, metavar="TIME",
    help="How long it lasts, from 10s on; start and end take at most 20 s more.",
)  # fmt: skip
@click.option("--beside-locks", is_flag=True, help="Also if locks of other clients are held.")
@click.option("--seed", type=int, help="Decides the faults; by chance if not given.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--remove", "left_queue", default="", metavar="QUEUE",
    help="Hold none, but remove what an earlier drill with this queue could not.",
)  # fmt: skip
@as_json
@click.pass_context
def drill(
    ctx: click.Context, seconds: float, beside_locks: bool, seed: int | None, yes: bool,
    left_queue: str, as_json: bool,
) -> None:  # fmt: skip
    """Freeze and kill workers of its own on these nodes and broker.

    It starts three worker processes on this machine, with a queue and locks of their own, and
    removes all of that at its end. The exit status is 1 if two bodies held one lock, if a message
    is lost, if the drill could not be held, or if it could not remove what it made.
    """
    from celery_redlock.operate.drill.drill import Drill, DrillError  # for this command alone

    app = app_from(ctx)
    name = ctx.find_root().params.get("app")
    if not isinstance(name, str):
        raise command_error("name the app, as in `celery -A shop redlock drill`: workers need it")
    if left_queue:
        remove(app, name, left_queue)
        print_result(as_json, {"queue": left_queue}, f"removed: {left_queue}, its keys and locks")
        return
    chosen = random.randrange(10**6) if seed is None else seed  # noqa: S311 - no secret
    planned = Drill(app, name, seconds, chosen, lambda text: print_all(text, err=as_json))
    refuse_if_used(app, beside_locks)
    if not yes:
        text = (
            f"Start 3 workers on this machine, and freeze and kill them for "
            f"{format_duration(seconds)}? They use the queue {planned.queue_name} and locks on "
            f"drill:{planned.token}:* alone."
        )
        click.confirm(text, abort=True, err=as_json)
    planned.count_from_now()
    found = Examination.of(app, asks_workers=False)
    try:
        with calling_at_signals(planned.stop):
            report = planned.hold()
    except KeyboardInterrupt:
        gone = "its workers are gone" if planned.left else GONE
        raise early_end(f"ended by a signal: {gone}", planned, name) from None
    except DrillError as failure:
        raise early_end(str(failure), planned, name) from None
    data = {**as_data(report), "doctor": found.data()}
    print_result(as_json, data, *lines_of(report), "", "What `doctor` finds here:", *found.lines())
    if planned.left:
        text = left_text(planned.left, name, planned.queue_name)
        raise click.ClickException(f"it is not all removed\n{text}")
    if report.audit.is_bad:
        ctx.exit(1)


def remove(app: Any, app_name: str, queue_name: str) -> None:
    """Remove what a drill has left. Raises an error for what is still there."""
    from celery_redlock.operate.drill.own_queue import OwnQueue
    from celery_redlock.operate.drill.removal import drill_token, remove_drill

    if not drill_token(queue_name):
        raise command_error(f"{queue_name} is not the queue of a drill")
    queue = OwnQueue(app, queue_name)
    try:
        left = remove_drill(app, queue)
    finally:
        queue.close()
    if left:
        raise click.ClickException(left_text(left, app_name, queue_name))


def left_text(left: Sequence[str], app_name: str, queue_name: str) -> str:
    """Return what could not be removed, and the command that does so."""
    lines = [f"NOT REMOVED: {line}" for line in left]
    command = f"celery -A {shlex.quote(app_name)} redlock drill --remove {queue_name}"
    return "\n".join([*map(escaped, lines), f"Once that answers again, run: {command}"])


def early_end(cause: str, drill: Drill, app_name: str) -> click.ClickException:
    """Return the error of a drill that has not come to its end, with the overlaps until then."""
    lines = [cause, *map(overlap_line, drill.seen().overlaps)]
    if drill.left:
        lines.append(left_text(drill.left, app_name, drill.queue_name))
    return click.ClickException("\n".join(lines))


@contextmanager
def calling_at_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call a function at each signal that is to end the block, which goes on until it looks."""
    handlers = {number: signal.getsignal(number) for number in handled_end_signals()}
    for number in handlers:
        signal.signal(number, lambda *_: stop())
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def refuse_if_used(app: Any, beside_locks: bool) -> None:
    """Raise an error without a quorum, or if locks of others are held and may not be."""
    made = redlock_of(app)
    nodes = made.status()
    if not nodes.has_quorum:
        raise command_error(f"a drill needs a quorum: {quorum_line(nodes)}")
    if beside_locks:
        return
    sight = made.locks()
    held = [f"{lock_name(lock)} by {lock.holder}" for lock in sight.locks]
    if held:
        raise command_error(
            f"these nodes are in use ({first_names(held)}): with --beside-locks the drill runs "
            "nevertheless, and adds its load"
        )
    if not sight.is_known:
        lines = [*failing_lines(sight.failing), *unknown_lines(sight)]
        raise command_error(f"it is not known whether locks are held: {'; '.join(lines)}")


def lines_of(report: DrillReport) -> list[str | Table]:
    """Return what a drill has seen, for people."""
    seen = report.audit
    rows = [
        ("grants", str(seen.grants)),
        ("overlaps", str(len(seen.overlaps))),
        ("longest idle lock", _time(seen.longest_idle)),
        ("slowest takeover", _time(seen.slowest_takeover)),
        ("recovery", _time(seen.recovery)),
        ("lost", str(len(seen.lost))),
        ("unfinished", str(seen.unfinished)),
        ("faults", _counts(report.faults)),
        ("seed", str(report.seed)),
    ]
    return [Table(("SEEN", "RESULT"), rows, ""), *_verdict(seen)]


def _verdict(seen: Audit) -> list[str]:
    """Return a line for each reason to exit with 1, or one that nothing is wrong."""
    lines = [*map(overlap_line, seen.overlaps)]
    lines += [f"LOST {message}" for message in seen.lost]
    if not seen.grants:
        lines.append("NO LOCK was granted")
    fine = "No two bodies held one lock, and no message is lost."
    return lines or [f"{fine} {counted(seen.unfinished, 'message')} had not ended."]


def overlap_line(overlap: Overlap) -> str:
    messages = " and ".join(overlap.messages)
    return f"OVERLAP of {overlap.seconds:.3f} s on {overlap.resource}: {messages}"


def _time(seconds: float | None) -> str:
    return "none seen" if seconds is None else f"{seconds:.2f} s"


def _counts(faults: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in faults.items()) or "none"
