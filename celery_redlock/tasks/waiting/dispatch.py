"""How a waiting message goes on to Celery: at its ETA, at its own retry, or dispatched before."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from celery_redlock.lock.platform.clock import Clock
from celery_redlock.tasks.waiting.cancelled import is_cancelled
from celery_redlock.tasks.waiting.capacity import CAPACITY, Overflow
from celery_redlock.tasks.waiting.loop import EventLoop
from celery_redlock.tasks.waiting.queues import Waiter, WaitQueues
from celery_redlock.tasks.waiting.times import WaitingTimes

logger = logging.getLogger(__name__)

ETA_PRIORITY = 6  # of an entry in the timer. Source: celery.worker.strategy, for a message's ETA


class Dispatcher:
    """The queues of one worker, the timers of their waiters, and the way to Celery.

    `dispatch` is for a release, `on_eta` for the end of a countdown. Both give a message to Celery
    once. mutex: of `queues`; a greenlet that has it may give way to others. capacity: how many may
    wait after the next `forget`. All methods but `waiting` run in the event loop.
    """

    def __init__(self, consumer: Any, loop: EventLoop, clock: Clock, times: WaitingTimes) -> None:
        self._consumer, self._loop, self._clock, self._times = consumer, loop, clock, times
        self._apply_eta_task: Callable[[Any], object] = consumer.apply_eta_task
        self.mutex = threading.RLock()
        self._eviction: Any = None  # the timer's entry, while one is due
        self.capacity = CAPACITY
        self.forget()

    def forget(self) -> None:
        """Forget all waiters."""
        self._loop.cancel(self._eviction)
        self._eviction = None
        self.queues = WaitQueues(self._times.retry_next_after)
        self._overflow = Overflow(self.capacity)
        self._dispatched: weakref.WeakSet[Any] = weakref.WeakSet()  # requests

    def waiting(self) -> list[Waiter]:
        """Return the waiters in order of first deferral; called by any thread."""
        with self.mutex:
            return sorted(self.queues.all())

    def add(self, waiter: Waiter, refused_at: float) -> None:
        """Queue a message. refused_at: monotonic seconds."""
        with self.mutex:
            displaced = self.queues.add(waiter, refused_at)
            if displaced is not None:
                self._arm(displaced)
            self._update_prefetch()

    def heads_to_run(self, channel: str) -> list[Waiter]:
        """Return the head of each queue of a channel that is to run.

        A cancelled message would take no lock, so no release would follow for those behind it: each
        cancelled head is dispatched, for Celery to end it.
        """
        while True:
            with self.mutex:
                heads = self.queues.heads(channel)
            if not self._dispatch_cancelled(heads):
                return heads

    def dispatch_cancelled(self) -> None:
        """Dispatch all cancelled messages, for Celery to end them."""
        with self.mutex:
            waiters = self.queues.all()
        self._dispatch_cancelled(waiters)

    def _dispatch_cancelled(self, waiters: list[Waiter]) -> bool:
        """Return whether there was any."""
        revoked = self._consumer.controller.state.revoked
        cancelled = [waiter for waiter in waiters if is_cancelled(waiter.request, revoked)]
        for waiter in cancelled:
            self.dispatch(waiter)
        return bool(cancelled)

    def dispatch(self, waiter: Waiter) -> None:
        """Give a message to Celery before its time, and survive what Celery raises there.

        Source: kombu.asynchronous.hub: what a reader raises ends the loop, and so the worker.
        """
        request = waiter.request
        try:
            celerys = getattr(request, "_eta_timer_entry", None)  # before 5.7 Celery's own stays
            self._loop.cancel(celerys if waiter.timer_entry is None else waiter.timer_entry)
            self._apply(request, waiter)
        except Exception:
            extra = {"event": "dispatch_failed", "task": request.name, "task_id": request.id}
            logger.exception("cannot dispatch %s[%s]", request.name, request.id, extra=extra)

    def on_eta(self, request: Any) -> None:
        """Give a message to Celery at the end of its countdown, unless it waits for a release."""
        with self.mutex:
            waiter = self.queues.of(request)
            if waiter is not None:
                waiter.eta = self._clock.now()  # the wall clock may reach it a little earlier
                if self.queues.retry_in(waiter, waiter.eta):  # neither None nor 0: it is to wait
                    self._arm(waiter)
                    return
        self._apply(request, waiter)

    def _on_retry(self, request: Any) -> None:
        """Give a message to Celery that is the head, or has waited until its deadline."""
        self._apply(request, self.queues.of(request))

    def _apply(self, request: Any, waiter: Waiter | None) -> None:
        """Give a message to Celery, once: outside the mutex, as a solo pool runs its body here.

        waiter: None for a message that does not wait here.
        """
        with self.mutex:
            if request in self._dispatched or waiter is not self.queues.of(request):
                return  # another thread was first, or the room was closed: the message comes again
            self._dispatched.add(request)
            if waiter is not None:
                following = self.queues.remove(waiter, self._clock.now())
                if following is not None:
                    self._arm(following)
        self._apply_eta_task(request)
        with self.mutex:  # after: Celery lowers its prefetch there, and never adds at its limit
            self._update_prefetch()

    def _arm(self, waiter: Waiter) -> None:
        """Set the timer for a waiter's own try, if its ETA has passed; before, Celery's is set."""
        seconds = self.queues.retry_in(waiter, self._clock.now())
        if seconds is None:
            return
        self._loop.cancel(waiter.timer_entry)
        request = waiter.request
        entry = self._loop.call_after(seconds, self._on_retry, request, priority=ETA_PRIORITY)
        waiter.timer_entry = entry
        if hasattr(request, "_eta_timer_entry"):  # so that Celery 5.7 cancels it
            request._eta_timer_entry = entry

    def _update_prefetch(self) -> None:
        """Take back what Celery adds to its prefetch for messages above the capacity."""
        change, qos = self._overflow.update(self.queues.waiting_for_release), self._consumer.qos
        for _ in range(-change):
            qos.decrement_eventually()
        for _ in range(change):
            qos.increment_eventually()
        if self._overflow.evicts and self._eviction is None:
            seconds = self._times.eviction_interval
            self._eviction = self._loop.call_after(seconds, self._evict)

    def _evict(self) -> None:
        """Dispatch the message that is needed last: if refused, it goes to its queue's end."""
        with self.mutex:
            self._eviction = None
            last = self.queues.last_of_longest() if self._overflow.evicts else None
        if last is not None:  # outside: a solo pool runs its body here
            self.dispatch(last)
