"""One subscriber connection to a node, in its own thread: a stalled node delays no caller."""

from __future__ import annotations

import contextlib
import select
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.threads import original
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import INCOMPLETE, ReplyReader, encode_command, text_of
from celery_redlock.lock.transport.connection import connect_budget, receive
from celery_redlock.lock.transport.node import RECONNECT

LINGER = 30.0  # seconds that an unused connection is kept; seconds without data before a PING


class Subscriber:
    """The subscriber connection to one node, in a thread that lives while a channel is wanted.

    channels: returns the channels to subscribe to. heard: called with a channel and a message. When
    a subscription begins the message is "", because earlier messages may have been missed.
    """

    def __init__(
        self,
        address: Address,
        timeout: float,
        platform: Platform,
        channels: Callable[[], set[str]],
        heard: Callable[[str, str], None],
    ) -> None:
        self._address, self._timeout = address, timeout
        self._platform, self._clock = platform, platform.clock
        self._channels, self._heard = channels, heard
        self._waker: Any = None  # made in the thread: no caller fails if no descriptor is left
        self._turn = platform.try_lock()
        self._calls = deque[None]()  # `resubscribe` calls to handle
        self._running = self._closed = False
        self._connection: Any = None
        self._reader = ReplyReader()
        self.asked: set[str] = set()
        # whether a PING waits for its reply; monotonic seconds of that PING, or of the last data
        self._pinged, self._spoke_at = False, 0.0
        self._tries = 0
        self.confirmed: set[str] = set()

    def resubscribe(self) -> None:
        """Subscribe to the channels that are wanted now. Never waits."""
        self._calls.append(None)
        self._ensure_running()
        self._wake()

    def _ensure_running(self) -> None:
        while self._calls and self._turn.run(self._start):
            pass  # again: a call may have come as the turn ended

    def _start(self) -> None:
        self._calls.clear()
        if not self._running and not self._closed and self._channels():
            self._platform.start_thread(self._run)
            self._running = True

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        waker = self._waker
        if waker is not None:
            waker.wake()

    def _run(self) -> None:
        while not self._closed:
            idle = False
            try:
                idle = not self._listen()
                self._tries = 0
            except Exception:  # any error of a connection, or of the user's credential provider
                self._drop()
                pause = RECONNECT.compute(self._tries)
                self._tries = min(self._tries + 1, 16)
                self._wait(pause)
            if idle and self._ends():
                return
        self._drop()

    def _ends(self) -> bool:
        """Return whether the thread ends, because no channel is wanted any more.

        The next caller starts a new thread.
        """
        over = False

        def end() -> None:
            nonlocal over
            if not self._channels():
                self._drop()  # first: later it might drop the next thread's connection
                self._running, over = False, True

        self._turn.run(end)  # refused if a caller asks for a channel just now
        self._ensure_running()
        if over and self._channels():  # who has just begun to wait has seen the old subscriptions
            self.resubscribe()
        return over

    def _listen(self) -> bool:
        """Subscribe to the wanted channels and handle messages; return False after a timeout."""
        if self._waker is None:
            self._waker = self._platform.new_waker()
            return True  # what was asked for before has woken nobody: look again at all
        wanted = self._channels()
        if wanted and self._connection is None:
            self._connection = self._address.dial(connect_budget(self._timeout), self._timeout)
            self._connection._sock.setblocking(False)
            self._reader = ReplyReader()
            self._pinged, self._spoke_at = False, self._clock.now()
        if self._connection is None:
            return self._wait(LINGER)
        for channel in sorted(wanted - self.asked):  # one each: a user may have no right to one
            self._send("SUBSCRIBE", [channel])
        self._send("UNSUBSCRIBE", self.asked - wanted)
        self.asked = wanted
        if not self._channels() <= wanted:  # who wants another one since has seen the old ones
            return True
        came = self._wait(self._timeout if self._pinged else LINGER)
        data = receive(self._connection._sock)
        if data or wanted:
            self._see_there(heard=bool(data), came=came)
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not INCOMPLETE:
            self._take(reply)
        return came

    def _see_there(self, *, heard: bool, came: bool) -> None:
        """Send PING to a node that sends nothing; raise OSError if it does not reply.

        Checks the clock, too: frequent wake-ups keep every wait shorter than its timeout.
        """
        now = self._clock.now()
        silent_for = now - self._spoke_at
        if heard:
            self._pinged, self._spoke_at = False, now
        elif self._pinged and (not came or silent_for >= self._timeout):
            raise OSError("no answer")
        elif not self._pinged and (not came or silent_for >= LINGER):
            self._send("PING", ("",))
            self._pinged, self._spoke_at = True, now

    def _send(self, command: str, words: Iterable[str]) -> None:
        """Send a whole command. A command with many channels needs more than one `send`."""
        words = list(words)
        data = encode_command(command, *words) if words else b""
        while data:
            sent = 0  # that is also what gevent's TLS socket returns if it accepts nothing
            with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                sent = self._connection._sock.send(data)
            data = data[sent:]
            awaited = [(self._connection._sock.fileno(), select.POLLOUT)]
            if data and not sent and not _poll(awaited, self._timeout):
                raise OSError("the node does not read what is sent")

    def _take(self, reply: Any) -> None:
        kind, name = reply[:2] if isinstance(reply, list) else (b"", b"")
        channel = text_of(name)
        if kind == b"subscribe":
            self.confirmed.add(channel)
            self._heard(channel, "")
        elif kind == b"unsubscribe":
            self.confirmed.discard(channel)
        elif kind == b"message" and reply[2]:  # an empty one would stand for a new subscription
            self._heard(channel, text_of(reply[2]))

    def _wait(self, seconds: float) -> bool:
        """Wait for bytes, a wake-up or the timeout; return False for the timeout."""
        waker, connection = self._waker, self._connection
        descriptors = [] if waker is None else [waker.descriptor]
        if connection is not None:
            descriptors.append(connection._sock.fileno())
        ready = _poll([(descriptor, select.POLLIN) for descriptor in descriptors], seconds)
        if waker is not None and any(descriptor == waker.descriptor for descriptor, _ in ready):
            waker.clear()
        return bool(ready)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self.asked, self.confirmed = set(), set()
        if connection is not None:
            connection.disconnect()


def _poll(awaited: Iterable[tuple[int, int]], seconds: float) -> list[tuple[int, int]]:
    """Return which descriptors are ready for their events, after this many seconds at most.

    For a real thread, also if greenlets are in use.
    """
    poll = original("select", "poll")()
    for descriptor, events in awaited:
        poll.register(descriptor, events)
    ready: list[tuple[int, int]] = poll.poll(max(1, int(seconds * 1000)))
    return ready
