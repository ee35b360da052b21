"""A TCP proxy before a node, on loopback, that does at a word what a bad network does."""

from __future__ import annotations

import contextlib
import enum
import math
import random
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from celery_redlock.testing import EmbeddedNode

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: the other end sees a reset, not an end
CONNECT = 1.0  # s for a connect to the node, which is on this machine


class Way(enum.Enum):
    """A direction of a connection."""

    TO_NODE = "to the node"
    TO_CLIENT = "to the client"


BOTH_WAYS = frozenset(Way)


@dataclass(frozen=True)
class Weather:
    """What happens to all that passes; fair where nothing is said.

    delay: s, least and greatest, drawn anew for each piece; the order within a connection stays.
    connects: s that a connect takes. The kernel connects at once, so the first bytes come later.
    rate: bytes per s that a direction of a connection takes. cuts: the chance that a piece resets
    its connection instead of passing. swallows: directions in which nothing passes: it is kept, and
    delivered when the weather is fair again, also what a client has long given up, as by TCP.
    refuses: nobody listens.
    """

    delay: tuple[float, float] = (0.0, 0.0)
    connects: float = 0.0
    rate: float = math.inf
    cuts: float = 0.0
    swallows: frozenset[Way] = field(default_factory=frozenset)
    refuses: bool = False


FAIR = Weather()


def slow_line(round_trip: float) -> Weather:
    """Return the weather of a distant node; a connect takes a round trip (s), too."""
    return Weather(delay=(round_trip / 2, round_trip / 2), connects=round_trip)


class Stream:
    """One direction of one connection: what has come and is not delivered yet, in order."""

    def __init__(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        self.way, self.source, self.sink = way, source, sink
        self.opens_at = 0.0  # monotonic s at which the connect is over
        self.ended = self.passed_on = False  # the source is at its end; the sink knows
        self._pieces: deque[tuple[float, bytes]] = deque()  # with the monotonic s they are due at
        self._free_at = 0.0  # monotonic s at which what came before has passed

    def take(self, data: bytes, weather: Weather, now: float) -> None:
        """Keep what came until it is due."""
        passes = max(now, self.opens_at) + random.uniform(*weather.delay)
        due = max(self._free_at, passes) + len(data) / weather.rate
        self._free_at = due
        self._pieces.append((due, data))

    def deliver(self, now: float) -> float:
        """Hand on what is due; returns the monotonic s to come again at. Raises OSError."""
        while self._pieces:
            due, data = self._pieces[0]
            if due > now:
                return due
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                return now + 0.01
            self._pieces.popleft()
            if sent < len(data):
                self._pieces.appendleft((due, data[sent:]))
        if self.ended:
            self.end()
        return math.inf

    def end(self) -> None:
        """Tell the sink that nothing follows."""
        if not self.passed_on:
            self.passed_on = True
            with contextlib.suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)


class Link:
    """A client's connection and the one to the node that belongs to it."""

    def __init__(self, client: socket.socket, node: socket.socket) -> None:
        self.client, self.node = client, node
        self.streams = (Stream(Way.TO_NODE, client, node), Stream(Way.TO_CLIENT, node, client))
        self.answered = True  # whether the node was the last to send

    @property
    def over(self) -> bool:
        """Whether nothing can pass any more, in either direction."""
        return all(stream.passed_on for stream in self.streams)

    def close(self, *, reset: bool) -> None:
        """End both connections."""
        for end in (self.client, self.node):
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            end.close()


