"""Locking switched off, for unit tests of task bodies.

No setting and no environment variable does this, only a `with` in the test's own process. A process
that is forked or started there locks, and so does a worker's run of a message in this process.
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
from celery_redlock.lock.engine.acquirer import Acquirer, Failure
from celery_redlock.lock.model.acquisition import Acquisition, Hold, Owner
from celery_redlock.lock.model.lease import LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.tasks.unique.claim import Claim

__all__ = ["locking_off"]

_tokens = itertools.count(1)


class Unlocked(Acquisition):
    """An acquisition while locking is off: no node has it, and it is held until its release."""

    __slots__ = ("_token",)

    def __init__(self, options: LockOptions, keys: Sequence[LockKey], owner: Owner) -> None:
        super().__init__(options, keys, owner)
        self._token = next(_tokens)

    def held(self, now: float) -> bool:
        """Return True; it is not asked after its release."""
        return True

    def lost(self, now: float) -> bool:
        """Return False, always."""
        return False

    def remaining(self, now: float) -> float:
        """Return the full ttl, always."""
        return self.options.ttl

    @property
    def fencing_token(self) -> int:
        """A number greater than the token of every earlier acquisition of this class."""
        return self._token

    def begin_renewal(self, now: float) -> bool:
        """Return False: there is nothing to renew."""
        return False


@contextlib.contextmanager
def locking_off() -> Iterator[None]:
    """Run locked bodies in this process without locks: no node is asked, no acquire waits or fails.

    `apply`, eager calls, `lock_for` and `Redlock.lock` take no lock, and `self.lock` and
    `current_lock()` say that it is held. A send is not deduplicated. A worker's run of a message is
    still locked. Raises RedlockError inside such a run.
    """
    if in_worker():
        raise RedlockError("locking_off() is for tests: a run in a worker is always locked")
    pid, locking_acquire, claiming_send = os.getpid(), Acquirer.try_acquire, Claim.send

    def is_off() -> bool:
        return os.getpid() == pid and not in_worker()

    def try_acquire(
        acquirer: Acquirer, hold: Hold, options: LockOptions, keys: Sequence[LockKey]
    ) -> Failure | None:
        if not is_off():
            return locking_acquire(acquirer, hold, options, keys)
        acquisition = Unlocked(options, keys, hold.owner)
        hold.add(acquisition)
        acquisition.acquired_at = acquirer.clock.now()
        acquisition.nest()
        acquirer.events.acquired(acquisition)
        return None

    def send(claim: Claim, publish: Any) -> Any:
        return publish(None) if is_off() else claiming_send(claim, publish)

    # by name: a test fails if a send is deduplicated by a method of another name
    with (
        mock.patch.object(Acquirer, "try_acquire", try_acquire),
        mock.patch.object(Claim, "send", send),
    ):
        yield


def in_worker() -> bool:
    """Return whether this code is part of a worker's run of a message."""
    requests = [task.request for task in _task_stack.stack]
    return any(not (request.called_directly or request.is_eager) for request in requests)
