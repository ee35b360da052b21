"""A message in the worker's main process, where Celery ends runs that the process cannot see.

Celery decides three things there with too little knowledge:
- An expired or revoked message counts as one that has not run, and gets REVOKED. If it was
  delivered before, only the nodes know whether it has run.
- The message of a run that Celery kills, at a hard time limit or for `revoke`, is acknowledged. The
  child sees a signal only, as at a shutdown that hands the message back.
- If a hard time limit passes while a cold shutdown waits for the pool, the message is acknowledged,
  and no state is stored.

And Celery acknowledges the message of a run that was refused its lock. If the task acknowledges
late, it is kept instead, and waits in the worker's waiting room.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import celery.worker.request
from celery.exceptions import TimeLimitExceeded
from celery.signals import task_revoked
from celery.worker import state

from celery_redlock import anchors
from celery_redlock.errors import Deferred
from celery_redlock.tasks.children.reaper import announce_end
from celery_redlock.tasks.delivery.delivery import (
    SEEN,
    Delivery,
    RunState,
    Seen,
    header_of,
    received_at,
    utc_now,
)
from celery_redlock.tasks.delivery.header import DEATHS, HEADER, LockHeader
from celery_redlock.tasks.delivery.republish import publish
from celery_redlock.tasks.delivery.route import DELAYED_EXCHANGE, QUEUE_INFO
from celery_redlock.tasks.recovery.keeper import MovedAwayError, moved_requests, still_owned
from celery_redlock.tasks.recovery.step import QUICK_ACK
from celery_redlock.tasks.reporting import StateReporter
from celery_redlock.tasks.unique.claim import end_claim
from celery_redlock.tasks.waiting.room import has_room, rooms_of

logger = logging.getLogger(__name__)


def noop(*_: Any, **__: Any) -> None:
    """Do nothing."""


def is_this_thread(pid: int) -> bool:
    """Return whether a run has begun in this thread or greenlet, not in a child. pid: the pool's.

    Source: celery.concurrency.gevent gives the id of the greenlet as the pid.
    """
    if pid == os.getpid():
        return True
    getcurrent = getattr(sys.modules.get("greenlet"), "getcurrent", None)
    return getcurrent is not None and pid == id(getcurrent())


class Request(celery.worker.request.Request):
    """What `LockedTask.Request` names; a task's own class may derive from it.

    is_revoked: the run acts on a revocation that this process leaves to it. is_deferred_here: it
    carries a deferral that the broker's copy of the message lacks.
    Source: celery.worker.strategy makes one for each delivery.
    """

    acknowledged: bool
    is_handed_back = False
    is_revoked = False
    is_deferred_here = False

    def __init__(self, message: Any, **options: Any) -> None:
        """Record what only this process sees of a delivery, and restore where it was sent to."""
        super().__init__(message, **options)
        request_dict = self.request_dict
        delivery_info = message.delivery_info or {}
        seen: Seen = {
            "received": received_at(self.eta),
            "queue": delivery_info.get(QUEUE_INFO),
            "named_at": None,
            "has_room": has_room(self.app),
            "nested": "headers" in request_dict and not options.get("decoded"),
        }
        # a new mapping: the message's own may go back to the broker. A sender may write the name
        properties = {**request_dict["properties"], SEEN: seen}
        content_type = self.content_type
        if content_type is not None:  # most brokers' properties leave it out
            properties["content_type"] = content_type
        request_dict["properties"] = properties
        if HEADER in request_dict:
            self._ask(self._restore_route)

    def _restore_route(self) -> None:
        """Set the exchange and routing key that the message was sent to, if its header has them."""
        origin = RunState.of(self._context).header.origin
        delivery_info = self.delivery_info
        if origin is None or not origin.exchange or not origin.queue:
            return
        if not delivery_info["exchange"] and delivery_info["routing_key"] == origin.queue:
            delivery_info.update(exchange=origin.exchange, routing_key=origin.routing_key)

    def _ask(self, question: Callable[[], object]) -> bool:
        """Return an answer from the lock header; after an error the message goes on without it.

        Celery handles no error here: the worker would end, and the broker would give the message to
        the next worker, which would end as well.
        """
        try:
            return bool(question())
        except Exception:
            extra = {"event": "header_unread", "task": self.name, "task_id": self.id}
            text = "cannot read the lock header of %s[%s], which goes on without it. See %s"
            logger.exception(text, self.name, self.id, anchors.UNEXPECTED, extra=extra)
            self.request_dict.pop(HEADER, None)
            self.__dict__.pop("_context", None)  # made from that
            return False

    @property
    def delivery(self) -> Delivery:
        """What is known of this delivery; new each time, for `_write_header` drops the request."""
        return Delivery(self.task, self._context)

    @property
    def _is_for_another_queue(self) -> bool:
        # the exchange first, for it is at hand: of most deliveries nothing else needs to be read
        return self.delivery_info["exchange"] == DELAYED_EXCHANGE and self._ask(
            lambda: self.delivery.is_for_another_queue
        )

    @property
    def _is_left_to_run(self) -> bool:
        """Whether the run itself decides what becomes of an expired or revoked message."""
        return bool(self.task.acks_late) and self._ask(lambda: self.delivery.may_have_run_elsewhere)

    def maybe_expire(self) -> bool:
        """Return whether the message has expired, unless the run decides that.

        Source: celery.worker.request: Request.revoked asks, and writes REVOKED.
        """
        if self._is_for_another_queue or self._is_left_to_run:
            return False
        return bool(super().maybe_expire())

    def revoked(self) -> bool:
        """Return whether the message has ended before its run, unless the run decides that.

        It has as well if it was moved away. Source: celery.worker.strategy asks, and just before a
        request goes to the pool celery.worker.request: create_request_cls, which overrides
        `execute_using_pool`.
        """
        if not still_owned(self.message.delivery_tag):
            self._leave()
            return True
        if self._is_for_another_queue:  # no state and no event is to tell of it
            return False
        return bool(super().revoked()) and not self.is_revoked

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Have REVOKED stored; if the message may have run elsewhere, leave that to the run.

        Celery's own stores it in the event loop, which a result backend that hangs would stop. The
        message is acknowledged after that, so no more of them are pending than the worker takes.
        """
        if not (terminated or expired) and self._is_left_to_run:
            self.is_revoked = True
            self._write_header(self.delivery.header.revoked())
            return
        state.task_ready(self)
        fields = {"terminated": terminated, "signum": signum, "expired": expired}
        thread = next((room.states for room in rooms_of(self.app)), None)
        reporter = StateReporter(self.task, self._context, self.send_event, thread)
        was_deferred = self._ask(lambda: self.delivery.was_deferred)
        reporter.show_revoked(reason, was_deferred=was_deferred, **fields)
        self._already_revoked = True

        def end() -> None:
            self.acknowledge()
            task_revoked.send(self.task, request=self._context, **fields)  # ends its claim

        if terminated:  # at once: the end of its child could have the message requeued
            end()
        on_end = noop if terminated else end
        reporter.revoked_untried(reason, store_result=self.store_errors, on_end=on_end)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Begin the run; if the message was moved while it waited for a thread, let the run end.

        Source: celery.concurrency.base: apply_target calls it in the thread or greenlet of the run.
        """
        tag = str(self.message.delivery_tag)
        if is_this_thread(pid) and not still_owned(tag):
            moved_requests[tag] = self
            return
        super().on_accepted(pid, time_accepted)

    def _leave(self) -> None:
        """Drop the message from this worker's records: it was moved, so another worker has it.

        It is not acknowledged, and not published again at a warm shutdown.
        """
        state.task_ready(self)
        if self.acknowledged:
            return
        self.acknowledged = True
        # counts for the prefetch alone, while `ack` would ask the broker
        getattr(self.message.channel.qos, QUICK_ACK)(self.message.delivery_tag)
        extra = {"event": "message_moved_away", "task": self.name, "task_id": self.id}
        logger.info("%s[%s] is with another worker", self.name, self.id, extra=extra)

    def reject(self, requeue: bool = False) -> None:
        self.is_handed_back = self.is_handed_back or requeue
        super().reject(requeue)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        """Handle a run's error, with which Celery may acknowledge the message.

        Source: celery.worker.request: on_success calls this, too. celery.concurrency.prefork:
        TaskPool.on_stop fires timers of hard time limits, also of a child that is killed already.
        """
        error = exc_info.exception
        if isinstance(getattr(error, "exc", None), Deferred):  # of a pool in this process
            error = error.exc
        if isinstance(getattr(error, "exc", error), MovedAwayError):
            self._leave()
            return
        if isinstance(error, Deferred):
            for room in rooms_of(self.app):
                room.note_refusal(error.header.deferral)
            if error.stays:
                self._stay(error.header)
                return
        if not (exc_info.type is TimeLimitExceeded and self._is_killed_by_shutdown):
            super().on_failure(exc_info, *args, **kwargs)

    def _stay(self, header: LockHeader) -> None:
        """Let the message wait here, unacknowledged, as one that was never in the pool."""
        if not still_owned(self.message.delivery_tag):
            self._leave()
            return
        state.task_ready(self)
        # back to the class' own: if the message were terminated, Celery would kill that process
        for name in ("time_start", "worker_pid", "_apply_result"):
            self.__dict__.pop(name, None)
        if self.acknowledged or getattr(self, "_already_cancelled", False):
            return  # it has ended meanwhile, or stays with the broker
        self.carry(header)
        for room in rooms_of(self.app):
            room.take_back(self, header.deferral)

    def carry(self, header: LockHeader) -> None:
        """Let the message carry a deferral and its countdown, as one that came back would."""
        self._write_header(header)
        self._eta = utc_now() + timedelta(seconds=header.deferral.countdown)
        self.is_deferred_here = True

    def _write_header(self, header: LockHeader) -> None:
        """Let this process and the pool read another header from now on."""
        self.request_dict[HEADER] = header.to_message()
        # the header counts them: each later look would take its deferrals for those of another life
        self.request_dict.pop(DEATHS, None)
        self.__dict__.pop("_context", None)  # made from that

    def publish_again(self) -> bool:
        """Publish a message that waits here, with its deferrals, as its worker stops.

        One that was sent to the pool may still run here: it is published as a redelivery. Return
        whether the broker has taken it; if not, the message stays there as it came.
        """
        if self.acknowledged or getattr(self, "_already_revoked", False):
            return True
        if not still_owned(self.message.delivery_tag):
            self._leave()
            return True
        delivery = self.delivery
        remaining = self.eta - utc_now()
        delivery.state.arguments = self.args, self.kwargs
        header = delivery.header
        if self._apply_result is not None:
            header = header.redelivered()
        try:
            publish(delivery, header, max(0.0, remaining.total_seconds()))
        except Exception as error:
            text = "cannot republish %s: %s; the message stays with the broker"
            extra = delivery.log_extra("republish_failed")
            logger.warning(text, delivery, error, extra=extra)
            return False
        self.acknowledge()
        return True

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Handle a time limit; the hard one after its failure was reported, before its signal.

        Source: billiard.pool, TimeoutHandler.on_hard_timeout, which names the parameters.
        """
        if not soft and not self.acknowledged and self._is_killed_by_shutdown:
            return
        if not soft and self.acknowledged and not self.is_handed_back:
            self._announce_end()
        super().on_timeout(soft, timeout)
        if not soft and self.acknowledged and not self.is_handed_back:
            # under gevent, Celery before 5.7 sends no task_failure for it
            end_claim(self.app, header_of(self._context))

    @property
    def _is_killed_by_shutdown(self) -> bool:
        """Whether a cold shutdown is to give the message back; Celery would acknowledge it."""
        return bool(self.task.acks_late and state.should_terminate)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """End the run by a signal; the message is acknowledged whatever the child does then.

        One that is not in the pool, or waits there for a thread or a greenlet, is ended by who asks
        next whether it is revoked: the run, at the latest. Celery's own would end no message there,
        and no run that threads have begun.
        """
        if self.time_start:
            self._announce_end()
        elif self._apply_result is None or not getattr(pool, "uses_semaphore", False):
            return
        super().terminate(pool, signal)

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> None:
        """End the run for a shutdown or a lost connection; a late message stays with the broker.

        Source: celery.concurrency.gevent reports a killed greenlet as one that has returned, which
        acknowledges its message.
        """
        if not pool.is_green:
            super().cancel(pool, signal, **options)
            return
        if self.task.acks_late:
            self._on_ack = noop
        # the handler runs in the event loop: nothing may wait there, nor raise past later requests
        pool.spawn_n(super().cancel, pool, signal, **options)

    def _announce_end(self) -> None:
        if self.task.acks_late:
            announce_end(self.worker_pid, str(self.delivery.run_id))
