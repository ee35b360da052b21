"""What becomes of a message whose run did not get its lock. Pure.

`outcomes.py` does it in the process of a run, `tasks/untried.py` in the worker's main process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from celery_redlock.errors import (
    LockTaken,
    NotAcquired,
    QuorumUnreachable,
    SettingsError,
    counted,
    describe_taken,
    summarize_causes,
)
from celery_redlock.label import Holder
from celery_redlock.tasks.delivery.header import Deferral
from celery_redlock.tasks.settings.call import TaskCall
from celery_redlock.tasks.settings.options import Backoff, TaskLockOptions
from celery_redlock.tasks.waiting.queues import BehindRun

STRATEGIES = ("defer", "skip", "fail")
REDELIVERY_BACKOFF = Backoff(first=1.0, cap=30.0)  # between the tries of a redelivered message
LEASE_END_SPREAD = (
    0.25  # s after the end of a lease over which tries are spread; `first` if that is less
)

Uniform = Callable[[float, float], float]  # draws between two bounds


@dataclass(frozen=True)
class Contention:
    """What a callable `on_conflict` gets when a task finds its lock taken.

    resource: the resource whose lock is taken. holder: the label of the holder, "" if it has none.
    deferrals: number of deferrals of the message so far. waited: seconds since the first try.
    task, args, kwargs: the task that found the lock taken, and its arguments. rate: that of the
    resource, as "100/h", if its starts are used up; "" if its lock is taken. expires_in: seconds
    until the next start, or until the holder's lease ends; None if unknown.
    """

    resource: str
    holder: str
    deferrals: int
    waited: float
    task: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rate: str = ""
    expires_in: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A run's failed acquire.

    refused_at: seconds since 1970, by the clocks of the lock nodes. resources: all that the run
    asked for. last_deferral: of its message, before this refusal.
    """

    error: NotAcquired
    refused_at: float
    options: TaskLockOptions
    resources: tuple[str, ...]
    call: TaskCall
    last_deferral: Deferral


@dataclass(frozen=True)
class Skip:
    """Do not run the body. reason: for people. rate: as of `LockTaken`."""

    reason: str
    rate: str = ""


# "fail": end the run as FAILURE. "run": run the body without a lock, and log an error.
Decision = Deferral | Skip | Literal["fail", "run"]


def decide(refusal: Refusal, countdown_cap: float, uniform: Uniform) -> Decision:
    """Return what becomes of the message; calls a callable `on_conflict`.

    countdown_cap: seconds, the longest countdown, whatever the backoff gives. Raises SettingsError
    for what a callable raises, or if it returns no strategy.
    """
    error = refusal.error
    options = refusal.options
    last_deferral = refusal.last_deferral
    lock_taken = error if isinstance(error, LockTaken) else None
    waited = last_deferral.waited(refusal.refused_at)
    max_wait = options.max_wait
    strategy = options.on_unreachable if lock_taken is None else options.on_conflict
    if lock_taken is not None and callable(strategy):
        strategy = _call_on_conflict(refusal, lock_taken, waited)
    rate = "" if lock_taken is None else lock_taken.rate
    if strategy == "skip":
        subject = "" if rate else f"{error.resource!r} is "
        return Skip(f"{subject}{describe_refusal(error)}", rate)
    if strategy == "run":
        return "run"
    if strategy == "fail":
        return "fail"
    if max_wait is not None and waited >= max_wait:
        if options.on_give_up == "fail":
            return "fail"
        return Skip(
            f"gave up on {error.resource!r} after {waited:.1f} s, {last_deferral.count} deferrals",
            rate,
        )
    countdown = countdown_of(options.backoff, last_deferral.count, error, countdown_cap, uniform)
    if max_wait is not None:
        countdown = min(countdown, max_wait - waited)
    waits_for_release = (
        lock_taken is not None and options.on_conflict == "defer" and max_wait is None
    )
    # only a run asks a callable: the waiting room would ask for the lock with an old limit
    waits_for_release = waits_for_release and not callable(options.limit)
    return Deferral(
        count=last_deferral.count + 1,
        since=last_deferral.since or refusal.refused_at,
        at=refusal.refused_at,
        countdown=countdown,
        had_waited=waited,
        resource=error.resource,
        resources=refusal.resources,
        holder="" if lock_taken is None else lock_taken.holder,
        expires_in=None if lock_taken is None else lock_taken.expires_in,
        limit=1 if lock_taken is None else lock_taken.limit,
        rate=rate,
        is_taken=lock_taken is not None,
        why=describe_refusal(error),
        waits_for_release=waits_for_release,
    )


