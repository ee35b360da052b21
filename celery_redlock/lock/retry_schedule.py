"""When a waiter tries again: in its turn, after a wake-up, or by itself; and when it gives up."""

from __future__ import annotations

import math
import random

from celery_redlock.errors import LockTaken, NotAcquired
from celery_redlock.lock.engine.acquirer import Failure
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.engine.wait_queue import Waiter
from celery_redlock.lock.hold import Hold
from celery_redlock.lock.model.handoff import TURN
from celery_redlock.lock.server.error_hints import is_misconfigured, is_of_a_replica

# all in seconds; hold.py has the pauses for rivals that share the nodes
FIRST_SPIN, LONGEST_SPIN = 0.05, 1.0  # between tries while the caller waits for the lock
LONGEST_DEAF = 5.0  # between looks of a caller that releases can name, in case one was missed
PUT_OFF = 3 * TURN  # for which later releases may put a turn off
MOST_TURNS = 10  # that a caller waits at a time for others, which may be stopped
HOPELESS = 3.0  # for which a caller waits for misconfigured nodes


class RetrySchedule:
    """When a waiter tries again and when it gives up, for threads and coroutines.

    until: the monotonic second at which the waiter gives up. If too many nodes are misconfigured,
    it gives up earlier, but not at once: their errors may be older than their last reconnect.
    """

    def __init__(self, session: Session, hold: Hold, waiter: Waiter, until: float) -> None:
        self._session, self._hold, self._waiter, self._until = session, hold, waiter, until
        self._tries = 0
        self._due_by = math.inf  # monotonic: its turn is then, though later releases put it off
        self._tried_at = session.clock.now()
        self._hopeless_at = self._tried_at + HOPELESS

    def next_try(self, failure: Failure) -> float | None:
        """Return when to try next if no release wakes the waiter before; None to give up.

        Monotonic seconds.
        """
        session, waiter, now = self._session, self._waiter, self._session.clock.now()
        if now >= self._until or session.is_closed:
            return None
        if not self._is_hopeless(failure):
            self._hopeless_at = now + HOPELESS
        elif self._tried_at > self._hopeless_at:  # not `now`: a pause of the process must not count
            return None
        pause = self._hold.pause_of_split()
        if pause is None and waiter.turn is not None:
            self._due_by = waiter.turn
            return min(waiter.turn, self._until)
        if pause is None:
            pause = _pause(failure, self._tries, hears=session.wait_queue.is_listening)
        return min(session.clock.now() + pause, self._until)

    def woken(self, moment: float) -> float | None:
        """Return the seconds to wait after a wake-up, None if there was none.

        Until its turn, if a release named this process. Later releases may put that off, but not
        for long, and not beyond `moment`, when it looks by itself. Else 0, to ask the nodes.
        """
        waiter = self._waiter
        if not waiter.take():
            return None
        if waiter.turn is None:
            return 0.0
        self._hold.splits = 0
        self._due_by = min(self._due_by, waiter.turn + PUT_OFF)
        turn = min(waiter.turn, self._due_by, moment)
        return max(0.0, turn - self._session.clock.now())

    def taken(self, failure: Failure) -> Failure | None:
        """Ask the nodes if others may be before this waiter; return what is in its way, or None.

        A waiter that a release names first tries at once. failure: of the last try.
        """
        waiter, now = self._waiter, self._session.clock.now()
        due, self._due_by = self._due_by, math.inf
        is_named = waiter.turn is not None and now > min(waiter.turn, due) - TURN / 2
        passed = waiter.turns if is_named else 0
        waiter.turn, waiter.turns = None, 0
        is_first = (is_named and not passed) or now >= self._until
        if is_first or self._hold.splits or not isinstance(failure, LockTaken):
            return None
        standing = self._session.wait_queue.ask(waiter, passed)
        if standing is None or (standing.is_free and standing.rank <= passed):
            return None
        if not standing.is_free:
            waiter.release = ""
            ends = standing.free_in if math.isfinite(standing.free_in) else None
            ttl, limit = failure.ttl, failure.limit
            return LockTaken(failure.resource, failure.holder, ends, ttl=ttl, limit=limit)
        waiter.turns = min(standing.rank, passed + MOST_TURNS)
        waiter.turn = self._session.clock.now() + (waiter.turns - passed) * TURN
        return failure

    def begin_try(self) -> None:
        """Record that a try begins."""
        self._tried_at, self._waiter.awaits = self._session.clock.now(), ""  # any may refuse

    def end_try(self, failure: Failure | None) -> None:
        """Record the result of a try, and the resource to wait for.

        A failed try for several resources releases the acquired ones, which wakes their waiters. So
        this waiter waits only for the resource that was refused.
        """
        waiter = self._waiter
        self._tries += 1
        if isinstance(failure, LockTaken):
            waiter.awaits = failure.resource if failure.resource in waiter.resources else ""
        if failure is not None:
            waiter.release = ""
            self._session.wait_queue.was_refused(waiter)

    def _is_hopeless(self, failure: Failure) -> bool:
        """Return whether no quorum is possible before an operator changes a setting."""
        if isinstance(failure, LockTaken):
            return False
        quorum = self._session.node_set
        wrong = [cause for cause in failure.causes if is_misconfigured(cause)]
        lasting = [cause for cause in wrong if not is_of_a_replica(cause)]  # a failover may end it
        return len(lasting) > len(quorum.nodes) - quorum.size


def _pause(failure: NotAcquired, tries: int, *, hears: bool) -> float:
    """Return the seconds until the next try: random, and at the latest soon after the lease ends.

    hears: whether a release message would wake the caller, so that it may try less often.
    """
    uniform = random.uniform
    if hears and isinstance(failure, LockTaken):
        spin = uniform(LONGEST_SPIN, LONGEST_DEAF)
    else:
        spin = uniform(0.001, min(LONGEST_SPIN, FIRST_SPIN * 2 ** min(tries, 16)))
    ends = failure.expires_in if isinstance(failure, LockTaken) else None
    return spin if ends is None else min(spin, ends + uniform(0, FIRST_SPIN))
