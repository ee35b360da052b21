"""The command `recover`: moves the messages of dead workers back to their queues.

Without an option it does what a worker does, and as safely. With `--older-than` it also takes what
no worker lease protects: of such a message nobody knows whether its worker lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from redis import RedisError

from celery_redlock.errors import counted
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.operate.cli.group import (
    Table,
    app_from,
    as_data,
    as_json,
    command_error,
    finite,
    format_duration,
    print_all,
    print_result,
    redlock,
)
from celery_redlock.operate.cli.stranded import BY_HAND, MOVED_TOO_OFTEN
from celery_redlock.operate.cli.views import ask_workers
from celery_redlock.tasks.recovery.ledger import Moved
from celery_redlock.tasks.recovery.survey import (
    DEAD,
    SILENT,
    LeaseReport,
    Survey,
    Unacknowledged,
    open_survey,
)
from celery_redlock.tasks.recovery.tags import moved

LONGEST_AGE = 10 * 366 * 86_400.0  # s
ASKED = ("active", "reserved", "scheduled", "redlock_waiting")  # of workers: what each has
NO_LEASES = "this broker has no worker leases: only kombu's own transport for Redis has them"
UNKNOWN_TASK = "of tasks that this app does not know"
UNKNOWN_QUEUE = "of no queue, or of several, that this app knows"


@dataclass(frozen=True)
class Recovered:
    """What became of the messages of one worker lease, or of those without one.

    worker: its name. tasks: how many there were, by task. messages: how many were moved. kept: were
    moved too often. changed: are acknowledged, or were taken anew meanwhile. refused: why the
    broker did not take one back, or "".
    """

    worker: str
    tasks: Mapping[str, int]
    messages: int = 0
    kept: int = 0
    changed: int = 0
    refused: str = ""

    def lines(self) -> list[str]:
        """Return what was done, for people."""
        of = self.worker and f" of {self.worker}"
        lines = [f"moved {counted(self.messages, 'message')}{of} back to their queues"]
        if self.kept:
            text = f"left {counted(self.kept, 'message')}{of}: {MOVED_TOO_OFTEN}; {BY_HAND}"
            lines.append(text)
        if self.changed:
            lines.append(f"left {counted(self.changed, 'message')}{of}: acknowledged or taken anew")
        if self.refused:
            lines.append(f"the broker does not take back all messages{of}: {self.refused}")
        return lines


@dataclass(frozen=True)
class Older:
    """The messages without a worker lease that are to be moved. left: how many are not, and why.

    lists: where each goes, by delivery tag.
    """

    messages: Sequence[Unacknowledged] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def find(cls, survey: Survey, seconds: float) -> Older:
        messages = []
        lists = dict[str, str]()
        left = Counter[str]()
        for message in survey.older_than(seconds):
            name = survey.list_of(message)
            if message.task not in survey.app.tasks:
                left[UNKNOWN_TASK] += 1
            elif not name:
                left[UNKNOWN_QUEUE] += 1
            else:
                messages.append(message)
                lists[message.tag] = name
        return cls(messages, lists, left)

    @property
    def tasks(self) -> Counter[str]:
        return _by_task(self.messages)

    def table(self) -> Table:
        oldest = dict[str, float]()
        for one in self.messages:
            oldest[one.task] = max(one.taken_for, oldest.get(one.task, 0.0))
        rows = [
            (task, str(count), f"{format_duration(oldest[task])} ago")
            for task, count in sorted(self.tasks.items())
        ]
        none = "No message without a worker lease was taken that long ago."
        return Table(("TASK", "MESSAGES", "FIRST TAKEN"), rows, none)

    def left_lines(self) -> list[str]:
        return [f"left {counted(number, 'message')} {why}" for why, number in self.left.items()]

    def refuse_if_alive(self, app: Any) -> None:
        """End the command if a worker that answers has one of the messages."""
        ids = {one.task_id: one.task for one in self.messages}
        for command in ASKED if ids else ():
            by_worker, cause = ask_workers(app, command)
            if cause:
                raise command_error(f"no worker can be asked what it runs: {cause}")
            for worker, rows in by_worker.items():
                found = Counter(ids[one] for one in _ids_in(rows) if one in ids)
                if found:
                    names = ", ".join(f"{count} of {task}" for task, count in found.items())
                    raise command_error(
                        f"{worker} lives and has some of these messages ({names}), so none is "
                        "moved: end it first, or give a longer time"
                    )

    def move(self, survey: Survey) -> Recovered:
        """Move the messages, but for those that were taken anew since they were found."""
        taken = survey.taken([one.tag for one in self.messages])
        same = [one for one in self.messages if taken.get(one.tag) == one.taken]
        made = [(one.tag, self.lists[one.tag], moved(one.entry, anew=True)) for one in same]
        done = survey.ledger.move((tag, name, text) for tag, name, text in made if text is not None)
        changed = len(self.messages) - done.messages if not done.refused else 0
        return Recovered("", self.tasks, done.messages, 0, changed, done.refused)


def _by_task(messages: Sequence[Unacknowledged]) -> Counter[str]:
    return Counter(one.task or "?" for one in messages)


def _ids_in(rows: Any) -> list[str]:
    """Return the ids of the tasks in what a worker answers; none of one that does not know it."""
    found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    scheduled = [row["request"] for row in found if isinstance(row.get("request"), dict)]
    return [str(row.get("id") or row.get("task_id") or "") for row in (*found, *scheduled)]


def recover_dead(survey: Survey, *, moves: bool, err: bool) -> list[Recovered]:
    """Move what has a dead worker lease, after the proof for those that are silent.

    err: the command's own lines go to stderr. Return what was done, or there is to do.
    """
    if moves:
        survey.ledger.recall()  # as a worker does at its start
    reports = {one.lease: one for one in survey.leases() if one.state in (SILENT, DEAD)}
    silent = {name: one for name, one in reports.items() if one.state == SILENT and one.messages}
    proved = dict[str, str]()
    if silent:
        names = ", ".join(map(_name_of, silent.values()))
        print_all(f"waits until it is sure that no beat comes from {names}", err=err)
        proved = survey.proved_dead(SystemClock(), silent)
    dead = [lease for lease, one in reports.items() if one.state == DEAD or lease in proved]
    found = survey.messages_of(dead)
    recovered = []
    for lease in dead:
        done = Moved()
        messages = found[lease]
        if moves and (lease not in proved or survey.ledger.declare_dead(lease, proved[lease])):
            done = survey.ledger.move_all(lease)
        name = _name_of(reports[lease])
        tasks = _by_task(messages)
        if messages:
            recovered.append(Recovered(name, tasks, done.messages, done.kept, 0, done.refused))
    return recovered


def _name_of(report: LeaseReport) -> str:
    return report.worker or "a worker"


def _table_of(recovered: Sequence[Recovered]) -> Table:
    rows = [
        (one.worker, task, str(count))
        for one in recovered
        for task, count in sorted(one.tasks.items())
    ]
    return Table(("WORKER", "TASK", "MESSAGES"), rows, "No message of a dead worker is left.")


@redlock.command()
@click.option(
    "--older-than", type=click.FloatRange(0.0, LONGEST_AGE), callback=finite, metavar="SECONDS",
    help="Also messages without a worker lease that were taken longer ago.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be moved, and move nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def recover(
    ctx: click.Context, older_than: float | None, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Move the messages of dead workers back to their queues.

    Workers do so by themselves. With --older-than, also messages of whose worker nothing is known:
    it asks first, and each may run twice if its worker lives. The exit status is 1 if a living
    worker has one of them, or the broker refuses one.
    """
    app = app_from(ctx)
    moves = not dry_run
    err = as_json
    older = Older()
    done = None
    try:
        with open_survey(app) as survey:
            if survey is None:
                raise command_error(NO_LEASES)
            recovered = recover_dead(survey, moves=moves, err=err)
            print_all(_table_of(recovered), err=err)
            print_all(*(line for one in recovered if moves for line in one.lines()), err=err)
            if older_than is not None:
                older = Older.find(survey, older_than)
                done = _recover_older(survey, older, moves=moves, asks=not yes, err=err)
    except RedisError as error:
        raise command_error(f"the broker does not answer: {error}") from None
    data = {
        "dry_run": dry_run,
        "workers": as_data(recovered),
        "without_lease": as_data(done),
        "left": dict(older.left),
    }
    print_result(as_json, data, *(done.lines() if done and moves else ()))
    if any(one.refused for one in (*recovered, *([done] if done else []))):
        ctx.exit(1)


def _recover_older(
    survey: Survey, older: Older, *, moves: bool, asks: bool, err: bool
) -> Recovered | None:
    """Move what no worker lease protects, once that is confirmed; None if there is nothing."""
    print_all(older.table(), *older.left_lines(), err=err)
    if not older.messages:
        return None
    older.refuse_if_alive(survey.app)
    if not moves:
        return Recovered("", older.tasks)
    print_all("Each of them may run twice if its worker lives.", err=err)
    if asks:
        text = f"Move {counted(len(older.messages), 'message')} back to their queues?"
        click.confirm(text, abort=True, err=err)
    return older.move(survey)
