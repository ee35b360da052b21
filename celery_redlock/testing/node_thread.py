"""The thread that answers as a lock node: one life of it, from its start to its end.

It runs the shipped scripts (`model`), on a TCP port, so that what takes a lock on it is the whole
of the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any

import hiredis

from celery_redlock.lock.platform.greenlets import original
from celery_redlock.lock.platform.threads import Waker, new_mutex, start_thread
from celery_redlock.lock.transport.encoding import encode_bulk
from celery_redlock.testing.clock import VirtualClock
from celery_redlock.testing.model import Server, library

LOOKED_AT = 0.01  # s: how often a node looks whether the clock has jumped
PATIENCE = 1.0  # s for a client that does not read
WELCOME = (b"SELECT", b"AUTH", b"CLIENT")  # what a client says first


class Memory(Server):
    """One life of a fake node: its keys, and who listens.

    clients: all connections.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(library())
        self.run_id = os.urandom(20).hex()
        self.clients: dict[int, Client] = {}
        self._clock = clock
        self._started = clock.now()

    @property
    def wall_ms(self) -> int:
        """The ms of its own wall clock."""
        return self._clock.node_ms()

    @property
    def uptime(self) -> float:
        """S since it was started."""
        return self._clock.now() - self._started

    def published(self, channel: bytes, message: bytes) -> int:
        """Send a message to who has subscribed to a channel."""
        heard = [client for client in self.clients.values() if channel in client.channels]
        for client in heard:
            client.send(b"*3\r\n" + b"".join(map(encode_bulk, (b"message", channel, message))))
        return len(heard)


class Client:
    """A connection to a fake node. channels: that it has subscribed to."""

    def __init__(self, connected: Any) -> None:
        connected.settimeout(PATIENCE)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.reader = hiredis.Reader()
        self.channels: dict[bytes, None] = {}

    def send(self, reply: bytes) -> None:
        """Write a reply; one that does not read it is hung up on at its next word."""
        with contextlib.suppress(OSError):
            self.socket.sendall(reply)

    def close(self) -> None:
        """Hang up, also where a forked child has the descriptor."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class NodeThread:
    """The thread that is a fake node from its start to its end."""

    def __init__(self, port: int, clock: VirtualClock) -> None:
        self._clock, self._memory = clock, Memory(clock)
        self._bell, self._over = Waker(), new_mutex()
        self._ended = self._paused = False
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(64)
        self._over.acquire()
        start_thread(self._run)

    def pause(self, paused: bool) -> None:
        """Stop or begin to answer."""
        self._paused = paused
        self._bell.wake()

    def end(self) -> None:
        """Hang up on everybody; returns when that is done."""
        self._ended = True
        self._bell.wake()
        self._over.acquire()

    def _run(self) -> None:
        try:
            while not self._ended:
                for descriptor in self._ready():
                    self._attend(descriptor)
                self._clock.tell()
        finally:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for client in self._memory.clients.values():
                client.close()
            self._over.release()

    def _ready(self) -> list[int]:
        """Return the descriptors that have something to read, after a moment at the most."""
        poll = original("select", "poll")()
        poll.register(self._bell.descriptor, select.POLLIN)
        for descriptor in () if self._paused else (self._listener.fileno(), *self._memory.clients):
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(int(LOOKED_AT * 1000))]
        self._bell.clear()
        return [descriptor for descriptor in ready if descriptor != self._bell.descriptor]

    def _attend(self, descriptor: int) -> None:
        clients = self._memory.clients
        if descriptor == self._listener.fileno():
            client = Client(self._listener.accept()[0])
            clients[client.socket.fileno()] = client
            return
        client = clients[descriptor]
        try:
            self._serve(client)
        except (OSError, hiredis.ProtocolError):
            clients.pop(descriptor).close()

    def _serve(self, client: Client) -> None:
        """Answer what has come. Raises OSError at the connection's end."""
        data = client.socket.recv(65536)
        if not data:
            raise OSError("the client has hung up")
        client.reader.feed(data)
        replies = []
        while (words := client.reader.gets()) is not False:
            replies.append(self._reply(client, words))
        client.socket.sendall(b"".join(replies))

    def _reply(self, client: Client, words: list[bytes]) -> bytes:
        verb = words[0].upper()
        if verb in (b"SUBSCRIBE", b"UNSUBSCRIBE"):
            return b"".join(subscribed(client, verb, channel) for channel in words[1:])
        if verb == b"PING" and client.channels:
            return b"*2\r\n" + encode_bulk(b"pong") + encode_bulk(b"".join(words[1:]))
        if verb in WELCOME:
            return b"+OK\r\n"
        with _one_lua:
            return self._memory.execute(words)[1]


_one_lua = new_mutex()  # shared by all nodes


def subscribed(client: Client, verb: bytes, channel: bytes) -> bytes:
    """Note a subscription, or its end; returns the reply."""
    if verb == b"SUBSCRIBE":
        client.channels[channel] = None
    else:
        client.channels.pop(channel, None)
    words = encode_bulk(verb.lower()) + encode_bulk(channel)
    return b"*3\r\n%b:%d\r\n" % (words, len(client.channels))
