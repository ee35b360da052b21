"""A message in the worker's main process, where Celery ends runs that it cannot see.

Two of its decisions there need more than that process knows. It takes a message that has expired or
was revoked for one that has not run, and writes REVOKED: of a message that is delivered again, only
the nodes can tell. And it lets go of the message of a run that it cuts, at a hard time limit or for
`revoke`, of which the child hears no more than a signal, the same as at a shutdown that gives the
message back. A third one loses messages: where a hard time limit passes while a cold shutdown
waits for its pool, it lets go of the message, and stores no state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import celery.worker.request
from billiard.exceptions import TimeLimitExceeded
from celery.utils.functional import noop
from celery.worker import state

from celery_redlock.tasks.children.forks import announce_end
from celery_redlock.tasks.delivery.delivery import NESTED, is_for_another_queue
from celery_redlock.tasks.delivery.header import HEADER, LockHeader
from celery_redlock.tasks.delivery.route import CAME_BACK, QUEUE
from celery_redlock.tasks.delivery.run_id import name_of_run


class Request(celery.worker.request.Request):
    """What `LockedTask.Request` names; a task's own class may derive from it.

    Source: celery.worker.strategy makes one for each delivery.
    """

    is_handed_back = False
    is_revoked = False  # which is for the gate to act on

    def __init__(self, message: Any, **options: Any) -> None:
        """Note what only this process sees of a delivery, and where its message was sent to."""
        super().__init__(message, **options)
        carried, where = self._request_dict, message.delivery_info or {}
        noted = {QUEUE: where[QUEUE]} if QUEUE in where else {}
        if "headers" in carried and not options.get("decoded"):
            noted[NESTED] = True
        if noted:
            carried["properties"] = {**carried["properties"], **noted}
        if HEADER in carried:
            self._restore_address()

    def _restore_address(self) -> None:
        """Let the run see the exchange and routing key that its message was sent to."""
        slip, where = LockHeader.of(self._context), self.delivery_info
        went_home = not where["exchange"] and where["routing_key"] == slip.queue
        if slip.exchange and slip.queue and went_home:
            where.update(exchange=slip.exchange, routing_key=slip.routing_key)

    @property
    def is_for_another_queue(self) -> bool:
        """Whether it is for another queue; nobody is told anything of it then."""
        return self.delivery_info["exchange"] == CAME_BACK and is_for_another_queue(
            self._context, self.slip
        )

    @property
    def slip(self) -> LockHeader:
        """What the message carries of ours, with what the broker says of this delivery."""
        return LockHeader.of(self._context).received(self.delivery_info)

    def maybe_expire(self) -> bool:
        """Tell whether it has expired, where that is for this process to say; else the gate does.

        Source: celery.worker.request: Request.revoked asks, and writes REVOKED.
        """
        if self.is_for_another_queue or (self.task.acks_late and self.slip.may_have_run_elsewhere):
            return False
        return bool(super().maybe_expire())

    def revoked(self) -> bool:
        """Tell whether it is over before it runs, where that is for this process to say.

        Source: celery.worker.strategy and celery.worker.request: Request.execute_using_pool ask.
        """
        return not self.is_for_another_queue and bool(super().revoked()) and not self.is_revoked

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Write REVOKED; of what may run elsewhere the gate does, unless that runs or is done.

        Source: celery.worker.request: Request.revoked calls it with what it has found out.
        """
        slip = self.slip
        if terminated or expired or not (self.task.acks_late and slip.may_have_run_elsewhere):
            super()._announce_revoked(reason, terminated, signum, expired)
            return
        self.is_revoked = True
        self.request_dict[HEADER] = replace(slip, revoked=True).to_message()

    def reject(self, requeue: bool = False) -> None:
        """Hand the message back, or let go of it."""
        self.is_handed_back = self.is_handed_back or requeue
        super().reject(requeue)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        """Hear of a run's error, which for Celery may be the end of its message.

        Source: celery.concurrency.prefork: TaskPool.on_stop fires the timers of hard time limits
        while it waits for children, also for one that is cut already.
        """
        if not (exc_info.type is TimeLimitExceeded and self._is_cut_late):
            super().on_failure(exc_info, *args, **kwargs)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Hear of a time limit; of the hard one after its failure was told, before its signal.

        Source: billiard.pool, TimeoutHandler.on_hard_timeout.
        """
        if not soft and not self.acknowledged and self._is_cut_late:
            return
        if not soft and self.acknowledged and not self.is_handed_back:
            self._tell_end()
        super().on_timeout(soft, timeout)

    @property
    def _is_cut_late(self) -> bool:
        """Tell whether a cold shutdown is to give its message back to the broker.

        Source: celery.worker.request: on_failure and on_timeout acknowledge, and store nothing.
        """
        return bool(self.task.acks_late and state.should_terminate)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """End the run by a signal, and let go of the message whatever the child does then."""
        if self.time_start:
            self._tell_end()
        super().terminate(pool, signal)

    def cancel(self, pool: Any, signal: Any = None, **how: Any) -> None:
        """Cut the run for a shutdown or a lost connection; a late message stays with the broker.

        Source: celery.concurrency.gevent reports a killed greenlet as one that has returned, which
        acknowledges its message.
        """
        if not pool.is_green:
            super().cancel(pool, signal, **how)
            return
        if self.task.acks_late:
            self._on_ack = noop
        # a shutdown's handler runs in the event loop, where nothing may wait for a socket, and
        # what is raised there leaves the requests that come after this one alone
        pool.spawn_n(super().cancel, pool, signal, **how)

    def _tell_end(self) -> None:
        if self.task.acks_late:
            announce_end(self.worker_pid, name_of_run(self.task, self._context))
