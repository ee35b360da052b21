"""The waiters of this process, and which of them a release wakes.

A release message is only a hint: a woken waiter makes an ordinary round. A waiter without a message
tries again by itself, at the latest when the other holder's lease ends. A process has one
subscriber connection to each node, made for its first waiter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import Round
from celery_redlock.lock.transport.subscriber import Subscriber


class Waiter(Round):
    """A caller that waits until a lock may be free.

    channels: of the releases it waits for. limit: of its lock, because a resource may be free for a
    higher limit only. awaits: the channel of the resource that refused it last; "" for any channel.
    """

    awaits = ""

    def __init__(self, channels: Sequence[str], limit: int = 1) -> None:
        super().__init__()
        self.channels, self.limit = channels, limit

    def take(self) -> bool:
        """Return whether the waiter was woken since the last call."""
        woken, self.decided = self.decided, False
        return woken


class WaitQueue:
    """The waiters of this process in order of arrival; subscribes to releases on every node.

    A release wakes only the first waiter of each limit, because more waiters would only collide.
    Each change is atomic and needs no mutex. So a finalizer or a signal handler may interrupt a
    change and wait for a lock, too.
    """

    def __init__(self, addresses: Sequence[Address], timeout: float, platform: Platform) -> None:
        self._addresses, self._timeout, self._platform = addresses, timeout, platform
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child: threads and connections stay with the parent."""
        self._waiters: dict[int, Waiter] = {}  # in order of arrival
        self._made: dict[None, list[Subscriber]] = {}

    @contextlib.contextmanager
    def waiting(self, channels: Sequence[str], limit: int = 1) -> Iterator[Waiter]:
        """Wait on channels. A confirmed subscription and each message wake the waiter."""
        waiter = Waiter(channels, limit)
        try:
            self._join(waiter)
            yield waiter
        finally:
            self._leave(waiter)

    def _join(self, waiter: Waiter) -> None:
        self._waiters[id(waiter)] = waiter
        if not self._made:
            make = (self._timeout, self._platform, self.channels, self.heard)
            new = self._platform.new_subscriber or Subscriber
            self._made.setdefault(None, [new(address, *make) for address in self._addresses])
        if all(map(self.hears, waiter.channels)):
            waiter.decide()  # the waiter may have missed a message before it joined
        self._attend()

    def _leave(self, waiter: Waiter) -> None:
        self._waiters.pop(id(waiter), None)
        if waiter.decided:  # the next waiter gets a wake-up that this waiter did not use
            for channel in waiter.channels:
                self.heard(channel)
        self._attend()

    def pass_on(self, waiter: Waiter) -> None:
        """Wake the next waiter for the same resource, because one message may concern both."""
        lines = [(channel, self.line(channel)) for channel in waiter.channels]
        behind = [_firsts(c, line[line.index(waiter) + 1 :]) for c, line in lines if waiter in line]
        for firsts in behind:
            if waiter.limit in firsts:
                firsts[waiter.limit].decide()

    def _attend(self) -> None:
        for subscriber in self._subscribers:
            subscriber.resubscribe()

    @property
    def _subscribers(self) -> list[Subscriber]:
        return self._made.get(None, [])

    def line(self, channel: str) -> list[Waiter]:
        """Return the waiters on a channel, in order of arrival."""
        return [one for one in list(self._waiters.values()) if channel in one.channels]

    def channels(self) -> set[str]:
        """Return the channels of all waiters."""
        return {channel for one in list(self._waiters.values()) for channel in one.channels}

    def hears(self, channel: str) -> bool:
        """Return whether at least one node has confirmed the subscription to a channel."""
        return self.subscriptions(channel) > 0

    def subscriptions(self, channel: str) -> int:
        """Return how many nodes have confirmed the subscription to a channel."""
        return sum(channel in subscriber.confirmed for subscriber in self._subscribers)

    def heard(self, channel: str, word: str = "") -> None:
        """Wake the first waiter on a channel. word: the message, not used here."""
        for first in _firsts(channel, self.line(channel)).values():
            first.decide()

    def close(self) -> None:
        """Close the connections for ever."""
        for subscriber in self._subscribers:
            subscriber.close()


def _firsts(channel: str, line: Sequence[Waiter]) -> dict[int, Waiter]:
    """Return the first waiter of each limit that a message on this channel concerns."""
    firsts: dict[int, Waiter] = {}
    for waiter in line:
        if waiter.awaits in ("", channel):
            firsts.setdefault(waiter.limit, waiter)
    return firsts
