"""Whether another delivery of the same message, or a later send, has made a run needless.

A run that may be delivered again leaves a completion marker on the nodes, with the release of its
lock. A redelivery reads the marker with its own grant, and does not run if it finds one. A later
send of a debounced task marks the run of the earlier one as superseded.
"""

from __future__ import annotations

import math

from celery_redlock.lock.engine.acquirer import SupersededError
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import completion_key
from celery_redlock.lock.model.options import CompletionMarker
from celery_redlock.lock.server.requests import MARKER
from celery_redlock.lock.transport.command import encode_command, read_number, read_text
from celery_redlock.tasks.delivery.delivery import Delivery, clock
from celery_redlock.tasks.delivery.header import CLOCK_TOLERANCE
from celery_redlock.tasks.per_app import redlock_of, time_of_nodes

MARKING_TIME = 1.0  # s that a run may take to mark itself as completed after its result is stored


def completion_marker(
    delivery: Delivery, kept_for: float, *, is_unique: bool
) -> CompletionMarker | None:
    """Return the marker of a run that may be delivered again; None for one that may not.

    kept_for: seconds. is_unique: the message is one of a deduplicated send. Each copy of a
    broadcast message is to run, though all of them have one task id.
    """
    # one that acknowledges early was published twice if the broker's reply to a deferral was lost
    may_have_run = delivery.may_have_run_elsewhere
    may_return = (may_have_run or delivery.acks_late) and delivery.can_republish
    if not (may_return or is_unique):
        return None
    app = delivery.task.app
    since = None
    received_at = delivery.received_at
    if may_return and may_have_run:
        since = ran_since(delivery)
    elif may_return and received_at is not None:  # a copy may have run while this one waited here
        waited_here = clock.now() - received_at
        # later: an id may be sent again once its result is stored, just before its run is marked
        since = redlock_of(app).session.clock.now() - waited_here + MARKING_TIME
    if is_unique and not (may_have_run and since is not None):
        since = -math.inf  # a later send may have replaced it
    return CompletionMarker(
        str(delivery.run_id),
        kept_for,
        since,
        # a redelivery heeds that under its lock: the first delivery may run, and has stored a state
        heeds_later=is_unique and not delivery.is_redelivered,
        is_redelivered=may_return and delivery.is_redelivered,
    )


def ran_since(delivery: Delivery) -> float:
    """Return the monotonic second from which another delivery may have run; -inf: at any time.

    An older marker is that of an earlier message with the same task id.
    """
    if delivery.is_redelivered:
        return -math.inf
    app = delivery.task.app
    waited = delivery.header.deferral.waited(time_of_nodes(app))
    return redlock_of(app).session.clock.now() - waited - CLOCK_TOLERANCE


def check_not_superseded(delivery: Delivery) -> None:
    """Raise SupersededError if a later send has replaced the message of a redelivery or a copy.

    Under the lock: no first delivery of a redelivery runs then, and the later send marks before it
    asks for the lock. The sender of a copy knows no queue, so it marked the run without one.
    """
    run_id = delivery.run_id
    if not (run_id.queue or run_id.life or delivery.is_redelivered) or run_id.retries:
        return
    raise_if_superseded(delivery)


def raise_if_superseded(delivery: Delivery) -> None:
    session = redlock_of(delivery.task.app).session
    run_id = str(delivery.run_id.of_all_copies)
    if any(age < 0 for age in read_markers(session, run_id)):
        raise SupersededError(run_id)


def later_send(delivery: Delivery) -> str:
    """Return the task id of the later send that has replaced a message; "" if no node says it."""
    session = redlock_of(delivery.task.app).session
    key = completion_key(session.options.prefix, str(delivery.run_id.of_all_copies))
    values = session.nodes.query(encode_command("GET", key), _read_marker).values()
    return next((later for _, _, later in (value.partition(" ") for value in values) if later), "")


def _read_marker(reply: object) -> str:
    return "" if reply is None else read_text(reply)


def read_markers(session: Session, run_id: str) -> list[float]:
    """Return the age of the completion marker in seconds, from each node that replies in time.

    0 if the node has none, below 0 if a later send has replaced the run.
    """
    request = MARKER.call([completion_key(session.options.prefix, run_id)])
    ages = session.nodes.query(request, read_number, script=MARKER).values()
    return [age / 1000 for age in ages]


def is_completed_since(delivery: Delivery, since: float) -> bool:
    """Return whether a node has a marker of the run from after `since`, in monotonic seconds."""
    session = redlock_of(delivery.task.app).session
    ages = read_markers(session, str(delivery.run_id))
    now = session.clock.now()
    return any(age > 0 and now - age >= since for age in ages)
