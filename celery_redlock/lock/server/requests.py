"""The Lua scripts of the lock, and the requests that call them.

Constant parts are encoded once. The connection appends its server's arguments (`Peer.suffix`) to
each acquire request as it writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files

from celery_redlock.lock.model.keys import (
    completion_key,
    fence_key,
    guard_keys,
    inbox_channel,
    lock_key,
    rate_keys,
    tenure_key,
    waiting_for,
    waiting_key,
)
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.model.rate import Rate, Start
from celery_redlock.lock.transport.command import Script, encode_bulk, encode_command, encode_text

REGISTRATION_TTL = 60.0  # seconds after which a set of waiters that nobody refreshes expires


def load_script(name: str, *preamble: str) -> Script:
    """Return a script of this package. preamble: files that stand before it, with its functions."""
    folder = files("celery_redlock.lock.server").joinpath("lua")
    texts = [folder.joinpath(f"{file}.lua").read_bytes() for file in (*preamble, name)]
    return Script(name, b"".join(texts))


GRANT, MARKER, UNIQUE, NEWEST = (
    load_script(name, "vote") for name in ("grant", "marker", "unique", "newest")
)
PERMIT = load_script("permit", "vote", "permits")
REGISTER = load_script("register", "vote", "permits", "starts")
TAKE = load_script("take", "vote", "tenure", "starts")
CANCEL = load_script("cancel", "vote", "announce", "starts")
RECORD = load_script("record", "vote", "starts")
RELEASE = load_script("release", "announce", "permits")
BREAK = load_script("break", "announce")
GUARD, TRUST = (load_script(name, "tenure") for name in ("guard", "trust"))
RENEW, FENCE = map(load_script, ("renew", "fence"))
SCRIPTS = (
    GRANT, PERMIT, RENEW, RELEASE, REGISTER, GUARD, TRUST, BREAK, UNIQUE, MARKER, NEWEST, TAKE,
    CANCEL, RECORD, FENCE,
)  # fmt: skip


def _number(value: float) -> bytes:
    return encode_bulk(b"%d" % value)


_PACKED_EMPTY = encode_bulk(b"")


class Requests:
    """The requests for keys under one prefix. drift: the fraction by which clocks may differ."""

    def __init__(self, prefix: str, drift: float) -> None:
        self._prefix = prefix
        self._drift = drift
        self._fence = encode_text(fence_key(prefix))
        names = b"".join((*map(encode_text, guard_keys(prefix)), self._fence)).replace(b"%", b"%%")
        inbox = encode_text(inbox_channel(prefix, "")).replace(b"%", b"%%")
        self._acquire = b"*12\r\n" + GRANT.by_digest + b"$1\r\n4\r\n%b" + names + b"%b%b%b"
        self._acquire_with_marker = (
            b"*13\r\n" + GRANT.by_digest + b"$1\r\n5\r\n%b" + names + b"%b%b%b%b"
        )
        guards = b"".join(map(encode_text, guard_keys(prefix))).replace(b"%", b"%%")
        self._permit = b"*13\r\n" + PERMIT.by_digest + b"$1\r\n3\r\n%b" + guards + b"%b" * 5
        self._permit_with_marker = (
            b"*14\r\n" + PERMIT.by_digest + b"$1\r\n4\r\n%b" + guards + b"%b" * 6
        )
        release = b"*8\r\n" + RELEASE.by_digest + b"$1\r\n2\r\n%b%b%b"
        self._release = release + inbox + b"%b"
        self._release_quietly = release + _PACKED_EMPTY + b"%b"
        with_marker = b"*11\r\n" + RELEASE.by_digest + b"$1\r\n3\r\n%b%b%b%b"
        self._release_with_marker = with_marker + inbox + b"%b%b%b"
        self._release_with_marker_quietly = with_marker + _PACKED_EMPTY + b"%b%b%b"

    def acquire(self, lease: Lease, options: LockOptions, min_token: int | None) -> bytes:
        """Return the request for a key.

        min_token: the proposed fencing token; None without fencing.
        """
        key = lease.key
        value = lease.packed_value
        marker = options.marker
        token = _PACKED_EMPTY if min_token is None else _number(min_token)
        if marker is None or marker.asks_since is None:
            return self._acquire % (key.packed_name, value, key.ttl_ms, token)
        marker_key = encode_text(completion_key(self._prefix, marker.run))
        return self._acquire_with_marker % (key.packed_name, marker_key, value, key.ttl_ms, token)

    def permit(
        self,
        lease: Lease,
        marker: CompletionMarker | None,
        first_permit: int,
        only_permit: int | None,
    ) -> bytes:
        """Return the request for one permit of a lock, whichever a node has free.

        first_permit: the permit at which each node begins its search. only_permit: the permit that
        is asked for; None for any.
        """
        key = lease.key
        value = lease.packed_value
        packed_permit = _PACKED_EMPTY if only_permit is None else _number(only_permit)
        words = value, key.ttl_ms, key.packed_limit, _number(first_permit), packed_permit
        if marker is None or marker.asks_since is None:
            return self._permit % (key.base, *words)
        return self._permit_with_marker % (
            key.base,
            encode_text(completion_key(self._prefix, marker.run)),
            *words,
        )

    def take(
        self, start: Start, first_permit: int, only_permit: int | None, *, is_repeated: bool
    ) -> bytes:
        """Return the request for one permit of a rate.

        start: its token and its rate. first_permit, only_permit: as in `permit`.
        is_repeated: the same start was asked for before.
        """
        key = start.key
        packed_permit = _PACKED_EMPTY if only_permit is None else _number(only_permit)
        words = (
            start.packed_value,
            key.packed_rate,
            key.packed_kept,
            _number(first_permit),
            packed_permit,
        )
        keys = (key.base, key.packed_tokens, *map(encode_text, guard_keys(self._prefix)))
        tenure = encode_text(tenure_key(self._prefix))
        head = b"*16\r\n" + TAKE.by_digest + _number(5)
        return b"".join((head, *keys, tenure, *words, _number(is_repeated)))

    def cancel(self, start: Start) -> bytes:
        """Return the request that gives a start back. A node may have granted another permit."""
        key = start.key
        inbox = encode_text(inbox_channel(self._prefix, ""))
        permit = _number(key.permit)
        words = key.base, key.packed_tokens, key.waiting, start.packed_value, permit, inbox
        return b"".join((b"*10\r\n", CANCEL.by_digest, _number(3), *words, key.packed_kept))

    def record(self, start: Start, begun_for: float) -> bytes:
        """Return the request that stores a start. begun_for: seconds since its body began."""
        key = start.key
        begun_ms = _number(begun_for * 1000)
        words = start.packed_value, _number(key.permit), key.packed_kept, begun_ms
        head = b"*9\r\n" + RECORD.by_digest + _number(2)
        return b"".join((head, key.base, key.packed_tokens, *words))

    def renew(self, leases: Sequence[Lease], note: bytes = b"") -> bytes:
        """Return the request that renews keys.

        note: for a reclaim of a single key, its encoded `broken_key`. The script then sets the key
        if it is missing.
        """
        count = len(leases)
        names = count + 1 + bool(note)
        head = b"*%d\r\n%b%b" % (3 + names + 3 * count, RENEW.by_digest, _number(names))
        keys = [lease.key.packed_name for lease in leases]
        renewals = [lease.packed_renewal or _renewal(lease) for lease in leases]
        return b"".join((head, *keys, self._fence, note, *renewals))

    def release(
        self,
        lease: Lease,
        marker: CompletionMarker | None = None,
        ended_for: float | None = None,
        *,
        publish: bool = True,
    ) -> bytes:
        """Return the request that releases a key, and records the end of its run if it has ended.

        marker: of the run. On a node its value is the time from the end of the run until the marker
        expires, so its remaining ttl tells its age by the node's own clock. ended_for: seconds
        since the end; None if the run has not ended. publish: whether to notify the waiters.
        """
        key = lease.key
        value = lease.packed_value
        if marker is not None and ended_for is not None:
            marker_key = encode_text(completion_key(self._prefix, marker.run))
            kept_ms = math.ceil(marker.kept_for * 1000)
            packed_left = _number(max(1, kept_ms - int(ended_for * 1000)))
            words = (
                key.base,
                key.waiting,
                marker_key,
                value,
                key.packed_limit,
                _number(kept_ms),
                packed_left,
            )
            if not publish:
                return self._release_with_marker_quietly % words
            return self._release_with_marker % words
        if not publish:
            return self._release_quietly % (key.base, key.waiting, value, key.packed_limit)
        if not lease.packed_release:
            released = key.base, key.waiting, value, key.packed_limit
            lease.packed_release = self._release % released
        return lease.packed_release

    def register(
        self,
        waiter: str,
        name: str,
        since: float,
        limit: int | Rate = 0,
        turns_passed: int = 0,
    ) -> bytes:
        """Return the request that registers a process as a waiter.

        name: of `keys.name_of_lock` or `keys.name_of_rate`. since: seconds since 1970, when its
        first caller or message began to wait. limit: of the lock about whose permits it asks, or
        the rate; 0: it does not ask. turns_passed: how many waiters before it have had their turn.
        """
        keys = [waiting_key(self._prefix, name)]
        resource, _ = waiting_for(name)
        terms = str(limit), ""
        if isinstance(limit, Rate):
            terms = str(limit.starts), str(limit.kept_ms(self._drift))
            keys.append(rate_keys(self._prefix, resource)[0])
        elif limit:
            keys.append(lock_key(self._prefix, resource))
        words = f"{since:.3f}", f"{REGISTRATION_TTL * 1000:.0f}", str(turns_passed)
        return REGISTER.call(keys, waiter, *words, inbox_channel(self._prefix, ""), *terms)

    def update(self, waiter: str, resource: str, since: float) -> bytes:
        """Return the request that changes since when a registered process waits.

        A node that lacks it stays so: that costs one command, and makes no set that never expires.
        """
        return encode_command(
            "ZADD", waiting_key(self._prefix, resource), "XX", f"{since:.3f}", waiter
        )

    def unregister(self, waiter: str, resource: str) -> bytes:
        return encode_command("ZREM", waiting_key(self._prefix, resource), waiter)


def _renewal(lease: Lease) -> bytes:
    """Return the arguments of one key in a renewal. Kept, unless its fencing token may grow."""
    token = 0 if lease.fence is None else lease.fence.token
    words = lease.packed_value + lease.key.ttl_ms + (_number(token) if token else _PACKED_EMPTY)
    if lease.fence is None:
        lease.packed_renewal = words
    return words
