"""What becomes of a delivery without its lock, done and logged; deferred in most cases.

Each function takes the delivery and a reason, stores and sends what is to be known of it, and
raises what Celery's tracer acts on: Ignore, Requeue, or the error that ends the run as FAILURE.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import NoReturn

from celery.exceptions import Ignore

from celery_redlock import signals
from celery_redlock.errors import LockTaken, NotAcquired, QuorumUnreachable, RedlockError
from celery_redlock.label import is_of_run
from celery_redlock.lock.engine.acquirer import SupersededError
from celery_redlock.tasks.delivery.delivery import Delivery, clock, utc_now
from celery_redlock.tasks.delivery.header import CLOCK_TOLERANCE, Deferral, LockHeader, hop_of
from celery_redlock.tasks.delivery.republish import NotRepublishedError, republish
from celery_redlock.tasks.delivery.route import has_quorum_queues, is_kept_by_broker, whole_seconds
from celery_redlock.tasks.execution.completion_markers import (
    is_completed_since,
    later_send,
    raise_if_superseded,
    ran_since,
)
from celery_redlock.tasks.execution.deferral import (
    REDELIVERY_BACKOFF,
    Refusal,
    Skip,
    countdown_of,
    decide,
    describe_refusal,
    with_history,
)
from celery_redlock.tasks.per_app import settings_of, time_of_nodes
from celery_redlock.tasks.recovery.keeper import end_if_moved
from celery_redlock.tasks.reporting import StateReporter
from celery_redlock.tasks.waiting.queues import BehindRun

logger = logging.getLogger(__name__)

# s: between tries to republish a message in its slot
FIRST_PAUSE_IN_SLOT = 0.5
LONGEST_PAUSE_IN_SLOT = 10.0


def pause_in_slot(delivery: Delivery, error: NotRepublishedError, last_pause: float) -> float:
    """Return the seconds that a message waits in its slot until it is republished again.

    error: why the broker did not take it back. last_pause: seconds, 0.0 before the first. Raises
    RedlockError if its queue is gone for good: only a worker's own queue comes back.
    """
    pause = min(LONGEST_PAUSE_IN_SLOT, 2 * last_pause or FIRST_PAUSE_IN_SLOT)
    if error.is_gone and pause == LONGEST_PAUSE_IN_SLOT:
        raise RedlockError(f"cannot be deferred: {error.reason}") from error
    text = "cannot republish %s: %s; it waits in its slot, and tries again soon"
    logger.warning(text, delivery, error.reason, extra=delivery.log_extra("republish_failed"))
    return pause


def end_refused(delivery: Delivery, refusal: Refusal) -> None:
    """End a run that was refused its lock, as its options say; return if it runs without a lock.

    A revoked or expired message ends, unless another delivery of it may be running.
    """
    # asked before the message is republished: if it has expired in its slot, another delivery may
    # have been revoked for that, and DEFERRED would be stored over its final state
    cancelled = delivery.cancelled
    error = refusal.error
    if isinstance(error, LockTaken):
        waits_for_first = is_held_by_own_run(delivery, error)
    elif cancelled is None:
        # no quorum can tell whether the first delivery of a redelivery runs or is done
        waits_for_first = delivery.is_redelivered and refusal.options.on_unreachable == "defer"
    else:
        # a cancelled message may be a copy of one that runs, and REVOKED would replace its state
        may_be_a_copy = delivery.acks_late and delivery.may_have_run_elsewhere
        waits_for_first = delivery.is_redelivered or may_be_a_copy
    if waits_for_first and delivery.can_republish:
        wait_for_first_delivery(delivery, error)
    if cancelled is not None:
        end_if_cancelled(delivery)
    decision = decide(refusal, settings_of(delivery.task.app).countdown_cap, random.uniform)
    _end_if_completed_meanwhile(delivery, refusal)
    if decision == "run":
        extra = delivery.log_extra("run_unlocked", resource=error.resource)
        logger.error("%s runs WITHOUT its lock: %s", delivery.task.name, error, extra=extra)
        event = signals.RunUnlockedEvent(error.resource, str(error))
        signals.run_unlocked.send(delivery.task, event=event)
    elif isinstance(decision, Skip):
        skip(delivery, error.resource, decision.reason, decision.rate)
    elif isinstance(decision, Deferral) and delivery.can_republish:
        defer(delivery, refusal, decision)
    else:
        raise with_history(refusal)


def _end_if_completed_meanwhile(delivery: Delivery, refusal: Refusal) -> None:
    """Discard a message that another delivery has completed: DEFERRED would stay over its state."""
    options = refusal.options
    may_have_run_since = callable(options.on_conflict) and delivery.may_have_run_elsewhere
    if may_have_run_since and is_completed_since(delivery, ran_since(delivery)):
        discard_redelivery(delivery)
    if not delivery.is_redelivered or not delivery.can_republish:
        return
    stores_a_state = isinstance(refusal.error, LockTaken) or options.on_unreachable != "run"
    # not marked as completed yet: its hooks still run, or its process died
    if stores_a_state and delivery.reporter.has_final_state():
        wait_for_first_delivery(delivery, refusal.error)


class Deferred(Ignore):
    """Ends a run without its lock, once its message is published again or is to stay.

    It reaches the worker's main process: see `tasks/worker_request.py`. header: what the message is
    to carry. stays: the message is not published again; it stays unacknowledged, and waits in the
    main process.
    """

    def __init__(self, header: LockHeader, stays: bool = False) -> None:
        super().__init__(header, stays)  # pickle makes a copy of that
        self.header = header
        self.stays = stays

    def __str__(self) -> str:
        return f"deferred: {self.header.deferral.why}"


def defer(delivery: Delivery, refusal: Refusal, deferral: Deferral) -> NoReturn:
    """Let the message wait: DEFERRED stored, sent, published, Deferred raised, in this order.

    A message that acknowledges late stays in its worker: at the tail of the broker's queue no
    release would reach it. Not if it has been here for long, for the broker would deliver it anew;
    nor with quorum queues: Celery cannot raise the prefetch, so it would keep out others.
    """
    end_if_moved(delivery)  # first: DEFERRED could be stored over the state of another delivery
    app = delivery.task.app
    received_at = delivery.received_at
    stays = False
    if delivery.acks_late and delivery.has_room and received_at is not None:
        is_new = clock.now() - received_at < settings_of(app).countdown_cap / 2
        stays = is_new and not has_quorum_queues(app)
    header = report(delivery, refusal, deferral, delivery.reporter, stays=stays)
    if not stays:
        end_if_moved(delivery)
        republish(delivery, header, header.deferral.countdown, at_head=delivery.has_room)
    delivery.state.continues_elsewhere = True
    signals.lock_deferred.send(delivery.task, event=header.deferral.event())
    raise Deferred(header, stays)


def report(
    delivery: Delivery,
    refusal: Refusal,
    deferral: Deferral,
    reporter: StateReporter,
    *,
    stays: bool,
) -> LockHeader:
    """Log a deferral, store DEFERRED, and send its event; return what the message is to carry.

    stays: in its worker; otherwise its countdown is one that the broker can keep.
    """
    is_kept = not stays and is_kept_by_broker(delivery.task.app, delivery.route)
    if is_kept:
        deferral = replace(deferral, countdown=whole_seconds(deferral.countdown))
    info = deferral.info(utc_now())
    wait_text = _describe_wait(delivery, refusal, deferral, is_kept)
    verb = "is" if deferral.is_taken else "has"
    lock_text = "" if deferral.rate else f"lock {deferral.resource!r} {verb} "
    extra = delivery.log_extra("run_deferred", **info)
    text = "Task %s deferred: %s%s; it %s"
    logger.info(text, delivery, lock_text, deferral.why, wait_text, extra=extra)
    is_stored = settings_of(delivery.task.app).store_deferred
    reporter.deferred(info, deferral.why, is_stored=is_stored)
    return delivery.header.deferred(delivery.request, deferral)


def _describe_wait(delivery: Delivery, refusal: Refusal, deferral: Deferral, is_kept: bool) -> str:
    """Return in few words what ends a wait. is_kept: in RabbitMQ, where it hears of no release."""
    error = refusal.error
    countdown = deferral.countdown
    if is_kept:
        return f"tries again in {countdown:.2f} s"
    if not isinstance(error, LockTaken):  # earlier, if another node is back before that
        return f"tries again within {countdown:.2f} s"
    if error.rate:
        return "waits for its next start"
    awaited = "behind that task" if isinstance(error, BehindRun) else "for a release"
    if not deferral.waits_for_release or delivery.request.expires is not None:
        return f"waits {awaited}, for {countdown:.2f} s at most"
    if error.unrenewed_for is not None:
        return f"waits for a release, or for the end of the lease in {error.expires_in:.0f} s"
    return f"waits {awaited}"


def skip(delivery: Delivery, resource: str, reason: str, rate: str = "") -> NoReturn:
    """End a run without its body: REVOKED is stored, SKIPPED sent, and Ignore raised."""
    extra = delivery.log_extra("run_skipped", resource=resource, reason=reason)
    logger.info("skipped %s: %s", delivery, reason, extra=extra)
    delivery.reporter.skipped(resource, reason)
    event = signals.LockSkippedEvent(resource, reason, rate)
    signals.lock_skipped.send(delivery.task, event=event)
    raise Ignore(reason)


def wait_for_first_delivery(delivery: Delivery, refusal: Exception) -> NoReturn:
    """Republish a redelivered message, to look again whether its first delivery has ended or died.

    refusal: why it does not run now; a soft time limit, too. Writes no state, sends no event and
    ignores strategy and budgets: that would overwrite what the first delivery has stored.
    """
    app = delivery.task.app
    attempt = delivery.header.waits
    cap = settings_of(app).countdown_cap
    countdown = countdown_of(REDELIVERY_BACKOFF, attempt, refusal, cap, random.uniform)
    if is_kept_by_broker(app, delivery.route):
        countdown = whole_seconds(countdown)
    other_delivery = "another delivery of its message"
    if not isinstance(refusal, LockTaken):
        cause = describe_refusal(refusal) if isinstance(refusal, NotAcquired) else repr(refusal)
        reason = f"was delivered again, and cannot check whether {other_delivery} runs ({cause})"
    elif is_held_by_own_run(delivery, refusal):
        remaining = refusal.expires_in
        lease_end = (
            "" if remaining is None else f" (if that worker is dead, for {remaining:.0f} s more)"
        )
        reason = f"waits: {other_delivery} holds its lock{lease_end}"
    else:
        reason = f"has already ended, by {other_delivery}"
    extra = delivery.log_extra("redelivery_waits", countdown=countdown)
    logger.info("%s %s; it checks again in %.2f s", delivery, reason, countdown, extra=extra)
    wait = Deferral(at=time_of_nodes(app), countdown=countdown)
    # so the waiting room dispatches it at the next one; a cancelled one would be at once
    if isinstance(refusal, QuorumUnreachable) and delivery.cancelled is None:
        resource = refusal.resource
        reason = describe_refusal(refusal)
        wait = replace(wait, resource=resource, resources=(resource,), is_taken=False, why=reason)
    header = delivery.header.waiting_for_first_delivery(delivery.request, wait)
    end_if_moved(delivery)
    republish(delivery, header, countdown)
    delivery.state.continues_elsewhere = True
    raise Ignore("runs already")


def discard_redelivery(delivery: Delivery) -> NoReturn:
    """Discard a message that another delivery has completed; the stored state stays."""
    delivery.state.continues_elsewhere = True
    extra = delivery.log_extra("redelivery_discarded")
    logger.info("discarded %s: another delivery of its message has finished", delivery, extra=extra)
    raise Ignore("done already")


def discard_if_ended(delivery: Delivery) -> None:
    """Discard a redelivery whose first delivery died after it had stored its final state."""
    if delivery.is_redelivered and delivery.reporter.has_final_state():
        discard_redelivery(delivery)


def end_superseded(delivery: Delivery, error: SupersededError) -> NoReturn:
    """End a message as REVOKED that a later send has replaced, or started before."""
    discard_if_ended(delivery)
    later = error.later or later_send(delivery)
    reason = "a later call replaced it"
    skip(delivery, str(error), f"{reason}: {later}" if later else reason)


def end_if_cancelled(delivery: Delivery) -> None:
    """Store REVOKED for a message that is revoked, or has expired, once a run has it."""
    reason = delivery.cancelled
    if reason is None:
        return
    discard_if_ended(delivery)
    extra = delivery.log_extra("run_cancelled", reason=reason)
    logger.info("%s is not run: %s", delivery, reason, extra=extra)
    delivery.reporter.revoked(reason, was_deferred=delivery.was_deferred)
    raise Ignore(reason)


def put_back_if_early(delivery: Delivery, wait_in_slot: float) -> None:
    """Publish a debounced message again that is here before its run is due.

    Its countdown goes in hops, because the broker would deliver again what a worker keeps for
    longer. wait_in_slot: seconds to wait first, of a message that the broker did not take back.
    Raises Ignore, and SupersededError if a later send has replaced it.
    """
    app = delivery.task.app
    header = delivery.header
    deferral = header.deferral
    if not deferral.at or deferral.since or header.waits or not delivery.can_republish:
        return
    clock.sleep(wait_in_slot)
    now = time_of_nodes(app)
    remaining = deferral.remaining(now)
    if remaining <= CLOCK_TOLERANCE:
        return
    raise_if_superseded(delivery)
    countdown = whole_seconds(hop_of(remaining, settings_of(app).countdown_cap))
    # counted from now on: a clock that was set back would have it go round until that time is over
    new_deferral = replace(deferral, at=now, countdown=remaining)
    end_if_moved(delivery)
    republish(delivery, replace(header, deferral=new_deferral), countdown)
    delivery.state.continues_elsewhere = True
    extra = delivery.log_extra("run_not_due", due_in=remaining)
    logger.debug("%s is due in %.2f s, and was published again", delivery, remaining, extra=extra)
    raise Ignore("not due")


def is_held_by_own_run(delivery: Delivery, refusal: NotAcquired) -> bool:
    """Return whether the holder is this very run, by another delivery of its message."""
    return isinstance(refusal, LockTaken) and is_of_run(refusal.holder, str(delivery.run_id))
