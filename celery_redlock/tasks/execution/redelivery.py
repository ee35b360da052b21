"""Another delivery of the same message: whether it runs, or has come to its end.

A run that may be delivered again leaves a completion marker on the nodes, with the release of its
lock. A redelivery reads the marker with its own grant, and does not run if it finds one.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from celery_redlock.errors import LockTaken, NotAcquired
from celery_redlock.lock.engine.acquirer import SupersededError
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import completion_key, is_of_run
from celery_redlock.lock.model.options import CompletionMarker
from celery_redlock.lock.transport.encoding import encode_command, read_text
from celery_redlock.tasks.delivery.delivery import Delivery
from celery_redlock.tasks.delivery.header import CLOCKS_DIFFER
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.reporting import StateReporter

_IS_A_MARKER = re.compile(r"-?[0-9]{1,18}")


def completion_marker(delivery: Delivery, *, is_unique: bool) -> CompletionMarker | None:
    """Return the marker of a run that may be delivered again; None for one that may not.

    is_unique: the message is one of a deduplicated send.
    A task that acknowledges early may run twice if its message was republished and the broker's
    reply was lost: it was published twice. Each copy of a broadcast message is to run, though all
    of them have one task id.
    """
    run = str(delivery.run_id)
    marker = _marker_of_deliveries(delivery, run)
    if not is_unique:
        return marker
    marker = marker or CompletionMarker(run, settings_of(delivery.task.app).done_ttl)
    asked = marker.asks_since if delivery.may_have_run_elsewhere else None
    return replace(
        marker,
        asks_since=-math.inf if asked is None else asked,  # a later send may have replaced it
        # a redelivery heeds that under its lock: the first delivery may run, and has stored a state
        heeds_later=not delivery.is_redelivered,
    )


def _marker_of_deliveries(delivery: Delivery, run: str) -> CompletionMarker | None:
    since = delivery.header.ran_after()
    if (since is None and not delivery.acks_late) or not delivery.can_republish:
        return None
    came = delivery.received_at
    if since is None and came is not None:  # a copy may have run while this one waited here
        since = came + CLOCKS_DIFFER
    kept_for = settings_of(delivery.task.app).done_ttl
    return CompletionMarker(run, kept_for, since, is_redelivered=delivery.is_redelivered)


def check_not_superseded(delivery: Delivery) -> None:
    """Raise SupersededError if a later send has replaced the message of a redelivery or a copy.

    Under the lock no first delivery of a redelivery runs. The sender of a copy knows no queue, so
    it marked the run without one, for which the copy does not ask with its lock. Under the lock is
    not too early: the later send marks before it asks for the lock.
    """
    run = delivery.run_id
    if not (run.queue or delivery.is_redelivered) or run.retries:
        return
    session = redlock_of(delivery.task.app).session
    sent = str(run.of_all_copies)
    if any(at is not None and at < 0 for at in read_markers(session, sent)):
        raise SupersededError(sent)


def read_markers(session: Session, run: str) -> list[float | None]:
    """Return the completion marker of each node that answers within one node timeout.

    Seconds since 1970, below 0 if a later send has replaced the run; None: the node has none.
    """
    request = encode_command("GET", completion_key(session.options.prefix, run))
    return list(session.node_set.query(request, _read_marker).values())


def _read_marker(reply: Any) -> float | None:
    """Return when a run ended; raises UnexpectedReplyError. Another program's text is no marker."""
    text = "" if reply is None else read_text(reply)
    return int(text) / 1000 if _IS_A_MARKER.fullmatch(text) else None


def is_completed_since(delivery: Delivery, since: float) -> bool:
    """Return whether a node knows that the run was completed after that, seconds since 1970."""
    markers = read_markers(redlock_of(delivery.task.app).session, str(delivery.run_id))
    return any(at is not None and at > since for at in markers)


def is_completed_elsewhere(delivery: Delivery, began: float) -> bool:
    """Return whether another delivery came to its end since the body of this one began.

    began: seconds since 1970. False if no node can tell, and if no final state is stored: this body
    may have stored a state of its own over it, and then a final one is to be stored again.
    """
    if not is_completed_since(delivery, began - CLOCKS_DIFFER):
        return False
    return StateReporter(delivery.task, delivery.request).has_final_state_if_wanted()


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
