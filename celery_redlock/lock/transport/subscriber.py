"""One subscriber connection to a node, in its own thread: a stalled node delays no caller.

It shares no code with `node.py`: there no caller waits, and each command has one reply. Here the
thread may wait, and messages come unasked.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable
from typing import Any

import hiredis
from redis.backoff import ExponentialBackoff

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.threads import JobQueue
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import text_of
from celery_redlock.lock.transport.connection import PubSub, connect_budget
from celery_redlock.lock.transport.node import RECONNECT_BACKOFF

IDLE_LIMIT = 30.0  # seconds that an unused connection is kept; seconds without data before a PING
# after a refused subscription
RESUBSCRIBE_BACKOFF = ExponentialBackoff(cap=IDLE_LIMIT, base=0.05)


class Subscriber:
    """The subscriber connection to one node, in a thread that lives while a channel is wanted.

    channels: returns the channels to subscribe to. heard: called with a channel and a message. When
    a subscription begins the message is "", because earlier messages may have been missed.
    refused: called with the node's words if it refuses a subscription, which is asked for again.
    asked, confirmed: the channels of this connection.
    """

    def __init__(
        self,
        address: Address,
        timeout: float,
        platform: Platform,
        channels: Callable[[], set[str]],
        on_message: Callable[[str, str], None],
        on_refused: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._address = address
        self._timeout = timeout
        self._platform = platform
        self._clock = platform.clock
        self._channels = channels
        self._on_message = on_message
        self._on_refused = on_refused
        self._waker: Any = None  # made in the thread: no caller fails if no descriptor is left
        self._jobs = JobQueue(platform.try_lock(), self._wake)  # start and end of the thread
        self._running = self._closed = False
        self._pubsub: PubSub | None = None
        self.requested: set[str] = set()
        self.confirmed: set[str] = set()
        # whether a PING waits for its reply; monotonic seconds of that PING, or of the last data
        self._awaits_pong = False
        self._last_data_at = 0.0
        self._failures = 0
        # refused subscriptions in a row; monotonic seconds when to ask for them again
        self._refusals = 0
        self._resubscribe_at = math.inf

    def resubscribe(self) -> None:
        """Subscribe to the channels that are wanted now. Never waits."""
        if len(self._jobs.pending) < 2:  # a first job may be done now, a second has not begun
            self._jobs.pending.append(self._start)
        self._jobs.go_on()
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        waker = self._waker
        if waker is not None:
            waker.wake()

    def _start(self) -> None:
        if not self._running and not self._closed and self._channels():
            self._platform.start_thread(self._run)
            self._running = True

    # the thread

    def _run(self) -> None:
        while not self._closed:
            try:
                if self._waker is None:
                    self._waker = self._platform.new_waker()
                is_idle = not self._listen()  # a call before there was a waker has woken nobody
                self._failures = 0
            except Exception:  # any error of a connection, or of the user's credential provider
                self._drop()
                pause = RECONNECT_BACKOFF.compute(self._failures)
                is_idle = False
                self._failures = min(self._failures + 1, 16)
                self._wait(pause)
            if is_idle and self._ends():
                return
        self._drop()

    def _ends(self) -> bool:
        """Return whether the thread ends, because no channel is wanted any more."""
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            if not self._channels():
                self._drop()  # first: later it might drop the next thread's connection
                self._running = False
                has_ended = True

        self._jobs.lock.run(end)  # refused if a caller asks for a channel just now
        self._jobs.go_on()
        if has_ended and self._channels():  # a new waiter has compared its channel with old ones
            self.resubscribe()
        return has_ended

    def _listen(self) -> bool:
        """Subscribe to the wanted channels and handle messages; return False after a timeout."""
        wanted_channels = self._channels()
        if self._pubsub is None:
            if not wanted_channels:
                return self._wait(IDLE_LIMIT)
            budget = connect_budget(self._timeout)
            self._pubsub = self._address.pubsub(budget, self._timeout)
            self._awaits_pong = False
            self._last_data_at = self._clock.now()
        if self._clock.now() >= self._resubscribe_at:
            self.requested = self.requested & self.confirmed
            self._resubscribe_at = math.inf
        # one request for each channel: the user may lack the right to one of them
        for channel in wanted_channels - self.requested:
            self._pubsub.send("SUBSCRIBE", channel)
        for channel in self.requested - wanted_channels:
            self._pubsub.send("UNSUBSCRIBE", channel)
        self.requested = wanted_channels
        if not self._channels() <= wanted_channels:  # a new waiter has compared with old ones
            return True
        max_wait = self._timeout if self._awaits_pong else IDLE_LIMIT
        remaining = self._resubscribe_at - self._clock.now()
        has_woken = self._wait(max(0.0, min(max_wait, remaining))) or remaining < max_wait
        has_spoken, replies = self._pubsub.receive()
        if has_spoken or wanted_channels:
            self._check_silence(self._pubsub, has_spoken=has_spoken, has_woken=has_woken)
        for reply in replies:
            self._take(reply)
        return has_woken

    def _check_silence(self, pubsub: PubSub, *, has_spoken: bool, has_woken: bool) -> None:
        """Send PING to a node that sends nothing; raise OSError if it does not reply.

        Checks the clock, too: frequent wake-ups keep every wait shorter than its timeout.
        """
        now = self._clock.now()
        is_over = not has_woken or now - self._last_data_at >= (
            self._timeout if self._awaits_pong else IDLE_LIMIT
        )
        if has_spoken:
            self._awaits_pong = False
            self._last_data_at = now
        elif is_over and self._awaits_pong:
            raise OSError("no answer")
        elif is_over:
            pubsub.send("PING", "")
            self._awaits_pong = True
            self._last_data_at = now

    def _take(self, reply: Any) -> None:
        if isinstance(reply, hiredis.ReplyError):
            # a server that is busy, or has no memory left, may take it later
            self._resubscribe_at = self._clock.now() + RESUBSCRIBE_BACKOFF.compute(self._refusals)
            self._refusals = min(self._refusals + 1, 16)
            self._on_refused(str(reply))
            return
        kind, name = reply[:2] if isinstance(reply, list) else (b"", b"")
        channel = text_of(name)
        if kind == b"subscribe":
            self.confirmed.add(channel)
            if self.confirmed >= self.requested:
                self._refusals = 0
            self._on_message(channel, "")
        elif kind == b"unsubscribe":
            self.confirmed.discard(channel)
        elif kind == b"message" and reply[2]:  # an empty one would stand for a new subscription
            self._on_message(channel, text_of(reply[2]))

    def _wait(self, seconds: float) -> bool:
        """Wait for bytes, a wake-up or the timeout; return False for the timeout."""
        poll = self._platform.new_poll(True)
        if self._waker is not None:  # it is, if no descriptor was left
            poll.register(self._waker.descriptor, select.POLLIN)
        if self._pubsub is not None:
            poll.register(self._pubsub.fileno(), select.POLLIN)
        ready = poll.poll(max(1, int(seconds * 1000)))
        if self._waker is not None:
            self._waker.clear()
        return bool(ready)

    def _drop(self) -> None:
        pubsub = self._pubsub
        self._pubsub = None
        self.requested = set()
        self.confirmed = set()
        self._resubscribe_at = math.inf
        if pubsub is not None:
            pubsub.disconnect()
