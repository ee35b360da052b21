"""`Hold`: one acquire that is not released yet."""

from __future__ import annotations

import random
from collections.abc import Callable

from celery_redlock.lock.engine.acquirer import Acquirer, Failure
from celery_redlock.lock.engine.releaser import Releaser
from celery_redlock.lock.model.acquisition import Acquisition, Owner
from celery_redlock.lock.platform.threads import uninterruptible

SPLIT_TRIES = 6  # tries while rivals that came at once share the nodes, and none has the lock
LONGEST_SPLIT = 0.25  # seconds, the longest pause between these tries


class Hold:
    """One acquire that is not released yet: its own acquisition, and outer ones that it relies on.

    owner: the owner that acquires. client: the `Redlock`, kept alive while a thread may still
    acquire. end_wait: ends the wait of the acquire, None while it does not wait. splits: number of
    consecutive tries in which rivals shared the nodes. took: seconds that the last try took.
    """

    __slots__ = ("__weakref__", "acquisitions", "client", "end_wait", "owner", "splits", "took")

    def __init__(self, owner: Owner, client: object) -> None:
        self.owner, self.client = owner, client
        self.acquisitions: list[Acquisition] = []
        self.splits, self.took = 0, 0.0
        self.end_wait: Callable[[], None] | None = None

    def pause_of_split(self) -> float | None:
        """Return the seconds until the next try if rivals share the nodes, else None.

        The pause is random, from a range that doubles, so that soon only one rival tries. After
        SPLIT_TRIES tries, the caller waits for the rivals as for any holder.
        """
        if not 0 < self.splits < SPLIT_TRIES:
            return None
        return random.uniform(0, min(LONGEST_SPLIT, self.took * 2**self.splits))  # noqa: S311

    def join(self, acquisition: Acquisition) -> None:
        """Begin to rely on an acquisition."""
        if acquisition not in self.acquisitions:
            self.acquisitions.append(acquisition)
            acquisition.join(self)

    def leave(self, acquisition: Acquisition) -> None:
        """Stop relying on an acquisition that is over."""
        self.acquisitions.remove(acquisition)
        acquisition.part(self)

    def confirm_fencing_token(self, acquirer: Acquirer) -> Failure | None:
        """Confirm one fencing token for all acquisitions; return None if it may be used."""
        token = max(one.fencing_token for one in self.acquisitions)
        failures = (acquirer.confirm_fencing_token(one, token) for one in self.acquisitions)
        return next((failure for failure in failures if failure is not None), None)

    @uninterruptible
    def release(self, releaser: Releaser) -> None:
        """End a wait, and release what no other hold relies on. A second call has no effect."""
        try:
            if self.end_wait is not None:
                self.end_wait()
        finally:
            for acquisition in self.acquisitions:
                acquisition.part(self)
                if not acquisition.users:
                    releaser.release(acquisition)

    @uninterruptible
    def release_anywhere(self, releaser: Releaser) -> None:
        """Do so in any thread, even while the owner may acquire the same lock again."""
        try:
            if self.end_wait is not None:
                self.end_wait()
        finally:
            for acquisition in self.acquisitions:
                releaser.release_if_unused(acquisition, self)
