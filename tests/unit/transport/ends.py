"""The two ends of a socket pair: what a node dials, and the server that a test plays."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hiredis

from celery_redlock import NodeError
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.lock.transport.address import RedisAddress
from celery_redlock.lock.transport.command import Command, encode_command
from celery_redlock.lock.transport.connection import Peer
from celery_redlock.lock.transport.node import Gate, Node
from celery_redlock.lock.transport.nodes import Nodes

PATIENCE = 20.0  # seconds in which even a busy machine brings a byte from one end to the other
Words = list[bytes]


class Dialled:
    """A connected socket, as redis-py hands it over."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def disconnect(self) -> None:
        self._sock.close()


class ServerEnd:
    """The server's end of one connection."""

    def __init__(self, sock: Any) -> None:
        self.socket = sock
        self.socket.settimeout(PATIENCE)
        self._commands = hiredis.Reader()

    def say(self, data: bytes) -> None:
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
    client, server = socket.socketpair()
    return Dialled(client), ServerEnd(server)


@dataclass(frozen=True)
class PairAddress(RedisAddress):
    """An address whose connections are socket pairs. servers: the other end of each, in order."""

    pool: Any = None
    servers: list[ServerEnd] = field(default_factory=list)

    def dial(self, timeout: float, node_timeout: float | None = None) -> Dialled:
        dialled, server = ends()
        self.servers.append(server)
        return dialled

    def cause_of(self, error: BaseException, timeout: float) -> str:
        return str(error)


class Kept:
    """A handler that keeps what it is told."""

    wanted = True

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any]] = []
        self.errors: list[tuple[int, str]] = []

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        self.replies.append((node, reply))

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        self.errors.append((node, error.cause))


def echo(word: str, handler: Any, **how: Any) -> Command:
    return Command(encode_command("ECHO", word), handler, **how)


class Pairs(Nodes):
    """Nodes over socket pairs, connected already. Any connection is used unless `refuses` says no.

    refuses: called with the index of a node that a connection is made to.
    """

    def __init__(
        self, count: int, timeout: float = PATIENCE, *, longest_idle: float = math.inf
    ) -> None:
        self.changes: list[tuple[int, str]] = []
        self.refused: list[str] = []  # error replies
        self.refuses: Callable[[int], bool] = lambda node: False
        addresses = [PairAddress(f"node{index}", f"node{index}") for index in range(count)]
        self.addresses = addresses
        gate = Gate(
            lambda connection, node: Peer(),
            self._admit_any,
            self._keep_refused,
            self._keep_down,
            lambda node: self.changes.append((node.index, "")),
        )
        platform = Platform(SystemClock())
        super().__init__(
            addresses, timeout, platform, gate, quorum=count, longest_idle=longest_idle
        )
        for node in self.all:
            node.adopt(node.address.dial(PATIENCE), Peer())

    def _admit_any(self, node: int, peer: Any, use: Callable[[], None]) -> None:
        if self.refuses(node):
            raise NodeError(f"node{node}", "not this one")
        use()

    def _keep_refused(self, node: Node, text: str) -> bool:
        self.refused.append(text)
        return False

    def _keep_down(self, node: Node, error: NodeError, was_down: bool) -> None:
        if not was_down:
            self.changes.append((node.index, error.cause))

    def server(self, index: int = 0) -> ServerEnd:
        return self.addresses[index].servers[-1]

    def send(self, *commands: Command, node: int = 0) -> None:
        now = self.clock.now()
        self.all[node].send([(command, now, command.request) for command in commands])