class Proxy:
    """Listens on a port of its own for one node, in a thread of its own.

    Each change is in force when its call returns. received: bytes that came so far, a direction.
    round_trips: how often a client sent after a reply, or as the first.
    """

    def __init__(self, node: EmbeddedNode) -> None:
        self._node, self._weather = node, FAIR
        self.received: Counter[Way] = Counter()
        self.round_trips = 0
        self._links: set[Link] = set()
        self._errands: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listener = self._bind(0)
        self.port: int = self._listener.getsockname()[1]
        self._listen()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL of the node by way of this proxy."""
        return self._node.url.replace(f":{self._node.port}/", f":{self.port}/")

    @property
    def weather(self) -> Weather:
        """What happens to all that passes from now on."""
        return self._weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        def change() -> None:
            if weather.refuses and not self._weather.refuses:
                self._selector.unregister(self._listener)
                self._listener.close()
                self._listener = self._bind(self.port)  # bound, not listening: refused
            elif self._weather.refuses and not weather.refuses:
                self._listen()
            self._weather = weather

        self._do(change)

    def lead_to(self, node: EmbeddedNode, *, cut: bool = True) -> None:
        """Lead new connections to another server; cut: reset those that stand."""

        def lead() -> None:
            self._node = node

        self._do(lead)
        if cut:
            self.cut()

    def cut(self) -> None:
        """Reset every connection."""

        def cut() -> None:
            for link in list(self._links):
                self._close(link, reset=True)

        self._do(cut)

    def half_close(self, way: Way) -> None:
        """End one direction of every connection; what comes the other way still passes."""

        def end() -> None:
            for stream in [s for link in self._links for s in link.streams if s.way is way]:
                stream.end()

        self._do(end)

    def close(self) -> None:
        """End every connection and the thread."""

        def close() -> None:
            self._closed = True

        self._do(close)
        self._thread.join()
        for end in (self._listener, self._wake, self._woken):
            end.close()
        self._selector.close()

    def _do(self, runner: Callable[[], None]) -> None:
        """Carry something out in the proxy's thread, and return when it is done."""
        done = threading.Event()

        def run() -> None:
            runner()
            done.set()

        self._errands.append(run)
        self._wake.send(b"!")
        assert done.wait(60), "the proxy's thread is gone"

    def _bind(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        return listener

    def _listen(self) -> None:
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _run(self) -> None:
        again = math.inf
        while not self._closed:
            left = None if math.isinf(again) else max(0.0, again - time.monotonic())
            for key, _ in self._selector.select(left):
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(*key.data)
            while self._errands:
                self._errands.popleft()()
            again = self._deliver()
        for link in list(self._links):
            self._close(link, reset=False)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        try:
            node = socket.create_connection(("127.0.0.1", self._node.port), CONNECT)
        except OSError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            client.close()
            return
        link = Link(client, node)
        self._links.add(link)
        for stream in link.streams:
            stream.opens_at = time.monotonic() + self._weather.connects
            stream.source.setblocking(False)
            stream.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(stream.source, selectors.EVENT_READ, (link, stream))

    def _receive(self, link: Link, stream: Stream) -> None:
        if link not in self._links:
            return  # cut a moment ago
        try:
            data = stream.source.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(stream.source)
            stream.ended = True
            return
        self.received[stream.way] += len(data)
        self.round_trips += link.answered and stream.way is Way.TO_NODE
        link.answered = stream.way is Way.TO_CLIENT
        if random.random() < self._weather.cuts:
            self._close(link, reset=True)
        else:
            stream.take(data, self._weather, time.monotonic())

    def _deliver(self) -> float:
        """Hand on what is due everywhere; returns the monotonic s at which something else is."""
        now, again = time.monotonic(), math.inf
        for link in list(self._links):
            for stream in link.streams:
                if stream.way not in self._weather.swallows:
                    try:
                        again = min(again, stream.deliver(now))
                    except OSError:  # the sink is gone, and with it whatever was meant for it
                        stream.passed_on = True
            if link.over:
                self._close(link, reset=False)
        return again

    def _close(self, link: Link, *, reset: bool) -> None:
        self._links.discard(link)
        for end in (link.client, link.node):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
        link.close(reset=reset)


@contextlib.contextmanager
def proxies(nodes: list[EmbeddedNode]) -> Iterator[list[Proxy]]:
    """Give a proxy for each node, in fair weather."""
    with contextlib.ExitStack() as stack:
        made = []
        for node in nodes:
            made.append(proxy := Proxy(node))
            stack.callback(proxy.close)
        yield made
