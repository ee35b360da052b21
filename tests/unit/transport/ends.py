"""The two ends of a socket pair: what a node dials, and the server that a test plays."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field
from typing import Any

import hiredis

from celery_redlock import NodeError
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import Command
from celery_redlock.lock.transport.connection import TransportOptions
from celery_redlock.lock.transport.encoding import encode_command
from celery_redlock.lock.transport.node_set import NodeSet

PATIENCE = 20.0  # seconds in which even a busy machine brings a byte from one end to the other
Words = list[bytes]


class Dialled:
    """A connected socket, as redis-py hands it over."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def disconnect(self) -> None:
        """Close it."""
        self._sock.close()


class ServerEnd:
    """The server's end of one connection."""

    def __init__(self, sock: Any) -> None:
        self.socket = sock
        self.socket.settimeout(PATIENCE)
        self._commands = hiredis.Reader()

    def say(self, data: bytes) -> None:
        """Send bytes of RESP, or of something else."""
        self.socket.sendall(data)

    def read_command(self) -> Words:
        """Return the words of the next command; fails if none comes."""
        while (command := self._commands.gets()) is False:
            data = self.socket.recv(65536)
            assert data, "the client has closed the connection"
            self._commands.feed(data)
        words: Words = command
        return words

    def wait_closed(self) -> None:
        """Return once the client has closed its end; else TimeoutError."""
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(65536):
                pass


def ends() -> tuple[Dialled, ServerEnd]:
    """Return the two ends of a new connection."""
    client, server = socket.socketpair()
    return Dialled(client), ServerEnd(server)


@dataclass(frozen=True)
class PairAddress(Address):
    """An address whose connections are socket pairs. servers: the other end of each, in order."""

    pool: Any = None
    servers: list[ServerEnd] = field(default_factory=list)

    def dial(self, timeout: float, sentinel_timeout: float | None = None) -> Dialled:
        """Return a new connection."""
        dialled, server = ends()
        self.servers.append(server)
        return dialled

    def cause_of(self, error: BaseException, timeout: float) -> str:
        """Return the text of an error."""
        return str(error)


class Kept:
    """A handler that keeps what it is told."""

    wanted = True

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any]] = []
        self.errors: list[tuple[int, str]] = []

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Keep a reply."""
        self.replies.append((node, reply))

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Keep the cause."""
        self.errors.append((node, error.cause))


def echo(word: str, handler: Any, **how: Any) -> Command:
    """Return a command that names a word."""
    return Command(encode_command("ECHO", word), handler, **how)


class Nodes(NodeSet[Any]):
    """Nodes over socket pairs, connected already."""

    def __init__(self, count: int, options: TransportOptions | None = None) -> None:
        self.changes: list[tuple[int, str]] = []
        self.refused: list[str] = []  # error replies
        addresses = [PairAddress(f"node{index}", f"node{index}") for index in range(count)]
        self.addresses = addresses
        super().__init__(
            addresses,
            options or TransportOptions(PATIENCE),
            Platform(SystemClock()),
            lambda node, error: self.changes.append((node.index, error.cause if error else "")),
        )
        for node in self.nodes:
            node.adopt(node.address.dial(PATIENCE), self.handshake(None, node.index))

    def on_error_reply(self, node: Any, text: str) -> bool:
        """Keep what a server refuses."""
        self.refused.append(text)
        return super().on_error_reply(node, text)

    def server(self, index: int = 0) -> ServerEnd:
        """Return the server's end of a node's last connection."""
        return self.addresses[index].servers[-1]

    def send(self, *commands: Command, node: int = 0) -> None:
        """Write commands to one node, in one batch."""
        now = self.clock.now()
        self.nodes[node].send([(command, now, command.request) for command in commands])
