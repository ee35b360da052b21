"""Lock nodes without a server: threads of this process, with a clock that a test moves.

A test starts and kills a `FakeNode`. Each start creates a `FakeServer`, which runs the shipped
scripts (`model.py`) behind a TCP port, so a lock on it uses the whole package. Every lock on the
nodes in this process uses their `VirtualClock`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hiredis
from redis import Redis

from celery_redlock.lock.client import sessions
from celery_redlock.lock.platform.clock import Platform, SystemClock, installed
from celery_redlock.lock.platform.threads import new_mutex, original, start_thread
from celery_redlock.lock.transport.command import encode_bulk
from celery_redlock.testing.model import Server, library
from celery_redlock.testing.servers import claim_port

MIN_JUMP = 0.001  # seconds: a smaller difference is the noise between two clocks
CLOCK_INTERVAL = 0.01  # seconds between two checks of the clock for a jump
SEND_TIMEOUT = 1.0  # seconds for a client that does not read
CONNECTION_SETUP = (b"SELECT", b"AUTH", b"CLIENT")  # a client's first commands
_lua_mutex = new_mutex()  # all nodes share one Lua engine


class FakeNode:
    """A lock node that is a thread of this process, with a clock that a test moves.

    It answers this package's requests, by the package's own scripts, and no others: it cannot be a
    broker. `start`, `kill`, `pause`, `resume` and `with` work as for an `EmbeddedNode`; `kill`
    loses the keys. Other processes may connect, but their leases use the machine's clock. clock:
    several nodes may share one; None makes a new one.
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
            installed[self._address] = Platform(self.clock)
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
            self._server.paused = True

    def resume(self) -> None:
        """Let a paused node answer again."""
        if self._server is not None:
            self._server.paused = False

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
        installed.pop(self._address, None)
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
        self._clock = clock
        self._started = clock.now()
        self._connections: dict[int, ClientConnection] = {}  # by file descriptor
        self._running = new_mutex()
        self._stopping = False
        self.paused = False
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
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

    def stop(self) -> None:
        """Close all connections; return once the thread has done so."""
        self._stopping = True
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
        for descriptor in () if self.paused else (self._listener.fileno(), *self._connections):
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(int(CLOCK_INTERVAL * 1000))
        return [] if self.paused else [descriptor for descriptor, _ in ready]

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
        self.subscriptions.pop(connection, None)
        self._connections.pop(descriptor).close()

    def _reply_to(self, connection: ClientConnection, words: list[bytes]) -> bytes:
        verb = words[0].upper()
        channels = self.subscriptions.setdefault(connection, set())
        if verb in (b"SUBSCRIBE", b"UNSUBSCRIBE"):
            change = channels.add if verb == b"SUBSCRIBE" else channels.discard
            reply = b""
            for channel in words[1:]:
                change(channel)
                head = encode_bulk(verb.lower()) + encode_bulk(channel)
                reply += b"*3\r\n%b:%d\r\n" % (head, len(channels))
            return reply
        if verb == b"PING" and channels:
            return b"*2\r\n" + encode_bulk(b"pong") + encode_bulk(b"".join(words[1:]))
        if verb in CONNECTION_SETUP:
            return b"+OK\r\n"
        with _lua_mutex:
            return self.execute(words)[1]


@dataclass(frozen=True)
class Sample:
    """The last reading of a virtual clock. All times in seconds.

    real: the machine's monotonic clock. wall: since 1970, as freezegun or time-machine sets it.
    freezes: how many of these tools' are active. ahead: the sum of all jumps so far. exit_wall: the
    last wall reading inside the freeze that ended last, None if none has ended.
    """

    real: float
    wall: float
    freezes: int = 0
    ahead: float = 0.0
    exit_wall: float | None = None

    def jump(self, real: float, wall: float, freezes: int) -> float:
        """Return by how many seconds the clock has jumped ahead since this sample.

        The end of a freeze is no jump. A new freeze that lies before the machine's time counts from
        the last time of the freeze before it: two freezes in a row are time that passes.
        """
        gained = self.gained(real, wall)
        if freezes < self.freezes:
            return 0.0
        if freezes > self.freezes and gained < 0 and self.exit_wall is not None:
            return max(0.0, wall - self.exit_wall)
        return max(0.0, gained)

    def gained(self, real: float, wall: float) -> float:
        """Return by how many seconds the wall clock has gained on the machine's."""
        return (wall - self.wall) - (real - self.real)


