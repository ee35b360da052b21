"""Lock nodes without a server: a thread that answers as one, by a clock that a test moves.

They run the shipped scripts (`model`), on a TCP port, so that what takes a lock on them is the
whole of the package. Everything in this process that locks on them goes by their clock.
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
from celery_redlock.lock.platform.clock import (
    Platform,
    SystemClock,
    install_platform,
    uninstall_platform,
)
from celery_redlock.lock.platform.greenlets import original
from celery_redlock.lock.platform.threads import Waker, new_mutex, start_thread
from celery_redlock.lock.transport.encoding import encode_bulk
from celery_redlock.testing.model import Server, library
from celery_redlock.testing.servers import claim_port

LOOKED_AT = 0.01  # s: how often a node looks whether the clock has jumped
LEAST_JUMP = 0.001  # s: less than that is the noise of two clocks
PATIENCE = 1.0  # s for a client that does not read
WELCOME = (b"SELECT", b"AUTH", b"CLIENT")  # what a client says first


@dataclass(frozen=True)
class Sample:
    """What a virtual clock has last compared. Times in s.

    real: monotonic. wall: since 1970, as a test says. depth: how many tools hold the clock.
    ahead: by how much the virtual clock is. left: the wall of what held the clock before.
    """

    real: float
    wall: float
    depth: int = 0
    ahead: float = 0.0
    left: float | None = None

    def jump(self, real: float, wall: float, depth: int) -> float:
        """Return the s by which the clock has jumped ahead since.

        Whoever lets go of the clock lets no time pass by that; who holds it next goes on from
        where that was, or from the machine's time, whichever means that time has passed.
        """
        gained = (wall - self.wall) - (real - self.real)
        if depth < self.depth:
            return 0.0
        if depth > self.depth and gained < 0 and self.left is not None:
            return max(0.0, wall - self.left)
        return max(0.0, gained)

    def says_the_same(self, real: float, wall: float, depth: int) -> bool:
        """Tell whether nobody has touched the clock since."""
        gained = (wall - self.wall) - (real - self.real)
        return depth == self.depth and abs(gained) < LEAST_JUMP


class VirtualClock:
    """What time it is for fake nodes, and for whoever locks on them in this process.

    It goes on as the machine's clock does, and never stops: threads that wait do not hang. It
    jumps ahead by `advance`, and whenever freezegun (`freezer.tick(31)`, `move_to`) or time-machine
    (`traveller.shift(31)`, `move_to`) moves the time ahead; that they freeze it, or set it back, or
    let go of it, does not touch it. A jump is what a suspended machine has: who held a lease has
    lost it.
    """

    resolution = 0.0

    def __init__(self) -> None:
        self._machine = SystemClock()
        self._last = Sample(*self._read())
        self._epoch = self._last.wall - self._last.real
        self._mutex = new_mutex()
        self._jumps = self._told = 0

    def now(self) -> float:
        """Return monotonic s. Never waits: a signal handler may ask."""
        last = self._last
        real, wall, depth = self._read()
        if last.says_the_same(real, wall, depth):
            return real + last.ahead
        jump = last.jump(real, wall, depth)
        if self._mutex.acquire(False):
            if self._last is last:  # else another thread has just noticed the same
                left = last.wall if depth < last.depth else last.left
                self._last = Sample(real, wall, depth, last.ahead + jump, left)
                self._jumps += jump > 0
            self._mutex.release()
        return real + last.ahead + jump

    def _read(self) -> tuple[float, float, int]:
        """Return the machine's monotonic s, and the wall and its depth as of one moment."""
        for _ in range(5):
            before, depth = self._machine.now(), held_by()
            wall = wall_clock()
            after = self._machine.now()
            if after - before < LEAST_JUMP / 2 and held_by() == depth:
                break  # else the thread was stopped in between
        return after, wall, depth

    def wall_us(self) -> int:
        """Return the us since 1970, as a test says."""
        return int(wall_clock() * 1e6)

    def node_ms(self) -> int:
        """Return the ms since 1970 of the nodes, which are never set back."""
        return int((self._epoch + self.now()) * 1000)

    def sleep(self, seconds: float) -> None:
        """Let so many s pass."""
        self._machine.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Jump so many s ahead, for all nodes that go by this clock and all who lock on them."""
        self.now()
        with self._mutex:
            self._last = replace(self._last, ahead=self._last.ahead + seconds)
            self._jumps += 1
        self.tell()

    def tell(self) -> None:
        """Wake what sleeps by this clock, where it has jumped since the last time."""
        self.now()
        jumps = self._jumps
        if self._told == jumps:
            return
        with contextlib.suppress(RuntimeError):  # one was made meanwhile: the next time
            for session in sessions():
                if session.clock is self:
                    session.watchdog.look()
                    for channel in session.wait_queue.channels():
                        session.wait_queue.heard(channel)
            self._told = jumps


def _frozen() -> Sequence[Any]:
    """Return what freezegun goes by, the innermost last.

    Its own fakes of `time` are of no use here: what is called near the top of a threading.Thread
    is given the real time, by the modules on the stack.
    """
    return getattr(sys.modules.get("freezegun.api"), "freeze_factories", ())


def held_by() -> int:
    """Return how many of freezegun and time-machine hold the clock, each freeze counted."""
    machine = sys.modules.get("time_machine")
    return len(_frozen()) + (machine is not None and machine.escape_hatch.is_travelling())


def wall_clock() -> float:
    """Return the s since 1970 as a test says.

    Source: time-machine moves CLOCK_REALTIME, freezegun does not; neither moves CLOCK_BOOTTIME.
    """
    for factory in _frozen()[-1:]:
        steps = hasattr(factory, "step_width")  # auto_tick_seconds: each look moves it; not ours
        frozen: dt.datetime = factory.time_to_freeze if steps else factory()
        return frozen.replace(tzinfo=dt.timezone.utc).timestamp()
    return time.clock_gettime(time.CLOCK_REALTIME)


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


class FakeNode:
    """A lock node that is a thread of this process, with a clock that a test moves.

    It answers what this package asks, by the package's own scripts, and nothing else: it is no
    broker. `start`, `kill`, `pause`, `resume` and `with` are as an `EmbeddedNode`'s; with `kill` it
    loses its keys. clock: what it goes by, its own where None; give several nodes one.
    Other processes may connect, but their leases go by the machine's clock.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        self._claim = claim_port()
        self.port = int(self._claim.getsockname()[1])
        self._serving: Serving | None = None
        self._server = f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The URL that `redlock_nodes` takes."""
        return f"redis://{self._server}/0"

    def start(self) -> FakeNode:
        """Start it, empty; nothing happens where it is up."""
        if self._serving is None:
            install_platform(self._server, Platform(self.clock))
            self._serving = Serving(self.port, self.clock)
        return self

    def kill(self) -> None:
        """End it with its keys and connections; nothing happens where it is down."""
        if self._serving is not None:
            self._serving.end()
            self._serving = None

    def pause(self) -> None:
        """Freeze it: connections open, nothing is answered."""
        if self._serving is not None:
            self._serving.pause(True)

    def resume(self) -> None:
        """Let it go on."""
        if self._serving is not None:
            self._serving.pause(False)

    def advance(self, seconds: float) -> None:
        """Let so many s pass at once on its clock, for its holders and the other nodes, too."""
        self.clock.advance(seconds)

    def client(self) -> Redis:
        """Return a redis-py client of this node, answering in str."""
        return Redis(port=self.port, decode_responses=True, protocol=2)

    def __enter__(self) -> FakeNode:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        uninstall_platform(self._server)
        self._claim.close()


class Serving:
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


@contextlib.contextmanager
def fake_nodes(count: int = 3) -> Iterator[list[FakeNode]]:
    """Start so many fake nodes with one clock, and end all of them on the way out."""
    clock = VirtualClock()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeNode(clock)) for _ in range(count)]
