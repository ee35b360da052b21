"""What the commands show of the messages of workers that are gone, and when they are back.

Not here: the queries (`tasks/recovery/survey.py`), and the command that moves the messages
(`recover.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from celery_redlock.errors import counted
from celery_redlock.operate.cli.group import Table, as_data, format_duration, within_deadline
from celery_redlock.operate.lints import ADVICE, WARNING, Lint
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.recovery.observer import DETECTION_TIME
from celery_redlock.tasks.recovery.survey import (
    ALIVE,
    DEAD,
    ORPHANED,
    SILENT,
    LeaseReport,
    Survey,
    Unacknowledged,
    has_leases,
    open_survey,
    sweep_of,
)
from celery_redlock.tasks.recovery.tags import MAX_MOVES, DeliveryTag
from celery_redlock.tasks.settings.levels import visibility_timeout
from celery_redlock.tasks.startup import locked_tasks

T = TypeVar("T")
MOVED_TOO_OFTEN = "it was moved too often in a row, so its body may be what ends workers"
MOVER = "`celery redlock recover --older-than`"
MOVE_HINT = f"{MOVER} moves it"


@dataclass(frozen=True)
class MessagesLint(Lint):
    """A lint of messages that a dead worker may have: no setting is wrong."""


@dataclass(frozen=True)
class MessagePlace:
    """Where the message of a task is. task: its name. text: for people; "" if that is not known.

    eta: in ISO 8601, "" for none. is_taken: whether a worker has taken it; None: not known.
    """

    task: str = ""
    text: str = ""
    eta: str = ""
    is_taken: bool | None = None


@dataclass(frozen=True)
class StrandedView:
    """The worker leases of an app's broker, and when the messages of gone workers are back.

    is_possible: the broker can have worker leases, even if recovery is switched off. visibility:
    seconds of its visibility timeout; None if it has none. cause: why the broker could not be
    asked; "" if it could. is_on: the app's own workers move messages. untagged: how many messages
    workers have without a worker lease.
    """

    is_possible: bool
    leases: Sequence[LeaseReport] = ()
    visibility: float | None = None
    cause: str = ""
    is_on: bool = True
    untagged: int = 0

    @classmethod
    def ask(cls, app: Any, known_cause: str = "") -> StrandedView:
        """Ask the broker. known_cause: why it is known not to answer; "" if it may answer."""
        is_possible = has_leases(app)
        is_on = settings_of(app).recovery
        visibility = visibility_timeout(app.conf)
        if known_cause or not is_possible:
            return cls(is_possible, (), visibility, known_cause, is_on)
        census, cause = ask_broker(app, Survey.census)
        leases, untagged = census or ([], 0)
        return cls(is_possible, leases, visibility, cause, is_on, untagged)

    @property
    def stranded(self) -> list[LeaseReport]:
        """The leases of workers that are gone and still have messages."""
        return [report for report in self.leases if report.state != ALIVE and report.messages]

    def tables(self) -> list[Table]:
        """Return a table of the stranded messages; no table if there are none."""
        heads = ("STRANDED WITH", "MESSAGES", "NO BEAT FOR", "BACK")
        rows = [
            (report.worker or "?", str(report.messages), _silent_for(report), self._back(report))
            for report in self.stranded
        ]
        return [Table(heads, rows, "")] if rows else []

    def notes(self) -> list[str]:
        """Return why the stranded messages are unknown, if they are."""
        text = "the broker cannot be asked whose messages lie stranded"
        return [f"{text}: {self.cause}"] if self.cause else []

    def data(self) -> list[dict[str, Any]]:
        return [as_data(report) for report in self.stranded]

    def lints(self) -> Iterator[Lint]:
        """Yield the stranded messages; a warning if no worker moves them within seconds."""
        for report in self.stranded:
            level = WARNING if report.back_in is None else ADVICE
            detail = f"no beat for {_silent_for(report)}" if report.silent_for else "it is dead"
            detail = MOVED_TOO_OFTEN if report.state == ORPHANED else detail
            value = counted(report.messages, "message")
            yield MessagesLint(
                level,
                f"stranded: {report.worker or '?'}",
                value,
                f"{detail}: back {self._back(report)}",
            )

    def _back(self, report: LeaseReport) -> str:
        if report.state == ORPHANED or (report.back_in is None and not self.is_on):
            return self.after_visibility()
        if report.back_in is None:
            return "once a worker runs"
        return f"in {format_duration(report.back_in)}" if report.back_in else "now"

    def after_visibility(self, taken_for: float = 0.0) -> str:
        """Return when a message that was taken so long ago is back without a move."""
        remaining = max(0.0, (self.visibility or 0.0) - taken_for)
        return f"within {format_duration(remaining)}" if remaining else "now"

    def redelivery_text(self, worker: str) -> str:
        """Return when the messages of a gone worker are back, as the end of a sentence."""
        timeout = self.visibility
        if timeout is None:
            return "the broker delivers the messages that waited in it again, now"
        redelivery = f"within its visibility_timeout of {timeout:g} s"
        reports = [report for report in self.stranded if report.worker == worker]
        is_known = self.is_possible and not self.cause
        if is_known and not reports and not self.untagged:
            return "its messages are back in their queues"
        if not is_known or not (reports or self.is_on):
            return f"the broker delivers the messages that waited in it again, {redelivery}"
        if not reports:
            back = "its messages with a worker lease are back in their queues"
        else:
            count = sum(report.messages for report in reports)
            times = ", ".join(dict.fromkeys(map(self._back, reports)))
            back = f"{count} of its messages with a worker lease are back {times}"
            if not self.untagged:
                return back
        return f"{back}; the broker delivers those without one again, {redelivery}"

    def place_of(self, app: Any, task_id: str) -> MessagePlace:
        """Return where the unacknowledged message of a task is."""
        if not self.is_possible or self.cause:
            return MessagePlace()
        messages, cause = ask_broker(app, lambda survey: survey.find(task_id))
        if messages:
            (first, *_) = messages
            return MessagePlace(first.task, self._place(first), first.eta, is_taken=True)
        return MessagePlace(is_taken=None if cause else False)

    def untaken_text(self, place: MessagePlace) -> str:
        """Return where the message of a deferred task is that no worker is known to have.

        A message that its task acknowledged early is gone if its worker died.
        """
        if place.is_taken is False:
            return "no worker has its message: it is in its queue, unless it was lost or purged"
        within = self.visibility and f", within its visibility_timeout of {self.visibility:g} s"
        text = "no worker that answers has its message: the broker delivers it again"
        return f"{text}{within or ''}"

    def ids_beginning(self, app: Any, start: str) -> set[str]:
        """Return the task ids that begin with a text, of unacknowledged messages."""
        if not self.is_possible or self.cause:
            return set()
        ids, _ = ask_broker(app, lambda survey: survey.ids_beginning(start))
        return ids or set()

    def _place(self, message: Unacknowledged) -> str:
        """Return where an unacknowledged message is, and when it is back in its queue."""
        tag = DeliveryTag.of(message.tag)
        report = next(
            (lease for lease in self.leases if tag is not None and lease.lease == tag.lease), None
        )
        is_moved_too_often = message.moves >= MAX_MOVES
        if report is not None:
            name = report.worker or "its worker"
            if report.state == ALIVE:
                return f"{name} has its message"
            if report.state == SILENT:
                silence = _silent_for(report)
                return f"{name} is gone for {silence}: its message is back {self._back(report)}"
            if not is_moved_too_often:
                return f"{name} is dead: its message is back {self._back(report)}"
        back = self.after_visibility(message.taken_for)
        if is_moved_too_often:
            hint = f", or {MOVE_HINT}" if report is None else ""
            return f"{MOVED_TOO_OFTEN}: it is back {back}{hint}"
        age = format_duration(message.taken_for)
        return (
            f"it was taken {age} ago, without a worker lease: if its worker is gone, it is back "
            f"{back}"
        )


NO_STRANDED_MESSAGES = StrandedView(False)


@dataclass(frozen=True)
class RecoveryTime:
    """After how many seconds the messages of a dead worker are back, and what is stranded now.

    state: "on"; "off"; "refused": the broker's user lacks rights; "none": the broker has no worker
    leases; "idle": the app has no locked tasks. locked: seconds for messages whose run surely holds
    a lock; None if they take as long as the others. others: the least and the most seconds for all
    other messages; None if the broker notices a lost connection. sweep: what a sweep adds. missing:
    the missing rights.
    """

    state: str
    locked: float | None
    others: tuple[float, float] | None
    sweep: str = field(default="", repr=False)
    missing: Sequence[str] = ()
    stranded: StrandedView = field(default=NO_STRANDED_MESSAGES, repr=False)

    @classmethod
    def of(cls, app: Any) -> RecoveryTime:
        """Return the times of an app. Queries the broker for rights and stranded messages."""
        visibility = visibility_timeout(app.conf)
        if not locked_tasks(app):
            return cls("idle", None, None)
        if not has_leases(app):
            return cls("none", None, None if visibility is None else (visibility, visibility))
        sweep_delay, sweep = sweep_of(app)
        earliest = visibility or 0.0
        other_times = earliest, earliest + sweep_delay
        if not settings_of(app).recovery:
            return cls("off", None, other_times, sweep, (), StrandedView.ask(app))
        missing, cause = ask_broker(app, lambda survey: survey.ledger.missing_rights())
        if missing:
            return cls("refused", None, other_times, sweep, missing)
        return cls("on", DETECTION_TIME, other_times, sweep, (), StrandedView.ask(app, cause))

    def __str__(self) -> str:
        if self.others is None:
            return "recovery: the broker delivers again as it notices that a worker is gone"
        earliest, latest = self.others
        delay = (
            f"after {earliest:g} s" if earliest == latest else f"after {earliest:g} to {latest:g} s"
        )
        setting = f"visibility_timeout{self.sweep and f', {self.sweep}'}"
        if self.locked is None:
            reasons = {
                "off": "off (redlock_recovery=False): ",
                "none": "not possible with this broker: ",
                "refused": "refused by the broker: ",
            }[self.state]
            return f"recovery: {reasons}a dead worker's messages are back {delay} ({setting})"
        return (
            f"recovery: a dead worker's messages are back {self.locked:g} s after its last beat, "
            f"those whose run may hold no lock {delay} ({setting})"
        )

    @property
    def lines(self) -> list[str]:
        """The line that `doctor` prints; none for an app without locked tasks."""
        return [] if self.state == "idle" else [f"{'ok':<7}  {self}"]

    @property
    def lints(self) -> tuple[Lint, ...]:
        """A lint of the missing rights, or those of the stranded messages."""
        if not self.missing:
            return tuple(self.stranded.lints())
        hint = (
            "without them a dead worker's messages come back after the visibility timeout alone: "
            "its user lacks them (ACL SETUSER): see operations/security"
        )
        return (Lint(WARNING, "broker: rights", " ".join(self.missing), hint),)


def _silent_for(report: LeaseReport) -> str:
    if report.state == DEAD:
        return "proved"
    return "" if report.silent_for is None else format_duration(report.silent_for)


def ask_broker(app: Any, ask: Callable[[Survey], T]) -> tuple[T | None, str]:
    """Ask the broker a question; return its answer and "", else None and the cause.

    The answer is also None if the broker has no worker leases.
    """

    def ask_survey() -> T | None:
        with open_survey(app) as survey:
            return None if survey is None else ask(survey)

    answer, cause = within_deadline(ask_survey)
    return answer, cause
