"""Another delivery of the same message: whether it runs, or has come to its end.

A run that may be delivered again leaves a completion marker on the nodes, with the release of its
lock. A redelivery reads the marker with its own grant, and does not run if it finds one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from celery_redlock.errors import LockTaken, NotAcquired
from celery_redlock.lock.engine.acquirer import SupersededError
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import completion_key, is_of_run
from celery_redlock.lock.model.options import CompletionMarker
from celery_redlock.lock.server.requests import MARKER
from celery_redlock.lock.transport.encoding import read_number
from celery_redlock.tasks.delivery.delivery import Delivery, clock
from celery_redlock.tasks.delivery.header import CLOCKS_DIFFER
from celery_redlock.tasks.per_app import redlock_of, settings_of, time_of_nodes

LATER_MARKED = 1.0  # s: for which a run may go on after its result is stored


def completion_marker(delivery: Delivery, *, is_unique: bool) -> CompletionMarker | None:
    """Return the marker of a run that may be delivered again; None for one that may not.

    is_unique: the message is one of a deduplicated send.
    A task that acknowledges early may run twice if its message was republished and the broker's
    reply was lost: it was published twice. Each copy of a broadcast message is to run, though all
    of them have one task id.
    """
    marker = _marker_of_deliveries(delivery)
    if not is_unique:
        return marker
    if marker is None:
        run, kept_for = str(delivery.run_id), settings_of(delivery.task.app).done_ttl
        marker = CompletionMarker(run, kept_for)
    asked = marker.asks_since if delivery.may_have_run_elsewhere else None
    return replace(
        marker,
        asks_since=-math.inf if asked is None else asked,  # a later send may have replaced it
        # a redelivery heeds that under its lock: the first delivery may run, and has stored a state
        heeds_later=not delivery.is_redelivered,
    )


def _marker_of_deliveries(delivery: Delivery) -> CompletionMarker | None:
    may_have_run = delivery.may_have_run_elsewhere
    if not (may_have_run or delivery.acks_late) or not delivery.can_republish:
        return None
    since, came = None, delivery.received_at
    if may_have_run:
        since = ran_since(delivery)
    elif came is not None:  # a copy may have run while this one waited here
        here_for = clock.now() - came
        # later: an id may be sent again once its result is stored, just before its run is marked
        since = redlock_of(delivery.task.app).session.clock.now() - here_for + LATER_MARKED
    kept_for = settings_of(delivery.task.app).done_ttl
    run = str(delivery.run_id)
    return CompletionMarker(run, kept_for, since, is_redelivered=delivery.is_redelivered)


def ran_since(delivery: Delivery) -> float:
    """Return since when another delivery of this message may have run, in monotonic seconds.

    -inf: at any time. An older marker is that of an earlier message with the same task id.
    """
    if delivery.is_redelivered:
        return -math.inf
    app = delivery.task.app
    waited = delivery.header.deferral.waited(time_of_nodes(app))
    return redlock_of(app).session.clock.now() - waited - CLOCKS_DIFFER


def check_not_superseded(delivery: Delivery) -> None:
    """Raise SupersededError if a later send has replaced the message of a redelivery or a copy.

    Under the lock no first delivery of a redelivery runs. The sender of a copy knows no queue, so
    it marked the run without one, for which the copy does not ask with its lock. Under the lock is
    not too early: the later send marks before it asks for the lock.
    """
    run = delivery.run_id
    if not (run.queue or run.life or delivery.is_redelivered) or run.retries:
        return
    session = redlock_of(delivery.task.app).session
    sent = str(run.of_all_copies)
    if any(age < 0 for age in read_markers(session, sent)):
        raise SupersededError(sent)


def read_markers(session: Session, run: str) -> list[float]:
    """Return how old the completion marker is on each node that answers within one node timeout.

    Seconds; 0 if the node has none, below 0 if a later send has replaced the run.
    """
    request = MARKER.call([completion_key(session.options.prefix, run)])
    ages = session.nodes.query(request, read_number, script=MARKER).values()
    return [age / 1000 for age in ages]


def is_completed_since(delivery: Delivery, since: float) -> bool:
    """Return whether a node knows that the run was completed after that, in monotonic seconds."""
    session = redlock_of(delivery.task.app).session
    ages = read_markers(session, str(delivery.run_id))
    now = session.clock.now()
    return any(age > 0 and now - age >= since for age in ages)


def is_completed_elsewhere(delivery: Delivery, began: float) -> bool:
    """Return whether another delivery came to its end since the body of this one began.

    began: monotonic seconds. False if no node can tell, and if no final state is stored: this body
    may have stored a state of its own over it, and then a final one is to be stored again.
    """
    if not is_completed_since(delivery, began):
        return False
    return delivery.reporter.has_final_state_if_wanted()


def is_held_by_own_run(delivery: Delivery, refusal: NotAcquired) -> bool:
    """Return whether the holder is this very run, by another delivery of its message."""
    return isinstance(refusal, LockTaken) and is_of_run(refusal.holder, str(delivery.run_id))


def is_to_wait_for_first_delivery(delivery: Delivery, refusal: NotAcquired) -> bool:
    """Return whether a message is to wait for its own first delivery, which may run or be done.

    If no quorum votes, that is not known of a redelivery, so it waits.
    """
    is_unknown = not isinstance(refusal, LockTaken) and delivery.is_redelivered
    if not (is_unknown or is_held_by_own_run(delivery, refusal)):
        return False
    return delivery.can_republish
