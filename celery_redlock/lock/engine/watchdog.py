"""Renews acquisitions and notices their loss, on two threads apart from each other.

One thread renews what it is given every third of its ttl and does the I/O that is left over. The
other does no I/O at all and takes no mutex that I/O holds, so a stalled socket cannot delay the
word that a lock is at risk or lost. The second thread also calls users' code.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from redis.backoff import ExponentialBackoff

from celery_redlock.lock.platform.clock import Platform

logger = logging.getLogger(__name__)

HEAD_START = 0.0005  # seconds by which a thread that waits for the GIL precedes one that gave it up
AFTER_ERROR = ExponentialBackoff(cap=1.0, base=0.05)  # seconds, after an error that should not be


class Watched(Protocol):
    """An acquisition as the watchdog sees it. Times are monotonic seconds."""

    renew_at: float  # inf: never (again)
    leeway: float  # seconds by which it may be renewed earlier, together with others

    @property
    def deadline(self) -> float:
        """When to look at it next; inf: never (again)."""


W = TypeVar("W", bound=Watched)


class Watchdog(Generic[W]):
    """Watches the acquisitions of a process.

    renew: renews these in one batch and moves their `renew_at` on. run_maintenance: does I/O that
    nobody waits for; returns the monotonic second at which to be called again. check_deadline:
    called with what has passed its `deadline`, and the time.
    Both threads start with the first acquisition and sleep while there is nothing to do.
    """

    def __init__(
        self,
        platform: Platform,
        renew: Callable[[Sequence[W]], object],
        run_maintenance: Callable[[], float],
        check_deadline: Callable[[W, float], None],
    ) -> None:
        self._platform, self._clock = platform, platform.clock
        self._renew, self._run_maintenance = renew, run_maintenance
        self._check_deadline = check_deadline
        self.forget()

    def forget(self) -> None:
        """Start anew after a fork: the threads and their locks stay with the parent."""
        self._watched: dict[int, W] = {}
        self._maintenance_at = math.inf  # for the thread that does it
        self._asked: deque[float] = deque()  # when else, by any thread
        self._news: deque[Callable[[], None]] = deque()
        self._renewals, self._deadlines = (
            self._platform.deadline_timer(),
            self._platform.deadline_timer(),
        )
        self._threads: dict[str, object] = {}  # by what they do; of each the first alone goes on
        self._started = self._stopped = False

    def watch(self, acquisition: W) -> None:
        """Renew an acquisition and check its deadline from now on."""
        if not self._started:
            self._start()
        self._watched[id(acquisition)] = acquisition
        self._renewals.by(acquisition.renew_at)
        self._deadlines.by(acquisition.deadline)

    @property
    def watched(self) -> list[W]:
        """What it watches."""
        return list(self._watched.values())

    def unwatch(self, acquisition: W) -> None:
        """Leave an acquisition alone; nothing happens if it is not watched."""
        self._watched.pop(id(acquisition), None)

    def reschedule(self, acquisition: W) -> None:
        """Note that the deadline or the next renewal comes earlier than before."""
        self._renewals.by(acquisition.renew_at)
        self._deadlines.by(acquisition.deadline)

    @property
    def is_started(self) -> bool:
        """Whether it has threads."""
        return self._started and not self._stopped

    @property
    def is_busy(self) -> bool:
        """Whether it watches anything, or has something to tell."""
        return bool(self._watched or self._news)

    @property
    def watches(self) -> bool:
        """Whether anything is watched."""
        return bool(self._watched)

    def renew_by(self, moment: float) -> None:
        """Renew by this monotonic second what is renewed at all."""
        for acquisition in list(self._watched.values()):
            if moment < acquisition.renew_at < math.inf:
                acquisition.renew_at = moment
        self._renewals.by(moment)

    def run_maintenance_by(self, moment: float) -> None:
        """Run maintenance by this monotonic second."""
        if not self._started:
            self._start()
        self._asked.append(moment)  # not compared here: of two at once the earlier might get lost
        self._renewals.by(moment)

    def tell(self, news: Callable[[], None]) -> None:
        """Call users' code soon, in a thread that delays neither I/O nor renewals."""
        if not self._started:
            self._start()
        self._news.append(news)
        self._deadlines.wake()

    def look(self) -> None:
        """Look around now: the clock has jumped, which threads that sleep do not notice."""
        self._renewals.wake()
        self._deadlines.wake()

    def stop(self) -> None:
        """Let both threads end."""
        self._stopped = True
        self.look()

    def _start(self) -> None:
        """Start both threads; two callers may start them at once, or one that interrupts itself."""
        self._platform.start_thread(functools.partial(self._run_renewals, self._threads))
        self._platform.start_thread(functools.partial(self._run_deadlines, self._threads))
        self._started = True

    def _run_renewals(self, threads: dict[str, object]) -> None:
        if threads.setdefault("renewals", mine := object()) is not mine:
            return
        timer, failures = self._renewals, 0
        while not self._stopped and timer is self._renewals:
            now = self._clock.now()
            timer.look(now)
            soonest = -math.inf
            try:
                soonest = self._do_what_is_due(now)
                failures = 0
            except Exception as error:
                # a thread that ended here would let every lock of the process run out
                text = "renewal failed; trying again in a moment"
                extra = {"event": "renewal_failed"}
                self.say(functools.partial(logger.exception, text, exc_info=error, extra=extra))
                timer.sleep(AFTER_ERROR.compute(failures))
                failures = min(failures + 1, 16)
            timer.rest(min(self._maintenance_at, soonest), self._clock.now())

    def _do_what_is_due(self, now: float) -> float:
        """Return the monotonic second at which the next renewal is due."""
        soonest = self._soonest()
        due = soonest <= now
        if due:  # in one batch with those that are due soon, else each would be one of its own
            watched = list(self._watched.values())
            self._renew([one for one in watched if one.renew_at - one.leeway <= now])
            soonest = self._soonest()
        asked = [self._asked.popleft() for _ in range(len(self._asked))]
        self._maintenance_at = min([self._maintenance_at, *asked])
        if due or self._maintenance_at <= now:
            self._maintenance_at = self._run_maintenance()
        return soonest

    def _soonest(self) -> float:
        return min([one.renew_at for one in list(self._watched.values())], default=math.inf)

    def _run_deadlines(self, threads: dict[str, object]) -> None:
        if threads.setdefault("deadlines", mine := object()) is not mine:
            return
        timer = self._deadlines
        while not self._stopped and timer is self._deadlines:
            now = self._clock.now()
            timer.look(now)
            soonest = math.inf
            for acquisition in list(self._watched.values()):
                moment = acquisition.deadline
                if moment <= now:
                    self.say(functools.partial(self._check_deadline, acquisition, now))
                    moment = acquisition.deadline
                if moment < soonest:
                    soonest = moment
            if self._news:  # one at a time: no flood of them may keep a loss from being told
                self.say(self._news.popleft())
                timer.wake()
            now = self._clock.now()
            if self._renewals.is_late(now):  # else C code that keeps the GIL would be next again
                self._platform.pause_keeping_gil(HEAD_START)
            timer.rest(soonest, now)

    def say(self, do: Callable[[], None]) -> None:
        """Call what logs or is a user's, whatever it raises."""
        try:
            do()
        except BaseException:  # SystemExit, too: this thread has the losses of others to tell
            text = "somebody who was told of a lock or a node failed"
            logger.exception(text, extra={"event": "receiver_failed"})
