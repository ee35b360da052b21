"""The thread that answers as a lock node, from the node's start until `kill`.

It runs the shipped scripts (`model.py`) behind a TCP port, so a lock on it uses the whole package.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any

import hiredis

from celery_redlock.lock.platform.threads import Waker, new_mutex, original, start_thread
from celery_redlock.lock.transport.encoding import encode_bulk
from celery_redlock.testing.clock import VirtualClock
from celery_redlock.testing.model import Server, library

POLL_INTERVAL = 0.01  # seconds between two checks of the clock for a jump
SEND_TIMEOUT = 1.0  # seconds for a client that does not read
CONNECTION_SETUP = (b"SELECT", b"AUTH", b"CLIENT")  # a client's first commands


class FakeServer(Server):
    """The keys and the connections of a fake node, from its start until `kill`.

    connections: by file descriptor.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(library())
        self.run_id = os.urandom(20).hex()
        self.connections: dict[int, ClientConnection] = {}
        self._clock = clock
        self._started = clock.now()

    @property
    def wall_ms(self) -> int:
        """Milliseconds since 1970, by the node's own clock."""
        return self._clock.node_ms()

    @property
    def uptime(self) -> float:
        """Seconds since the start."""
        return self._clock.now() - self._started

    def published(self, channel: bytes, message: bytes) -> int:
        """Send a message to the subscribers of a channel; return how many there are."""
        heard = self._subscribed(channel)
        for one in heard:
            one.send(b"*3\r\n" + b"".join(map(encode_bulk, (b"message", channel, message))))
        return len(heard)

    def subscribers(self, channel: bytes) -> int:
        """Return how many subscribers a channel has."""
        return len(self._subscribed(channel))

    def _subscribed(self, channel: bytes) -> list[ClientConnection]:
        return [one for one in self.connections.values() if channel in one.channels]


class ClientConnection:
    """A client's connection to a fake node. channels: the client's subscriptions."""

    def __init__(self, connected: Any) -> None:
        connected.settimeout(SEND_TIMEOUT)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.reader = hiredis.Reader()
        self.channels: dict[bytes, None] = {}

    def send(self, reply: bytes) -> None:
        """Write a message; if the client is gone, its next read closes the connection."""
        with contextlib.suppress(OSError):
            self.socket.sendall(reply)

    def close(self) -> None:
        """Close the connection, even if a forked child has a copy of the descriptor."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class NodeThread:
    """Listens on a fake node's port and answers its clients, until `stop`."""

    def __init__(self, port: int, clock: VirtualClock) -> None:
        self._clock, self._server = clock, FakeServer(clock)
        self._waker, self._running = Waker(), new_mutex()
        self._stopping = self._paused = False
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(64)
        self._running.acquire()
        start_thread(self._run)

    def set_paused(self, paused: bool) -> None:
        """Stop answering requests, or answer them again."""
        self._paused = paused
        self._waker.wake()

    def stop(self) -> None:
        """Close all connections; return once the thread has done so."""
        self._stopping = True
        self._waker.wake()
        self._running.acquire()

    def _run(self) -> None:
        try:
            while not self._stopping:
                for descriptor in self._ready():
                    self._handle(descriptor)
                self._clock.tell()
        finally:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for connection in self._server.connections.values():
                connection.close()
            self._running.release()

    def _ready(self) -> list[int]:
        """Return the descriptors with data to read; wait at most `POLL_INTERVAL` for some."""
        poll = original("select", "poll")()
        poll.register(self._waker.descriptor, select.POLLIN)
        sockets = () if self._paused else (self._listener.fileno(), *self._server.connections)
        for descriptor in sockets:
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(int(POLL_INTERVAL * 1000))]
        self._waker.clear()
        return [descriptor for descriptor in ready if descriptor != self._waker.descriptor]

    def _handle(self, descriptor: int) -> None:
        """Accept a connection, or answer a client's requests."""
        connections = self._server.connections
        if descriptor == self._listener.fileno():
            connection = ClientConnection(self._listener.accept()[0])
            connections[connection.socket.fileno()] = connection
            return
        try:
            self._answer(connections[descriptor])
        except (OSError, hiredis.ProtocolError):
            connections.pop(descriptor).close()

    def _answer(self, connection: ClientConnection) -> None:
        """Answer the requests that have arrived. Raises OSError at the connection's end."""
        data = connection.socket.recv(65536)
        if not data:
            raise OSError("the client has closed the connection")
        connection.reader.feed(data)
        replies = []
        while (words := connection.reader.gets()) is not False:
            replies.append(self._execute(connection, words))
        connection.socket.sendall(b"".join(replies))

    def _execute(self, connection: ClientConnection, words: list[bytes]) -> bytes:
        """Run one command; return the reply."""
        verb = words[0].upper()
        if verb in (b"SUBSCRIBE", b"UNSUBSCRIBE"):
            return b"".join(subscribe(connection, verb, channel) for channel in words[1:])
        if verb == b"PING" and connection.channels:
            return b"*2\r\n" + encode_bulk(b"pong") + encode_bulk(b"".join(words[1:]))
        if verb in CONNECTION_SETUP:
            return b"+OK\r\n"
        with _lua_mutex:
            return self._server.execute(words)[1]


_lua_mutex = new_mutex()  # all nodes share one Lua engine


def subscribe(connection: ClientConnection, verb: bytes, channel: bytes) -> bytes:
    """Record a subscription, or its end; return the reply."""
    if verb == b"SUBSCRIBE":
        connection.channels[channel] = None
    else:
        connection.channels.pop(channel, None)
    words = encode_bulk(verb.lower()) + encode_bulk(channel)
    return b"*3\r\n%b:%d\r\n" % (words, len(connection.channels))
