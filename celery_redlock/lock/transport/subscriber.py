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
from celery_redlock.lock.transport.node import RECONNECT

LINGER = 30.0  # seconds that an unused connection is kept; seconds without data before a PING
ASK_AGAIN = ExponentialBackoff(cap=LINGER, base=0.05)  # of a subscription that was refused


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
        heard: Callable[[str, str], None],
        refused: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._address = address
        self._timeout = timeout
        self._platform = platform
        self._clock = platform.clock
        self._channels = channels
        self._heard = heard
        self._refused = refused
        self._waker: Any = None  # made in the thread: no caller fails if no descriptor is left
        self._jobs = JobQueue(platform.try_lock(), self._wake)  # start and end of the thread
        self._running = self._closed = False
        self._pubsub: PubSub | None = None
        self.asked: set[str] = set()
        self.confirmed: set[str] = set()
        # whether a PING waits for its reply; monotonic seconds of that PING, or of the last data
        self._pinged = False
        self._spoke_at = 0.0
        self._failures = 0
        # refused subscriptions in a row; monotonic seconds when to ask for them again
        self._refusals = 0
        self._again_at = math.inf

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
                pause = RECONNECT.compute(self._failures)
                is_idle = False
                self._failures = min(self._failures + 1, 16)
                self._wait(pause)
            if is_idle and self._ends():
                return
        self._drop()

    def _ends(self) -> bool:
        """Return whether the thread ends, because no channel is wanted any more."""
        over = False

        def end() -> None:
            nonlocal over
            if not self._channels():
                self._drop()  # first: later it might drop the next thread's connection
                self._running = False
                over = True

        self._jobs.lock.run(end)  # refused if a caller asks for a channel just now
        self._jobs.go_on()
        if over and self._channels():  # who has just begun to wait has seen the old subscriptions
            self.resubscribe()
        return over

    def _listen(self) -> bool:
        """Subscribe to the wanted channels and handle messages; return False after a timeout."""
        wanted = self._channels()
        if self._pubsub is None:
            if not wanted:
                return self._wait(LINGER)
            budget = connect_budget(self._timeout)
            self._pubsub = self._address.pubsub(budget, self._timeout)
            self._pinged = False
            self._spoke_at = self._clock.now()
        if self._clock.now() >= self._again_at:
            self.asked = self.asked & self.confirmed
            self._again_at = math.inf
        for channel in wanted - self.asked:  # one each: a user may have no right to one
            self._pubsub.send("SUBSCRIBE", channel)
        for channel in self.asked - wanted:
            self._pubsub.send("UNSUBSCRIBE", channel)
        self.asked = wanted
        if not self._channels() <= wanted:  # who wants another one since has seen the old ones
            return True
        longest = self._timeout if self._pinged else LINGER
        left = self._again_at - self._clock.now()
        came = self._wait(max(0.0, min(longest, left))) or left < longest
        heard, replies = self._pubsub.receive()
        if heard or wanted:
            self._check_silence(self._pubsub, heard=heard, came=came)
        for reply in replies:
            self._take(reply)
        return came

    def _check_silence(self, pubsub: PubSub, *, heard: bool, came: bool) -> None:
        """Send PING to a node that sends nothing; raise OSError if it does not reply.

        Checks the clock, too: frequent wake-ups keep every wait shorter than its timeout.
        """
        now = self._clock.now()
        is_over = not came or now - self._spoke_at >= (self._timeout if self._pinged else LINGER)
        if heard:
            self._pinged = False
            self._spoke_at = now
        elif is_over and self._pinged:
            raise OSError("no answer")
        elif is_over:
            pubsub.send("PING", "")
            self._pinged = True
            self._spoke_at = now

    def _take(self, reply: Any) -> None:
        if isinstance(reply, hiredis.ReplyError):
            # a server that is busy, or has no memory left, may take it later
            self._again_at = self._clock.now() + ASK_AGAIN.compute(self._refusals)
            self._refusals = min(self._refusals + 1, 16)
            self._refused(str(reply))
            return
        kind, name = reply[:2] if isinstance(reply, list) else (b"", b"")
        channel = text_of(name)
        if kind == b"subscribe":
            self.confirmed.add(channel)
            if self.confirmed >= self.asked:
                self._refusals = 0
            self._heard(channel, "")
        elif kind == b"unsubscribe":
            self.confirmed.discard(channel)
        elif kind == b"message" and reply[2]:  # an empty one would stand for a new subscription
            self._heard(channel, text_of(reply[2]))

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
        self.asked = set()
        self.confirmed = set()
        self._again_at = math.inf
        if pubsub is not None:
            pubsub.disconnect()