def _call_on_conflict(refusal: Refusal, lock_taken: LockTaken, waited: float) -> str:
    """Return the strategy that a callable `on_conflict` returns; raises SettingsError."""
    on_conflict = refusal.options.on_conflict
    call = refusal.call
    contention = Contention(
        lock_taken.resource, lock_taken.holder, refusal.last_deferral.count, waited,
        call.task, tuple(call.args), dict(call.kwargs), lock_taken.rate, lock_taken.expires_in,
    )  # fmt: skip
    cause: Exception | None = None
    try:
        strategy = on_conflict(contention)
        if strategy in STRATEGIES:
            return str(strategy)
        allowed = ", ".join(map(repr, STRATEGIES))
        hint = f"the callable returned {strategy!r}, and must return one of {allowed}"
    except Exception as error:
        cause = error
        hint = f"the callable raised {type(error).__name__}: {error}"
    level = f"resource {lock_taken.resource!r}"
    raise SettingsError(level, "on_conflict", repr(on_conflict), hint) from cause


def countdown_of(
    backoff: Backoff, attempt: int, refusal: Exception, cap: float, uniform: Uniform
) -> float:
    """Return the seconds until the next try of a message.

    attempt: 0 for the first. refusal: the error of the try. cap: seconds.
    If a lock is taken, the countdown ends with the holder's lease at the latest, because a dead
    holder announces no release. If a rate refused, it does not end before the next start. If nodes
    are in their grace period, it ends with the first grace period, or at the backoff's cap: a
    message that the broker delays learns of no `trust`. The backoff spreads a crowd of messages
    that wait for the same moment.
    """
    countdown = min(backoff.delay(attempt, uniform), cap)
    if isinstance(refusal, QuorumUnreachable) and refusal.votes_in is not None:
        return min(cap, backoff.cap, refusal.votes_in + uniform(0.0, backoff.first))
    if not isinstance(refusal, LockTaken) or refusal.expires_in is None:
        return countdown
    lease_end = refusal.expires_in + uniform(0.0, min(LEASE_END_SPREAD, backoff.first))
    return min(cap, max(lease_end, countdown)) if refusal.rate else min(countdown, lease_end)


def with_history(refusal: Refusal) -> NotAcquired:
    """Return the error with how long the message has waited, and how often it was deferred."""
    error = refusal.error
    deferrals = refusal.last_deferral.count
    waited = refusal.last_deferral.waited(refusal.refused_at)
    if isinstance(error, QuorumUnreachable):
        return QuorumUnreachable(error.resource, error.causes, error.quorum, waited, deferrals)
    if isinstance(error, LockTaken):
        fields = error.resource, error.holder, error.expires_in
        return LockTaken(*fields, waited, deferrals, error.ttl, error.limit, error.rate)
    return error


def describe_refusal(error: NotAcquired) -> str:
    if isinstance(error, QuorumUnreachable):
        return f"no quorum of {counted(error.quorum, 'node')} ({summarize_causes(error.causes)})"
    if isinstance(error, BehindRun):
        return f"needed first by {Holder.of(error.holder)}"
    return describe_taken(error) if isinstance(error, LockTaken) else "not acquired"
