"""One key of a lock: its constant parts, and its lease on each node."""

from __future__ import annotations

import functools
import math

from celery_redlock.lock.model.fencing import Fence
from celery_redlock.lock.model.keys import broken_key, lock_key, waiting_key
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.transport.encoding import encode_bulk, encode_text


class LockKey:
    """One key that a lock may take, with the constant parts of its requests.

    permit: number of the semaphore's permit; 0 for a plain lock.
    """

    __slots__ = ("name", "packed_name", "permit", "resource", "ttl_ms", "waiting")

    def __init__(self, prefix: str, resource: str, permit: int, ttl: float) -> None:
        self.resource, self.permit = resource, permit
        self.name = lock_key(prefix, resource, permit)
        self.packed_name = encode_text(self.name)
        self.waiting = encode_text(waiting_key(prefix, resource))
        self.ttl_ms = _encode_ttl(ttl)


@functools.lru_cache(maxsize=64)  # a program has few of them, and each lock asks
def _encode_ttl(ttl: float) -> bytes:
    return encode_bulk(b"%d" % math.ceil(ttl * 1000))


class KeyLease:
    """One key of an acquisition: its value, its lease, and its fencing token.

    sent: monotonic seconds, read before the request was written. granted: indexes of nodes that
    granted the key. never_asked: of nodes that the request certainly did not reach. asked_again: of
    nodes where an older request may still run later.
    """

    __slots__ = ("asked_again", "fence", "granted", "key", "lease", "never_asked",
                 "packed_release", "packed_renewal", "packed_value", "sent", "value")  # fmt: skip

    def __init__(self, key: LockKey, value: str, lease: Lease, fence: Fence | None) -> None:
        self.key, self.value, self.lease, self.fence = key, value, lease, fence
        self.sent = 0.0  # also of a repetition: an old fencing proposal must not get a newer lease
        self.granted: set[int] = set()
        self.never_asked: set[int] = set()
        self.asked_again: set[int] = set()
        self.packed_value = encode_text(value)
        self.packed_release = self.packed_renewal = b""  # encoded once, at the first use

    @property
    def broken_key(self) -> str:
        """The key that records on a node that an operator broke this lock."""
        return broken_key(self.key.name, self.value)

    def reclaiming(self, node: int) -> None:
        """Record that a reclaim, which may set the key, is about to be sent to a node."""
        self.never_asked.discard(node)
        self.asked_again.add(node)

    def withdraw(self, node: int) -> None:
        """Stop counting a node whose server was replaced by another server for a while."""
        self.granted.discard(node)
        self.lease.withdraw(node)
        if self.fence is not None:
            self.fence.withdraw(node)

    def replaced(self, replaced_at: dict[int, float]) -> list[int]:
        """Return the nodes whose replacement was detected after they were asked for this key.

        replaced_at: monotonic seconds of the detection, by node.
        """
        return [node for node, moment in replaced_at.copy().items() if moment >= self.sent]
