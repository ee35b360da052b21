"""The requests for the keys of a lock: acquire, renew, release."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from celery_redlock.lock.model.handoff import Registration
from celery_redlock.lock.model.key_lease import KeyLease
from celery_redlock.lock.model.keys import completion_key, inbox_channel, lock_key, waiting_key
from celery_redlock.lock.model.options import ClientOptions, LockOptions
from celery_redlock.lock.platform.clock import Clock
from celery_redlock.lock.server.restart_guard import GuardedNodeSet
from celery_redlock.lock.server.scripts import EndMarker, Requests
from celery_redlock.lock.transport.encoding import encode_bulk, encode_text


@dataclass(frozen=True)
class Servers:
    """The nodes of one `Redlock`, the requests for keys, and the options that all locks share."""

    nodes: GuardedNodeSet
    requests: KeyRequests
    options: ClientOptions

    @property
    def clock(self) -> Clock:
        """The clock that measures leases."""
        return self.nodes.clock


class KeyRequests:
    """The requests for keys under one prefix. Constant parts of a key lease are encoded once."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._requests = prefix, Requests(prefix)

    def acquire(self, key_lease: KeyLease, options: LockOptions, least: int | None) -> bytes:
        """Return the request for a key. least: the proposed fencing token; None without fencing."""
        requests, key, marker = self._requests, key_lease.key, options.marker
        if marker is None or marker.asks_since is None:
            return requests.grant(key.packed_name, key_lease.packed_value, key.ttl_ms, least)
        marker_key = encode_text(completion_key(self._prefix, marker.run))
        return requests.ask(key.packed_name, key_lease.packed_value, key.ttl_ms, least, marker_key)

    def renew(self, key_leases: Sequence[KeyLease], note: bytes = b"") -> bytes:
        """Return the request that renews keys. note: as in `Requests.renew`."""
        names = [one.key.packed_name for one in key_leases]
        return self._requests.renew(names, [self._renewal(one) for one in key_leases], note)

    def _renewal(self, key_lease: KeyLease) -> bytes:
        """Return the arguments of one key lease in a renewal request."""
        if key_lease.packed_renewal:
            return key_lease.packed_renewal
        ttl_ms, fence = key_lease.key.ttl_ms, key_lease.fence
        if fence is not None:  # its token may grow
            return self._requests.renewal(key_lease.packed_value, ttl_ms, fence.token)
        key_lease.packed_renewal = self._requests.renewal(key_lease.packed_value, ttl_ms)
        return key_lease.packed_renewal

    def release(self, key_lease: KeyLease) -> bytes:
        """Return the request that releases a key and notifies the waiters."""
        if not key_lease.packed_release:
            key, value = key_lease.key, key_lease.packed_value
            key_lease.packed_release = self._requests.release(key.packed_name, key.waiting, value)
        return key_lease.packed_release

    def release_quietly(self, key_lease: KeyLease) -> bytes:
        """Return the request that releases a key without notifying the waiters."""
        key, value = key_lease.key, key_lease.packed_value
        return self._requests.release(key.packed_name, key.waiting, value, publish=False)

    def release_ended(
        self, key_lease: KeyLease, options: LockOptions, ended_for: float | None, *, publish: bool
    ) -> bytes:
        """Return the request that records the end of a run and releases its key.

        ended_for: seconds since the end; None if the run has not ended. publish: whether to notify
        the waiters. Without a marker, or before the run's end, the request only releases.
        """
        marker = options.marker
        if marker is None or ended_for is None:
            return self.release(key_lease) if publish else self.release_quietly(key_lease)
        key, value = key_lease.key, key_lease.packed_value
        end = EndMarker(
            encode_text(completion_key(self._prefix, marker.run)),
            math.ceil(marker.kept_for * 1000),
            int(ended_for * 1000),
        )
        return self._requests.release_done(
            key.packed_name, key.waiting, value, end, publish=publish
        )

    def register(self, registration: Registration, *, asks: bool) -> bytes:
        """Return the request that registers a waiter. asks: for when a key of the lock is free."""
        prefix, resource = self._prefix, registration.resource
        permits = range(min(registration.limit, MOST_ASKED)) if asks else ()
        return self._requests.register(
            encode_text(waiting_key(prefix, resource)),
            [encode_text(lock_key(prefix, resource, permit)) for permit in permits],
            [
                encode_text(registration.waiter),
                encode_bulk(b"%.3f" % registration.since),
                _REGISTERED_FOR,
                encode_bulk(b"%d" % registration.passed),
                encode_text(inbox_channel(prefix, "")),
            ],
        )

    def update(self, registration: Registration) -> bytes:
        """Return the request that changes since when a registered waiter waits."""
        key = encode_text(waiting_key(self._prefix, registration.resource))
        since, waiter = encode_bulk(b"%.3f" % registration.since), encode_text(registration.waiter)
        return b"*5\r\n%b%b%b%b%b" % (encode_bulk(b"ZADD"), key, encode_bulk(b"XX"), since, waiter)

    def unregister(self, waiter: str, resource: str) -> bytes:
        """Return the request that takes a waiter out of the set of a resource's waiters."""
        key = encode_text(waiting_key(self._prefix, resource))
        return b"*3\r\n%b%b%b" % (encode_bulk(b"ZREM"), key, encode_text(waiter))


MOST_ASKED = 100  # permits of a lock that one registration looks at
REGISTERED_FOR = 60.0  # seconds after which a set of waiters that nobody refreshes expires
_REGISTERED_FOR = encode_bulk(b"%d" % (REGISTERED_FOR * 1000))
