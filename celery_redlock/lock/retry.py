"""Retries an acquire: in a thread or in the event loop, while others hold the lock."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping, Sequence

from celery_redlock.errors import CLOSED, LockLost, QuorumUnreachable
from celery_redlock.lock.engine.acquirer import Failure
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.engine.wait_queue import Waiter
from celery_redlock.lock.hold import Hold
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.key_lease import LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.platform.coroutines import StepRunner, rest
from celery_redlock.lock.retry_schedule import RetrySchedule


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
        """Acquire, and try again for up to `timeout` seconds.

        If this raises, the caller releases the hold. Raises LockTaken, QuorumUnreachable, LockLost,
        SettingsError.
        """
        if not self._keys:
            return
        failure = self._try()
        if failure is not None:
            if timeout > 0 and not self._session.is_closed:
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
        if failure is not None and timeout > 0 and not self._session.is_closed:
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
        now, session = self._clock.now(), self._session
        if failure is not None and session.is_closed:  # which ended the wait, or failed the try
            failure = QuorumUnreachable(failure.resource, [CLOSED], session.node_set.size)
        if failure is not None:
            failure._set_waited(now - self._started)
            raise failure
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
        with self._waiting() as waiter:
            schedule = RetrySchedule(self._session, self._hold, waiter, until)
            while failure is not None and (moment := schedule.next_try(failure)) is not None:
                self._session.node_set.wait(waiter, moment)
                while (pause := schedule.woken(moment)) is not None:
                    if pause > 0:  # meanwhile another release may name it first
                        self._session.node_set.wait(waiter, self._clock.now() + pause)
                failure = self._try_in_turn(schedule, failure)
        return failure

    async def _wait_async(self, first: Failure, until: float, runner: StepRunner) -> Failure | None:
        """Do what `_wait` does: ask and try in threads, and wait in the event loop."""
        failure: Failure | None = first
        with self._waiting() as waiter:
            schedule = RetrySchedule(self._session, self._hold, waiter, until)
            while failure is not None and (moment := schedule.next_try(failure)) is not None:
                await rest(waiter, moment - self._clock.now())
                while (pause := schedule.woken(moment)) is not None:
                    if pause > 0:
                        await rest(waiter, pause)
                failure = await runner.do(functools.partial(self._try_in_turn, schedule, failure))
        return failure

    def _waiting(self) -> contextlib.AbstractContextManager[Waiter]:
        resources = list(dict.fromkeys(key.resource for key in self._keys))
        return self._session.wait_queue.waiting(resources, self._options.limit)

    def _try_in_turn(self, schedule: RetrySchedule, failure: Failure) -> Failure | None:
        """Try, unless the nodes say that the lock is taken or that it is another one's turn.

        Returns what kept it from the lock. failure: of the last try.
        """
        taken = schedule.taken(failure)
        if taken is not None:
            return taken
        schedule.begin_try()
        result = self._try()
        schedule.end_try(result)
        return result
