"""Lock nodes without a server: threads of this process, with a clock that a test moves.

A `FakeNode` is what a test starts and kills, a `FakeServer` one life of it: it runs the shipped
scripts (`model.py`) behind a TCP port, so a lock on it uses the whole package. Every lock on the
nodes in this process uses their clock (`clock.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator

import hiredis
from redis import Redis

from celery_redlock.lock.platform.clock import Platform, install_platform, uninstall_platform
from celery_redlock.lock.platform.threads import Waker, new_mutex, original, start_thread
from celery_redlock.lock.transport.command import encode_bulk
from celery_redlock.testing.clock import VirtualClock
from celery_redlock.testing.model import Server, library
from celery_redlock.testing.servers import claim_port

CLOCK_INTERVAL = 0.01  # seconds between two checks of the clock for a jump
SEND_TIMEOUT = 1.0  # seconds for a client that does not read
CONNECTION_SETUP = (b"SELECT", b"AUTH", b"CLIENT")  # a client's first commands
_lua_mutex = new_mutex()  # all nodes share one Lua engine


class FakeNode:
    """A lock node that is a thread of this process, with a clock that a test moves.

    It answers this package's requests, by the package's own scripts, and no others: it cannot be a
    broker. `start`, `kill`, `pause`, `resume` and `with` work as for an `EmbeddedNode`; `kill`
    loses the keys. clock: several nodes may share one; None makes a new one.
    Other processes may connect, but their leases use the machine's clock.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        self._claim = claim_port()
        self.port = int(self._claim.getsockname()[1])
        self._server: FakeServer | None = None
        self._address = f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The URL that `redlock_nodes` takes."""
        return f"redis://{self._address}/0"

    def start(self) -> FakeNode:
        """Start the node, empty; do nothing if it is up."""
        if self._server is None:
            install_platform(self._address, Platform(self.clock))
            self._server = FakeServer(self.port, self.clock)
        return self

    def kill(self) -> None:
        """End the node with its keys and connections; do nothing if it is down."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def pause(self) -> None:
        """Freeze the node: connections stay open, and no request is answered."""
        if self._server is not None:
            self._server.set_paused(True)

    def resume(self) -> None:
        """Let a paused node answer again."""
        if self._server is not None:
            self._server.set_paused(False)

    def advance(self, seconds: float) -> None:
        """Let the node's clock jump ahead, also for its lock holders and nodes that share it."""
        self.clock.advance(seconds)

    def client(self) -> Redis:
        """Return a redis-py client of this node, answering in str."""
        return Redis(port=self.port, decode_responses=True, protocol=2)

    def __enter__(self) -> FakeNode:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        uninstall_platform(self._address)
        self._claim.close()


@contextlib.contextmanager
def fake_nodes(count: int = 3) -> Iterator[list[FakeNode]]:
    """Start fake nodes that share one clock, and end all of them at exit."""
    clock = VirtualClock()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeNode(clock)) for _ in range(count)]


class ClientConnection:
    """A client's connection to a fake node."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(SEND_TIMEOUT)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.reader = hiredis.Reader()

    def published(self, channel: bytes, message: bytes) -> None:
        """Write a message; if the client is gone, its next read closes the connection."""
        with contextlib.suppress(OSError):
            words = b"".join(map(encode_bulk, (b"message", channel, message)))
            self.socket.sendall(b"*3\r\n" + words)

    def close(self) -> None:
        """Close the connection, even if a forked child has a copy of the descriptor."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class FakeServer(Server):
    """One life of a fake node: a thread that listens on its port and answers, until `stop`."""

    def __init__(self, port: int, clock: VirtualClock) -> None:
        super().__init__(library())
        self.run_id = os.urandom(20).hex()
        self._clock, self._started = clock, clock.now()
        self._connections: dict[int, ClientConnection] = {}  # by file descriptor
        self._waker, self._running = Waker(), new_mutex()
        self._stopping = self._paused = False
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(64)
        self._running.acquire()
        start_thread(self._serve)

    @property
    def wall_ms(self) -> int:
        """Milliseconds since 1970, by the node's own clock."""
        return self._clock.node_ms()

    @property
    def uptime(self) -> float:
        """Seconds since the start."""
        return self._clock.now() - self._started

    def set_paused(self, paused: bool) -> None:
        """Stop answering requests, or answer them again."""
        self._paused = paused
        self._waker.wake()

    def stop(self) -> None:
        """Close all connections; return once the thread has done so."""
        self._stopping = True
        self._waker.wake()
        self._running.acquire()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                for descriptor in self._ready():
                    self._handle(descriptor)
                self._clock.tell()
        finally:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for connection in self._connections.values():
                connection.close()
            self._running.release()

    def _ready(self) -> list[int]:
        """Return the descriptors with data to read; wait at most `CLOCK_INTERVAL` for some."""
        poll = original("select", "poll")()
        poll.register(self._waker.descriptor, select.POLLIN)
        sockets = () if self._paused else (self._listener.fileno(), *self._connections)
        for descriptor in sockets:
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(int(CLOCK_INTERVAL * 1000))]
        self._waker.clear()
        return [descriptor for descriptor in ready if descriptor != self._waker.descriptor]

    def _handle(self, descriptor: int) -> None:
        """Accept a connection, or answer the requests that have arrived on one."""
        if descriptor == self._listener.fileno():
            accepted = ClientConnection(self._listener.accept()[0])
            self._connections[accepted.socket.fileno()] = accepted
            return
        connection = self._connections[descriptor]
        with contextlib.suppress(OSError, hiredis.ProtocolError):
            if data := connection.socket.recv(65536):
                connection.reader.feed(data)
                replies = []
                while (words := connection.reader.gets()) is not False:
                    replies.append(self._reply_to(connection, words))
                connection.socket.sendall(b"".join(replies))
                return
        # the client has closed the connection, or its data are no requests
        self.ears.pop(connection, None)
        self._connections.pop(descriptor).close()

    def _reply_to(self, connection: ClientConnection, words: list[bytes]) -> bytes:
        verb, channels = words[0].upper(), self.ears.setdefault(connection, set())
        if verb in (b"SUBSCRIBE", b"UNSUBSCRIBE"):
            change = channels.add if verb == b"SUBSCRIBE" else channels.discard
            reply = b""
            for channel in words[1:]:
                change(channel)
                told = encode_bulk(verb.lower()) + encode_bulk(channel)
                reply += b"*3\r\n%b:%d\r\n" % (told, len(channels))
            return reply
        if verb == b"PING" and channels:
            return b"*2\r\n" + encode_bulk(b"pong") + encode_bulk(b"".join(words[1:]))
        if verb in CONNECTION_SETUP:
            return b"+OK\r\n"
        with _lua_mutex:
            return self.execute(words)[1]
