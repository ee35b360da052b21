"""Deferrals without a try, in the worker's main process: of messages that a run would defer."""

from __future__ import annotations

import random
from typing import Any

from celery_redlock import signals
from celery_redlock.errors import RedlockError
from celery_redlock.lock.model.keys import name_of_rate
from celery_redlock.tasks.declaration import config_of, dumped
from celery_redlock.tasks.delivery.delivery import Delivery
from celery_redlock.tasks.delivery.header import Deferral
from celery_redlock.tasks.delivery.route import has_quorum_queues
from celery_redlock.tasks.execution.deferral import Refusal, decide
from celery_redlock.tasks.execution.outcomes import report
from celery_redlock.tasks.per_app import settings_of, time_of_nodes
from celery_redlock.tasks.reporting import StateReporter
from celery_redlock.tasks.settings.app import CELERY_PREFIX
from celery_redlock.tasks.settings.call import TaskCall
from celery_redlock.tasks.waiting.queues import QueueKey
from celery_redlock.tasks.waiting.room import WaitingRoom, rooms


def defer_untried(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Give a message that would be refused a countdown before Celery looks for one.

    If another message of the worker waits for the same lock, was refused it just now, or runs under
    it in one of several slots, a new one would be refused as well: a run in the pool, and two
    rounds to the nodes. So it waits in the worker's memory from the start, and what is told of it
    is what the run would have told.

    It tries if only a run can say what becomes of it: its key, `limit` or `on_conflict` is a
    callable, it waits in its slot (`wait`), it may have run elsewhere, or its budget is spent. With
    quorum queues each message tries: for those Celery cannot raise the prefetch, so messages that
    wait would keep out all others. If its task has a rate limit, a try that is refused would use up
    a token, so of each lock one message waits for its rate, and the others wait for that one.

    sender: Celery's consumer. `admit_received` comes after this, and lets the message wait.
    Source: celery.worker.strategy sends task_received before it reads the request's ETA.
    """
    room = rooms.get(sender)
    if room is None or request.eta is not None or not room.may_refuse(request.task.name):
        return  # most messages
    delivery: Delivery | None = getattr(request, "delivery", None)
    if delivery is None or request.name.startswith(CELERY_PREFIX):  # with app.Task = LockedTask
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
    options = config.options_for(queue, config.allowed_options(delivery.header.options))
    if options.on_conflict != "defer" or options.wait > 0:
        return None
    if callable(options.key) or callable(options.limit):  # never called in the event loop
        return None
    arguments = dumped(delivery.task, tuple(request.args), dict(request.kwargs))
    call = TaskCall(delivery.task, *arguments, queue)
    resources = config.resources(options, call)
    ordered, limits, rates = config.keys(options, call, resources)
    queue_keys = [
        QueueKey.of(resource, (limits or {}).get(resource, 1), "") for resource in ordered
    ]
    if rates is not None:
        queue_keys += [
            QueueKey(name_of_rate(resource), rates[resource])
            for resource in ordered
            if resource in rates
        ]
    error = room.refusal_of(request, queue_keys)
    if error is None:
        return None
    now = time_of_nodes(delivery.task.app)
    return Refusal(error, now, options, resources, call, delivery.header.deferral)
