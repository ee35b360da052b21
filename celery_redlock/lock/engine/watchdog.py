"""Renews acquisitions and detects their loss, in two independent threads.

The first thread renews each acquisition every third of its ttl (`Acquisition.renew_at`), and does
pending I/O. The second thread does no I/O and takes no mutex that is held during I/O. So a stalled
socket cannot delay the report that a lock is at risk or lost. The second thread also calls users'
code.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from redis.backoff import ExponentialBackoff

from celery_redlock import anchors
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.transport.node import MAX_RECONNECT_PAUSE

logger = logging.getLogger(__name__)

HEAD_START = 0.0005  # seconds of keeping the GIL, so that a late renewal is the next to get it
ERROR_BACKOFF = ExponentialBackoff(cap=1.0, base=0.05)  # seconds after an unexpected error


Renew = Callable[[Sequence[Acquisition]], object]


class Watchdog:
    """Watches the acquisitions of a process.

    renew: renews these in one batch and sets a later `renew_at`. run_maintenance: does I/O that no
    caller waits for; returns the monotonic second of its next call. check_deadline: called with an
    acquisition that has passed its `deadline`, and the time.
    Both threads start with the first acquisition and sleep while there is nothing to do.
    """

    def __init__(
        self,
        platform: Platform,
        renew: Renew,
        run_maintenance: Callable[[], float],
        check_deadline: Callable[[Acquisition, float], None],
    ) -> None:
        self._platform = platform
        self._clock = platform.clock
        self._renew = renew
        self._run_maintenance = run_maintenance
        self._check_deadline = check_deadline
        self.forget()

    def forget(self) -> None:
        """Reset after a fork: the threads and their locks stay with the parent."""
        self._watched: dict[int, Acquisition] = {}
        self._maintenance_at = math.inf  # used by the first thread alone
        self._last_early_renewal = -math.inf
        # requests for maintenance, by any thread
        self._maintenance_requests: deque[float] = deque()
        self._pending: deque[Callable[[], object]] = deque()  # calls for the second thread
        self._renewals = self._platform.deadline_timer()
        self._deadlines = self._platform.deadline_timer()
        self._threads: dict[str, object] = {}  # by task; of two threads for a task, the first stays
        self._started = self._stopped = False

    def watch(self, acquisition: Acquisition) -> None:
        """Renew an acquisition and check its deadline from now on."""
        if not self._started:
            self._start()
        self._watched[id(acquisition)] = acquisition
        self._renewals.schedule_by(acquisition.renew_at)
        self._deadlines.schedule_by(acquisition.deadline)

    @property
    def watched(self) -> list[Acquisition]:
        return list(self._watched.values())

    def is_watching(self, acquisition: Acquisition) -> bool:
        return id(acquisition) in self._watched

    def unwatch(self, acquisition: Acquisition) -> None:
        """Stop watching an acquisition. No effect if it is not watched."""
        self._watched.pop(id(acquisition), None)

    def reschedule(self, acquisition: Acquisition) -> None:
        """Wake the threads in time, because the deadline or the next renewal has become earlier."""
        self._renewals.schedule_by(acquisition.renew_at)
        self._deadlines.schedule_by(acquisition.deadline)

    @property
    def is_started(self) -> bool:
        return self._started and not self._stopped

    @property
    def is_busy(self) -> bool:
        return bool(self._watched or self._pending)

    def release_dropped(self, acquisition: Acquisition) -> None:
        """Have an acquisition released soon if its last user was garbage collected.

        One that has another user stays as it is: it may be one that is not renewed. Called in any
        thread, also within a finalizer: it takes no mutex.
        """
        if not acquisition.users:
            acquisition.renew_at = moment = self._clock.now()  # a renewal releases it instead
            self._renewals.schedule_by(moment)

    def renew_by(self, moment: float) -> None:
        """Renew by this monotonic second every acquisition that is still renewed."""
        for acquisition in list(self._watched.values()):
            if moment < acquisition.renew_at < math.inf:
                acquisition.renew_at = moment
        self._renewals.schedule_by(moment)

    def renew_soon(self) -> None:
        """Renew now, but at most once a second: a node has connected.

        So a key that a restarted node lost is reclaimed while the node's promise is still true. If
        a renewal breaks the connection, each reconnect would cause the next renewal.
        """
        now = self._clock.now()
        if self._last_early_renewal <= now:  # otherwise the planned renewal serves this node, too
            self._last_early_renewal = max(now, self._last_early_renewal + MAX_RECONNECT_PAUSE)
        self.renew_by(self._last_early_renewal)

    def run_maintenance_by(self, moment: float) -> None:
        """Run maintenance by this monotonic second."""
        if not self._started:
            self._start()
        # not compared here: two callers at once might lose the earlier
        self._maintenance_requests.append(moment)
        self._renewals.schedule_by(moment)

    def call_soon(self, function: Callable[..., object], *args: Any, **options: Any) -> None:
        """Call users' code soon, in the second thread, where it delays neither I/O nor renewals."""
        if not self._started:
            self._start()
        self._pending.append(functools.partial(function, *args, **options))
        self._deadlines.wake()

    def wake(self) -> None:
        """Wake both threads now: the clock has jumped, which a sleeping thread does not notice."""
        self._renewals.wake()
        self._deadlines.wake()

    def stop(self) -> None:
        self._stopped = True
        self.wake()

    def _start(self) -> None:
        """Start both threads. If two callers do this at once, the extra threads end."""
        self._platform.start_thread(functools.partial(self._run_renewals, self._threads))
        self._platform.start_thread(functools.partial(self._run_deadlines, self._threads))
        self._started = True

    def _run_renewals(self, threads: dict[str, object]) -> None:
        thread_mark = object()
        running_mark = threads.setdefault("renewals", thread_mark)
        if running_mark is not thread_mark:
            return
        timer = self._renewals
        failures = 0
        while not self._stopped and timer is self._renewals:
            now = self._clock.now()
            timer.begin_pass(now)
            next_renewal = -math.inf
            try:
                next_renewal = self._do_what_is_due(now)
                failures = 0
            except Exception as error:
                # the thread must go on: otherwise every lock of the process would expire
                text = "renewal failed; it is tried again in a moment. See %s"
                extra = {"event": "renewal_failed"}
                see = anchors.UNEXPECTED
                self._call_safely(logger.exception, text, see, exc_info=error, extra=extra)
                timer.sleep(ERROR_BACKOFF.compute(failures))
                failures = min(failures + 1, 16)
            timer.wait_until(min(self._maintenance_at, next_renewal), self._clock.now())

    def _do_what_is_due(self, now: float) -> float:
        """Renew and maintain what is due; return the monotonic second of the next renewal."""
        next_renewal = self._next_renewal()
        is_due = next_renewal <= now
        try:
            if is_due:  # in one batch with renewals that are due soon, to save requests
                watched = list(self._watched.values())
                due = [
                    acquisition
                    for acquisition in watched
                    if acquisition.renew_at - acquisition.leeway <= now
                ]
                self._renew(due)
                next_renewal = self._next_renewal()
        finally:  # otherwise the replies of a renewal that fails again and again are never read
            requests = self._maintenance_requests
            requested = [requests.popleft() for _ in range(len(requests))]
            self._maintenance_at = min([self._maintenance_at, *requested])
            if is_due or self._maintenance_at <= now:
                self._maintenance_at = self._run_maintenance()
        return next_renewal

    def _next_renewal(self) -> float:
        renewals = [acquisition.renew_at for acquisition in list(self._watched.values())]
        return min(renewals, default=math.inf)

    def _run_deadlines(self, threads: dict[str, object]) -> None:
        thread_mark = object()
        running_mark = threads.setdefault("deadlines", thread_mark)
        if running_mark is not thread_mark:
            return
        timer = self._deadlines
        while not self._stopped and timer is self._deadlines:
            now = self._clock.now()
            timer.begin_pass(now)
            next_deadline = self._check_deadlines(now)
            if self._pending:  # one at a time: many reports must not delay the report of a loss
                self._call_safely(self._pending.popleft())
                timer.wake()
            now = self._clock.now()
            if self._renewals.is_late(now):  # otherwise C code may take the GIL before the renewal
                self._platform.pause_keeping_gil(HEAD_START)
            timer.wait_until(next_deadline, now)

    def _check_deadlines(self, now: float) -> float:
        """Report what has passed its deadline; return the monotonic second of the next deadline.

        A function of its own: a local variable of the thread would keep the last acquisition, and
        with it a dropped `Redlock`, for as long as the thread sleeps.
        """
        next_deadline = math.inf
        for acquisition in self.watched:
            deadline = acquisition.deadline
            if deadline <= now:
                self._call_safely(self._check_deadline, acquisition, now)
                deadline = acquisition.deadline
            if deadline < next_deadline:
                next_deadline = deadline
        return next_deadline

    def _call_safely(self, function: Callable[..., object], *args: Any, **options: Any) -> None:
        """Call a function that writes the log or is users' code; log any exception."""
        try:
            function(*args, **options)
        except BaseException:  # SystemExit, too: this thread must go on to report other losses
            text = "a receiver of an event of a lock or a node raised an exception. See %s"
            logger.exception(text, anchors.UNEXPECTED, extra={"event": "receiver_failed"})
