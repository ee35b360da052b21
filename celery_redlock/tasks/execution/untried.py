"""Messages that are deferred without a try, in a worker's main process.

If another message of the worker waits for the same lock, was refused it just now, or runs under it
in one of several slots, a new message would be refused as well: a run in the pool, and two rounds
to the nodes. So it waits in the worker's memory from the start, unacknowledged as a message with a
countdown is. What it may lead to is what the run would have done: DEFERRED, its event, its signal
and its log line.

A message tries as before if only a run can say what becomes of it: its key or `on_conflict` is a
callable, it waits in its slot (`wait`), it may have run elsewhere, or its budget is spent. So does
each message of an app with quorum queues: for it Celery cannot raise the prefetch, so messages that
wait would keep out all others. If its task has a rate limit, a try that is refused would use up a
token, so of each lock one message waits for its rate, and the others wait for that one.
"""

from __future__ import annotations

import random
from typing import Any

from celery_redlock import signals
from celery_redlock.errors import RedlockError
from celery_redlock.lock.model.keys import in_order
from celery_redlock.tasks.declaration import config_of
from celery_redlock.tasks.delivery.delivery import Deferral, Delivery
from celery_redlock.tasks.delivery.route import has_quorum_queues
from celery_redlock.tasks.execution.deferral import Refusal, decide
from celery_redlock.tasks.execution.outcomes import report
from celery_redlock.tasks.per_app import settings_of, time_of_nodes
from celery_redlock.tasks.reporting import StateReporter
from celery_redlock.tasks.settings.task_config import TaskCall
from celery_redlock.tasks.waiting.room import WaitingRoom, room_of


def defer_untried(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Give a message that would be refused a countdown before Celery looks for one.

    sender: Celery's consumer. `admit_received` comes after this, and lets the message wait.
    Source: celery.worker.strategy sends task_received before it reads the request's ETA.
    """
    room = room_of(sender)
    if room is None or request.eta is not None or not room.may_refuse(request.name):
        return  # most messages
    delivery: Delivery | None = getattr(request, "delivery", None)
    if delivery is None:
        return
    header = delivery.header
    if header.unique is not None or header.deferral.at or delivery.may_have_run_elsewhere:
        return
    # Source of the first: celery.worker.consumer.tasks: Tasks.qos_global
    if has_quorum_queues(sender.app) or not delivery.can_republish:
        return
    try:
        refusal = _known_refusal(room, delivery, request)
    except RedlockError:  # the run reports it
        return
    if refusal is None:
        return
    decision = decide(refusal, settings_of(sender.app).countdown_cap, random.uniform)
    if isinstance(decision, Deferral):
        reporter = StateReporter(delivery.task, delivery.request, request.send_event, room.states)
        header = report(delivery, refusal, decision, reporter, stays=True)
        signals.lock_deferred.send(delivery.task, event=header.deferral.event())
        request.carry(header)


def _known_refusal(room: WaitingRoom, delivery: Delivery, request: Any) -> Refusal | None:
    """Return the refusal that a run would get; None if that is not known. Raises RedlockError."""
    config = config_of(delivery.task)
    queue = delivery.queue(config.queues)
    options = config.options_for(queue, config.heeded(delivery.header.options))
    if options.on_conflict != "defer" or options.wait > 0 or callable(options.key):
        return None
    call = TaskCall(delivery.task, tuple(request.args), dict(request.kwargs), queue)
    resources = config.resources(options, call)
    error = room.refusal_of(request, in_order(resources), options.limit)  # as a run asks for them
    if error is None:
        return None
    now = time_of_nodes(delivery.task.app)
    return Refusal(error, now, options, resources, call, delivery.header.deferral)
