"""A Lua script of a server, and the commands that run it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from celery_redlock.lock.transport.encoding import encode_bulk, encode_text


class Script:
    """A Lua script as the bytes of the commands that run it. name: for people."""

    def __init__(self, name: str, source: bytes) -> None:
        digest = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self.name, self.source = name, source
        self._by_source = encode_bulk(b"EVAL") + encode_bulk(source)
        self.by_digest = encode_bulk(b"EVALSHA") + encode_bulk(digest)
        self.load = b"*3\r\n" + encode_bulk(b"SCRIPT") + encode_bulk(b"LOAD") + encode_bulk(source)

    def call(self, keys: Sequence[str], *args: str) -> bytes:
        """Return the request for these keys and arguments, by the script's digest."""
        return self.begin(keys, len(args)) + b"".join(map(encode_text, args))

    def begin(self, keys: Sequence[str], count: int) -> bytes:
        """Return the first part of a call for these keys; count: encoded arguments that follow."""
        words = [str(len(keys)), *keys]
        head = len(words) + count + 2
        return b"*%d\r\n%b%b" % (head, self.by_digest, b"".join(map(encode_text, words)))

    def with_source(self, request: bytes) -> bytes:
        """Return a request of this script with the source instead of the digest."""
        return request.replace(self.by_digest, self._by_source, 1)
