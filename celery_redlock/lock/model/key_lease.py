"""One key of a lock: what never changes about it, and what each node is known to keep of it."""

from __future__ import annotations

import functools
import math

from celery_redlock.lock.model.fencing import Fence
from celery_redlock.lock.model.keys import broken_key, lock_key, wake_channel
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.transport.encoding import encode_bulk, encode_text


class LockKey:
    """One key that a lock may take, with the parts of its requests that never change.

    permit: which of a semaphore's; 0 for a plain lock.
    """

    __slots__ = ("channel", "name", "packed_name", "permit", "resource", "ttl_ms")

    def __init__(self, prefix: str, resource: str, permit: int, ttl: float) -> None:
        self.resource, self.permit = resource, permit
        self.name = lock_key(prefix, resource, permit)
        self.packed_name = encode_text(self.name)
        self.channel = encode_text(wake_channel(prefix, resource))
        self.ttl_ms = _encode_ttl(ttl)


@functools.lru_cache(maxsize=64)  # a program has few of them, and each lock asks
def _encode_ttl(ttl: float) -> bytes:
    return encode_bulk(b"%d" % math.ceil(ttl * 1000))


def lock_keys(prefix: str, options: LockOptions) -> list[LockKey]:
    """Return the keys that a lock may take: one a resource, or one a permit of its resource."""
    return [
        LockKey(prefix, resource, permit, options.ttl)
        for resource in options.resources
        for permit in range(options.limit)
    ]


class KeyLease:
    """One key of an acquisition: the value that proves it, its lease, and its fencing token.

    sent: monotonic seconds, before its request left. Nodes, by index: granted: that voted for it;
    never_asked: that its request surely did not reach; asked_again: where an older request may
    still run some day.
    """

    __slots__ = ("asked_again", "fence", "granted", "key", "lease", "never_asked",
                 "packed_release", "packed_renewal", "packed_value", "sent", "value")  # fmt: skip

    def __init__(self, key: LockKey, value: str, lease: Lease, fence: Fence | None) -> None:
        self.key, self.value, self.lease, self.fence = key, value, lease, fence
        self.sent = 0.0  # an older fencing proposal must not meet a younger lease
        self.granted: set[int] = set()
        self.never_asked: set[int] = set()
        self.asked_again: set[int] = set()
        self.packed_value = encode_text(value)
        self.packed_release = self.packed_renewal = b""  # encode_text once, when first needed

    @property
    def broken_key(self) -> str:
        """Where a node notes that an operator broke it."""
        return broken_key(self.key.name, self.value)

    def reclaiming(self, node: int) -> None:
        """Note that a reclaim, which may set the key, is about to be sent to a node."""
        self.never_asked.discard(node)
        self.asked_again.add(node)

    def withdraw(self, node: int) -> None:
        """Stop counting a node whose server another one had replaced meanwhile."""
        self.granted.discard(node)
        self.lease.withdraw(node)

    def replaced(self, replaced_at: dict[int, float]) -> list[int]:
        """Return the nodes whose server turned out to be replaced after they were asked.

        replaced_at: monotonic seconds, by node.
        """
        return [node for node, moment in replaced_at.copy().items() if moment >= self.sent]
