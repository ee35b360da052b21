"""`Lock`: acquire, extend, release and `held` for one owner at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

from celery_redlock.errors import (
    NEVER_ACQUIRED,
    OF_THE_PARENT,
    RELEASED,
    LockLost,
    LockTaken,
    QuorumUnreachable,
    RedlockError,
)
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.hold import Hold
from celery_redlock.lock.model.acquisition import Acquisition, Owner
from celery_redlock.lock.model.key_lease import lock_keys
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.platform.coroutines import StepRunner
from celery_redlock.lock.platform.interrupts import uninterruptible
from celery_redlock.lock.retry import Attempts, acquire_with_retry
from celery_redlock.lock.server.error_hints import causes_of
from celery_redlock.lock.validation import check_wait

logger = logging.getLogger(__name__)


class Client(Protocol):
    """The `Redlock` of a lock."""

    @property
    def session(self) -> Session:
        """What this process has for all its locks."""


class Lock:
    """One lock on one resource, of one owner (thread, greenlet, asyncio task) at a time.

    `with lock:` acquires, waiting up to `wait` seconds, and releases; `async with lock:` does the
    same without blocking the event loop. The same object may be acquired again after its release.
    client: the `Redlock`, which the lock keeps alive.
    """

    def __init__(self, client: Client, options: LockOptions) -> None:
        self._client, self._options, self._session = client, options, client.session
        self._clock = self._session.clock
        self._holds: list[Hold] = []  # one for each acquire that is not released yet
        self._last: Hold | None = None  # to say of it why it is over
        self._keys = lock_keys(self._session.options.prefix, options)

    @property
    def resource(self) -> str:
        """What is protected, as the user names it; several of them with commas between."""
        return ", ".join(self._options.resources)

    @property
    def ttl(self) -> float:
        """Seconds that a node keeps the lock unrenewed."""
        return self._options.ttl

    @property
    def held(self) -> bool:
        """Whether the lock is ours now, computed by the clock, without network I/O."""
        acquisitions, now = self._acquisitions(), self._clock.now()
        for one in acquisitions:  # no generator: asked around each body
            if not one.held(now):
                return False
        return bool(acquisitions)

    @property
    def remaining(self) -> float:
        """Seconds of validity left if nothing renews it; 0.0 once it is lost or released."""
        now = self._clock.now()
        return min((one.remaining(now) for one in self._acquisitions()), default=0.0)

    @property
    def fencing_token(self) -> int:
        """A number greater than every earlier holder's, for storage that refuses smaller ones.

        Of several resources the largest. Raises RedlockError if the lock was taken without
        `fencing=True`, or is not acquired.
        """
        if not self._options.fencing:
            raise RedlockError(f"{self.resource!r} has no fencing token: take it with fencing=True")
        acquisitions = self._acquisitions()
        if not acquisitions:
            raise RedlockError(f"{self.resource!r} is not acquired, so it has no fencing token yet")
        return max(one.fencing_token for one in acquisitions)

    def ensure(self) -> None:
        """Raise LockLost, which says why, unless the lock is held now. No I/O."""
        if not self.held:
            raise LockLost(self.resource, self._why())

    def try_acquire(self, wait: float | None = None) -> bool:
        """Acquire; return False if it is taken. wait, and what else is raised: as `acquire`."""
        try:
            self.acquire(wait)
        except LockTaken:
            return False
        return True

    def acquire(self, wait: float | None = None) -> Lock:
        """Acquire and return the lock itself.

        Keep the object: a Lock that nobody keeps is released instead of renewed.
        wait: seconds to keep trying; None: the lock's own `wait`. What this thread, greenlet or
        asyncio task holds already by the same `Redlock` is taken again and counted: it is free
        once each acquire has had its release.
        Raises LockTaken, QuorumUnreachable, LockLost if what it holds already is lost,
        SettingsError if that promises less than is asked here, or if nodes turn out to be one
        server, and RedlockError if another owner has acquired this object.
        """
        timeout = self._options.wait if wait is None else check_wait("Lock.acquire", "wait", wait)
        hold = Hold(self._session.reentrancy.current_owner(), self._client)
        try:
            self._enter(hold)
            acquire_with_retry(self._session, self._options, self._keys, hold, timeout)
        except BaseException:
            # also an exception from outside, as a soft time limit's, at whatever point
            self._release_hold(hold)
            raise
        self._last = hold
        return self

    async def acquire_async(self, wait: float | None = None) -> Lock:
        """Acquire without blocking the event loop, and return the lock itself.

        The asyncio task that awaits this is the owner. What it holds already, by `acquire` or
        `acquire_async`, is taken again and counted. If the task is cancelled, the lock is released.
        Use `wait` instead of `asyncio.wait_for`, which before Python 3.12 runs this in a task of
        its own. wait, and what is raised: as for `acquire`.
        """
        options, session = self._options, self._session
        timeout = options.wait if wait is None else check_wait("Lock.acquire_async", "wait", wait)
        owner, runner = session.reentrancy.current_owner(), StepRunner(session.threads)
        hold = Hold(owner, self._client)
        try:
            self._enter(hold)
            attempts = Attempts(session, options, self._keys, hold)
            await attempts.run_async(timeout, runner)
        except BaseException:  # cancelled, too; or the loop has ended
            self._forget(hold)
            runner.then(lambda: hold.release_anywhere(session.releaser))
            raise
        self._last = hold
        return self

    def _enter(self, hold: Hold) -> None:
        self._check_owner(hold.owner)
        self._holds.append(hold)
        self._check_owner(hold.owner)  # of two threads that came at once, one was first

    def _forget(self, hold: Hold) -> None:
        if hold in self._holds:  # else it was cut before it was in
            self._holds.remove(hold)

    def extend(self) -> None:
        """Renew the lease now.

        Raises LockLost if it is lost, and QuorumUnreachable if no quorum answered in time: then the
        lock is held for `remaining` seconds and extend may be called again.
        """
        self._check_owner(self._session.reentrancy.current_owner())
        self.ensure()
        reached = self._session.renew(self._acquisitions())
        self.ensure()
        if not reached:
            nodes = self._session.node_set
            raise QuorumUnreachable(self.resource, causes_of(nodes.nodes), nodes.size)

    @uninterruptible
    def release(self) -> None:
        """Release the lock: written to every node, without waiting for their replies.

        Does nothing if it is released already; one that was lost is logged.
        Raises RedlockError if it was never acquired, or belongs to another owner.
        """
        last = self._holds[-1:]  # no call: an exception from outside strikes in the `try`, or above
        held: list[Acquisition] = []
        lost: list[Acquisition] = []
        try:
            self._check_acquired()
            hold = last[0] if last else None
            owner = self._session.reentrancy.current_owner()
            if hold is None or hold.owner[0] != owner[0] or not hold.acquisitions:
                return  # released; or a child, which neither holds nor releases its parent's locks
            self._check_owner(owner)
            now = self._clock.now()
            for one in hold.acquisitions:
                if one.users == 1:
                    (held if one.held(now) else lost if one.lost(now) else []).append(one)
            self._release_hold(hold)
        except RedlockError:
            raise
        except BaseException:  # cut before it was on its way, it would be renewed for ever
            self._release_holds(last)
            raise
        events = self._session.events
        for acquisition in held:
            events.released(acquisition)
        for acquisition in lost:
            extra = {"event": "lock_released_lost", "resource": acquisition.resource}
            text = "released %r after it was lost: %s"
            logger.warning(text, acquisition.resource, acquisition.reason, extra=extra)
            events.lost_soon(acquisition, acquisition.reason)

    async def release_async(self) -> None:
        """Release the lock, in the asyncio task that has acquired it; raises as `release` does.

        The release is written at once, without waiting, so a cancellation cannot interrupt it.
        """
        self.release()

    @uninterruptible
    def _release_hold(self, hold: Hold) -> None:
        """Release what a hold may have got."""
        releaser = self._session.releaser
        try:
            hold.release(releaser)
        except BaseException:
            hold.release(releaser)  # cut before it was on its way
            raise
        finally:
            self._forget(hold)

    @uninterruptible
    def _release_holds(self, holds: Sequence[Hold]) -> None:
        """Release what a release that was cut may have left."""
        for hold in holds:
            if hold in self._holds and hold.owner[0] == os.getpid():
                self._release_hold(hold)

    def _check_acquired(self) -> None:
        if self._last is None:
            raise RedlockError(f"{self.resource!r} was never acquired: call acquire() first")

    def __enter__(self) -> Lock:
        return self.acquire()

    @uninterruptible
    def __exit__(self, *exc_info: object) -> None:
        last = self._holds[-1:]
        try:
            self.release()
        except RedlockError:
            raise
        except BaseException:  # cut before the first line of `release`
            self._release_holds(last)
            raise

    async def __aenter__(self) -> Lock:
        return await self.acquire_async()

    async def __aexit__(self, *exc_info: object) -> None:
        last = self._holds[-1:]
        try:
            self.__exit__(*exc_info)
        except RedlockError:  # another task leaves the block, as when it closes an async generator
            self._release_holds(last)
            if exc_info[0] is None:
                raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource!r} {'held' if self.held else 'not held'}>"

    def _acquisitions(self) -> list[Acquisition]:
        """Return what the last acquire relies on; nothing in a child, whose parent holds it."""
        holds = self._holds
        if not holds or holds[0].owner[0] != os.getpid():
            return []
        return holds[-1].acquisitions

    def _why(self) -> str:
        if self._last is None:
            return NEVER_ACQUIRED
        acquisitions = self._acquisitions()
        if not acquisitions:
            return OF_THE_PARENT if self._holds else RELEASED
        now = self._clock.now()
        return next((one.reason for one in acquisitions if one.lost(now)), RELEASED)

    def _check_owner(self, owner: Owner) -> None:
        """Raise if another owner has acquired the object; the first one in is its owner."""
        first = self._holds[:1]  # in one step: it may go meanwhile
        if not first or first[0].owner is owner:
            return
        known = first[0].owner
        if known[0] != owner[0]:
            self._holds.clear()  # in a child, which holds nothing of its parent's
        elif known != owner:
            raise RedlockError(
                f"the lock on {self.resource!r} belongs to another thread, greenlet or task: make "
                "one Lock for each"
            )
