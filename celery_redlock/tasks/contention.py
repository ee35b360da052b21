"""What is to become of a message whose run did not get its lock. Decides, and does nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import (
    LockTaken,
    NotAcquired,
    QuorumUnreachable,
    SettingsError,
    describe_holder,
    summarize_causes,
)
from celery_redlock.tasks.backoff import Backoff
from celery_redlock.tasks.settings import Rules

WORDS = ("defer", "skip", "fail")
TWINS = Backoff(first=1.0, cap=30.0)  # between the tries of a twin
AFTER_LEASE = 0.25  # s: tries after the end of a lease are spread over so long, or `first` if less


@dataclass(frozen=True)
class Contention:
    """What a callable `on_conflict` is given when a task finds its lock taken.

    resource: the lock that is taken. holder: the label of its holder as the nodes keep it, ""
    if it has none. deferrals: how often the message was deferred so far. waited: seconds since
    the first try. task, args, kwargs: the task that found the lock taken, and its arguments.
    """

    resource: str
    holder: str
    deferrals: int
    waited: float
    task: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Past:
    """What the message has been through. waited: s since its first try; delay: s, the last one."""

    deferrals: int = 0
    waited: float = 0.0
    delay: float | None = None


@dataclass(frozen=True)
class Defer:
    """Put the message back. countdown: s; delay: s, what the backoff said before it was cut."""

    countdown: float
    delay: float


@dataclass(frozen=True)
class Skip:
    """Do not run it. reason: for people."""

    reason: str


@dataclass(frozen=True)
class Fail:
    """End it as FAILURE."""

    error: NotAcquired


@dataclass(frozen=True)
class RunUnlocked:
    """Run the body without a lock, loudly."""


Decision = Defer | Skip | Fail | RunUnlocked


def decide(
    rules: Rules,
    refused: NotAcquired,
    past: Past,
    ask: Callable[[Callable[[Contention], object], LockTaken], object],
    uniform: Callable[[float, float], float],
    countdown_cap: float,
) -> Decision:
    """Return what to do.

    ask: calls an `on_conflict` callable with its Contention. uniform: draws between two bounds.
    countdown_cap: s, the longest countdown, whatever the backoff says.
    """
    if isinstance(refused, LockTaken):
        word = _word(rules.on_conflict, refused, ask)
    else:
        word = rules.on_unreachable
    if word == "skip":
        return Skip(f"{refused.resource!r} is held by {_holder(refused)}")
    if word == "run":
        return RunUnlocked()
    if word == "fail":
        return Fail(told(refused, past))
    return _again(rules, refused, past, uniform, countdown_cap)


def _again(
    rules: Rules,
    refused: NotAcquired,
    past: Past,
    uniform: Callable[[float, float], float],
    countdown_cap: float,
) -> Decision:
    delay = rules.backoff.delay(past.deferrals, uniform, past.delay)
    countdown = _by_the_lease(min(delay, countdown_cap), rules.backoff, refused, uniform)
    spent = rules.max_deferrals is not None and past.deferrals >= rules.max_deferrals
    if rules.max_wait is not None:
        left = rules.max_wait - past.waited
        spent = spent or left <= 0
        countdown = min(countdown, max(0.0, left))
    if not spent:
        return Defer(countdown, delay)
    if rules.on_give_up == "skip":
        reason = f"gave up on {refused.resource!r} after {past.waited:.1f} s"
        return Skip(f"{reason}, {past.deferrals} deferrals")
    return Fail(told(refused, past))


def await_twin(
    refused: Exception, tries: int, uniform: Callable[[float, float], float], countdown_cap: float
) -> Defer:
    """Return when a second delivery of the message that runs is to look again: without a budget.

    refused: why it does not run. tries: so far. uniform, countdown_cap: as for `decide`.
    """
    delay = TWINS.delay(tries, uniform)
    return Defer(_by_the_lease(min(delay, countdown_cap), TWINS, refused, uniform), delay)


def _by_the_lease(
    countdown: float,
    backoff: Backoff,
    refused: Exception,
    uniform: Callable[[float, float], float],
) -> float:
    """Return a countdown that ends with the lease that refused: who died wakes nobody."""
    if not isinstance(refused, LockTaken) or refused.expires_in is None:
        return countdown
    return min(countdown, refused.expires_in + uniform(0.0, min(AFTER_LEASE, backoff.first)))


def told(refused: NotAcquired, past: Past) -> NotAcquired:
    """Return the error with what the message has been through."""
    if isinstance(refused, QuorumUnreachable):
        return QuorumUnreachable(
            refused.resource, refused.causes, refused.quorum, past.waited, past.deferrals
        )
    if isinstance(refused, LockTaken):
        return LockTaken(
            refused.resource, refused.holder, refused.expires_in, past.waited, past.deferrals
        )
    return refused


def _word(
    on_conflict: Any,
    refused: LockTaken,
    ask: Callable[[Callable[[Contention], object], LockTaken], object],
) -> str:
    if not callable(on_conflict):
        return str(on_conflict)
    level, allowed = f"resource {refused.resource!r}", ", ".join(map(repr, WORDS))
    try:
        word = ask(on_conflict, refused)
    except Exception as error:
        hint = f"the callable raised {type(error).__name__}: {error}"
        raise SettingsError(level, "on_conflict", repr(on_conflict), hint) from error
    if word not in WORDS:
        hint = f"the callable returned {word!r}, and must return one of {allowed}"
        raise SettingsError(level, "on_conflict", repr(on_conflict), hint)
    return str(word)


def why(refused: NotAcquired) -> str:
    """Return in few words why a lock was not acquired."""
    if isinstance(refused, QuorumUnreachable):
        return f"no quorum of {refused.quorum} nodes ({summarize_causes(refused.causes)})"
    return f"held by {_holder(refused)}"


def _holder(refused: NotAcquired) -> str:
    holder = describe_holder(refused.holder) if isinstance(refused, LockTaken) else ""
    return holder or "an unnamed holder"
