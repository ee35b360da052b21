"""A deferral of a refused delivery: planned, and told to everybody who is to know of it.

Who carries it out differs: `outcomes.py` publishes the message anew, in the process of a run;
`untried.py` lets a message wait that has not tried, in the worker's main process.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery.exceptions import Ignore

from celery_redlock.errors import LockTaken, NotAcquired
from celery_redlock.tasks import signals
from celery_redlock.tasks.delivery.delivery import Delivery, utc_now
from celery_redlock.tasks.delivery.header import LockHeader, Wait
from celery_redlock.tasks.delivery.route import is_kept_by_broker, supported_countdown
from celery_redlock.tasks.execution.contention import (
    Contention,
    Decision,
    Defer,
    decide,
    describe_refusal,
)
from celery_redlock.tasks.per_app import settings_of, time_of_nodes
from celery_redlock.tasks.reporting import DeferredInfo, StateReporter, in_iso
from celery_redlock.tasks.settings.options import TaskLockOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """That a run did not get its lock. at: as of `Wait`. resources: all that it asked for."""

    error: NotAcquired
    at: float
    options: TaskLockOptions
    resources: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def is_taken(self) -> bool:
        """Whether the lock is taken; else no quorum voted."""
        return isinstance(self.error, LockTaken)

    @property
    def holder(self) -> str:
        """The label of the holder, "" if none is known."""
        return self.error.holder if isinstance(self.error, LockTaken) else ""

    @property
    def waits_for_release(self) -> bool:
        """Whether the message may wait for a release alone: it has no budget, and asks no callable.

        So it may wait in the worker's memory for longer than its countdown.
        """
        options = self.options
        return self.is_taken and options.on_conflict == "defer" and options.max_wait is None

    def to_wait(self, countdown: float) -> Wait:
        """Return what the republished message carries of it. countdown: seconds."""
        return Wait(
            self.resources,
            self.error.resource if self.is_taken else None,
            self.at,
            self.options.limit,
            self.waits_for_release,
            "" if self.is_taken else describe_refusal(self.error),
            countdown,
        )


class Deferred(Ignore):
    """Ends a run that found its lock taken, once its message is published again.

    resource: the lock that is taken. holder: the label of its holder, "" if none is known.
    expires_in: seconds until the holder's lease ends; None if unknown. limit: the run's own.
    It reaches the worker's main process: see `tasks/worker_request.py`.
    """

    def __init__(self, resource: str, holder: str, expires_in: float | None, limit: int) -> None:
        super().__init__(resource, holder, expires_in, limit)  # pickle makes a copy of these
        self.resource, self.holder = resource, holder
        self.expires_in, self.limit = expires_in, limit

    def __str__(self) -> str:
        return (
            f"deferred: {describe_refusal(LockTaken(self.resource, self.holder, limit=self.limit))}"
        )


def decide_refused(delivery: Delivery, refusal: Refusal) -> tuple[Decision, Contention]:
    """Return what becomes of a refused delivery, and what that was decided by.

    Raises SettingsError as `decide` does.
    """
    deferral = delivery.header.deferral
    contention = Contention(
        refusal.error.resource,
        refusal.holder,
        deferral.count,
        deferral.waited(time_of_nodes(delivery.task.app)),
        delivery.task,
        refusal.args,
        refusal.kwargs,
    )
    cap = settings_of(delivery.task.app).countdown_cap
    decision = decide(
        refusal.options, refusal.error, contention, deferral.delay, random.uniform, cap
    )
    return decision, contention


@dataclass(frozen=True)
class PlannedDeferral:
    """What a deferral is to be. header: what the message carries then. countdown: seconds.

    info: what is stored and sent of it. why, waits: for people, why it is deferred, and what ends
    its wait. is_taken: the lock is taken; else no quorum voted.
    """

    header: LockHeader
    countdown: float
    info: DeferredInfo
    why: str
    waits: str
    is_taken: bool


def plan(delivery: Delivery, refusal: Refusal, decision: Defer) -> PlannedDeferral:
    """Return the next deferral of a message."""
    request, error, before = delivery.request, refusal.error, delivery.header
    now = time_of_nodes(delivery.task.app)
    deferral = before.deferral.next(now, decision.delay)
    countdown = supported_countdown(delivery.task.app, decision.countdown, delivery.route)
    header = replace(
        before,
        id=request.id,
        retries=request.retries,
        deferral=deferral,
        wait=refusal.to_wait(countdown),
    )
    waited, next_try = before.deferral.waited(now), in_iso(utc_now(), countdown)
    info = DeferredInfo(error.resource, refusal.holder, deferral.count, waited, next_try)
    why, waits = describe_refusal(error), _describe_wait(delivery, refusal, countdown)
    return PlannedDeferral(header, countdown, info, why, waits, refusal.is_taken)


def _describe_wait(delivery: Delivery, refusal: Refusal, countdown: float) -> str:
    """Return in few words what ends the wait of a message. countdown: seconds.

    A message that RabbitMQ keeps back hears of no release.
    """
    error = refusal.error
    if not isinstance(error, LockTaken) or is_kept_by_broker(delivery.task.app, delivery.route):
        return f"tries again in {countdown:.2f} s"
    if not refusal.waits_for_release or delivery.request.expires is not None:
        return f"waits for a release, for {countdown:.2f} s at most"
    if error.unrenewed_for is not None:
        return f"waits for a release, or for the end of the lease in {error.expires_in:.0f} s"
    return "waits for a release"


def report(delivery: Delivery, deferral: PlannedDeferral, reporter: StateReporter) -> None:
    """Log a deferral, store DEFERRED, and send its event."""
    info = deferral.info
    text = "Task %s deferred: lock %r %s %s; it %s"
    extra = delivery.log_extra("run_deferred", **vars(info))
    verb = "is" if deferral.is_taken else "has"
    words = (info.resource, verb, deferral.why, deferral.waits)
    logger.info(text, delivery, *words, extra=extra)
    reporter.deferred(info, deferral.why)


def send_signal(delivery: Delivery, deferral: PlannedDeferral) -> None:
    """Send lock_deferred."""
    info = deferral.info
    event = signals.LockDeferredEvent(
        info.resource, info.holder, info.deferrals, info.waited, deferral.countdown
    )
    signals.lock_deferred.send(delivery.task, event=event)
