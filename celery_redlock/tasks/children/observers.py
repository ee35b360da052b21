"""The lock observers of a process that forks, and of its children."""

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
    """Journals each key of a child from its acquire request until no node may keep it any more."""

    def __init__(self, slot: JournalSlot) -> None:
        self._slot, self._pid = slot, os.getpid()
        self._offsets: dict[KeyLease, int] = {}
        self._has_warned = False

    def claiming(self, redlock: Any, acquisition: Acquisition, key_lease: KeyLease) -> None:
        """Write the entry before the acquire request leaves, so that no kill leaves it unknown."""
        if os.getpid() != self._pid:  # a fork outside of Python ran no hook: the slot is another's
            return
        offset = self._slot.write(encode_entry(redlock.session, acquisition, key_lease))
        if offset:
            self._offsets[key_lease] = offset
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the parent process does not know of lock %r: its name is too long, or too many "
                "locks are held at once; if this process is killed, the lock expires with its ttl",
                key_lease.key.resource,
                extra={"event": "parent_not_told", "resource": key_lease.key.resource},
            )

    def acquired(self, redlock: Any, acquisition: Acquisition) -> None:
        """Mark the entries as held, and send lock_acquired."""
        self._set_state(acquisition, HELD)
        super().acquired(redlock, acquisition)

    def released(self, redlock: Any, acquisition: Acquisition) -> None:
        """Mark the entries as released, and send lock_released."""
        self._set_state(acquisition, RELEASED)
        super().released(redlock, acquisition)

    def _set_state(self, acquisition: Acquisition, state: int) -> None:
        for key_lease in acquisition.key_leases:
            offset = self._offsets.get(key_lease)
            if offset is not None:
                self._slot.set_state(offset, state)

    def settled(self, key_lease: KeyLease) -> None:
        """Clear the entry: no node keeps the key any more."""
        offset = self._offsets.pop(key_lease, None)
        if offset is not None:
            self._slot.clear(offset)


class ParentObserver(SignalObserver):
    """Sends the signals of a process that forks, and sends those of nodes under a mutex.

    mutex: `Children.sending`. The process's own locks need none: no thread of ours sends theirs.
    """

    def __init__(self, mutex: Any) -> None:
        self._mutex = mutex

    def node_failed(self, redlock: Any, node: str, cause: str) -> None:
        """Send node_failed while no fork can begin."""
        with self._mutex:
            super().node_failed(redlock, node, cause)

    def node_recovered(self, redlock: Any, node: str) -> None:
        """Send node_recovered while no fork can begin."""
        with self._mutex:
            super().node_recovered(redlock, node)
