"""Locking switched off, for unit tests of what bodies do.

There is no setting and no environment variable for it: it is a `with` of the test's own process.
A forked or started process does not have it, and a run that a worker makes of a message takes its
lock whatever this process says.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from celery._state import _task_stack

from celery_redlock.errors import RedlockError
from celery_redlock.lock import redlock as redlock_module
from celery_redlock.lock.session import Holding, Refused
from celery_redlock.tasks import task as task_module
from celery_redlock.tasks.uniqueness import send_once

__all__ = ["locking_off"]

_tokens = itertools.count(1)


class Unlocked(Holding):
    """What stands for a hold while locking is off: held from acquire to release, on no node."""

    __slots__ = ("_over", "_token")

    def acquire(self) -> Refused | None:
        """Be held, at once."""
        self.acquired_at = self.session.clock.now()
        self._over, self._token = False, next(_tokens)
        _, here, task = self._context
        for spot in self._spots:
            here.held[task, spot.resource] = self
        self.session.redlock.observer.acquired(self)
        return None

    @property
    def held(self) -> bool:
        """Whether it is not released."""
        return not getattr(self, "_over", True)

    @property
    def lost(self) -> bool:
        """Never."""
        return False

    @property
    def remaining(self) -> float:
        """A whole ttl, always."""
        return self.terms.ttl if self.held else 0.0

    @property
    def fencing_token(self) -> int:
        """A number greater than that of every such hold before it."""
        return self._token

    def settle_fences(self, token: int) -> Refused | None:
        """Leave it as it is."""
        return None

    def renews(self, now: float) -> bool:
        """Tell that there is nothing to renew."""
        return False

    def let_go(self, *, publish: bool = True) -> None:
        """Be over."""
        self._over = True
        self.leave()


@contextlib.contextmanager
def locking_off() -> Iterator[None]:
    """Let locked bodies just run in this process: no node is asked, nobody waits or is refused.

    `apply`, eager calls, `lock_for` and `Redlock.lock` take no lock, and `self.lock` and
    `current_lock()` say that it is held. A send is not deduplicated. Runs that a worker makes of
    messages are locked all the same. Raises RedlockError in such a run.
    """
    if in_worker():
        raise RedlockError("locking_off() is for tests: a run in a worker is always locked")
    own = os.getpid()

    def is_off() -> bool:
        return os.getpid() == own and not in_worker()

    def holding(*what: Any) -> Holding:
        return Unlocked(*what) if is_off() else Holding(*what)

    def send(redlock: Any, message: Any, publish: Any) -> Any:
        return publish(None) if is_off() else send_once(redlock, message, publish)

    with (
        mock.patch.object(redlock_module, "Holding", holding),
        mock.patch.object(task_module, "send_once", send),
    ):
        yield


def in_worker() -> bool:
    """Tell whether what runs here was begun by a worker, for a message that it got."""
    requests = [task.request for task in _task_stack.stack]
    return any(not (one.called_directly or one.is_eager) for one in requests)