class VirtualClock:
    """The time of fake nodes, and of every lock on them in this process.

    It runs at the machine's rate and never stops, so a waiting thread does not hang. `advance`
    makes it jump ahead, and so do freezegun (`freezer.tick(31)`, `move_to`) and time-machine
    (`traveller.shift(31)`, `move_to`) if they move the time ahead. A freeze, its end, or a clock
    that is set back has no effect. A jump acts like a suspended machine: a lease that ended during
    the jump is lost.
    """

    resolution = 0.0

    def __init__(self) -> None:
        self._machine = SystemClock()
        self._sample = Sample(*self._read())
        self._epoch = self._sample.wall - self._sample.real
        self._mutex = new_mutex()
        self._jumps = self._announced = 0

    def now(self) -> float:
        """Return monotonic seconds. Never blocks, because a signal handler may call it."""
        sample = self._sample
        real, wall, freezes = self._read()
        if freezes == sample.freezes and abs(sample.gained(real, wall)) < MIN_JUMP:
            return real + sample.ahead  # no tool has moved, frozen or released the clock
        jump = sample.jump(real, wall, freezes)
        if self._mutex.acquire(False):
            if self._sample is sample:  # else another thread has recorded the same jump
                exit_wall = sample.wall if freezes < sample.freezes else sample.exit_wall
                self._sample = Sample(real, wall, freezes, sample.ahead + jump, exit_wall)
                self._jumps += jump > 0
            self._mutex.release()
        return real + sample.ahead + jump

    def _read(self) -> tuple[float, float, int]:
        """Return the machine's monotonic seconds, the wall clock and the freezes of one moment."""
        for _ in range(5):
            started = self._machine.now()
            freezes = active_freezes()
            wall = wall_clock()
            finished = self._machine.now()
            if finished - started < MIN_JUMP / 2 and active_freezes() == freezes:
                break  # else the thread was suspended in between, and the times do not fit
        return finished, wall, freezes

    def wall_us(self) -> int:
        """Return microseconds since 1970, as freezegun or time-machine sets them."""
        return int(wall_clock() * 1e6)

    def node_ms(self) -> int:
        """Return the nodes' milliseconds since 1970, which are never set back."""
        return int((self._epoch + self.now()) * 1000)

    def sleep(self, seconds: float) -> None:
        """Sleep for this many seconds of the machine's time."""
        self._machine.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Jump ahead, for all nodes with this clock and for every lock on them."""
        self.now()
        with self._mutex:
            self._sample = replace(self._sample, ahead=self._sample.ahead + seconds)
            self._jumps += 1
        self.tell()

    def tell(self) -> None:
        """Wake the watchdogs and waiters that use this clock if it jumped since the last call."""
        self.now()
        jumps = self._jumps
        if self._announced == jumps:
            return
        with contextlib.suppress(RuntimeError):  # a new session in the loop: the next call retries
            for session in sessions():
                if session.clock is self:
                    session.watchdog.wake()
                    session.callers.on_listening()
            self._announced = jumps


def _freezegun_clocks() -> Sequence[Any]:
    """Return the clocks of freezegun's active freezes, the innermost last.

    Its fakes of `time` do not work here: below a threading.Thread, freezegun chooses by the modules
    on the stack and returns the real time.
    """
    return getattr(sys.modules.get("freezegun.api"), "freeze_factories", ())


def active_freezes() -> int:
    """Return how many freezes of freezegun and time-machine are active."""
    machine = sys.modules.get("time_machine")
    is_travelling = machine is not None and machine.escape_hatch.is_travelling()
    return len(_freezegun_clocks()) + is_travelling


def wall_clock() -> float:
    """Return seconds since 1970, as freezegun or time-machine sets them.

    Source: time-machine moves CLOCK_REALTIME, freezegun does not; neither moves CLOCK_BOOTTIME.
    """
    for factory in _freezegun_clocks()[-1:]:
        # a factory with auto_tick_seconds moves at each call, and the kit's calls must not move it
        ticks = hasattr(factory, "step_width")
        frozen: dt.datetime = factory.time_to_freeze if ticks else factory()
        return frozen.replace(tzinfo=dt.UTC).timestamp()
    return time.clock_gettime(time.CLOCK_REALTIME)
