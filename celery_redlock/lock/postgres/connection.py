"""One connection: calls are written without waiting, and replies are read in their order.

The same surface as `RedisConnection`, for `lock/transport/node.py` and `nodes.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.lock.postgres.pipeline import Pipeline
from celery_redlock.lock.transport.command import Entry
from celery_redlock.lock.transport.connection import POISONED, Peer, refuse


class PostgresConnection:
    """One live connection, and the commands in flight, in order: see `RedisConnection`."""

    is_tls = True  # as with TLS, reading and writing share one state: libpq's

    def __init__(self, pipeline: Pipeline, peer: Peer) -> None:
        self._pipeline = pipeline
        self.peer = peer
        self.run_id = peer.run_id
        self.poisoned = self._is_overdue = False
        self.discarded = ""
        self.opened_at = self.used_at = 0.0
        self.socket = pipeline  # for a poll
        self.in_flight: deque[Entry] = deque()
        self.replies: deque[tuple[Entry, Any]] = deque()
        self.interrupted_reply: tuple[Entry, Any] | None = None
        self.write_buffer = b""  # not empty if libpq has bytes that the socket does not take yet

    def write(self, entries: Sequence[Entry], keeps_gil: bool = True) -> None:
        """Write commands. Raises OSError; the commands are in flight then, too."""
        try:
            self.in_flight.extend(entries)
            if self.poisoned:
                refuse(POISONED)
            for command, _, text in entries:
                self._pipeline.send(text + self.peer.suffix if command.suffixed else text)
            self.write_buffer = b"" if self._pipeline.flush() else b"more"
        except OSError:
            raise
        except BaseException:
            self.poisoned = True
            raise

    def read(self, keeps_gil: bool = True) -> None:
        """Read, and move complete replies to `replies`. Raises OSError at the connection's end."""
        if self.poisoned:
            refuse(POISONED)
        try:
            self._pipeline.receive()
            self._move_replies()  # without a loop here: see `JobQueue.go_on`
        except OSError:
            raise
        except BaseException:
            self.poisoned = True
            raise

    def _move_replies(self) -> None:
        while self._pipeline.replies:
            self.replies.append((self.in_flight[0], self._pipeline.replies[0]))
            self.in_flight.popleft()
            self._pipeline.replies.popleft()

    def close(self, *, reset: bool) -> None:
        """Close the connection; reset: at once. What was written may be executed then, too."""
        if self._is_overdue:
            return  # its canceller closes it
        if reset:
            self._pipeline.close()
        else:
            self._pipeline.finish()

    def canceller(self) -> Callable[[], None]:
        """Return what ends the overdue calls and closes. Reads no more: two readers would hang."""
        self.poisoned = self._is_overdue = True
        return self._pipeline.cancel
