"""How a delivery ends whose body is not to run."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from celery.exceptions import Ignore, SoftTimeLimitExceeded

from celery_redlock.errors import LockTaken, NotAcquired
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError, SupersededError
from celery_redlock.tasks import reporting, signals
from celery_redlock.tasks.delivery.delivery import expires_in, route_of, utc_now
from celery_redlock.tasks.delivery.header import LockHeader, Past
from celery_redlock.tasks.delivery.republish import republish
from celery_redlock.tasks.delivery.route import supported_countdown
from celery_redlock.tasks.execution.contention import (
    Contention,
    Defer,
    RunUnlocked,
    Skip,
    decide,
    decide_redelivery,
    describe_refusal,
    with_history,
)
from celery_redlock.tasks.execution.redelivery import (
    CONTINUES,
    goes_back,
    is_marked_since,
    is_twin,
    may_be_twin,
)
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.settings.options import TaskLockOptions

logger = logging.getLogger(__name__)


def _tell_nothing(task: Any, request: Any, slip: LockHeader, cut: BaseException) -> None:
    """Put a second delivery back that a soft time limit has cut while it waited for its lock.

    The first one may run by now, and what ends this one as FAILURE would be stored over its state.
    """
    if isinstance(cut, SoftTimeLimitExceeded) and slip.is_redelivered and goes_back(task, request):
        await_first(task, request, slip, cut)


def turn_away(
    task: Any,
    request: Any,
    rules: TaskLockOptions,
    slip: LockHeader,
    refused: NotAcquired,
    resources: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Do what the rules say of a run without its lock; returns only where it is to run without.

    Raises Ignore (put back, or skipped), or the error that ends the run as FAILURE.
    """
    refused_at = utc_now().timestamp()
    may_wait = isinstance(refused, LockTaken) or rules.on_unreachable == "defer"
    if may_wait and may_be_twin(task, request, slip, refused):
        await_first(task, request, slip, refused)
    past = slip.past(utc_now())

    def ask(on_conflict: Callable[[Contention], object], taken: LockTaken) -> object:
        told = (taken.resource, taken.holder, past.deferrals, past.waited, task)
        return on_conflict(Contention(*told, tuple(args), dict(kwargs)))

    cap = settings_of(task.app).countdown_cap
    decision = decide(rules, refused, past, ask, random.uniform, cap)
    _make_way_to_done(task, request, rules, slip, refused)
    if isinstance(decision, RunUnlocked):
        told = reporting.fields("run_unlocked", task, request, resource=refused.resource)
        logger.error("%s runs WITHOUT its lock: %s", task.name, refused, extra=told)
    elif isinstance(decision, Skip):
        skip(task, request, refused.resource, decision.reason)
    elif isinstance(decision, Defer) and goes_back(task, request):
        following = slip.next(utc_now(), decision.delay, request.retries, request.id)
        is_taken = isinstance(refused, LockTaken)
        following = replace(
            following,
            waits_for=tuple(resources),
            reason="" if is_taken else describe_refusal(refused),
            refused_by=refused.resource if is_taken else None,
            refused_at=refused_at,
            limit=rules.limit,
            patient=is_taken and is_patient(rules),
        )
        defer(task, request, following, past, refused, decision.countdown)
    else:
        raise with_history(refused, past)


def _make_way_to_done(
    task: Any, request: Any, rules: TaskLockOptions, slip: LockHeader, refused: NotAcquired
) -> None:
    """Let go of a message that another delivery of it has brought to its end since the refusal.

    What this one would store, such as DEFERRED, would stay over that end. Where an end is stored
    and not marked yet, its hooks run, or its process died: this one looks again.
    """
    since = slip.asks_since() if callable(rules.on_conflict) else None  # which takes its time
    if since is not None and is_marked_since(task, request, max(0.0, since)):
        make_way(task, request)
    stores = isinstance(refused, LockTaken) or rules.on_unreachable != "run"
    if (
        slip.is_redelivered
        and stores
        and goes_back(task, request)
        and reporting.has_end(task, request)
    ):
        await_first(task, request, slip, refused)


def why_over(task: Any, request: Any, slip: LockHeader) -> str:
    """Return why a message is not to run that may run elsewhere: "expired", "revoked", or ""."""
    if slip.revoked:
        return "revoked"
    return "expired" if slip.may_have_run_elsewhere and expires_in(task, request) < 0 else ""


def turn_away_unrun(
    task: Any, request: Any, slip: LockHeader, refused: NotAcquired, over: str
) -> None:
    """End a message that is over, unless it runs already; where nobody can say, it waits.

    over: as of `why_over`. What has expired by now, in its slot, is not put back, either: another
    delivery may have been revoked for that, and DEFERRED would be stored over its end.
    """
    over = over or ("expired" if expires_in(task, request) < 0 else "")
    if not over:
        return
    if may_be_twin(task, request, slip, refused):
        await_first(task, request, slip, refused)
    end_unrun(task, request, slip, over)


