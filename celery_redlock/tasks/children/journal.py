"""The write-ahead journal of a child's locks, in memory that the child shares with its parent.

Not here: who makes a journal, and what the parent does with it (`reaper.py`).
"""

from __future__ import annotations

import hashlib
import logging
import marshal
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from celery_redlock.label import run_of_label
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.keys import label_of
from celery_redlock.lock.model.lease import Lease

logger = logging.getLogger(__name__)

HEADER_SIZE = 64  # bytes
ENTRY_SIZE = 1024  # bytes
MAX_ENTRIES = 255  # keys of one child at a time
SIZE = HEADER_SIZE + ENTRY_SIZE * MAX_ENTRIES  # pages that are never written take no memory

FREE, CLAIMED, HELD, RELEASED = range(4)  # the first byte of an entry
SIGNED = 1  # the first byte of a slot
END_OFFSET = 16  # offset of the run that the parent announced as ended
END_SIZE = 8  # bytes

_ENTRY_HEADER = struct.Struct("<II")  # checksum and length of what follows
_CHILD = struct.Struct("<IQ")  # pid, start time


@dataclass(frozen=True)
class JournalEntry:
    """One key that a child requested, and that a node may still keep.

    state: CLAIMED, HELD, or RELEASED if some node may not have executed the release yet.
    session: `Session.identity`. acquisition: `Acquisition.number`. requested_at: monotonic seconds.
    ttl: seconds. is_requested: False for the run's own key, which is locked beside a permit.
    limit: number of permits, one of which it is. task_name: "" without a task. value: of the lock's
    key, with token and label.
    """

    state: int
    session: bytes
    acquisition: int
    requested_at: float
    ttl: float
    is_requested: bool
    limit: int
    resource: str
    task_name: str
    value: str

    @property
    def run_id(self) -> str:
        return run_of_label(label_of(self.value))


def encode_entry(
    session: bytes, requested_at: float, acquisition: Acquisition, lease: Lease
) -> bytes:
    key = lease.key
    options = acquisition.options
    texts = (key.resource, getattr(options.sender, "name", ""), lease.value)
    fields: Any = (
        session, acquisition.number, requested_at, float(options.ttl),
        key.resource in options.resources, key.limit,
        *map(str.__str__, texts),  # marshal refuses a subclass of str, as a user's resource may be
    )  # fmt: skip
    body = marshal.dumps(fields)
    return _ENTRY_HEADER.pack(zlib.crc32(body), len(body)) + body


def parse_entry(state: int, encoded: bytes) -> JournalEntry | None:
    """Return the entry in these bytes; None if a dying child has left only a part of it."""
    checksum, length = _ENTRY_HEADER.unpack_from(encoded)
    body = encoded[_ENTRY_HEADER.size : _ENTRY_HEADER.size + length]
    if state not in (CLAIMED, HELD, RELEASED) or not body or len(body) != length:
        return None
    if zlib.crc32(body) != checksum:
        return None
    return JournalEntry(state, *marshal.loads(body))  # noqa: S302 - a child of this process wrote it


def _digest(run_id: str) -> bytes:
    text = run_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=END_SIZE).digest()


class JournalSlot:
    """The journal of one child, in memory that only the child and its parent share.

    The child notes each key from its acquire request until no node may keep it any more.
    An entry is complete or free at any moment: the child writes the first byte last, and clears it
    before it uses the place again. memory: SIZE zeros.
    """

    def __init__(self, memory: Any = None) -> None:
        self._memory = mmap.mmap(-1, SIZE) if memory is None else memory
        last_offset = HEADER_SIZE + ENTRY_SIZE * (MAX_ENTRIES - 1)
        self._free_offsets = list(
            range(last_offset, 0, -ENTRY_SIZE)
        )  # the lowest offset is used first
        self._offsets: dict[Lease, int] = {}  # of the entries, in the child
        self._pid = 0
        self._has_warned = False

    def sign(self, pid: int, start_time: int) -> None:
        """Write the child's identity, before its first entry."""
        self._pid = pid
        self._memory[1 : 1 + _CHILD.size] = _CHILD.pack(pid, start_time)
        self._memory[0] = SIGNED

    @property
    def child(self) -> tuple[int, int] | None:
        """Pid and start time of the child; None before the child has written them."""
        if self._memory[0] != SIGNED:
            return None
        pid, start_time = _CHILD.unpack_from(self._memory, 1)
        return pid, start_time

    def announce_end(self, run_id: str) -> None:
        """Note, in the parent, that Celery ended a run, which its child may not learn."""
        self._memory[END_OFFSET : END_OFFSET + END_SIZE] = _digest(run_id)

    def is_end_announced(self, run_id: str) -> bool:
        """Return whether the parent noted the end of this run."""
        return bytes(self._memory[END_OFFSET : END_OFFSET + END_SIZE]) == _digest(run_id)

    def claiming(
        self, session: bytes, requested_at: float, acquisition: Acquisition, lease: Lease
    ) -> None:
        """Write the entry before the acquire request leaves, so that no kill leaves it unknown."""
        if (
            os.getpid() != self._pid
        ):  # after a fork outside of Python, which ran no hook: the slot is the parent's
            return
        encoded = encode_entry(session, requested_at, acquisition, lease)
        if len(encoded) >= ENTRY_SIZE or not self._free_offsets:
            if not self._has_warned:
                self._has_warned = True
                resource = lease.key.resource
                logger.warning(
                    "the parent process does not know of lock %r: its name is too long, or too "
                    "many locks are held at once; if this process is killed, the lock expires "
                    "with its ttl",
                    resource, extra={"event": "parent_not_told", "resource": resource},
                )  # fmt: skip
            return
        offset = self._free_offsets.pop()
        self._memory[offset + 1 : offset + 1 + len(encoded)] = encoded
        self._memory[offset] = CLAIMED  # last: a child killed before this leaves no entry
        self._offsets[lease] = offset

    def held(self, acquisition: Acquisition) -> None:
        self._set_state(acquisition, HELD)

    def released(self, acquisition: Acquisition) -> None:
        self._set_state(acquisition, RELEASED)

    def _set_state(self, acquisition: Acquisition, state: int) -> None:
        for lease in acquisition.leases:
            offset = self._offsets.get(lease)
            if offset is not None:
                self._memory[offset] = state

    def settled(self, lease: Lease) -> None:
        """Free the place of an entry: no node keeps the key any more."""
        offset = self._offsets.pop(lease, None)
        if offset is not None:
            self._memory[offset] = FREE
            self._free_offsets.append(offset)

    def read(self) -> Iterator[JournalEntry]:
        for offset in range(HEADER_SIZE, SIZE, ENTRY_SIZE):
            state = self._memory[offset]
            if state != FREE:
                entry = parse_entry(state, self._memory[offset + 1 : offset + ENTRY_SIZE])
                if entry is not None:
                    yield entry

    def close(self) -> None:
        self._memory.close()
