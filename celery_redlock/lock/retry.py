"""Retries an acquire: after a wake-up, with backoff, or among rivals; and decides to give up."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Mapping, Sequence

from celery_redlock.errors import LockLost, LockTaken, NotAcquired
from celery_redlock.lock.engine.acquirer import Failure
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.engine.wait_queue import Waiter
from celery_redlock.lock.hold import Hold
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.key_lease import LockKey
from celery_redlock.lock.model.keys import wake_channel
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.platform.coroutines import StepRunner, rest
from celery_redlock.lock.server.error_hints import is_misconfigured, is_of_a_replica

# all in seconds; hold.py has the pauses for rivals that share the nodes
FIRST_SPIN, LONGEST_SPIN = 0.05, 1.0  # between tries while the caller waits for the lock
LONGEST_DEAF = 5.0  # between tries of a subscribed caller, in case it missed a release message
HOPELESS = 3.0  # for which a caller waits for misconfigured nodes
WOKEN = 0.02  # callers that one release wakes try at random moments within this time


def acquire_with_retry(
    session: Session, options: LockOptions, keys: Sequence[LockKey], hold: Hold, timeout: float
) -> None:
    """Acquire, and try again for up to `timeout` seconds.

    If this raises, the caller releases the hold. Raises LockTaken, QuorumUnreachable, LockLost,
    SettingsError.
    """
    Attempts(session, options, keys, hold).run(timeout)


class Attempts:
    """The tries of one acquire. They leave out resources that the owner holds already."""

    __slots__ = ("_clock", "_hold", "_keys", "_options", "_outer", "_session", "_started")

    def __init__(
        self, session: Session, options: LockOptions, keys: Sequence[LockKey], hold: Hold
    ) -> None:
        self._session, self._options, self._hold = session, options, hold
        self._clock = session.clock
        self._started = session.clock.now()
        self._keys = keys
        self._outer: Mapping[str, Acquisition] = {}
        _, flow, _ = hold.owner
        if flow.held:
            self._outer = self._join_outer()
            self._keys = [key for key in keys if key.resource not in self._outer]

    def _join_outer(self) -> Mapping[str, Acquisition]:
        """Rely on acquisitions that the owner holds already; return them by resource."""
        session, hold = self._session, self._hold
        outer = session.reentrancy.held_by(hold.owner, self._options, self._started)
        for resource, acquisition in list(outer.items()):
            hold.join(acquisition)
            if acquisition.abandoned:  # its Lock was garbage collected, and it is being released
                hold.leave(acquisition)
                del outer[resource]
        return outer

    def run(self, timeout: float) -> None:
        """Try, and wait if others hold the lock, as `acquire_with_retry` does."""
        if not self._keys:
            return
        failure = self._try()
        if failure is not None:
            if timeout > 0:
                failure = self._wait(failure, self._started + timeout)
            else:
                failure = self._try_while_split(failure)
        if failure is None and self._outer and self._options.fencing:
            failure = self._hold.confirm_fencing_token(self._session.acquirer)
        if failure is not None or self._outer:
            self._check_acquired(failure)

    async def run_async(self, timeout: float, runner: StepRunner) -> None:
        """Do what `run` does: try in threads, and wait in the event loop."""
        if not self._keys:
            return
        failure = await runner.do(self._try)
        if failure is not None and timeout > 0:
            failure = await self._wait_async(failure, self._started + timeout, runner)
        while failure is not None and timeout <= 0:
            pause = self._hold.pause_of_split()
            if pause is None:
                break
            await asyncio.sleep(pause)
            failure = await runner.do(self._try)
        if failure is None and self._outer and self._options.fencing:
            confirm = functools.partial(self._hold.confirm_fencing_token, self._session.acquirer)
            failure = await runner.do(confirm)
        self._check_acquired(failure)

    def _check_acquired(self, failure: Failure | None) -> None:
        """Raise the failure, or LockLost if an outer lock expired during the tries."""
        now = self._clock.now()
        if failure is not None:
            raise failure._after(now - self._started)
        for acquisition in self._outer.values():
            if not acquisition.held(now):
                raise LockLost(acquisition.resource, acquisition.reason)

    def _try(self) -> Failure | None:
        """Try once; return None on success, else the failure."""
        session, hold, began = self._session, self._hold, self._clock.now()
        acquisition = session.new_acquisition(self._options, self._keys, hold.owner)
        hold.join(acquisition)  # before its request leaves, so that an exception releases it
        failure = session.try_acquire(acquisition)
        if failure is None:
            return None
        hold.leave(acquisition)
        hold.splits = hold.splits + 1 if acquisition.was_split else 0
        hold.took = self._clock.now() - began
        return failure

    def _try_while_split(self, first: Failure) -> Failure | None:
        """Try again if rivals kept each other from the lock, because no release will be published.

        The pauses are random, so one rival gets the lock within some rounds. This is done even if
        the caller does not wait.
        """
        failure: Failure | None = first
        while failure is not None and (pause := self._hold.pause_of_split()) is not None:
            self._clock.sleep(pause)
            failure = self._try()
        return failure

    def _wait(self, first: Failure, until: float) -> Failure | None:
        """Try again whenever the lock may be free, up to the monotonic second `until`."""
        failure: Failure | None = first
        session, limit = self._session, self._options.limit
        schedule = RetrySchedule(session, self._hold, self._keys, limit, until)
        with session.wait_queue.waiting(schedule.channels, limit) as waiter:
            while failure is not None and (moment := schedule.next_try(failure)) is not None:
                session.node_set.wait(waiter, moment)
                if waiter.take():
                    self._clock.sleep(schedule.woken())
                    schedule.share(waiter)
                schedule.begin_try(waiter)
                failure = self._try()
                schedule.end_try(waiter, failure)
        return failure

    async def _wait_async(self, first: Failure, until: float, runner: StepRunner) -> Failure | None:
        """Do what `_wait` does: try in threads, and wait in the event loop."""
        failure: Failure | None = first
        session, limit = self._session, self._options.limit
        schedule = RetrySchedule(session, self._hold, self._keys, limit, until)
        with session.wait_queue.waiting(schedule.channels, limit) as waiter:
            try:
                while failure is not None and (moment := schedule.next_try(failure)) is not None:
                    await rest(waiter, moment - self._clock.now())
                    if waiter.take():
                        await asyncio.sleep(schedule.woken())
                        schedule.share(waiter)
                    schedule.begin_try(waiter)
                    failure = await runner.do(self._try)
                    schedule.end_try(waiter, failure)
            except BaseException:
                waiter.decided = True  # the next waiter gets a wake-up that this waiter did not use
                raise
        return failure


class RetrySchedule:
    """When a waiter tries again and when it gives up, for threads and coroutines.

    keys: what the waiter waits for. limit: as in `LockOptions`. until: the monotonic second at
    which the waiter gives up. If too many nodes are misconfigured, it gives up earlier, but not at
    once: their errors may be older than their last reconnect.
    """

    def __init__(
        self, session: Session, hold: Hold, keys: Sequence[LockKey], limit: int, until: float
    ) -> None:
        self._session, self._hold, self._limit, self._until = session, hold, limit, until
        resources = dict.fromkeys(key.resource for key in keys)
        prefix = session.options.prefix
        self.channels = [wake_channel(prefix, resource) for resource in resources]
        self._tries = self._vain = 0
        self._tried_at = session.clock.now()
        self._hopeless_at = self._tried_at + HOPELESS

    def next_try(self, failure: Failure) -> float | None:
        """Return when to try next if no release wakes the waiter before; None to give up.

        Monotonic seconds.
        """
        session, now = self._session, self._session.clock.now()
        if now >= self._until:
            return None
        if not self._is_hopeless(failure):
            self._hopeless_at = now + HOPELESS
        elif self._tried_at > self._hopeless_at:  # not `now`: a pause of the process must not count
            return None
        pause = self._hold.pause_of_split()
        if pause is None:
            hears = all(map(session.wait_queue.hears, self.channels))
            pause = _pause(failure, self._tries, hears=hears)
        return min(session.clock.now() + pause, self._until)

    def woken(self) -> float:
        """Return the seconds to wait after a wake-up: random, because others are woken, too."""
        self._hold.splits = 0
        seconds = random.uniform(0, min(LONGEST_SPIN, WOKEN * 2**self._vain))  # noqa: S311
        self._vain = min(self._vain + 1, 16)
        return seconds

    def share(self, waiter: Waiter) -> None:
        """Drop other nodes' messages about the same release; with permits, wake the next waiter."""
        waiter.take()
        if self._limit > 1:
            self._session.wait_queue.pass_on(waiter)

    def begin_try(self, waiter: Waiter) -> None:
        """Record that a try begins."""
        self._tried_at, waiter.awaits = self._session.clock.now(), ""  # any resource may refuse

    def end_try(self, waiter: Waiter, failure: Failure | None) -> None:
        """Record the result of a try, and the resource to wait for.

        A failed try for several resources releases the acquired ones, which wakes their waiters. So
        this waiter waits only for the resource that was refused.
        """
        self._tries += 1
        if isinstance(failure, LockTaken):
            channel = wake_channel(self._session.options.prefix, failure.resource)
            waiter.awaits = channel if channel in self.channels else ""

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
