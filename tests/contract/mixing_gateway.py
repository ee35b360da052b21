"""A gateway before a PostgreSQL node that hands on replies as a pooler does which mixes them up.

It speaks enough of the protocol to tell one reply from the next. It keeps each whole reply, so that
a test can have one handed on again.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

from tests.postgres import Server

HEAD = struct.Struct("!cI")  # of a message: its kind, and its length without the kind
READY = b"Z"  # ends a reply: ReadyForQuery
SSL_REQUEST = struct.pack("!II", 8, 80877103)  # what libpq may ask first
CANCEL = struct.pack("!II", 16, 80877102)  # how a cancel request begins
NO_SSL = b"N"


class MixingGateway:
    """Listens on a port of its own for one node, or a pooler; a test has it `closing`.

    cancels: how many cancel requests have come.
    replies: every reply that was handed on, of all clients, in order. The first of each connection
    are those to its handshake.
    """

    def __init__(self, node: Server) -> None:
        self._node = node
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.replies: list[bytes] = []
        self._mutex = threading.Lock()
        self._before: list[bytes] = []  # to hand on before the next reply
        self._withheld: list[bytes] | None = None
        self.cancels = 0
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres?sslmode=disable"

    def insert(self, reply: bytes) -> None:
        """Hand on a reply before the next one, as one that an earlier client has left behind."""
        with self._mutex:
            self._before.append(reply)

    @contextlib.contextmanager
    def withholding(self) -> Iterator[list[bytes]]:
        """Hand on no reply meanwhile; gives those that came."""
        kept: list[bytes] = []
        with self._mutex:
            self._withheld = kept
        try:
            yield kept
        finally:
            with self._mutex:
                self._withheld = None

    def close(self) -> None:
        """End all connections, and listen no more."""
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                node = socket.create_connection(("127.0.0.1", self._node.port))
                self._ends += [client, node]
                threading.Thread(target=self._pass_calls, args=(client, node), daemon=True).start()
                threading.Thread(
                    target=self._pass_replies, args=(node, client), daemon=True
                ).start()

    def _pass_calls(self, client: socket.socket, node: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if data.startswith(CANCEL):
                    self.cancels += 1
                node.sendall(data)
        _end(node)

    def _pass_replies(self, node: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            buffer = b""
            while data := node.recv(65536):
                buffer += data
                while reply := _whole_reply(buffer):
                    buffer = buffer[len(reply) :]
                    self._hand_on(reply, client)
        _end(client)

    def _hand_on(self, reply: bytes, client: socket.socket) -> None:
        with self._mutex:
            if self._withheld is not None:
                self._withheld.append(reply)
                return
            before, self._before = b"".join(self._before), []
            self.replies.append(reply)
        client.sendall(before + reply)


def _whole_reply(buffer: bytes) -> bytes:
    """Return what a buffer begins with up to the end of the first reply; b"" if it is not whole."""
    at = 0
    while len(buffer) >= at + HEAD.size:
        kind, length = HEAD.unpack_from(buffer, at)
        at += 1 + length
        if kind == READY and len(buffer) >= at:
            return buffer[:at]
    return b""


def _end(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)
