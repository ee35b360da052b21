"""The command `recover`: moves the messages of dead workers back to their queues.

Without an option it moves what a worker would move, as safely. With `--older-than` it also moves
messages without a worker lease. Whether the worker of such a message lives is unknown.
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
from celery_redlock.operate.cli.stranded import MOVE_HINT, MOVED_TOO_OFTEN
from celery_redlock.operate.cli.taken import ids_by_worker
from celery_redlock.tasks.recovery.ledger import MoveResult
from celery_redlock.tasks.recovery.survey import (
    DEAD,
    SILENT,
    LeaseReport,
    Survey,
    Unacknowledged,
    open_survey,
)
from celery_redlock.tasks.recovery.tags import moved

MAX_AGE = 10 * 366 * 86_400.0  # s
NO_LEASES = "this broker has no worker leases: only kombu's own transport for Redis has them"
UNKNOWN_TASK = "of tasks that this app does not know"
UNKNOWN_QUEUE = "of no queue, or of several, that this app knows"


@dataclass(frozen=True)
class Recovered:
    """The result for the messages of one worker lease, or for those without a lease.

    worker: the worker's name; "" without a lease. tasks: the number of messages by task. messages:
    the number that were moved. kept: the number that stay because they were moved too often.
    changed: the number that were acknowledged or taken again meanwhile. refused: why the broker
    did not take a message back; "" if it took all.
    """

    worker: str
    tasks: Mapping[str, int]
    messages: int = 0
    kept: int = 0
    changed: int = 0
    refused: str = ""

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        origin = self.worker and f" of {self.worker}"
        lines = [f"moved {counted(self.messages, 'message')}{origin} back to their queues"]
        if self.kept:
            text = f"left {counted(self.kept, 'message')}{origin}: {MOVED_TOO_OFTEN}; {MOVE_HINT}"
            lines.append(text)
        if self.changed:
            lines.append(
                f"left {counted(self.changed, 'message')}{origin}: acknowledged or taken anew"
            )
        if self.refused:
            lines.append(f"the broker does not take back all messages{origin}: {self.refused}")
        return lines


@dataclass(frozen=True)
class Older:
    """The messages without a worker lease that are to be moved.

    lists: the Redis list of each message's queue, by delivery tag. left: the number of messages
    that are not moved, by reason.
    """

    messages: Sequence[Unacknowledged] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def find(cls, survey: Survey, seconds: float) -> Older:
        messages = []
        lists = dict[str, str]()
        skipped = Counter[str]()
        for message in survey.older_than(seconds):
            name = survey.list_of(message)
            if message.task not in survey.app.tasks:
                skipped[UNKNOWN_TASK] += 1
            elif not name:
                skipped[UNKNOWN_QUEUE] += 1
            else:
                messages.append(message)
                lists[message.tag] = name
        return cls(messages, lists, skipped)

    @property
    def tasks(self) -> Counter[str]:
        return _by_task(self.messages)

    def table(self) -> Table:
        oldest = dict[str, float]()
        for message in self.messages:
            oldest[message.task] = max(message.taken_for, oldest.get(message.task, 0.0))
        rows = [
            (task, str(count), f"{format_duration(oldest[task])} ago")
            for task, count in sorted(self.tasks.items())
        ]
        empty_text = "No message without a worker lease was taken that long ago."
        return Table(("TASK", "MESSAGES", "FIRST TAKEN"), rows, empty_text)

    def left_lines(self) -> list[str]:
        return [f"left {counted(number, 'message')} {why}" for why, number in self.left.items()]

    def refuse_if_alive(self, app: Any) -> None:
        """End the command if a worker that answers has one of the messages."""
        ids = {message.task_id: message.task for message in self.messages}
        by_worker, cause = ids_by_worker(app) if ids else ({}, "")
        if cause:
            raise command_error(f"no worker can be asked what it runs: {cause}")
        for worker, worker_ids in by_worker.items():
            counts = Counter(ids[task_id] for task_id in worker_ids & ids.keys())
            if counts:
                names = ", ".join(f"{count} of {task}" for task, count in counts.items())
                raise command_error(
                    f"{worker} lives and has some of these messages ({names}), so none is "
                    "moved: end it first, or give a longer time"
                )

    def move(self, survey: Survey) -> Recovered:
        """Move the messages, except those that a worker has taken again meanwhile."""
        times = survey.taken([message.tag for message in self.messages])
        entries = []
        for message in self.messages:
            if times.get(message.tag) == message.taken:
                entry = moved(message.entry, anew=True)
                if entry is not None:
                    entries.append((message.tag, self.lists[message.tag], entry))
        result = survey.ledger.move(entries)
        changed = 0 if result.refusal else len(self.messages) - result.messages
        return Recovered("", self.tasks, result.messages, 0, changed, result.refusal)


def _by_task(messages: Sequence[Unacknowledged]) -> Counter[str]:
    return Counter(message.task or "?" for message in messages)


def recover_dead(survey: Survey, *, moves: bool, err: bool) -> list[Recovered]:
    """Move the messages of dead worker leases; silent leases are proved dead first.

    moves: False moves nothing, and returns what would be moved. err: print to stderr.
    """
    if moves:
        survey.ledger.recall()  # as a worker does at its start
    reports = {report.lease: report for report in survey.leases() if report.state in (SILENT, DEAD)}
    proved = _proved_dead(survey, reports, err=err)
    dead = [lease for lease, report in reports.items() if report.state == DEAD or lease in proved]
    messages_of = survey.messages_of(dead)
    recovered = []
    for lease in dead:
        result = MoveResult()
        if moves and (lease not in proved or survey.ledger.declare_dead(lease, proved[lease])):
            result = survey.ledger.move_all(lease)
        messages = messages_of[lease]
        if messages:
            name = _name_of(reports[lease])
            counts = (result.messages, result.kept, 0, result.refusal)
            recovered.append(Recovered(name, _by_task(messages), *counts))
    return recovered


def _proved_dead(
    survey: Survey, reports: Mapping[str, LeaseReport], *, err: bool
) -> Mapping[str, str]:
    """Wait for beats of the silent leases with messages; return those that are proved dead."""
    silent = {
        lease: report
        for lease, report in reports.items()
        if report.state == SILENT and report.messages
    }
    if not silent:
        return {}
    names = ", ".join(map(_name_of, silent.values()))
    print_all(f"waits until it is sure that no beat comes from {names}", err=err)
    return survey.proved_dead(SystemClock(), silent)


def _name_of(report: LeaseReport) -> str:
    return report.worker or "a worker"


def _table_of(recovered: Sequence[Recovered]) -> Table:
    rows = [
        (result.worker, task, str(count))
        for result in recovered
        for task, count in sorted(result.tasks.items())
    ]
    return Table(("WORKER", "TASK", "MESSAGES"), rows, "No message of a dead worker is left.")


@redlock.command()
@click.option(
    "--older-than", type=click.FloatRange(0.0, MAX_AGE), callback=finite, metavar="SECONDS",
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
    older_result = None
    try:
        with open_survey(app) as survey:
            if survey is None:
                raise command_error(NO_LEASES)
            recovered = recover_dead(survey, moves=moves, err=err)
            print_all(_table_of(recovered), err=err)
            print_all(*(line for result in recovered if moves for line in result.lines()), err=err)
            if older_than is not None:
                older = Older.find(survey, older_than)
                older_result = _recover_older(survey, older, moves=moves, asks=not yes, err=err)
    except RedisError as error:
        raise command_error(f"the broker does not answer: {error}") from None
    data = {
        "dry_run": dry_run,
        "workers": as_data(recovered),
        "without_lease": as_data(older_result),
        "left": dict(older.left),
    }
    print_result(as_json, data, *(older_result.lines() if older_result and moves else ()))
    if any(result.refused for result in (*recovered, *([older_result] if older_result else []))):
        ctx.exit(1)


def _recover_older(
    survey: Survey, older: Older, *, moves: bool, asks: bool, err: bool
) -> Recovered | None:
    """Move the messages without a worker lease after a confirmation; None if there are none."""
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
