"""`Lock`: acquire, extend and release, for one owner at a time.

The functions at the end are for a run that was interrupted, and cannot know what it holds, and for
a process that may hang. Not here: the tries of an acquire (`retry.py`), and one try
(`engine/acquirer.py`).
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from celery_redlock.errors import (
    HELD_BY_PARENT,
    NEVER_ACQUIRED,
    RELEASED,
    LockLost,
    LockTaken,
    QuorumUnreachable,
    RedlockError,
)
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Acquisition, Hold, Owner
from celery_redlock.lock.model.lease import LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.platform.coroutines import StepRunner
from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.lock.retry import Attempts
from celery_redlock.lock.validation import check_wait

logger = logging.getLogger(__name__)
CONFIRM = "celery_redlock.lock.postgres.confirm"  # by name: only `confirm_in` imports it


class Lock:
    """One lock on one resource, of one owner (thread, greenlet, asyncio task) at a time.

    `with lock:` acquires, waiting up to `wait` seconds, and releases; `async with lock:` does the
    same without blocking the event loop. The same object may be acquired again after its release.
    client: the `Redlock`, which the lock keeps alive.
    """

    def __init__(self, client: Any, options: LockOptions) -> None:
        self._client = client
        self._options = options
        self._session: Session = client.session
        self._clock = self._session.clock
        self._holds: list[Hold] = []  # one for each acquire that is not released yet
        self._last: Hold | None = None  # the last acquire, to report why it has ended
        prefix = self._session.options.prefix
        limits = options.limits or {}
        self._keys: list[LockKey] = []
        for resource in options.resources:
            self._keys.append(LockKey(prefix, resource, options.ttl, limits.get(resource, 1)))

    @property
    def resource(self) -> str:
        """The name of the resource; several names are separated by commas."""
        return ", ".join(self._options.resources)

    @property
    def ttl(self) -> float:
        """Seconds that a node keeps the lock without a renewal."""
        return self._options.ttl

    @property
    def held(self) -> bool:
        """Whether the lock is held now, computed locally, without network I/O."""
        acquisitions = acquisitions_of(self)
        now = self._clock.now()
        for one in acquisitions:  # no generator: asked around each body
            if not one.held(now):
                return False
        return bool(acquisitions)

    @property
    def remaining(self) -> float:
        """Seconds of validity left without a renewal; 0.0 once the lock is lost or released."""
        now = self._clock.now()
        return min((one.remaining(now) for one in acquisitions_of(self)), default=0.0)

    @property
    def fencing_token(self) -> int:
        """A number greater than every earlier holder's, for storage that rejects smaller numbers.

        Several resources share one token. Raises RedlockError if the lock was acquired without
        `fencing=True`, or is not acquired.
        """
        if not self._options.fencing:
            raise RedlockError(f"{self.resource!r} has no fencing token: take it with fencing=True")
        acquisitions = acquisitions_of(self)
        if not acquisitions:
            raise RedlockError(f"{self.resource!r} is not acquired, so it has no fencing token yet")
        return max(one.fencing_token for one in acquisitions)

    def ensure(self) -> None:
        """Raise LockLost with the reason unless the lock is held now. No I/O."""
        if not self.held:
            raise LockLost(self.resource, self._why())

    def confirm_in(self, cursor: Any) -> None:
        """Confirm the lock in a transaction of the database that is the lock node, PostgreSQL.

        Until the transaction ends, nobody else gets the lock, even if it expires: a write of the
        transaction is never late. Commit before the release.
        cursor: what the body writes with: a cursor or connection of psycopg or psycopg2, a
        connection or session of SQLAlchemy, a cursor of Django. Raises LockLost unless the lock is
        held, RedlockError for a lock on other nodes, without a transaction (autocommit) and without
        the schema, and SettingsError for another kind of cursor.
        """
        keys = self._keys_to_confirm()
        if keys:
            importlib.import_module(CONFIRM).confirm(self.resource, keys, cursor)

    async def confirm_in_async(self, cursor: Any) -> None:
        """Confirm the lock as `confirm_in` does, without blocking the event loop.

        cursor: an AsyncCursor or AsyncConnection of psycopg, an AsyncConnection or AsyncSession of
        SQLAlchemy. Raises the errors of `confirm_in`.
        """
        keys = self._keys_to_confirm()
        if keys:
            await importlib.import_module(CONFIRM).confirm_async(self.resource, keys, cursor)

    def _keys_to_confirm(self) -> list[tuple[str, str]]:
        """Return name and value of each key; none while locking is off in a test."""
        self.ensure()
        leases = [lease for one in acquisitions_of(self) for lease in one.leases]
        if leases and not self._session.nodes.all[0].address.keeps_locks:
            raise RedlockError(
                "confirm_in needs the lock in the database that the body writes: "
                f"{self.resource!r} is on Redis nodes, so use a fencing token"
            )
        return [(lease.key.name, lease.value) for lease in leases]

    def try_acquire(self, wait: float | None = None) -> bool:
        """Acquire; return False if the lock is taken. wait, and other errors: as in `acquire`."""
        try:
            self.acquire(wait)
        except LockTaken:
            return False
        return True

    def acquire(self, wait: float | None = None) -> Lock:
        """Acquire and return the lock itself.

        Keep a reference: a Lock that is garbage collected is released and not renewed. wait:
        seconds to keep trying; None for the lock's own `wait`. If this thread, greenlet or asyncio
        task holds the resource already by the same `Redlock`, the acquire is nested, unless the
        lock has `reentrant=False`. The resource is free after one release for each acquire.
        Raises LockTaken and QuorumUnreachable. Raises LockLost if the outer lock is lost, and
        SettingsError if the outer lock promises less or two nodes turn out to be one server. Raises
        RedlockError if another owner has acquired this object.
        """
        timeout = self._options.wait if wait is None else check_wait("Lock.acquire", "wait", wait)
        hold = Hold(self._session.current_owner(), self._client)
        try:
            self._enter(hold)
            Attempts(self._session, self._options, self._keys, hold).run(timeout)
        except BaseException:
            # also an asynchronous exception at any point, for example a soft time limit
            self._release_hold(hold)
            raise
        self._last = hold
        return self

    async def acquire_async(self, wait: float | None = None) -> Lock:
        """Acquire without blocking the event loop, and return the lock itself.

        The asyncio task that awaits this is the owner. An acquire inside another `acquire` or
        `acquire_async` of the task is nested. If the task is cancelled, the lock is released. Use
        `wait` and not `asyncio.wait_for`, which before Python 3.12 runs this in a separate task.
        wait, and errors: as in `acquire`.
        """
        options = self._options
        session = self._session
        timeout = options.wait if wait is None else check_wait("Lock.acquire_async", "wait", wait)
        owner = session.current_owner()
        runner = StepRunner(session.threads)
        hold = Hold(owner, self._client)
        try:
            self._enter(hold)
            attempts = Attempts(session, options, self._keys, hold)
            await attempts.run_async(timeout, runner)
        except BaseException:  # also a cancellation, or the end of the loop
            if hold in self._holds:  # otherwise an exception interrupted `_enter`
                self._holds.remove(hold)
            runner.then(lambda: session.releaser.release_hold(hold, anywhere=True))
            raise
        self._last = hold
        return self

    def _enter(self, hold: Hold) -> None:
        if self._holds:
            self._check_owner(hold.owner)
        self._holds.append(hold)
        self._check_owner(hold.owner)  # again: another thread may have been first

    def extend(self) -> None:
        """Renew the lease now.

        Raises LockLost if the lock is lost. Raises QuorumUnreachable if no quorum answered in time:
        the lock is still held for `remaining` seconds then, and extend may be called again.
        """
        self._check_owner(self._session.current_owner())
        self.ensure()
        started = self._clock.now()
        causes = self._session.renewer.renew(acquisitions_of(self))
        self.ensure()
        if causes:
            waited = self._clock.now() - started
            raise QuorumUnreachable(self.resource, causes, self._session.nodes.quorum, waited)

    @uninterruptible
    def release(self) -> None:
        """Release the lock: write to every node, without waiting for replies.

        Does nothing if the lock is released already. Logs a warning if the lock was lost. Raises
        RedlockError if the lock was never acquired, or belongs to another owner.
        """
        # without a call, so that no asynchronous exception is raised before `try`
        if self._last is None:
            raise RedlockError(f"{self.resource!r} was never acquired: call acquire() first")
        last = self._holds[-1:]
        held: list[Acquisition] = []
        lost: list[Acquisition] = []
        try:  # without a loop: see `JobQueue.go_on`
            hold = last[0] if last else None
            owner = self._session.current_owner()
            if hold is None or hold.owner[0] != owner[0] or not hold.acquisitions:
                return  # released already, or a forked child, which has none of its parent's locks
            self._check_owner(owner)
            self._sort(hold, held, lost)
            self._release_hold(hold)
        except RedlockError:
            raise
        except BaseException:  # an interrupted release must not leave a lock that is still renewed
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

    @uninterruptible
    def _sort(self, hold: Hold, held: list[Acquisition], lost: list[Acquisition]) -> None:
        """Add what no other hold relies on to what is held, or to what was lost just now."""
        now = self._clock.now()
        for one in hold.acquisitions:
            if one.users == 1:
                (held if one.held(now) else lost if one.expire(now) else []).append(one)

    async def release_async(self) -> None:
        """Release the lock in the asyncio task that acquired it. Raises the errors of `release`.

        The release is written at once, without waiting, so a cancellation cannot interrupt it.
        """
        self.release()

    @uninterruptible
    def _release_hold(self, hold: Hold) -> None:
        """Release the acquisitions of a hold, and forget the hold."""
        releaser = self._session.releaser
        try:
            releaser.release_hold(hold)
        except BaseException:
            releaser.release_hold(hold)  # again: the exception may have come before the write
            raise
        finally:
            if hold in self._holds:  # otherwise an exception interrupted `_enter`
                self._holds.remove(hold)

    @uninterruptible
    def _release_holds(self, holds: Sequence[Hold]) -> None:
        """Release holds that an interrupted release may have left."""
        for hold in holds:
            if hold in self._holds and hold.owner[0] == os.getpid():
                self._release_hold(hold)

    def __enter__(self) -> Lock:
        return self.acquire()

    @uninterruptible
    def __exit__(self, *exc_info: object) -> None:
        last = self._holds[-1:]
        try:
            self.release()
        except RedlockError:
            raise
        except BaseException:  # an exception came before the first line of `release`
            self._release_holds(last)
            raise

    async def __aenter__(self) -> Lock:
        return await self.acquire_async()

    async def __aexit__(self, *exc_info: object) -> None:
        last = self._holds[-1:]
        try:
            self.__exit__(*exc_info)
        except RedlockError:  # another task leaves the block, for example by closing a generator
            self._release_holds(last)
            if exc_info[0] is None:
                raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource!r} {'held' if self.held else 'not held'}>"

    def _why(self) -> str:
        if self._last is None:
            return NEVER_ACQUIRED
        acquisitions = acquisitions_of(self)
        if not acquisitions:
            return HELD_BY_PARENT if self._holds else RELEASED
        now = self._clock.now()
        return next((one.reason for one in acquisitions if one.lost(now)), RELEASED)

    def _check_owner(self, owner: Owner) -> None:
        """Raise if another owner has acquired this object. The first hold's owner is the owner."""
        first = self._holds[:1]  # in one step: another thread may remove the hold meanwhile
        if not first or first[0].owner is owner:
            return
        known = first[0].owner
        if known[0] != owner[0]:
            self._holds.clear()  # a forked child holds none of its parent's locks
        elif known != owner:
            raise RedlockError(
                f"the lock on {self.resource!r} belongs to another thread, greenlet or task: make "
                "one Lock for each"
            )


