"""One connection: commands are written without waiting, and replies are read in their order.

And one that hears messages, which come unasked: `PubSub`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import hiredis
import redis
from redis.connection import DefaultParser

from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.platform.threads import keeping_gil
from celery_redlock.lock.transport.command import INCOMPLETE, Entry, ReplyReader, encode_command

POISONED = "an exception interrupted a command"
CLOSED_BY_SERVER = "connection closed by the server"
# said by the server itself: no command in flight was executed
CLOSED_BY_TIMEOUT = "closed by the server's idle_session_timeout"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: unsent bytes go with the connection
MAX_READ_BYTES = 65536  # bytes of a read
MAX_DIALOGUE = 60.0  # seconds for all replies on a new connection: a scan needs many
# of a reply that an operator asks for
MAX_LISTED_ITEMS = 1_000_000
MAX_LISTED_BYTES = 1 << 26
CLOCK = SystemClock()


class GarbledError(OSError):
    """The bytes of a server fit no command."""


@dataclass
class Peer:
    """The server at the other end of a connection, as found by the handshake.

    run_id: "" if the server does not report it. suffix: bytes that this connection appends to every
    command flagged `suffixed`.
    """

    run_id: str = ""
    suffix: bytes = b""


class Connection(Protocol):
    """One live connection to a server, of the kind that its address makes.

    poisoned: an exception interrupted a write or a read. discarded: the reason if no further reply
    of this connection counts. opened_at, used_at: monotonic seconds: connected, last written to.
    interrupted_reply: the last reply whose handler raised. write_buffer: not empty if bytes have
    yet to leave. is_tls: reading and writing share one state, which two threads must not use at
    once.
    """

    peer: Any  # of the class that `Gate.handshake` returns
    run_id: str
    is_tls: bool
    poisoned: bool
    discarded: str
    opened_at: float
    used_at: float
    in_flight: deque[Entry]
    replies: deque[tuple[Entry, Any]]
    interrupted_reply: tuple[Entry, Any] | None
    write_buffer: bytes
    socket: Any

    def write(self, entries: Sequence[Entry], keeps_gil: bool = True) -> None: ...

    def read(self, keeps_gil: bool = True) -> None: ...

    def close(self, *, reset: bool) -> None: ...

    def canceller(self) -> Callable[[], None] | None:
        """Return what ends calls that would outlive a close, and closes: it may wait. Else None."""


class RedisConnection:
    """One live connection, and the commands in flight, in order.

    Written in the turn of its node, read by one thread at a time. An exception during a write or a
    read poisons the connection: bytes may be missing, and replies must not shift. A command is in
    `in_flight` or in `replies`, or for a moment in both, until its handler has the reply.
    """

    __slots__ = ("_add", "_dialled", "_gets", "_reader", "_sockets", "discarded", "in_flight",
                 "interrupted_reply", "is_tls", "opened_at", "peer", "poisoned", "replies",
                 "run_id", "socket", "suffix", "used_at", "write_buffer")  # fmt: skip

    def __init__(self, dialled: Any, peer: Peer) -> None:
        self._dialled = dialled
        self.peer: Any = peer  # of the class that `Gate.handshake` returns
        self.run_id = peer.run_id
        self.suffix = peer.suffix
        self.poisoned = False  # an exception interrupted a write or a read
        self.discarded = ""  # the reason if no further reply of this connection counts
        self.opened_at = self.used_at = 0.0  # monotonic seconds: connected, last written to
        self.socket = dialled._sock
        self.socket.setblocking(False)
        # reading and writing share one TLS state, which two threads must not use at once
        self.is_tls = hasattr(self.socket, "pending")
        unyielding = self.socket
        if self.is_tls:
            unyielding = UnyieldingTlsSocket(self.socket)
        elif isinstance(self.socket, socket.socket):  # not a simulated one
            unyielding = UnyieldingSocket(self.socket)
        self._sockets = self.socket, unyielding  # by `keeps_gil`
        self._reader = ReplyReader()
        self.in_flight: deque[Entry] = deque()
        self.replies: deque[tuple[Entry, Any]] = deque()
        # bound once: each reply would look them up
        self._gets = self._reader.gets
        self._add = self.replies.append
        # the last reply whose handler raised
        self.interrupted_reply: tuple[Entry, Any] | None = None
        self.write_buffer = b""

    def write(self, entries: Sequence[Entry], keeps_gil: bool = True) -> None:
        """Write commands. Bytes that the socket does not accept stay in `write_buffer`.

        keeps_gil: as in `Node.send`. Raises OSError; the commands are in flight then, too.
        """
        try:
            self.in_flight.extend(entries)
            if self.poisoned:
                refuse(POISONED)
            suffix = self.suffix
            if len(entries) == 1:
                command, _, data = entries[0]
                if command.suffixed:
                    data += suffix
            else:
                parts = [
                    text + suffix if command.suffixed else text for command, _, text in entries
                ]
                data = b"".join(parts)
            remainder = self.write_buffer
            if remainder:
                data = remainder + data
            try:
                sent_bytes = self._sockets[keeps_gil].send(data)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                sent_bytes = 0
            if remainder or sent_bytes < len(data):
                self.write_buffer = data[sent_bytes:]
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
            sock = self._sockets[keeps_gil]
            received = (
                receive(sock)
                if self.is_tls
                else sock.recv(MAX_READ_BYTES) or refuse(CLOSED_BY_SERVER)
            )
            self._reader.feed(received)
            self._move_replies()  # without a loop here: see `JobQueue.go_on`
        except IndexError:
            raise GarbledError("an unexpected answer") from None
        except BlockingIOError:
            return  # nothing has come
        except OSError:
            raise
        except hiredis.ProtocolError as error:
            raise GarbledError(f"not a Redis server: {error}") from error
        except BaseException:
            self.poisoned = True
            raise

    def _move_replies(self) -> None:
        gets = self._gets
        in_flight = self.in_flight
        add = self._add
        while (reply := gets()) is not INCOMPLETE:
            add((in_flight[0], reply))
            in_flight.popleft()  # last: if an exception strikes before, no command is lost

    def close(self, *, reset: bool) -> None:
        """Close the connection; reset: discard bytes that have not left this machine."""
        if reset:
            with contextlib.suppress(OSError):  # a unix socket, or a closed one
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._dialled.disconnect()
        self.socket.close()  # again, if an exception interrupted the line above

    def canceller(self) -> None: ...


class DialledParser(DefaultParser):  # type: ignore[misc, valid-type]
    """Reads the replies to a handshake and to operators, for redis-py: each within its timeout.

    redis-py's own parser waits for as long as bytes come, and reserves memory for any list.
    """

    def on_connect(self, connection: Any, **_: Any) -> None:
        self._socket = connection._sock
        self._timeout = connection.socket_timeout
        self._reader = ReplyReader(MAX_LISTED_ITEMS, MAX_LISTED_BYTES)
        self._end = CLOCK.now() + MAX_DIALOGUE

    def read_response(self, *_: Any, **__: Any) -> Any:
        """Return the next reply, or the error that it is. Raises redis.RedisError."""
        until = min(self._end, CLOCK.now() + self._timeout)
        try:
            while (reply := self._reader.gets()) is INCOMPLETE:
                self._reader.feed(self._received(until))
            self._socket.settimeout(self._timeout)
        except TimeoutError:
            raise redis.TimeoutError("Timeout reading from socket") from None
        except ConnectionError as error:
            raise redis.ConnectionError(f"{error} instead of a reply") from None
        except OSError as error:
            raise redis.ConnectionError(str(error)) from None
        except hiredis.ProtocolError as error:
            raise redis.InvalidResponse(str(error)) from None
        if type(reply) is not hiredis.ReplyError:
            return reply
        refusal = self.parse_error(str(reply))
        refusal.args = (str(reply).removeprefix("ERR "),)  # redis-py takes every code out
        if isinstance(refusal, redis.ConnectionError):
            raise refusal
        return refusal

    def _received(self, until: float) -> Any:
        remaining = until - CLOCK.now()
        if remaining <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining)
        if not (data := self._socket.recv(MAX_READ_BYTES)):
            raise ConnectionError(CLOSED_BY_SERVER)
        return data


# A new buffer for each read would be 64 KiB of zeros. A reader takes one out of the list: no other
# thread, and no finalizer or signal handler between two of its lines, reads into the same one.
_free_buffers: list[ctypes.Array[ctypes.c_char]] = []
_SEND_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
_send = keeping_gil.send
_recv = keeping_gil.recv
for _call in (_send, _recv):
    _call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


class UnyieldingSocket:
    """`send` and `recv` of a socket that keep the interpreter's lock (GIL).

    Python's own calls release the GIL and then wait for it. If C code in another thread keeps the
    GIL for a second, each call takes a second. These calls take a microsecond longer instead. Both
    raise OSError; BlockingIOError if no byte goes or has come. sock: non-blocking, so that a call
    only copies bytes.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._descriptor = sock.fileno  # asked each time: a closed socket has none

    def send(self, data: bytes) -> int:
        count: int = _send(self._descriptor(), data, len(data), _SEND_FLAGS)
        return count if count >= 0 else _checked(count)

    def recv(self, size: int) -> bytes:
        return self._received(size, socket.MSG_DONTWAIT)

    def _received(self, size: int, flags: int) -> bytes:
        try:
            buffer = _free_buffers.pop()
        except IndexError:
            buffer = ctypes.create_string_buffer(MAX_READ_BYTES)
        try:
            length = min(size, MAX_READ_BYTES)
            count = _checked(_recv(self._descriptor(), buffer, length, flags))
            data: bytes = buffer[:count]  # type: ignore[assignment]
            return data
        finally:
            _free_buffers.append(buffer)


