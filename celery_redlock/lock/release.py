"""Ends a lock from outside, for a run that was interrupted and cannot know what it holds."""

from __future__ import annotations

from celery_redlock.errors import LockLost
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.acquisition import Acquisition


def release_all(lock: Lock, *, ended: bool = False) -> None:
    """Release a lock as often as it has been acquired.

    ended: the run under the lock has ended. This is recorded even if the lock was released or lost.
    """
    session, last = lock._session, lock._last
    if ended and last is not None:
        own = [one for one in last.acquisitions if one.options is lock._options]
        for acquisition in own:  # not outer acquisitions, whose runs have not ended
            session.mark_ended(acquisition)
            if last not in lock._holds:
                session.releaser.release(acquisition, publish=False)
    while lock._holds:
        before = len(lock._holds)
        lock.release()
        if len(lock._holds) == before:  # the parent's hold in a forked child, or without a request
            return


def acquisitions_of(lock: Lock) -> list[Acquisition]:
    """Return what a lock relies on now: its own acquisition, and outer ones."""
    return lock._acquisitions()


def loss_of(lock: Lock) -> LockLost | None:
    """Return the error for a lost lock; None if the lock is held or released."""
    if lock.held:  # first: asked before and after each body, and nearly always so
        return None
    now = lock._clock.now()
    if any(one.lost(now) for one in acquisitions_of(lock)):
        return LockLost(lock.resource, lock._why())
    return None
