"""A TCP server before a node that answers some commands with nonsense, on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import hiredis

from celery_redlock.lock.transport.command import Script, encode_bulk
from celery_redlock.testing import EmbeddedNode

DRIPS = b"+"  # a reply of which the end never comes
PACE = 0.02  # s between two bytes of it


class Liar:
    """Hands commands on to a node, and what the node says back, but for some that it answers.

    A test has it `closing`.

    answers: its own reply, as bytes of RESP, by the digest of a script or the name of a command.
    `DRIPS` goes on until they are cleared.
    """

    def __init__(self, node: EmbeddedNode) -> None:
        self._node = node
        self.answers: dict[bytes, bytes] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = [self._listener]
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """The URL of the node by way of this server."""
        return f"redis://127.0.0.1:{self.port}/0"

    def lie(self, about: Script | bytes, reply: bytes) -> None:
        """Answer calls of a script, or a command, like this from now on."""
        self.answers[_name_of(about)] = reply

    def close(self) -> None:
        """End every connection and thread."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                node = socket.create_connection(("127.0.0.1", self._node.port))
                self._ends += [client, node]
                thread = threading.Thread(target=self._serve, args=(client, node))
                thread.start()
                self._threads.append(thread)

    def _serve(self, client: socket.socket, node: socket.socket) -> None:
        commands = hiredis.Reader()
        with contextlib.suppress(OSError), client, node:
            while data := client.recv(65536):
                commands.feed(data)
                while (words := commands.gets()) is not False:
                    said = self.answers.get(words[1 if words[0].startswith(b"EVAL") else 0])
                    client.sendall(said or _answer(node, words))
                    while said == DRIPS and self.answers:
                        client.sendall(b"x")
                        time.sleep(PACE)


def _name_of(about: Script | bytes) -> bytes:
    return about if isinstance(about, bytes) else about.by_digest.splitlines()[3]


def _answer(node: socket.socket, words: list[bytes]) -> bytes:
    node.sendall(b"*%d\r\n" % len(words) + b"".join(map(encode_bulk, words)))
    reader, said = hiredis.Reader(), b""
    while reader.gets() is False:
        data = node.recv(65536)
        if not data:
            raise OSError("the node is gone")
        said += data
        reader.feed(data)
    return said
