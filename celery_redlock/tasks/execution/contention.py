"""What becomes of a message whose run did not get its lock. Decides, and does nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import (
    LockTaken,
    NotAcquired,
    QuorumUnreachable,
    SettingsError,
    describe_taken,
    summarize_causes,
)
from celery_redlock.tasks.settings.backoff import Backoff
from celery_redlock.tasks.settings.options import TaskLockOptions

STRATEGIES = ("defer", "skip", "fail")
OF_REDELIVERIES = Backoff(first=1.0, cap=30.0)  # between the tries of a redelivered message
AFTER_LEASE = 0.25  # s: tries after the end of a lease are spread over it, or over `first` if less

Uniform = Callable[[float, float], float]  # draws between two bounds


@dataclass(frozen=True)
class Contention:
    """What a callable `on_conflict` gets when a task finds its lock taken.

    resource: the resource whose lock is taken. holder: the label of the holder, "" if it has none.
    deferrals: number of deferrals of the message so far. waited: seconds since the first try.
    task, args, kwargs: the task that found the lock taken, and its arguments.
    """

    resource: str
    holder: str
    deferrals: int
    waited: float
    task: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Defer:
    """Republish the message. countdown: seconds; delay: seconds of the backoff before the cut."""

    countdown: float
    delay: float


@dataclass(frozen=True)
class Skip:
    """Do not run the body. reason: for people."""

    reason: str


@dataclass(frozen=True)
class Fail:
    """End the run as FAILURE."""

    error: NotAcquired


@dataclass(frozen=True)
class RunUnlocked:
    """Run the body without a lock, and log an error."""


Decision = Defer | Skip | Fail | RunUnlocked


def decide(
    options: TaskLockOptions,
    refusal: NotAcquired,
    contention: Contention,
    last_delay: float | None,
    uniform: Uniform,
    countdown_cap: float,
) -> Decision:
    """Return what to do; calls a callable `on_conflict`.

    last_delay: seconds, of the message's last deferral. countdown_cap: seconds, the longest
    countdown, whatever the backoff gives. Raises SettingsError for what a callable raises, or if it
    returns no strategy.
    """
    if isinstance(refusal, LockTaken):
        strategy = _strategy(options.on_conflict, contention)
    else:
        strategy = options.on_unreachable
    if strategy == "skip":
        return Skip(f"{refusal.resource!r} is {describe_refusal(refusal)}")
    if strategy == "run":
        return RunUnlocked()
    failure = Fail(with_history(refusal, contention.waited, contention.deferrals))
    if strategy == "fail":
        return failure
    if options.max_wait is not None and contention.waited >= options.max_wait:
        if options.on_give_up == "fail":
            return failure
        reason = f"gave up on {refusal.resource!r} after {contention.waited:.1f} s"
        return Skip(f"{reason}, {contention.deferrals} deferrals")
    delay = options.backoff.delay(contention.deferrals, uniform, last_delay)
    countdown = _cut_to_lease(min(delay, countdown_cap), options.backoff, refusal, uniform)
    if options.max_wait is not None:
        countdown = min(countdown, max(0.0, options.max_wait - contention.waited))
    return Defer(countdown, delay)


def decide_redelivery(
    refusal: Exception, tries: int, uniform: Uniform, countdown_cap: float
) -> Defer:
    """Return when a redelivered message looks again whether its first delivery still runs.

    refusal: why it does not run now. tries: so far. No budget ends this: the message would be lost
    if the first delivery died.
    """
    delay = OF_REDELIVERIES.delay(tries, uniform)
    countdown = min(delay, countdown_cap)
    return Defer(_cut_to_lease(countdown, OF_REDELIVERIES, refusal, uniform), delay)


def _cut_to_lease(
    countdown: float, backoff: Backoff, refusal: Exception, uniform: Uniform
) -> float:
    """Return a countdown that ends with the lease that refused: a dead holder announces nothing."""
    if not isinstance(refusal, LockTaken) or refusal.expires_in is None:
        return countdown
    return min(countdown, refusal.expires_in + uniform(0.0, min(AFTER_LEASE, backoff.first)))


def with_history(refusal: NotAcquired, waited: float, deferrals: int) -> NotAcquired:
    """Return the error with how long the message has waited, in seconds, and how often."""
    if isinstance(refusal, QuorumUnreachable):
        return QuorumUnreachable(
            refusal.resource, refusal.causes, refusal.quorum, waited, deferrals
        )
    if isinstance(refusal, LockTaken):
        found = refusal.resource, refusal.holder, refusal.expires_in
        return LockTaken(*found, waited, deferrals, refusal.ttl, refusal.limit)
    return refusal


def _strategy(on_conflict: Any, contention: Contention) -> str:
    if not callable(on_conflict):
        return str(on_conflict)
    level, allowed = f"resource {contention.resource!r}", ", ".join(map(repr, STRATEGIES))
    try:
        strategy = on_conflict(contention)
    except Exception as error:
        hint = f"the callable raised {type(error).__name__}: {error}"
        raise SettingsError(level, "on_conflict", repr(on_conflict), hint) from error
    if strategy not in STRATEGIES:
        hint = f"the callable returned {strategy!r}, and must return one of {allowed}"
        raise SettingsError(level, "on_conflict", repr(on_conflict), hint)
    return str(strategy)


def describe_refusal(refusal: NotAcquired) -> str:
    """Return in few words why a lock was not acquired."""
    if isinstance(refusal, QuorumUnreachable):
        return f"no quorum of {refusal.quorum} nodes ({summarize_causes(refusal.causes)})"
    return describe_taken(refusal) if isinstance(refusal, LockTaken) else "not acquired"