def is_patient(rules: TaskLockOptions) -> bool:
    """Tell whether a message may wait for a release alone: without a budget, and asked nothing."""
    return rules.on_conflict == "defer" and rules.max_wait is None and rules.max_deferrals is None


def await_first(task: Any, request: Any, slip: LockHeader, refused: Exception) -> NoReturn:
    """Put a twin back, to look again whether the first delivery is done or has died.

    refused: why it did not get its lock; a soft time limit, too. No state, event or signal tells
    of it: they would overwrite what the first one is at. For the same reason no budget ends it, nor
    what `on_conflict` says.
    """
    cap = settings_of(task.app).countdown_cap
    decision = decide_redelivery(refused, slip.twin, random.uniform, cap)
    countdown = supported_countdown(task.app, decision.countdown, route_of(request, slip))
    by = "by another delivery of its message"
    why = f"may run already, {by} ({refused!r})"
    if isinstance(refused, LockTaken):
        runs = is_twin(task, request, refused)
        why = f"runs already, {by}" if runs else f"is at its end already, {by}"
    told = reporting.fields("redelivery_waits", task, request, countdown=countdown)
    text = "%s[%s] %s: this one looks again in %.2f s"
    logger.info(text, task.name, request.id, why, countdown, extra=told)
    republish(task, request, slip.next_redelivery(request.retries, request.id), countdown)
    request.__dict__[CONTINUES] = True
    raise Ignore("runs already")


def drop(task: Any, request: Any, known: AlreadyCompletedError | SupersededError) -> NoReturn:
    """Let go of a message that is not to run: it has run already, or another one runs instead."""
    if isinstance(known, SupersededError):
        skip(task, request, str(known), "a later send of the same took its place")
    make_way(task, request)


def make_way(task: Any, request: Any) -> NoReturn:
    """Let go of a message that another delivery of it has brought to its end; that state stays."""
    request.__dict__[CONTINUES] = True
    told = reporting.fields("redelivery_discarded", task, request)
    text = "dropped %s[%s]: another delivery of its message is done"
    logger.info(text, task.name, request.id, extra=told)
    raise Ignore("done already")


def end_unrun(task: Any, request: Any, slip: LockHeader, over: str) -> None:
    """End a message that is over; the worker's main process has left this to the gate.

    over: as of `why_over`. Source: celery.worker.request: Request._announce_revoked.
    """
    if not over:
        return
    if slip.is_redelivered and reporting.has_end(task, request):
        make_way(task, request)
    told = reporting.fields("run_cancelled", task, request, reason=over)
    logger.info("%s[%s] is not run: %s", task.name, request.id, over, extra=told)
    reporting.show_revoked(task, request, over)
    raise Ignore(over)


def skip(task: Any, request: Any, resource: str, reason: str) -> NoReturn:
    """End a run without running its body."""
    told = reporting.fields("run_skipped", task, request, resource=resource, reason=reason)
    logger.info("skipped %s[%s]: %s", task.name, request.id, reason, extra=told)
    reporting.show_skipped(task, request, resource, reason)
    signals.lock_skipped.send(task, event=signals.LockSkippedEvent(resource, reason))
    raise Ignore(reason)


def defer(
    task: Any,
    request: Any,
    following: LockHeader,
    past: Past,
    refused: NotAcquired,
    countdown: float,
) -> None:
    """Put the message back: DEFERRED stored, sent, published, then Ignore raised, in this order.

    following: the slip that it goes with. countdown: s.
    """
    now = utc_now()
    countdown = supported_countdown(task.app, countdown, route_of(request, following))
    holder = refused.holder if isinstance(refused, LockTaken) else ""
    info = {
        "resource": refused.resource,
        "holder": holder,
        "deferrals": following.deferrals,
        "waited": past.waited,
        "next_try": reporting.in_iso(now, countdown),
    }
    why = describe_refusal(refused)
    told = reporting.fields("run_deferred", task, request, **info)
    text = "Task %s[%s] deferred for %.2f s: lock %r %s %s"
    verb = "is" if isinstance(refused, LockTaken) else "has"
    names = task.name, request.id, countdown, refused.resource
    logger.info(text, *names, verb, why, extra=told)
    reporting.show_deferred(task, request, info, why)
    republish(task, request, following, countdown)
    request.__dict__[CONTINUES] = True
    event = signals.LockDeferredEvent(
        refused.resource, holder, following.deferrals, past.waited, countdown
    )
    signals.lock_deferred.send(task, event=event)
    raise Ignore(f"deferred: {why}")
