"""What a child writes of each lock before it asks for it, in memory shared with its parent."""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.key_lease import KeyLease
from celery_redlock.lock.model.keys import label_of

HEADER, LINE, LINES = 64, 1024, 255  # bytes, bytes, how many locks one child can write down
SIZE = HEADER + LINE * LINES  # of which only what is written ever takes memory

FREE, CLAIMED, HELD, RELEASED = range(4)  # the first byte of a line
BORN = 1  # the first byte of a slot
TOLD, TOLD_SIZE = 16, 8  # where in a slot the parent names a run, and in how many bytes


_SEAL = struct.Struct("<II")  # checksum and length of what follows
_HEAD = struct.Struct("<8sQdd?IIII")
_BIRTH = struct.Struct("<IQ")  # pid, start time


@dataclass(frozen=True)
class JournalEntry:
    """One line: what a child claims of one key.

    state: CLAIMED, HELD, or RELEASED where some node may not have heard of the release yet.
    session: `Session.identity`. holding: `Acquisition.number`. asked_at: monotonic s. ttl: s.
    is_asked_for: not so where it is of the run's own lock, beside a permit. owner: the task's
    name. value: token and label.
    """

    state: int
    session: bytes
    holding: int
    asked_at: float
    ttl: float
    is_asked_for: bool
    permit: int
    resource: str
    owner: str
    value: str

    @property
    def run(self) -> str:
        """The name of the run that claims it; behind that its label has the worker's."""
        return label_of(self.value).rpartition(" ")[0]


def encode_entry(session: Session, acquisition: Acquisition, key_lease: KeyLease) -> bytes:
    """Return what a child writes of a claim, without its state."""
    key, options = key_lease.key, acquisition.options
    resource = key.resource.encode("utf-8", "surrogatepass")
    owner = getattr(options.sender, "name", "").encode("utf-8", "surrogatepass")
    value = key_lease.value.encode("utf-8", "surrogatepass")
    head = _HEAD.pack(
        session.identity, acquisition.number, session.clock.now(), options.ttl,
        key.resource in options.resources, key.permit, len(resource), len(owner), len(value),
    )  # fmt: skip
    body = head + resource + owner + value
    return _SEAL.pack(zlib.crc32(body), len(body)) + body


def parse_entry(state: int, line: bytes) -> JournalEntry | None:
    """Return what stands on a line; None where it is not whole: a dying child writes anything."""
    checksum, length = _SEAL.unpack_from(line)
    body = line[_SEAL.size : _SEAL.size + length]
    if state not in (CLAIMED, HELD, RELEASED) or len(body) != length or length < _HEAD.size:
        return None
    if zlib.crc32(body) != checksum:
        return None
    *numbers, resource_size, owner_size, value_size = _HEAD.unpack_from(body)
    texts, at = [], _HEAD.size
    for size in (resource_size, owner_size, value_size):
        texts.append(body[at : at + size].decode("utf-8", "surrogatepass"))
        at += size
    return JournalEntry(state, *numbers, *texts)


def _digest(run: str) -> bytes:
    text = run.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=TOLD_SIZE).digest()


class JournalSlot:
    """The memory that one child shares with its parent, and with nobody else.

    A line is whole or free at any moment: its first byte is written last, and cleared before the
    line is used again. memory: what it is kept in, SIZE zeros.
    """

    def __init__(self, memory: Any = None) -> None:
        self._memory = mmap.mmap(-1, SIZE) if memory is None else memory
        self._free = list(range(HEADER + LINE * (LINES - 1), 0, -LINE))  # the first line last

    def sign(self, pid: int, started: int) -> None:
        """Say whose it is: the child's first word. started: as of `started_at`."""
        self._memory[1 : 1 + _BIRTH.size] = _BIRTH.pack(pid, started)
        self._memory[0] = BORN

    @property
    def child(self) -> tuple[int, int] | None:
        """Pid and start time of the child; None where it has not said them yet."""
        if self._memory[0] != BORN:
            return None
        pid, started = _BIRTH.unpack_from(self._memory, 1)
        return pid, started

    def tell_end(self, run: str) -> None:
        """Say, in the parent, that a run is at its end, whatever its child still sees of that."""
        self._memory[TOLD : TOLD + TOLD_SIZE] = _digest(run)

    def is_ended(self, run: str) -> bool:
        """Tell whether the parent has said that."""
        return bytes(self._memory[TOLD : TOLD + TOLD_SIZE]) == _digest(run)

    def write(self, line: bytes) -> int:
        """Write what `encode_entry` gives, and return where; 0 where there is no room for it."""
        if len(line) >= LINE or not self._free:
            return 0
        at = self._free.pop()
        self._memory[at + 1 : at + 1 + len(line)] = line
        self._memory[at] = CLAIMED
        return at

    def mark(self, at: int, state: int) -> None:
        """Change the state of what has been written."""
        self._memory[at] = state

    def clear(self, at: int) -> None:
        """Free a line."""
        self._memory[at] = FREE
        self._free.append(at)

    def read(self) -> Iterator[JournalEntry]:
        """Yield what stands there."""
        for at in range(HEADER, SIZE, LINE):
            state = self._memory[at]
            if state != FREE:
                entry = parse_entry(state, self._memory[at + 1 : at + LINE])
                if entry is not None:
                    yield entry

    def close(self) -> None:
        """Give the memory back, as far as this process goes."""
        self._memory.close()