class UnyieldingTlsSocket(UnyieldingSocket):
    """The same for TLS. It releases the GIL once for a send, and once for received data."""

    _socket: ssl.SSLSocket

    def send(self, data: bytes) -> int:
        return self._socket.send(data)

    def recv(self, size: int) -> bytes:
        if not self._socket.pending():
            self._received(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        return self._socket.recv(size)

    def pending(self) -> int:
        return self._socket.pending()


def _checked(count: int) -> int:
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count


def receive(sock: Any) -> bytes:
    """Return what a non-blocking socket has received, perhaps b""; raise OSError at its end."""
    data: bytes | None = None
    try:
        data = sock.recv(MAX_READ_BYTES)
        if data and hasattr(sock, "pending"):  # TLS: decrypted already
            while sock.pending():
                data += sock.recv(MAX_READ_BYTES)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return data or b""
    return data or refuse(CLOSED_BY_SERVER)


class PubSub(Protocol):
    """A connection that hears channels, for a `Subscriber`. Only its thread uses it."""

    def fileno(self) -> int: ...

    def send(self, *words: str) -> None:
        """Send SUBSCRIBE or UNSUBSCRIBE with a channel, or PING with "". Raises OSError."""

    def receive(self) -> tuple[bool, list[Any]]:
        """Return whether the node spoke, and what is complete: [kind, channel, ...] of Redis.

        Never waits. Raises OSError at the end of the connection.
        """

    def disconnect(self) -> None: ...


class RedisPubSub:
    """Hears channels of a Redis or Valkey node. timeout: s for a node that does not read."""

    def __init__(self, dialled: Any, timeout: float) -> None:
        self._dialled = dialled
        self._timeout = timeout
        self._reader = ReplyReader()

    def fileno(self) -> int:
        return int(self._dialled._sock.fileno())

    def send(self, *words: str) -> None:
        self._dialled._sock.settimeout(self._timeout)
        self._dialled._sock.sendall(encode_command(*words))

    def receive(self) -> tuple[bool, list[Any]]:
        self._dialled._sock.setblocking(False)
        data = receive(self._dialled._sock)
        replies = []
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not INCOMPLETE:
            replies.append(reply)
        return bool(data), replies

    def disconnect(self) -> None:
        self._dialled.disconnect()


def refuse(cause: str) -> NoReturn:
    raise OSError(cause)


# Seconds for each step of a connect, and in all for an acquire that has to connect. A first acquire
# takes four round trips, and up to twelve with TLS, a password, a database and Sentinels.
CONNECT_BUDGET = 2.0


def connect_budget(timeout: float) -> float:
    return max(CONNECT_BUDGET, timeout)
