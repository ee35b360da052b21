"""What the commands show of messages whose worker is gone, and when they are back.

The questions are in `tasks/recovery/survey.py`. Not here: what moves them (`recover.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from celery_redlock.errors import counted
from celery_redlock.operate.cli.group import Table, as_data, format_duration, within_deadline
from celery_redlock.operate.lints import ADVICE, WARNING, Lint
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.recovery.observer import LENGTH
from celery_redlock.tasks.recovery.survey import (
    ALIVE,
    DEAD,
    LEFT,
    SILENT,
    LeaseReport,
    Survey,
    Unacknowledged,
    has_leases,
    open_survey,
    sweep_of,
)
from celery_redlock.tasks.recovery.tags import MOST_MOVES, DeliveryTag
from celery_redlock.tasks.settings.levels import visibility_timeout
from celery_redlock.tasks.startup import locked_tasks

T = TypeVar("T")
MOVED_TOO_OFTEN = "it was moved too often in a row, so its body may be what ends workers"
BY_HAND = "`celery redlock recover --older-than` moves it"


@dataclass(frozen=True)
class StrandedView:
    """The worker leases of an app's broker. can: it can have some; with recovery switched off, too.

    cause: why the broker could not be asked. visibility: of `visibility_timeout`. is_on: the app's
    own workers move messages.
    """

    can: bool
    leases: Sequence[LeaseReport] = ()
    visibility: float | None = None
    cause: str = ""
    is_on: bool = True

    @classmethod
    def ask(cls, app: Any, silent: str = "") -> StrandedView:
        """Ask the broker. silent: why it is known not to answer."""
        can = has_leases(app)
        is_on = settings_of(app).recovery
        visibility = visibility_timeout(app.conf)
        if silent or not can:
            return cls(can, (), visibility, silent, is_on)
        leases, cause = ask_broker(app, Survey.leases)
        return cls(can, leases or (), visibility, cause, is_on)

    @property
    def stranded(self) -> list[LeaseReport]:
        """What lies with workers that are gone."""
        return [one for one in self.leases if one.state != ALIVE and one.messages]

    def tables(self) -> list[Table]:
        """Return a table of what lies stranded, none if nothing does."""
        heads = ("STRANDED WITH", "MESSAGES", "NO BEAT FOR", "BACK")
        rows = [
            (one.worker or "?", str(one.messages), _silent_for(one), self._back(one))
            for one in self.stranded
        ]
        return [Table(heads, rows, "")] if rows else []

    def notes(self) -> list[str]:
        """Return why it is not known what lies stranded, if so."""
        text = "the broker cannot be asked whose messages lie stranded"
        return [f"{text}: {self.cause}"] if self.cause else []

    def data(self) -> list[dict[str, Any]]:
        return [as_data(one) for one in self.stranded]

    def lints(self) -> Iterator[Lint]:
        """Yield what lies stranded: as a warning, where no worker moves it within seconds."""
        for one in self.stranded:
            level = WARNING if one.back_in is None else ADVICE
            since = f"no beat for {_silent_for(one)}" if one.silent_for else "it is dead"
            since = MOVED_TOO_OFTEN if one.state == LEFT else since
            value = counted(one.messages, "message")
            yield Lint(
                level, f"stranded: {one.worker or '?'}", value, f"{since}: back {self._back(one)}"
            )

    def _back(self, report: LeaseReport) -> str:
        if report.state == LEFT or (report.back_in is None and not self.is_on):
            return self._after_visibility()
        if report.back_in is None:
            return "once a worker runs"
        return f"in {format_duration(report.back_in)}" if report.back_in else "now"

    def _after_visibility(self, taken_for: float = 0.0) -> str:
        left = max(0.0, (self.visibility or 0.0) - taken_for)
        return f"within {format_duration(left)}" if left else "now"

    def of_gone(self, worker: str) -> str:
        """Return when the messages of a worker that is gone are back, as the end of a line."""
        after = self.visibility
        if after is None:
            return "the broker delivers the messages that waited in it again, now"
        others = f"within its visibility_timeout of {after:g} s"
        its = [one for one in self.stranded if one.worker == worker]
        if not self.can or self.cause or not (its or self.is_on):
            return f"the broker delivers the messages that waited in it again, {others}"
        if not its:
            back = "its messages with a worker lease are back in their queues"
        else:
            count = sum(one.messages for one in its)
            when = ", ".join(dict.fromkeys(map(self._back, its)))
            back = f"{count} of its messages with a worker lease are back {when}"
        return f"{back}; the broker delivers those without one again, {others}"

    def place_of(self, app: Any, task_id: str) -> tuple[str, str]:
        """Return the name of a task, and where its unacknowledged message is; "" if nowhere."""
        if not self.can or self.cause:
            return "", ""
        found, _ = ask_broker(app, lambda survey: survey.find(task_id))
        texts = [(one.task, self._place(one)) for one in found or ()]
        return texts[0] if texts else ("", "")

    def _place(self, message: Unacknowledged) -> str:
        tag = DeliveryTag.of(message.tag)
        own = [one for one in self.leases if tag is not None and one.lease == tag.lease]
        for one in own:
            name = one.worker or "its worker"
            if one.state == ALIVE:
                return f"{name} has its message"
            if one.state == SILENT:
                return (
                    f"{name} is gone for {_silent_for(one)}: its message is back {self._back(one)}"
                )
            if message.moves < MOST_MOVES:
                return f"{name} is dead: its message is back {self._back(one)}"
        back = self._after_visibility(message.taken_for)
        if message.moves >= MOST_MOVES:
            by_hand = "" if own else f", or {BY_HAND}"
            return f"{MOVED_TOO_OFTEN}: it is back {back}{by_hand}"
        taken = f"it was taken {format_duration(message.taken_for)} ago, without a worker lease"
        return f"{taken}: if its worker is gone, it is back {back}"


NOTHING = StrandedView(False)


@dataclass(frozen=True)
class RecoveryTime:
    """After how many seconds the messages of a dead worker are back, and what lies stranded now.

    state: "on", "off", "refused" by the rights of the broker's user, "none": this broker has no
    worker leases, or "idle": the app has no locked tasks. locked: of runs that are sure to hold a
    lock; None as others. others: at least and at most, None if the broker notices a lost
    connection. missing: the rights.
    """

    state: str
    locked: float | None
    others: tuple[float, float] | None
    sweep: str = field(default="", repr=False)
    missing: Sequence[str] = ()
    stranded: StrandedView = field(default=NOTHING, repr=False)

    @classmethod
    def of(cls, app: Any) -> RecoveryTime:
        """Find it for an app; its broker is asked for the rights alone."""
        visibility = visibility_timeout(app.conf)
        if not locked_tasks(app):
            return cls("idle", None, None)
        if not has_leases(app):
            return cls("none", None, None if visibility is None else (visibility, visibility))
        later, sweep = sweep_of(app)
        least = visibility or 0.0
        others = least, least + later
        if not settings_of(app).recovery:
            return cls("off", None, others, sweep, (), StrandedView.ask(app))
        missing, cause = ask_broker(app, lambda survey: survey.ledger.missing_rights())
        if missing:
            return cls("refused", None, others, sweep, missing)
        return cls("on", LENGTH, others, sweep, (), StrandedView.ask(app, cause))

    def __str__(self) -> str:
        if self.others is None:
            return "recovery: the broker delivers again as it notices that a worker is gone"
        least, most = self.others
        after = f"after {least:g} s" if least == most else f"after {least:g} to {most:g} s"
        by = f"visibility_timeout{self.sweep and f', {self.sweep}'}"
        if self.locked is None:
            why = {
                "off": "off (redlock_recovery=False): ",
                "none": "not possible with this broker: ",
                "refused": "refused by the broker: ",
            }[self.state]
            return f"recovery: {why}a dead worker's messages are back {after} ({by})"
        return (
            f"recovery: a dead worker's messages are back {self.locked:g} s after its last beat, "
            f"those whose run may hold no lock {after} ({by})"
        )

    @property
    def lines(self) -> list[str]:
        """The line of `doctor`, none for an app without locked tasks."""
        return [] if self.state == "idle" else [f"{'ok':<7}  {self}"]

    @property
    def lints(self) -> tuple[Lint, ...]:
        """The rights that are missing, or what lies with workers that are gone."""
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

    The answer is None if it has no worker leases, too.
    """

    def within() -> T | None:
        with open_survey(app) as survey:
            return None if survey is None else ask(survey)

    answer, cause = within_deadline(within)
    return answer, cause
