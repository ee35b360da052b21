"""Connections: in order each way, of any delay, breaking, with commands that run after their end.

`Link` is what the shipped code takes for a redis-py connection, and for its socket.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hiredis
import redis

from tests.simulation.world import STALE

if TYPE_CHECKING:
    from tests.simulation.clients import Process
    from tests.simulation.nodes import Node


@dataclass
class Path:
    """The way between a process and a node, for all connections. Times in s.

    base: of one way, as a rule. slow: how often one takes up to `worst` instead.
    """

    base: float
    slow: float
    worst: float
    random: random.Random
    jams_until: float = 0.0  # real s: nothing comes through before
    closed: bool = False  # nothing comes through before somebody lets it
    refuses: float = 0.0  # how often no connection comes about

    def delay(self, now: float) -> float:
        """Draw how long something takes that is sent now."""
        if self.closed:
            return math.inf
        draw = self.random.random
        delay = self.base * (0.5 + draw())
        if self.slow and draw() < self.slow:
            delay += self.worst * draw() ** 2
        return delay + max(0.0, self.jams_until - now)


class Chunk:
    """Commands that travel together. at: real s of their arrival; lost: they never do.

    records: of the claims they are about. written: s of the client's clock at which they were
    handed to the socket.
    """

    __slots__ = ("at", "commands", "lost", "records", "written")

    def __init__(
        self, commands: list[list[bytes]], records: list[list[Any]], written: float, at: float
    ) -> None:
        self.commands, self.records = commands, records
        self.written, self.at, self.lost = written, at, False


class Link:
    """One connection from a process to one life of a node."""

    def __init__(self, process: Process, node: Node, path: Path) -> None:
        self.process, self.node, self.path = process, node, path
        self.world = process.world
        self.fd = process.open(self)
        self.readable = False
        self.broken = False  # at the client's end: reading and writing fails
        self.closed = False  # by the client
        self.on_its_way: deque[Chunk] = deque()
        self._parser = hiredis.Reader()
        self._inbox: list[bytes] = []
        self._replies: deque[bytes] = deque()
        self._handshake: list[list[bytes]] = []
        self._life = node.run_id
        self._up_at = self._down_at = 0.0  # real s: nothing arrives before what was sent before
        node.links[self] = None

    # the face of a redis-py connection, for the handshake: it takes no time once it is connected

    @property
    def _sock(self) -> Link:
        return self

    def send_packed_command(self, requests: list[bytes]) -> None:
        """Ask several things in the handshake."""
        reader = hiredis.Reader()
        reader.feed(b"".join(requests))
        while words := reader.gets():
            self._handshake.append(words)

    def send_command(self, *words: Any) -> None:
        """Ask something in the handshake."""
        self._handshake.append([w if isinstance(w, bytes) else str(w).encode() for w in words])

    def read_response(self) -> Any:
        """Return the answer to the oldest question of the handshake."""
        if self.broken or self.node.down:
            raise OSError("Connection closed by server")
        _, reply = self.node.execute(self._handshake.pop(0))
        reader = hiredis.Reader()
        reader.feed(reply)
        answer = reader.gets()
        if isinstance(answer, hiredis.ReplyError):
            raise redis.ResponseError(str(answer))
        return answer

    def disconnect(self) -> None:
        """Close; what is on its way may still arrive, from the front."""
        if not self.closed:
            self.closed = True
            self.process.descriptors.pop(self.fd, None)
            self._leave_in_flight()
            self.node.links.pop(self, None)

    close = disconnect

    # the face of its socket

    def setblocking(self, flag: bool) -> None:
        """Never block anyway."""

    def setsockopt(self, *option: Any) -> None:
        """Take SO_LINGER for granted."""

    def fileno(self) -> int:
        """Return its number, -1 once it is closed."""
        return -1 if self.closed else self.fd

    def send(self, data: bytes) -> int:
        """Write as much as the socket takes."""
        process = self.process
        process.step()
        if self.closed or self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        size = process.socket_takes(len(data))
        self._write(data[:size])
        process.step()
        return size

    def recv(self, most: int) -> bytes:
        """Read all that has come."""
        self.process.step()
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        if self._inbox:
            data = b"".join(self._inbox)
            self._inbox.clear()
            self.readable = self.broken
            return data
        if self.broken:
            return b""
        raise BlockingIOError

    # the way itself

    def _write(self, data: bytes) -> None:
        world, parser = self.world, self._parser
        parser.feed(data)
        commands: list[list[bytes]] = []
        while (words := parser.gets()) is not False:
            commands.append(words)
        if not commands:
            return
        written = self.process.clock.now()
        records = [world.witness.written(self, words) for words in commands]
        self._up_at = max(self._up_at, world.now + self.path.delay(world.now))
        chunk = Chunk(commands, records, written, self._up_at)
        self.on_its_way.append(chunk)
        world.at(chunk.at, self._arrive, chunk, chunk.at)

    def _arrive(self, chunk: Chunk, at: float) -> object:
        node, world = self.node, self.world
        if chunk.lost or chunk.at != at or node.down or node.run_id != self._life:
            return STALE
        if node.stopped_until > world.now:
            chunk.at = node.stopped_until
            world.at(chunk.at, self._arrive, chunk, chunk.at)
            return STALE
        self.on_its_way.remove(chunk)
        chunk.at = -math.inf  # `flow` may have been before what was due
        if self.closed or self.broken:
            world.counts["zombies"] += len(chunk.commands)
        replies = []
        for words, records in zip(chunk.commands, chunk.records, strict=True):
            script, reply = node.execute(words)
            replies.append(reply)
            if script and records:
                world.witness.executed(records, node, script, words, reply, chunk.written)
        if not (self.closed or self.broken):
            self._replies.append(b"".join(replies))
            self._down_at = max(self._down_at, world.now + self.path.delay(world.now))
            world.at(self._down_at, self._deliver)
        return None

    def _deliver(self) -> object:
        if self.closed or self.broken or not self._replies:
            return STALE
        self._inbox.append(self._replies.popleft())
        self.readable = True
        self.process.notify(self.fd)
        return None

    def flow(self) -> None:
        """Let all that is on its way, both ways, arrive now."""
        self._up_at = self._down_at = 0.0
        for chunk in list(self.on_its_way):
            chunk.at = self.world.now
            self._arrive(chunk, chunk.at)
        while self._deliver() is not STALE:
            pass
        if self.node.run_id != self._life:
            self.break_off()

    def _leave_in_flight(self) -> None:
        """Let some of what is on its way arrive later than it would have: the first of it."""
        chunks, draw = self.on_its_way, self.path.random
        if not chunks:
            return
        survive = draw.randint(0, len(chunks)) if draw.random() < self.process.zombies else 0
        late = draw.random() ** 2 * self.process.zombie_delay if draw.random() < 0.5 else 0.0
        for number, chunk in enumerate(chunks):
            if number >= survive:
                chunk.lost = True
            elif late:
                chunk.at += late
                self.world.at(chunk.at, self._arrive, chunk, chunk.at)

    def break_off(self) -> None:
        """Break for the client at once; what is on its way may still arrive."""
        if not (self.closed or self.broken):
            self.broken = self.readable = True
            self._leave_in_flight()
            self.node.links.pop(self, None)
            self.process.notify(self.fd)

    def server_ended(self) -> None:
        """Take it that the server is gone: nothing arrives there, and the client learns of it."""
        for chunk in self.on_its_way:
            chunk.lost = True
        moment = max(self._down_at, self.world.now + self.path.delay(self.world.now))
        self.world.at(moment, self.break_off)
