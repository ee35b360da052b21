"""One connection that hears messages, for `lock/transport/subscriber.py`.

A subscription counts once a message to itself has come, and only a message that has come answers a
PING. Behind a pooler that shows nothing: the address says whether one stands between.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import hiredis

from celery_redlock.lock.postgres.pipeline import Pipeline
from celery_redlock.lock.transport.command import encode_bulk, encode_text, encoded

ECHO = b"echo"  # the payload of a message to ourselves; of a new subscription it is empty


class PostgresPubSub:
    """Hears channels: see `PubSub`. Its messages come as those of Redis.

    hears: whether messages can come. If not, it makes no subscription, and stays connected.
    """

    def __init__(self, pipeline: Pipeline, *, hears: bool = True) -> None:
        self._pipeline = pipeline
        self._hears = hears
        self._names: dict[bytes, bytes] = {}  # channels by their name in PostgreSQL
        self._left: list[Any] = []  # the replies to UNSUBSCRIBE

    def fileno(self) -> int:
        return self._pipeline.fileno()

    def send(self, *words: str) -> None:
        """Send SUBSCRIBE, UNSUBSCRIBE or PING. Raises OSError."""
        verb = words[0]
        channel = encoded(words[1])
        if not self._hears:
            verb = "PING"
        elif verb == "PING":  # to itself, on a channel that it hears anyway
            verb = "ECHO"
            channel = next(iter(self._names.values()), b"")
        elif verb == "SUBSCRIBE":
            self._names[_name_of(channel)] = channel
        elif verb == "UNSUBSCRIBE":  # first: an ECHO on what is not heard would not come back
            self._names.pop(_name_of(channel), None)
            self._left.append([b"unsubscribe", channel, 0])
        self._pipeline.send(b"*2\r\n" + encode_text(verb) + encode_bulk(channel))
        self._pipeline.flush()

    def receive(self) -> tuple[bool, list[Any]]:
        """Return whether a message has come, and the replies as of Redis. Raises OSError."""
        pipeline = self._pipeline
        has_spoken = False
        messages = self._left
        self._left = []
        pipeline.flush()
        pipeline.receive()
        while pipeline.replies:
            reply = pipeline.replies.popleft()
            if isinstance(reply, hiredis.ReplyError):
                raise OSError(str(reply))
            has_spoken = not self._hears
        while (notice := pipeline.connection.notifies()) is not None:
            channel = self._names.get(notice.relname)
            has_spoken = True
            if channel is not None and not notice.extra:
                messages.append([b"subscribe", channel, 1])
            elif channel is not None and notice.extra != ECHO:
                messages.append([b"message", channel, base64.b64decode(notice.extra)])
        return has_spoken, messages

    def disconnect(self) -> None:
        self._pipeline.close()


def _name_of(channel: bytes) -> bytes:
    """Return the name of a channel in PostgreSQL, as `redlock.channel` makes it."""
    return b"redlock_" + hashlib.sha256(channel).hexdigest()[:48].encode()
