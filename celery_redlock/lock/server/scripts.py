"""The Lua scripts of the lock, and the requests that call them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from celery_redlock.lock.model.keys import fence_key, guard_keys, inbox_channel
from celery_redlock.lock.transport.encoding import encode_bulk, encode_text
from celery_redlock.lock.transport.script import Script


def load_script(name: str, *before: str) -> Script:
    """Return a script of this package. before: files that stand before it, with its functions."""
    folder = files("celery_redlock.lock.server").joinpath("lua")
    texts = [folder.joinpath(f"{file}.lua").read_bytes() for file in (*before, name)]
    return Script(name, b"".join(texts))


GRANT, RENEW, REGISTER = map(load_script, ("grant", "renew", "register"))
RELEASE, BREAK = (load_script(name, "announce") for name in ("release", "break"))
GUARD, TRUST = (load_script(name, "tenure") for name in ("guard", "trust"))
MARKER, FENCE = map(load_script, ("marker", "fence"))


class Requests:
    """The requests of all locks under one prefix. Common parts are encoded once.

    The connection appends its server's arguments (`Peer.suffix`) to each grant as it writes it.
    """

    def __init__(self, prefix: str) -> None:
        names = b"".join(map(encode_text, (*guard_keys(prefix), fence_key(prefix)))).replace(
            b"%", b"%%"
        )
        self._grant = b"*12\r\n" + GRANT.by_digest + b"$1\r\n4\r\n%b" + names + b"%b%b%b"
        self._asking = b"*13\r\n" + GRANT.by_digest + b"$1\r\n5\r\n%b" + names + b"%b%b%b%b"
        inbox = encode_text(inbox_channel(prefix, "")).replace(b"%", b"%%")
        release = b"*7\r\n" + RELEASE.by_digest + b"$1\r\n2\r\n%b%b%b"
        self._release, self._release_quietly = release + inbox, release + NOTHING
        last = b"*10\r\n" + RELEASE.by_digest + b"$1\r\n3\r\n%b%b%b%b"
        self._last, self._last_quietly = last + inbox + b"%b%b", last + NOTHING + b"%b%b"
        self._fence = encode_text(fence_key(prefix))

    def grant(self, key: bytes, value: bytes, ttl_ms: bytes, proposal: int | None = None) -> bytes:
        """Return the request for a lock. proposal: a fencing token. Other arguments are encoded."""
        least = NOTHING if proposal is None else encode_bulk(b"%d" % proposal)
        return self._grant % (key, value, ttl_ms, least)

    def ask(
        self, key: bytes, value: bytes, ttl_ms: bytes, proposal: int | None, mark: bytes
    ) -> bytes:
        """Return the request for a lock that also reads a completion marker. mark: its key."""
        least = NOTHING if proposal is None else encode_bulk(b"%d" % proposal)
        return self._asking % (key, mark, value, ttl_ms, least)

    def renewal(self, value: bytes, ttl_ms: bytes, token: int = 0) -> bytes:
        """Return the arguments of one lock in a renewal request.

        token: for fencing; 0 if the lock has none.
        """
        return value + ttl_ms + (encode_bulk(b"%d" % token) if token else NOTHING)

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

    def release(self, key: bytes, waiting: bytes, value: bytes, *, publish: bool = True) -> bytes:
        """Return the request that releases a lock.

        waiting: the key of the resource's waiters. publish: whether to name the first of them.
        """
        request = self._release if publish else self._release_quietly
        return request % (key, waiting, value)

    def release_done(
        self, key: bytes, waiting: bytes, value: bytes, marker: EndMarker, *, publish: bool = True
    ) -> bytes:
        """Return the request that writes a completion marker and releases the lock."""
        kept = encode_bulk(b"%d" % marker.kept_ms)
        left = encode_bulk(b"%d" % max(1, marker.kept_ms - marker.age_ms))
        request = self._last if publish else self._last_quietly
        return request % (key, waiting, marker.key, value, kept, left)

    def register(self, waiting: bytes, keys: Sequence[bytes], arguments: Sequence[bytes]) -> bytes:
        """Return the request that registers a waiter.

        keys: of the lock, empty if nobody asks whether one is free. arguments: encoded, as of
        lua/register.lua.
        """
        names = len(keys) + 1
        head = b"*%d\r\n%b%b%b" % (
            3 + names + len(arguments),
            REGISTER.by_digest,
            encode_bulk(b"%d" % names),
            waiting,
        )
        return b"".join([head, *keys, *arguments])


class EndMarker(NamedTuple):
    """What records that a run has ended. key: encoded.

    kept_ms: milliseconds from the end of the run until the marker expires. On a node this is the
    marker's value, and its remaining ttl tells how old it is, by the node's own clock. age_ms:
    milliseconds since the end.
    """

    key: bytes
    kept_ms: int
    age_ms: int


NOTHING = encode_bulk(b"")