def release_all(lock: Lock, *, ended: bool = False) -> None:
    """Release a lock as often as it has been acquired.

    ended: the run under the lock has ended. This is recorded even if the lock was released or lost.
    """
    session = lock._session
    last = lock._last
    if ended and last is not None:
        own = [one for one in last.acquisitions if one.options is lock._options]
        for acquisition in own:  # not outer acquisitions, whose runs have not ended
            if acquisition.ended_at is None:
                acquisition.ended_at = session.clock.now()
            if last not in lock._holds:
                session.releaser.release(acquisition, publish=False)
    while lock._holds:
        before = len(lock._holds)
        lock.release()
        if len(lock._holds) == before:  # the parent's hold in a forked child, or without a request
            return


def renew_for(lock: Lock, seconds: float) -> None:
    """Have a held lock renewed for this many seconds from now, and no longer, until called again.

    A process that hangs calls this no more, so it loses the lock.
    """
    session = lock._session
    now = lock._clock.now()
    for acquisition in acquisitions_of(lock):
        acquisition.renew_until(now + seconds, now)
        session.watchdog.reschedule(acquisition)


def begin_body(lock: Lock) -> None:
    """Count the starts of an acquired lock's rates: its body begins now.

    Raises NotAcquired if a start came too late and is not to be had again.
    """
    for one in acquisitions_of(lock):
        if one.options is lock._options:
            failure = lock._session.acquirer.begin_body(one)
            if failure is not None:
                raise failure


def acquisitions_of(lock: Lock) -> list[Acquisition]:
    """Return what the last acquire relies on; in a forked child, nothing."""
    holds = lock._holds
    if not holds or holds[0].owner[0] != os.getpid():
        return []
    return holds[-1].acquisitions


def loss_of(lock: Lock) -> LockLost | None:
    """Return the error for a lost lock; None if the lock is held or released."""
    if lock.held:  # first: asked before and after each body, and nearly always so
        return None
    now = lock._clock.now()
    if any(one.lost(now) for one in acquisitions_of(lock)):
        return LockLost(lock.resource, lock._why())
    return None
