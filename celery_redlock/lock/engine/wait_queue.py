"""Who of this process waits for a lock, and whom a release wakes.

A message is a hint and nothing else: whoever is woken makes a round like any other, and whoever
never hears one tries again by itself, at the end of the lease that refused it at the latest. One
subscriber connection a node and process, made when somebody waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import Round
from celery_redlock.lock.transport.subscriber import Subscriber


class Waiter(Round):
    """One that waits until something may be free.

    channels: where that is said. limit: by which it asks; what is taken to one may be free to
    another. awaits: the one channel of what refused it last, "" where it may be any.
    """

    awaits = ""

    def __init__(self, channels: Sequence[str], limit: int = 1) -> None:
        super().__init__()
        self.channels, self.limit = channels, limit

    def take(self) -> bool:
        """Return whether it has been rung since the last time."""
        rung, self.decided = self.decided, False
        return rung


class WaitQueue:
    """Who waits in this process, and for what; hears of releases on every node.

    Of those that wait for one resource the first alone is rung, or the first of each limit: many
    would only collide. Each change is one step, and needs no mutex: a finalizer or a signal handler
    may come in between, and wait, too.
    """

    def __init__(self, addresses: Sequence[Address], timeout: float, platform: Platform) -> None:
        self._addresses, self._timeout, self._platform = addresses, timeout, platform
        self.forget()

    def forget(self) -> None:
        """Start anew after a fork: threads and connections stay with the parent."""
        self._waiters: dict[int, Waiter] = {}  # in the order in which they came
        self._made: dict[None, list[Subscriber]] = {}

    @contextlib.contextmanager
    def waiting(self, channels: Sequence[str], limit: int = 1) -> Iterator[Waiter]:
        """Wait on channels; the waiter is rung once one is subscribed to, and at each message."""
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
            waiter.decide()  # subscribed before it came: something may have been missed
        self._attend()

    def _leave(self, waiter: Waiter) -> None:
        self._waiters.pop(id(waiter), None)
        if waiter.decided:  # a word that it did not use is the next one's
            for channel in waiter.channels:
                self.heard(channel)
        self._attend()

    def pass_on(self, waiter: Waiter) -> None:
        """Ring who waits behind a waiter for the same: one word may have been for both."""
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
        """Return who waits on a channel, in the order in which they came."""
        return [one for one in list(self._waiters.values()) if channel in one.channels]

    def channels(self) -> set[str]:
        """Return the channels that somebody waits on."""
        return {channel for one in list(self._waiters.values()) for channel in one.channels}

    def hears(self, channel: str) -> bool:
        """Tell whether a node has confirmed that it will say what is published there."""
        return self.subscriptions(channel) > 0

    def subscriptions(self, channel: str) -> int:
        """Return how many nodes announce the releases on a channel to this process."""
        return sum(channel in subscriber.confirmed for subscriber in self._subscribers)

    def heard(self, channel: str, word: str = "") -> None:
        """Ring the first that waits on a channel; word: which release it was does not matter."""
        for first in _firsts(channel, self.line(channel)).values():
            first.decide()

    def close(self) -> None:
        """Close the connections for good."""
        for subscriber in self._subscribers:
            subscriber.close()


def _firsts(channel: str, line: Sequence[Waiter]) -> dict[int, Waiter]:
    """Return the first of each limit in a line that a word on this channel may be for."""
    firsts: dict[int, Waiter] = {}
    for waiter in line:
        if waiter.awaits in ("", channel):
            firsts.setdefault(waiter.limit, waiter)
    return firsts
