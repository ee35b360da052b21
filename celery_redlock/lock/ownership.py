"""`Ownership`: the acquires of one `Lock` that are not released yet, and how they are released.

Some of it is for what runs under a lock: a run that was interrupted cannot know what it holds, and
a process may hang. Not here: the public object (`lock.py`), and the tries of an acquire
(`retry.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from celery_redlock.errors import HELD_BY_PARENT, NEVER_ACQUIRED, RELEASED, LockLost, RedlockError
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Acquisition, Hold, Owner
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.platform.threads import uninterruptible

logger = logging.getLogger(__name__)


class Ownership:
    """What one `Lock` has acquired: all of it has one owner (thread, greenlet, asyncio task).

    options: of the lock. holds: one for each acquire that is not released yet. last: the last
    acquire that succeeded, to report why it has ended.
    """

    def __init__(self, session: Session, options: LockOptions) -> None:
        self.options = options
        self.holds: list[Hold] = []
        self.last: Hold | None = None
        self._session = session
        self._clock = session.clock

    # what is held

    @property
    def acquisitions(self) -> list[Acquisition]:
        """What the last acquire relies on; in a forked child, nothing."""
        holds = self.holds
        if not holds or holds[0].owner[0] != os.getpid():
            return []
        return holds[-1].acquisitions

    @property
    def held(self) -> bool:
        """Whether the lock is held now, computed locally, without network I/O."""
        # as `acquisitions`, and no generator: asked around each body
        holds = self.holds
        if not holds or holds[0].owner[0] != os.getpid():
            return False
        acquisitions = holds[-1].acquisitions
        now = self._clock.now()
        for acquisition in acquisitions:
            if not acquisition.held(now):
                return False
        return bool(acquisitions)

    def loss(self) -> LockLost | None:
        """Return the error for a lost lock; None if the lock is held or released."""
        if self.held:  # first: asked before and after each body, and nearly always so
            return None
        now = self._clock.now()
        if any(acquisition.lost(now) for acquisition in self.acquisitions):
            return LockLost(self.options.resource, self.why_not_held())
        return None

    def why_not_held(self) -> str:
        """Return why the lock is not held, as a sentence of an error says it."""
        if self.last is None:
            return NEVER_ACQUIRED
        acquisitions = self.acquisitions
        if not acquisitions:
            return HELD_BY_PARENT if self.holds else RELEASED
        now = self._clock.now()
        return next(
            (acquisition.reason for acquisition in acquisitions if acquisition.lost(now)), RELEASED
        )

    def renew_for(self, seconds: float) -> None:
        """Have the lock renewed for this many seconds from now, and no longer, until called again.

        A process that hangs calls this no more, so it loses the lock.
        """
        now = self._clock.now()
        for acquisition in self.acquisitions:
            acquisition.renew_until(now + seconds, now)
            self._session.watchdog.reschedule(acquisition)

    def begin_body(self) -> None:
        """Count the starts of the lock's rates: its body begins now.

        Raises NotAcquired if a start came too late and is not to be had again.
        """
        for acquisition in self.acquisitions:
            if acquisition.options is self.options:
                failure = self._session.acquirer.begin_body(acquisition)
                if failure is not None:
                    raise failure

    # whose it is

    def enter(self, hold: Hold) -> None:
        """Add an acquire that begins. Raises RedlockError if the lock has another owner."""
        if self.holds:
            self.check_owner(hold.owner)
        self.holds.append(hold)
        self.check_owner(hold.owner)  # again: another thread may have been first

    def check_owner(self, owner: Owner) -> None:
        """Raise if another owner has acquired the lock. The first hold's owner is the owner."""
        first_holds = self.holds[:1]  # in one step: another thread may remove the hold meanwhile
        if not first_holds or first_holds[0].owner is owner:
            return
        lock_owner = first_holds[0].owner
        if lock_owner[0] != owner[0]:
            self.holds.clear()  # a forked child holds none of its parent's locks
        elif lock_owner != owner:
            raise RedlockError(
                f"the lock on {self.options.resource!r} belongs to another thread, greenlet or "
                "task: make one Lock for each"
            )

    # its release

    @uninterruptible
    def release(self) -> None:
        """Release the last acquire; log a warning if it was lost. Raises RedlockError."""
        # without a call, so that no asynchronous exception is raised before `try`
        if self.last is None:
            resource = self.options.resource
            raise RedlockError(f"{resource!r} was never acquired: call acquire() first")
        last_holds = self.holds[-1:]
        try:  # without a loop: see `JobQueue.go_on`
            owner = self._session.current_owner()
            if not last_holds:
                return  # released already
            hold = last_holds[0]
            if hold.owner[0] != owner[0] or not hold.acquisitions:
                return  # a forked child has none of its parent's locks; or nothing is acquired yet
            self.check_owner(owner)
            held, lost = self._ended_by(hold)
            self.release_hold(hold)
        except RedlockError:
            raise
        except BaseException:  # an interrupted release must not leave a lock that is still renewed
            self.release_holds(last_holds)
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
    def _ended_by(self, hold: Hold) -> tuple[list[Acquisition], list[Acquisition]]:
        """Return what the release of a hold ends: what is held now, and what was lost before.

        It does not end outer acquisitions, on which other holds rely. What is neither held nor lost
        has been released already, or is not acquired yet.
        """
        held: list[Acquisition] = []
        lost: list[Acquisition] = []
        now = self._clock.now()
        for acquisition in hold.acquisitions:
            if acquisition.users != 1:  # 0: an interrupted release has begun to end it
                continue
            if acquisition.held(now):
                held.append(acquisition)
                continue
            reason = acquisition.expire(now)
            if reason is not None:
                lost.append(acquisition)
        return held, lost

    @uninterruptible
    def release_hold(self, hold: Hold) -> None:
        """Release the acquisitions of a hold, and forget the hold."""
        releaser = self._session.releaser
        try:
            releaser.release_hold(hold)
        except BaseException:
            releaser.release_hold(hold)  # again: the exception may have come before the write
            raise
        finally:
            if hold in self.holds:  # otherwise an exception interrupted `enter`
                self.holds.remove(hold)

    @uninterruptible
    def release_holds(self, holds: Sequence[Hold]) -> None:
        """Release holds that an interrupted release may have left."""
        for hold in holds:
            if hold in self.holds and hold.owner[0] == os.getpid():
                self.release_hold(hold)

    def release_all(self, *, ended: bool = False) -> None:
        """Release the lock as often as it has been acquired.

        ended: the run under the lock has ended. This is recorded even if the lock was released or
        lost.
        """
        if ended and self.last is not None:
            self._record_end(self.last)
        while self.holds:
            count = len(self.holds)
            self.release()
            if len(self.holds) == count:  # the parent's hold in a forked child, or no request
                return

    def _record_end(self, hold: Hold) -> None:
        """Record that the run under a hold has ended; on the nodes, if the hold is released."""
        for acquisition in hold.acquisitions:
            if acquisition.options is not self.options:
                continue  # an outer acquisition: its run has not ended
            if acquisition.ended_at is None:
                acquisition.ended_at = self._clock.now()
            if hold not in self.holds:
                self._session.releaser.release(acquisition, publish=False)
