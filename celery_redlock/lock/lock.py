"""`Lock`: acquire, extend and release, for one owner at a time.

Not here: what a lock keeps of its owner (`ownership.py`), the tries of an acquire (`retry.py`), and
one try (`engine/acquirer.py`).
"""

from __future__ import annotations

import importlib
from typing import Any

from celery_redlock.errors import (
    LockLost,
    LockTaken,
    NoTokenError,
    QuorumUnreachable,
    RedlockError,
)
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Hold
from celery_redlock.lock.model.lease import LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.ownership import Ownership
from celery_redlock.lock.platform.coroutines import StepRunner
from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.lock.retry import Attempts
from celery_redlock.lock.validation import check_wait

CONFIRM = "celery_redlock.lock.postgres.confirm"  # by name: only `confirm_in` imports it


class Lock:
    """One lock on one resource, of one owner (thread, greenlet, asyncio task) at a time.

    `with lock:` acquires, waiting up to `wait` seconds, and releases; `async with lock:` does the
    same without blocking the event loop. The same object may be acquired again after its release.
    client: the `Redlock`, which the lock keeps alive. ownership: for the package alone.
    """

    def __init__(self, client: Any, options: LockOptions) -> None:
        self._client = client
        self._session: Session = client.session
        self._clock = self._session.clock
        self.ownership = Ownership(self._session, options)
        prefix = self._session.options.prefix
        limits = options.limits or {}
        self._keys: list[LockKey] = []
        for resource in options.resources:
            self._keys.append(LockKey(prefix, resource, options.ttl, limits.get(resource, 1)))

    @property
    def resource(self) -> str:
        """The name of the resource; several names are separated by commas."""
        return self.ownership.options.resource

    @property
    def ttl(self) -> float:
        """Seconds that a node keeps the lock without a renewal."""
        return self.ownership.options.ttl

    @property
    def held(self) -> bool:
        """Whether the lock is held now, computed locally, without network I/O."""
        return self.ownership.held

    @property
    def remaining(self) -> float:
        """Seconds of validity left without a renewal; 0.0 once the lock is lost or released."""
        now = self._clock.now()
        return min(
            (acquisition.remaining(now) for acquisition in self.ownership.acquisitions), default=0.0
        )

    @property
    def fencing_token(self) -> int:
        """A number greater than every earlier holder's, for storage that rejects smaller numbers.

        Several resources share one token. Raises RedlockError, also an AttributeError, if the lock
        was acquired without `fencing=True`, or is not acquired.
        """
        if not self.ownership.options.fencing:
            raise NoTokenError(
                f"{self.resource!r} has no fencing token: give the task lock_fencing=True, or take "
                "the lock with fencing=True"
            )
        acquisitions = self.ownership.acquisitions
        if not acquisitions:
            raise NoTokenError(f"{self.resource!r} is not acquired, so it has no fencing token yet")
        return max(acquisition.fencing_token for acquisition in acquisitions)

    def ensure(self) -> None:
        """Raise LockLost with the reason unless the lock is held now. No I/O."""
        if not self.ownership.held:
            raise LockLost(self.resource, self.ownership.why_not_held())

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
        leases = [
            lease for acquisition in self.ownership.acquisitions for lease in acquisition.leases
        ]
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
        ownership = self.ownership
        options = ownership.options
        timeout = options.wait if wait is None else check_wait("Lock.acquire", "wait", wait)
        session = self._session
        hold = Hold(session.current_owner(), self._client, session.watchdog.release_dropped)
        try:
            ownership.enter(hold)
            Attempts(session, options, self._keys, hold).run(timeout)
        except BaseException:
            # also an asynchronous exception at any point, for example a soft time limit
            ownership.release_hold(hold)
            raise
        ownership.last = hold
        return self

    async def acquire_async(self, wait: float | None = None) -> Lock:
        """Acquire without blocking the event loop, and return the lock itself.

        The asyncio task that awaits this is the owner. An acquire inside another `acquire` or
        `acquire_async` of the task is nested. If the task is cancelled, the lock is released. Use
        `wait` and not `asyncio.wait_for`, which before Python 3.12 runs this in a separate task.
        wait, and errors: as in `acquire`.
        """
        ownership = self.ownership
        options = ownership.options
        session = self._session
        timeout = options.wait if wait is None else check_wait("Lock.acquire_async", "wait", wait)
        owner = session.current_owner()
        runner = StepRunner(session.threads)
        hold = Hold(owner, self._client, session.watchdog.release_dropped)
        try:
            ownership.enter(hold)
            attempts = Attempts(session, options, self._keys, hold)
            await attempts.run_async(timeout, runner)
        except BaseException:  # also a cancellation, or the end of the loop
            if hold in ownership.holds:  # otherwise an exception interrupted `enter`
                ownership.holds.remove(hold)
            runner.then(lambda: session.releaser.release_hold(hold, in_any_thread=True))
            raise
        ownership.last = hold
        return self

    def extend(self) -> None:
        """Renew the lease now.

        Raises LockLost if the lock is lost. Raises QuorumUnreachable if no quorum answered in time:
        the lock is still held for `remaining` seconds then, and extend may be called again.
        """
        self.ownership.check_owner(self._session.current_owner())
        self.ensure()
        started = self._clock.now()
        causes = self._session.renewer.renew(self.ownership.acquisitions)
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
        last_holds = self.ownership.holds[-1:]
        try:
            self.ownership.release()
        except RedlockError:
            raise
        except BaseException:  # an exception came before the first line of `Ownership.release`
            self.ownership.release_holds(last_holds)
            raise

    async def release_async(self) -> None:
        """Release the lock in the asyncio task that acquired it. Raises the errors of `release`.

        The release is written at once, without waiting, so a cancellation cannot interrupt it.
        """
        self.release()

    def __enter__(self) -> Lock:
        return self.acquire()

    @uninterruptible
    def __exit__(self, *exc_info: object) -> None:
        last_holds = self.ownership.holds[-1:]  # as in `release`
        try:
            self.release()
        except RedlockError:
            raise
        except BaseException:
            self.ownership.release_holds(last_holds)
            raise

    async def __aenter__(self) -> Lock:
        return await self.acquire_async()

    async def __aexit__(self, *exc_info: object) -> None:
        last_holds = self.ownership.holds[-1:]
        try:
            self.__exit__(*exc_info)
        except RedlockError:  # another task leaves the block, for example by closing a generator
            self.ownership.release_holds(last_holds)
            if exc_info[0] is None:
                raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource!r} {'held' if self.held else 'not held'}>"
