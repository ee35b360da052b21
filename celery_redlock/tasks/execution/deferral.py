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
from celery_redlock.tasks.delivery.header import Deferral
from celery_redlock.tasks.settings.call import TaskCall
from celery_redlock.tasks.settings.options import Backoff, TaskLockOptions

STRATEGIES = ("defer", "skip", "fail")
OF_REDELIVERIES = Backoff(first=1.0, cap=30.0)  # between the tries of a redelivered message
AFTER_LEASE = 0.25  # s: tries after the end of a lease are spread over it, or over `first` if less

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

    at: seconds since 1970, by the clocks of the lock nodes. resources: all that it asked for.
    before: the last deferral of its message.
    """

    error: NotAcquired
    at: float
    options: TaskLockOptions
    resources: tuple[str, ...]
    call: TaskCall
    before: Deferral


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
    before = refusal.before
    taken = error if isinstance(error, LockTaken) else None
    waited = before.waited(refusal.at)
    max_wait = options.max_wait
    strategy = options.on_unreachable if taken is None else options.on_conflict
    if taken is not None and callable(strategy):
        strategy = _asked(refusal, taken, waited)
    if strategy == "skip":
        rate = "" if taken is None else taken.rate
        is_ = "" if rate else f"{error.resource!r} is "
        return Skip(f"{is_}{describe_refusal(error)}", rate)
    if strategy == "run":
        return "run"
    if strategy == "fail":
        return "fail"
    if max_wait is not None and waited >= max_wait:
        if options.on_give_up == "fail":
            return "fail"
        return Skip(f"gave up on {error.resource!r} after {waited:.1f} s, {before.count} deferrals")
    countdown = countdown_of(options.backoff, before.count, error, countdown_cap, uniform)
    if max_wait is not None:
        countdown = min(countdown, max_wait - waited)
    waits = taken is not None and options.on_conflict == "defer" and max_wait is None
    # only a run asks a callable: the waiting room would ask for the lock with an old limit
    waits = waits and not callable(options.limit)
    return Deferral(
        count=before.count + 1,
        since=before.since or refusal.at,
        at=refusal.at,
        countdown=countdown,
        had_waited=waited,
        resource=error.resource,
        resources=refusal.resources,
        holder="" if taken is None else taken.holder,
        expires_in=None if taken is None else taken.expires_in,
        limit=1 if taken is None else taken.limit,
        rate="" if taken is None else taken.rate,
        is_taken=taken is not None,
        why=describe_refusal(error),
        waits_for_release=waits,
    )


def _asked(refusal: Refusal, taken: LockTaken, waited: float) -> str:
    """Return what a callable `on_conflict` decides."""
    on_conflict = refusal.options.on_conflict
    call = refusal.call
    contention = Contention(
        taken.resource, taken.holder, refusal.before.count, waited,
        call.task, tuple(call.args), dict(call.kwargs), taken.rate, taken.expires_in,
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
    level = f"resource {taken.resource!r}"
    raise SettingsError(level, "on_conflict", repr(on_conflict), hint) from cause


def countdown_of(
    backoff: Backoff, tries: int, refusal: Exception, cap: float, uniform: Uniform
) -> float:
    """Return the seconds until the next try of a message, `cap` at most.

    They end with the lease that refused: a dead holder announces nothing. If a rate refused, they
    do not end before its next start. If nodes in their grace period did, they end with the first
    grace period, or at the backoff's cap: a broker that keeps the message hears of no `trust`. A
    crowd that waits for one of these is spread by the backoff.
    """
    countdown = min(backoff.delay(tries, uniform), cap)
    if isinstance(refusal, QuorumUnreachable) and refusal.votes_in is not None:
        return min(cap, backoff.cap, refusal.votes_in + uniform(0.0, backoff.first))
    if not isinstance(refusal, LockTaken) or refusal.expires_in is None:
        return countdown
    ends = refusal.expires_in + uniform(0.0, min(AFTER_LEASE, backoff.first))
    return min(cap, max(ends, countdown)) if refusal.rate else min(countdown, ends)


def with_history(refusal: Refusal) -> NotAcquired:
    """Return the error with how long the message has waited, and how often it was deferred."""
    error = refusal.error
    deferrals = refusal.before.count
    waited = refusal.before.waited(refusal.at)
    if isinstance(error, QuorumUnreachable):
        return QuorumUnreachable(error.resource, error.causes, error.quorum, waited, deferrals)
    if isinstance(error, LockTaken):
        found = error.resource, error.holder, error.expires_in
        return LockTaken(*found, waited, deferrals, error.ttl, error.limit, error.rate)
    return error


def describe_refusal(error: NotAcquired) -> str:
    if isinstance(error, QuorumUnreachable):
        return f"no quorum of {counted(error.quorum, 'node')} ({summarize_causes(error.causes)})"
    return describe_taken(error) if isinstance(error, LockTaken) else "not acquired"
