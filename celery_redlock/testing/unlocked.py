"""Locking switched off, for unit tests of what bodies do.

There is no setting and no environment variable for it: it is a `with` of the test's own process.
A forked or started process does not have it, and a run that a worker makes of a message takes its
lock whatever this process says.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from celery._state import _task_stack

from celery_redlock.errors import RedlockError
from celery_redlock.lock.engine.acquirer import Failure
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Acquisition, Owner
from celery_redlock.lock.model.key_lease import LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.tasks.unique import send as send_module
from celery_redlock.tasks.unique.send import send_once

__all__ = ["locking_off"]

_tokens = itertools.count(1)


class Unlocked(Acquisition):
    """What stands for an acquisition while locking is off: held until its release, on no node."""

    __slots__ = ("_token",)

    def __init__(self, options: LockOptions, keys: Sequence[LockKey], owner: Owner) -> None:
        super().__init__(options, keys, owner)
        self._token = next(_tokens)

    def held(self, now: float) -> bool:
        """Return True: after its release nobody asks it."""
        return True

    def lost(self, now: float) -> bool:
        """Return False, always."""
        return False

    def remaining(self, now: float) -> float:
        """Return a whole ttl, always."""
        return self.options.ttl

    @property
    def fencing_token(self) -> int:
        """A number greater than that of every such acquisition before it."""
        return self._token

    def begin_renewal(self, now: float) -> bool:
        """Return False: there is nothing to renew."""
        return False


@contextlib.contextmanager
def locking_off() -> Iterator[None]:
    """Let locked bodies just run in this process: no node is asked, nobody waits or is refused.

    `apply`, eager calls, `lock_for` and `Redlock.lock` take no lock, and `self.lock` and
    `current_lock()` say that it is held. A send is not deduplicated. Runs that a worker makes of
    messages are locked all the same. Raises RedlockError in such a run.
    """
    if in_worker():
        raise RedlockError("locking_off() is for tests: a run in a worker is always locked")
    own, shipped = os.getpid(), Session.try_acquire

    def is_off() -> bool:
        return os.getpid() == own and not in_worker()

    def new_acquisition(session: Session, *what: Any) -> Acquisition:
        return Unlocked(*what) if is_off() else Acquisition(*what)

    def try_acquire(session: Session, acquisition: Acquisition) -> Failure | None:
        if not isinstance(acquisition, Unlocked):
            return shipped(session, acquisition)
        acquisition.acquired_at = session.clock.now()
        session.reentrancy.enter(acquisition)
        session.events.acquired(acquisition)
        return None

    def send(redlock: Any, message: Any, publish: Any) -> Any:
        return publish(None) if is_off() else send_once(redlock, message, publish)

    with (
        mock.patch.object(Session, "new_acquisition", new_acquisition),
        mock.patch.object(Session, "try_acquire", try_acquire),
        mock.patch.object(send_module, "send_once", send),
    ):
        yield


def in_worker() -> bool:
    """Tell whether what runs here was begun by a worker, for a message that it got."""
    requests = [task.request for task in _task_stack.stack]
    return any(not (one.called_directly or one.is_eager) for one in requests)
