"""One event loop for the ways a worker runs: kombu's hub, greenlets, a timer thread.

No other file knows how the pools differ. With Redis and RabbitMQ the main process of the prefork,
threads and solo pools runs kombu's hub; a callback gets there through a pipe that the hub reads.
With gevent each callback gets a greenlet, as connections belong to the hub of their thread. With
other brokers there is no loop: the callback runs in the thread that asks, and what is due later in
Celery's timer thread. A solo pool runs a task's body inside a callback.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from celery_redlock import anchors
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.tasks.body import current_interrupter

logger = logging.getLogger(__name__)

Callback = Callable[..., object]


class EventLoop:
    """The event loop of a worker's main process.

    `call_soon` may be called by any thread; everything else in the loop, or as the worker starts.
    """

    def __init__(self, consumer: Any, platform: Platform) -> None:
        self._consumer = consumer
        self._platform = platform
        self._calls: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._waker: Any = None
        self._wake: Callable[[], object] = self._run_calls

    def start(self) -> None:
        """Begin to take calls; again after the connection to the broker was lost."""
        hub = self._consumer.hub
        pool = self._consumer.pool
        if hub is not None:
            self._waker = self._waker or self._platform.new_waker()
            hub.add_reader(self._waker.descriptor, self._run_calls)
            self._wake = self._waker.wake
        elif getattr(pool, "is_green", False):
            greenlet = current_interrupter()
            self._wake = lambda: greenlet.run_beside(self._run_calls)

    def clear(self) -> None:
        """Forget the calls that have not begun."""
        self._calls.clear()

    def call_soon(self, callback: Callback, *args: object) -> None:
        """Call a function in the loop."""
        self._calls.append((callback, args))
        self._wake()

    def call_after(
        self, seconds: float, callback: Callback, *args: object, priority: int = 0
    ) -> Any:
        """Call a function after so many seconds; return the timer's entry."""
        return self._consumer.timer.call_after(seconds, callback, args, priority=priority)

    def call_repeatedly(self, seconds: float, callback: Callback) -> Callable[[], None]:
        """Call a function again and again; return what ends that, with a call that runs then.

        Source: celery.concurrency.gevent: what its own returns cancels the first call alone.
        """
        entry = None
        is_cancelled = False

        def run() -> None:
            nonlocal entry
            if is_cancelled:
                return
            try:
                callback()
            finally:
                if not is_cancelled:
                    entry = self.call_after(seconds, run)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True  # before: a call that runs meanwhile looks at it as it ends
            self.cancel(entry)

        entry = self.call_after(seconds, run)
        return cancel

    def cancel(self, entry: Any) -> None:
        """Cancel an entry of the timer that has not begun; None: nothing happens.

        Source: kombu.asynchronous.timer keeps it until its time, and celery.worker.control lists
        what its arguments name: `inspect scheduled` would show a message once for each entry.
        """
        if entry is not None and not _is_running(entry):
            self._consumer.timer.cancel(entry)
            if hasattr(entry, "tref"):  # none of gevent's, which leaves its timer
                entry.args = ()

    def _run_calls(self) -> None:
        """Make the calls that are due; log the error of a call, as it would end the worker."""
        if self._waker is not None:
            self._waker.clear()  # first: a call that comes meanwhile wakes the hub again
        while True:
            try:
                callback, args = self._calls.popleft()
            except IndexError:  # also if another thread was first: without a loop several may run
                return
            try:
                callback(*args)
            except Exception:
                text = (
                    "a release could not be dispatched; waiting messages retry on their own. See %s"
                )
                logger.exception(text, anchors.UNEXPECTED, extra={"event": "hand_off_failed"})


def _is_running(entry: Any) -> bool:
    """Return whether an entry of gevent's timer runs: to cancel it would kill its greenlet.

    Source: celery.concurrency.gevent: Timer. A greenlet is true once it has begun.
    """
    greenlet = getattr(sys.modules.get("greenlet"), "greenlet", None)
    return greenlet is not None and isinstance(entry, greenlet) and greenlet.__bool__(entry)
