"""How a waiting message goes on to Celery: at its ETA, at its own retry, or dispatched before."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Container
from datetime import datetime
from typing import Any

from celery.worker import state

from celery_redlock import anchors
from celery_redlock.lock.platform.clock import Clock
from celery_redlock.tasks.reporting import StoringThread
from celery_redlock.tasks.waiting.buckets import Buckets
from celery_redlock.tasks.waiting.loop import EventLoop
from celery_redlock.tasks.waiting.prefetch import Prefetch
from celery_redlock.tasks.waiting.queues import MessageQueues, QueueKey, WaitingMessage

logger = logging.getLogger(__name__)

ETA_PRIORITY = 6  # of an entry in the timer. Source: celery.worker.strategy, for a message's ETA


class Dispatcher:
    """The timers of waiting messages, and their way to Celery.

    `dispatch` gives a message to Celery before its time, `on_eta` at the end of its countdown; both
    once. states: stores those of the messages. All methods run in the event loop.

    The owner sets these before the first message comes:
    - on_head: called with a resource that has another head, or none, and with the first message of
      a queue that was empty.
    - on_due: called with a head that is to try by itself.
    """

    def __init__(
        self,
        consumer: Any,
        loop: EventLoop,
        clock: Clock,
        queues: MessageQueues,
        buckets: Buckets,
        prefetch: Prefetch,
        states: StoringThread,
    ) -> None:
        self._consumer = consumer
        self._loop = loop
        self._clock = clock
        self._queues = queues
        self._buckets = buckets
        self._prefetch = prefetch
        self._states = states
        self.on_head: Callable[[str, WaitingMessage | None], object] = lambda resource, first: None
        self.on_due: Callable[[WaitingMessage], object] = lambda waiter: None
        self._apply_eta_task: Callable[[Any], object] = consumer.apply_eta_task
        self.forget()

    def forget(self) -> None:
        """Forget all messages: what was on its way to Celery does not arrive there."""
        self._dispatched: weakref.WeakSet[Any] = weakref.WeakSet()  # requests
        self._runs_by_resource: dict[
            str, Any
        ] = {}  # by resource: its last request that went to the pool
        # by name of a queue with several permits: its requests that went to the pool
        self._sent_by_queue: dict[str, list[Any]] = {}

    def unaccepted(self) -> list[Any]:
        """Return the requests that Celery has, and forgets when it stops.

        Source: celery.worker.consumer: Consumer.on_close empties its buckets, and the queue for a
        slot of the prefork pool; AsynPool.flush forgets each job that no child has accepted, even
        if a child is about to read it. Other pools run what they have.
        """
        forgets_unaccepted = getattr(self._consumer.pool, "uses_semaphore", False)
        unaccepted = (
            [request for request in list(self._dispatched) if request.time_start is None]
            if forgets_unaccepted
            else []
        )
        return [*self._buckets.waiting(), *unaccepted]

    def add(self, waiter: WaitingMessage) -> None:
        """Queue a message."""
        with self._queues.mutex:
            first = waiter if self._queues.head(waiter.queue) is None else None
            displaced = self._queues.add(waiter)
            if displaced is not None:
                self._arm(displaced)
            self._prefetch.update()
            is_head = self._queues.head(waiter.queue) is waiter
        if is_head:
            self.on_head(waiter.queue.name, first)

    def schedule(self, request: Any, countdown: float) -> None:
        """Do what Celery does for a message with a countdown, for one that was in the pool.

        All but the prefetch: at its limit Celery adds nothing, so the caller raises it at the end.
        Source: celery.worker.strategy; `task_scheduled` is new in 5.7.
        """
        self._dispatched.discard(request)
        entry = self._loop.call_after(
            countdown, self._consumer.apply_eta_task, request, priority=ETA_PRIORITY
        )
        request._eta_timer_entry = entry
        getattr(state, "task_scheduled", str)(request)

    def heads_to_run(self, resource: str) -> list[WaitingMessage]:
        """Return the head of each queue of a resource that is to run.

        A cancelled message would take no lock, so no release would follow for those behind it: each
        cancelled head is dispatched, for Celery to end it.
        """
        while True:
            with self._queues.mutex:
                heads = self._queues.heads(resource)
            if not self._dispatch_cancelled(heads):
                return [head for head in heads if not self._buckets.awaits_rate(head.queue)]

    def _dispatch_cancelled(self, waiters: list[WaitingMessage]) -> bool:
        revoked = self._consumer.controller.state.revoked
        cancelled = [waiter for waiter in waiters if is_cancelled(waiter.request, revoked)]
        for waiter in cancelled:
            self.dispatch(waiter)
        return bool(cancelled)

    def dispatch(self, waiter: WaitingMessage, *, is_named: bool = False) -> None:
        """Give a message to Celery before its time, and survive what Celery raises there.

        is_named: a release names this worker. Source: kombu.asynchronous.hub: what a reader raises
        ends the loop, and so the worker.
        """
        request = waiter.request
        try:
            self._cancel_timer(waiter)
            self._apply(request, waiter, is_named=is_named)
        except Exception:
            extra = {"event": "dispatch_failed", "task": request.name, "task_id": request.id}
            text = "cannot dispatch %s[%s]. See %s"
            see = anchors.UNEXPECTED
            logger.exception(text, request.name, request.id, see, extra=extra)

    def note_leaving(self, request: Any, queues: list[QueueKey]) -> None:
        """Record the locks that a message needs, at once or as soon as its rate allows it to run.

        A lock with several permits is not recorded, because the next message may run as well.
        """
        single_permit = [queue for queue in queues if queue.limit == 1]
        if self._buckets.bucket_of(request.task.name) is not None:
            self._buckets.note_waiting(request, single_permit)
        elif self.has_slots:
            for queue in single_permit:
                if queue.name and self.run_of(queue.name) is None:
                    self._runs_by_resource[queue.name] = request

    @property
    def has_slots(self) -> bool:
        """Whether two messages may run at once here; else each waits for the one before anyway."""
        return getattr(self._consumer.pool, "num_processes", 1) > 1

    def run_of(self, resource: str) -> Any:
        """Return the request of this worker that holds a lock, or is about to acquire it; or None.

        Source: celery.worker.state: `reserved_requests` are those in the pool and on their way.
        """
        request = self._runs_by_resource.get(resource)
        return request if request in state.reserved_requests else None

    def _forget_run(self, request: Any) -> None:
        """Let those behind a message try their lock, though Celery counts it as in the pool."""
        for resource, run in list(self._runs_by_resource.items()):
            if run is request:
                self._runs_by_resource.pop(resource, None)
        for sent in list(self._sent_by_queue.values()):
            if request in sent:
                sent.remove(request)

    def unbegun(self, queue: QueueKey) -> int:
        """Return how many messages of a queue wait in the pool: their runs have not begun."""
        sent = self._sent_by_queue.pop(queue.name, [])
        reserved = state.reserved_requests
        waiting = [
            request for request in sent if request in reserved and request.time_start is None
        ]
        if waiting:
            self._sent_by_queue[queue.name] = waiting
        return len(waiting)

    def sweep(self) -> None:
        """Dispatch cancelled messages, and forget ended runs."""
        with self._queues.mutex:
            waiters = self._queues.all()
        self._dispatch_cancelled(waiters)
        for resource, run in list(self._runs_by_resource.items()):  # another thread may note one
            if run not in state.reserved_requests:
                self._runs_by_resource.pop(resource, None)

    def has_succeeded(self, id_: str) -> bool:
        """Return whether the run of a message has just ended with success in this worker."""
        return id_ in self._consumer.controller.state.successful_requests

    def on_eta(self, request: Any, *_limit: Any) -> None:
        """Give a message to Celery at the end of its countdown, unless it waits for a release.

        _limit: the bucket and the tokens, of a message whose task had a rate limit as it came.
        """
        with self._queues.mutex:
            waiter = self._queues.of(request)
            if waiter is not None:
                if waiter.is_postponed:
                    return  # it has a later time of its own; before 5.7 Celery's timer stays
                waiter.eta = self._clock.now()  # the wall clock may reach it a little earlier
                if waiter.waits_for_release:
                    self._arm(waiter)
                    return
        self._apply(request, waiter)

    def _on_retry(self, request: Any) -> None:
        """Let a head check its lock; give a message to Celery at its deadline."""
        with self._queues.mutex:
            waiter = self._queues.of(request)
        if waiter is not None and self._clock.now() < waiter.deadline:
            self.on_due(waiter)
        else:
            self._apply(request, waiter)

    def postpone(self, waiter: WaitingMessage, seconds: float) -> None:
        """Let a waiter check its lock again after some seconds, at its deadline at the latest.

        For waiters that wait for a release: nothing but Celery's timer ends the wait of others.
        """
        with self._queues.mutex:
            if self._queues.of(waiter.request) is waiter:
                waiter.eta = self._clock.now() + seconds
                waiter.is_postponed = True
                self._arm(waiter)

    def _apply(
        self, request: Any, waiter: WaitingMessage | None, *, is_named: bool = False
    ) -> None:
        """Give a message to Celery, once: outside the mutex, as a solo pool runs its body here.

        waiter: None for a message that does not wait here.
        """
        was_head = False
        with self._queues.mutex:
            if request in self._dispatched or waiter is not self._queues.of(request):
                return  # another thread was first, or the room was closed: the message comes again
            self._dispatched.add(request)
            if waiter is not None:
                self.note_leaving(request, [waiter.queue])
                if waiter.queue.limit != 1:
                    self._sent_by_queue.setdefault(waiter.queue.name, []).append(request)
                was_head = self._queues.head(waiter.queue) is waiter
                next_head = self._queues.remove(waiter, self._clock.now(), is_named=is_named)
                if next_head is not None:
                    self._arm(next_head)
        try:
            if waiter is not None and was_head:
                self.on_head(waiter.queue.name, None)
        finally:  # it is in no queue any more
            self._pass_on(request)

    def _pass_on(self, request: Any) -> None:
        """Let Celery run a message, once its DEFERRED is stored, which could stay otherwise."""
        # in the timer, which survives errors
        retry = functools.partial(
            self._loop.call_soon, self._loop.call_after, 0.0, self._pass_on, request
        )
        if request not in self._dispatched or not self._states.withdraw(str(request.id), retry):
            return  # the room was closed, or a result backend is slow
        bucket = self._buckets.bucket_of(request.task.name)
        if bucket is None:
            self._buckets.note_left(request)
            try:
                self._apply_eta_task(request)
            except BaseException:  # as if no thread can start: Celery holds it, and never ends it
                self._forget_run(request)
                raise
        else:
            self._consumer.qos.decrement_eventually()
            self._buckets.enter(request, bucket)
        with self._queues.mutex:
            # after: Celery lowers its prefetch there, and never adds at its limit
            self._prefetch.update()

    def _arm(self, waiter: WaitingMessage) -> None:
        """Set the timer for a waiter's own try, if its ETA has passed; before, Celery's is set."""
        seconds = self._queues.retry_in(waiter, self._clock.now())
        if seconds is None:
            return
        request = waiter.request
        self._cancel_timer(waiter)  # otherwise it would outlive the connection
        entry = self._loop.call_after(seconds, self._on_retry, request, priority=ETA_PRIORITY)
        waiter.timer_entry = entry
        if hasattr(request, "_eta_timer_entry"):  # so that Celery 5.7 cancels it
            request._eta_timer_entry = entry

    def _cancel_timer(self, waiter: WaitingMessage) -> None:
        self._loop.cancel(waiter.timer_entry)
        self._loop.cancel(getattr(waiter.request, "_eta_timer_entry", None))  # before 5.7 it stays


def is_cancelled(request: Any, revoked: Container[str]) -> bool:
    """Return whether a message has expired or is revoked: by its id, or by a stamp.

    revoked: the ids that this worker was told of. Source: celery.worker.request: `Request.revoked`
    writes REVOKED; a message that may run elsewhere gets that when its lock is taken.
    """
    if request.id in revoked:
        return True
    expires = request.expires
    if expires is not None and expires < datetime.now(expires.tzinfo):
        return True
    try:
        is_revoked = bool(request.stamped_headers and request.revoked())
    except Exception:  # it is revoked, and the result backend that is to store that is away
        return True
    return is_revoked or getattr(request, "is_revoked", False)
