"""The observers of the lock's floor in a process that forks, and in its children."""

from __future__ import annotations

import logging
import os
from typing import Any

from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.key_lease import KeyLease
from celery_redlock.tasks.children.journal import HELD, RELEASED, JournalSlot, encode_entry
from celery_redlock.tasks.signals import SignalObserver

logger = logging.getLogger(__name__)


class JournalingObserver(SignalObserver):
    """Writes down what a child claims, in its slot, until no node has anything of it any more."""

    def __init__(self, slot: JournalSlot) -> None:
        self._slot, self._pid = slot, os.getpid()
        self._lines: dict[KeyLease, int] = {}
        self._told = False

    def claiming(self, redlock: Any, acquisition: Acquisition, key_lease: KeyLease) -> None:
        """Write it down, before its grant leaves."""
        if os.getpid() != self._pid:  # forked past Python, so that nobody told us
            return
        at = self._slot.write(encode_entry(redlock.session, acquisition, key_lease))
        if at:
            self._lines[key_lease] = at
        elif not self._told:
            self._told = True
            logger.warning(
                "the parent process is not told of %r: its name is too long, or too many locks are "
                "held at once; if this process is killed, it ends with its ttl",
                key_lease.key.resource,
                extra={"event": "parent_not_told", "resource": key_lease.key.resource},
            )

    def acquired(self, redlock: Any, acquisition: Acquisition) -> None:
        """Mark it as held, and tell."""
        self._mark(acquisition, HELD)
        super().acquired(redlock, acquisition)

    def released(self, redlock: Any, acquisition: Acquisition) -> None:
        """Mark it as given back, and tell."""
        self._mark(acquisition, RELEASED)
        super().released(redlock, acquisition)

    def _mark(self, acquisition: Acquisition, state: int) -> None:
        for key_lease in acquisition.key_leases:
            at = self._lines.get(key_lease)
            if at is not None:
                self._slot.mark(at, state)

    def settled(self, key_lease: KeyLease) -> None:
        """Forget it: every node has been told."""
        at = self._lines.pop(key_lease, None)
        if at is not None:
            self._slot.clear(at)


class ParentObserver(SignalObserver):
    """Tells what a process hears that forks; working: taken meanwhile, as of `Children`.

    What it holds itself it tells as any process does, and has no threads that do.
    """

    def __init__(self, working: Any) -> None:
        self._working = working

    def node_failed(self, redlock: Any, node: str, cause: str) -> None:
        """Send node_failed, and let no fork come in between."""
        with self._working:
            super().node_failed(redlock, node, cause)

    def node_recovered(self, redlock: Any, node: str) -> None:
        """Send node_recovered, and let no fork come in between."""
        with self._working:
            super().node_recovered(redlock, node)
