"""The Lua scripts of the lock, and the requests that call them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from celery_redlock.lock.model.keys import fence_key, guard_keys
from celery_redlock.lock.transport.encoding import encode_bulk, encode_text
from celery_redlock.lock.transport.script import Script


def load_script(name: str) -> Script:
    """Return a script of this package."""
    folder = files("celery_redlock.lock.server").joinpath("lua")
    return Script(name, folder.joinpath(f"{name}.lua").read_bytes())


GRANT, RENEW, RELEASE = map(load_script, ("grant", "renew", "release"))
GUARD, TRUST, BREAK = map(load_script, ("guard", "trust", "break"))


class Requests:
    """The requests of all locks under one prefix. Common parts are encoded once.

    The connection appends its server's arguments (`Peer.suffix`) to each grant as it writes it.
    """

    def __init__(self, prefix: str) -> None:
        names = b"".join(map(encode_text, (*guard_keys(prefix), fence_key(prefix)))).replace(
            b"%", b"%%"
        )
        self._grant = b"*13\r\n" + GRANT.by_digest + b"$1\r\n4\r\n%b" + names + b"%b%b%b"
        self._asking = b"*14\r\n" + GRANT.by_digest + b"$1\r\n5\r\n%b" + names + b"%b%b%b%b"
        self._release = b"*6\r\n" + RELEASE.by_digest + b"$1\r\n1\r\n%b%b%b"
        self._last = b"*9\r\n" + RELEASE.by_digest + b"$1\r\n2\r\n%b%b%b%b%b%b"
        self._fence = encode_text(fence_key(prefix))

    def grant(self, key: bytes, value: bytes, ttl_ms: bytes, proposal: int | None = None) -> bytes:
        """Return the request for a lock. proposal: a fencing token. Other arguments are encoded."""
        least = _NOTHING if proposal is None else encode_bulk(b"%d" % proposal)
        return self._grant % (key, value, ttl_ms, least)

    def ask(
        self, key: bytes, value: bytes, ttl_ms: bytes, proposal: int | None, mark: bytes
    ) -> bytes:
        """Return the request for a lock that also reads a completion marker. mark: its key."""
        least = _NOTHING if proposal is None else encode_bulk(b"%d" % proposal)
        return self._asking % (key, mark, value, ttl_ms, least)

    def renewal(self, value: bytes, ttl_ms: bytes, token: int = 0) -> bytes:
        """Return the arguments of one lock in a renewal request.

        token: for fencing; 0 if the lock has none.
        """
        return value + ttl_ms + (encode_bulk(b"%d" % token) if token else _NOTHING)

    def renew(self, keys: Sequence[bytes], renewals: Sequence[bytes], note: bytes = b"") -> bytes:
        """Return the request that renews these locks.

        note: for a reclaim of a single lock, its encoded `broken_key`. The script then sets the
        lock's key if it is missing.
        """
        names = len(keys) + 1 + bool(note)
        head = b"*%d\r\n%b%b" % (
            3 + names + 3 * len(keys),
            RENEW.by_digest,
            encode_bulk(b"%d" % names),
        )
        return b"".join([head, *keys, self._fence, note, *renewals])

    def release(self, key: bytes, value: bytes, channel: bytes) -> bytes:
        """Return the request that releases a lock. channel: encoded, or `SAY_NOTHING`."""
        return self._release % (key, value, channel)

    def release_done(
        self, key: bytes, value: bytes, channel: bytes, mark: bytes, at_ms: int, kept_ms: int
    ) -> bytes:
        """Return the request that writes a completion marker and releases the lock.

        mark: the marker's key. at_ms: milliseconds since 1970, the end of the run. kept_ms:
        milliseconds until the marker expires.
        """
        times = encode_bulk(b"%d" % at_ms), encode_bulk(b"%d" % kept_ms)
        return self._last % (key, mark, value, channel, *times)


_NOTHING = encode_bulk(b"")
SAY_NOTHING = _NOTHING  # instead of a channel: publish nothing
