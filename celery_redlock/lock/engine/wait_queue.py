"""The waiters of this process, and which of them a release wakes.

The nodes know that this process waits for a resource, and a release names the first processes. A
release message is only a hint: a woken waiter makes an ordinary round. A waiter without a message
tries again by itself, at the latest when the other holder's lease ends. A process has one
subscriber connection to each node, made for its first waiter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Iterator, Sequence

from celery_redlock.lock.engine.registrar import Registrar
from celery_redlock.lock.model.handoff import (
    FOR_EARLIER_VERSIONS,
    TURN,
    Named,
    Namings,
    Registration,
    Standing,
)
from celery_redlock.lock.model.keys import inbox_channel, resource_of_channel, waiting_channel
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.platform.clock import Platform, new_token
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import Round
from celery_redlock.lock.transport.subscriber import Subscriber


class Waiter(Round):
    """A caller that waits until a lock may be free.

    channels: of the releases it waits for. limit: of its lock, because a resource may be free for a
    higher limit only. since: seconds since 1970. awaits: the channel of the resource that refused
    it last; "" for any channel. turn: the monotonic second from which it may try, if a release has
    named its process; None if it was woken by a message to all. turns: how many others were named
    before it. release: the id of the release that it is to use, "" for none.
    """

    awaits = ""
    turn: float | None = None
    turns = 0
    release = ""

    def __init__(self, channels: Sequence[str], limit: int = 1, since: float = 0.0) -> None:
        super().__init__()
        self.channels, self.limit, self.since = channels, limit, since

    def take(self) -> bool:
        """Return whether the waiter was woken since the last call."""
        woken, self.decided = self.decided, False
        return woken

    def wake_for(self, turn: float | None, turns: int = 0, release: str = "") -> None:
        """Wake the waiter for its turn. turn, turns, release: as of the class."""
        self.turn, self.turns, self.release = turn, turns, release
        self.decide()


class WaitQueue:
    """The waiters of this process in order of arrival; subscribes to releases on every node.

    A release wakes only the first waiter of each limit, because more waiters would only collide.
    Each change is atomic and needs no mutex. So a finalizer or a signal handler may interrupt a
    change and wait for a lock, too. registrar: of the waiters, None for a queue without nodes.
    inbox: the channel on which releases name this process.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        timeout: float,
        platform: Platform,
        prefix: str = "",
        registrar: Registrar | None = None,
    ) -> None:
        self._addresses, self._timeout, self._platform = addresses, timeout, platform
        self._prefix, self._registrar = prefix, registrar
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child: threads and connections stay with the parent."""
        self._waiters: dict[int, Waiter] = {}  # in order of arrival
        self._made: dict[None, list[Subscriber]] = {}
        self._name = process_name(socket.gethostname(), self._platform.new_token())
        self.inbox = inbox_channel(self._prefix, self._name)
        self._registered: dict[str, float] = {}  # by channel: since when, as the nodes know it
        # the subscribers' threads count alone
        self._counting = self._platform.new_mutex()
        self._namings = Namings(quorum_of(len(self._addresses)))

    @contextlib.contextmanager
    def waiting(self, channels: Sequence[str], limit: int = 1) -> Iterator[Waiter]:
        """Wait on channels. A confirmed subscription and each message wake the waiter."""
        waiter = Waiter(channels, limit, self._platform.clock.wall_us() / 1e6)
        try:
            self._join(waiter)
            yield waiter
        except BaseException:
            waiter.decided = True  # it may have taken a wake-up, which the next waiter gets
            raise
        finally:
            self._leave(waiter)

    def _join(self, waiter: Waiter) -> None:
        self._waiters[id(waiter)] = waiter
        if not self._made:
            how = (self._timeout, self._platform, self.channels)
            new = self._platform.new_subscriber or Subscriber
            made = [
                new(address, *how, functools.partial(self.heard, node=node))
                for node, address in enumerate(self._addresses)
            ]
            self._made.setdefault(None, made)
        if all(map(self.hears, waiter.channels)):
            waiter.decide()  # the waiter may have missed a message before it joined
        if self.hears_names:  # before, a release would take it for dead
            self._register(waiter.channels)
        self._attend()

    def _leave(self, waiter: Waiter) -> None:
        self._waiters.pop(id(waiter), None)
        if waiter.decided:  # the next waiter gets a wake-up that this waiter did not use
            for channel in waiter.channels:
                for first in _firsts(channel, self.line(channel)).values():
                    first.wake_for(waiter.turn, waiter.turns, waiter.release)
        self._register(waiter.channels)
        self._attend()

    # what the nodes know

    def _register(self, channels: Sequence[str]) -> None:
        """Let the nodes know since when the first waiter of each channel waits."""
        if self._registrar is None:
            return
        for channel in channels:
            since = self._since(channel)
            if since is None:
                if self._registered.pop(channel, None) is not None:
                    self._unregister(channel)
            elif self._registered.get(channel) != since:
                self._registered[channel] = since
                self._registrar.register(self._registration(channel, since))

    def _unregister(self, channel: str) -> None:
        if self._registrar is not None:
            self._registrar.unregister(self._name, resource_of_channel(self._prefix, channel))
            if self._since(channel) is not None:  # another thread has begun to wait meanwhile
                self._registered.pop(channel, None)  # it may have registered before
                self._register([channel])

    def _since(self, channel: str) -> float | None:
        """Return since when the first waiter waits that a message on a channel concerns."""
        waits = [one.since for one in self.line(channel) if one.awaits in ("", channel)]
        return waits[0] if waits else None

    def _registration(
        self, channel: str, since: float, limit: int = 1, passed: int = 0
    ) -> Registration:
        resource = resource_of_channel(self._prefix, channel)
        return Registration(self._name, resource, since, limit, passed)

    def ask(self, waiter: Waiter, passed: int) -> Standing | None:
        """Ask the nodes whose turn it is; return None if they do not say. Waits for them.

        passed: how many other processes have had their turn. They leave the nodes' sets if the lock
        is free. None if the waiter waits for any of several resources, or if no release would name
        this process.
        """
        channels = [waiter.awaits] if waiter.awaits else waiter.channels
        since = self._since(channels[0])
        if self._registrar is None or len(channels) > 1 or since is None or not self.hears_names:
            return None
        self._registered[channels[0]] = since
        registration = self._registration(channels[0], since, waiter.limit, passed)
        return self._registrar.standing(registration)

    def was_refused(self, waiter: Waiter) -> None:
        """Register a waiter again: another one may have taken it for dead."""
        for channel in waiter.channels:
            if waiter.awaits in ("", channel):  # of another one the nodes are to know no more
                self._registered.pop(channel, None)
        if self.hears_names:
            self._register(waiter.channels)

    # who is woken

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
        """Return the channels of all waiters, and those by which releases name this process."""
        common = {channel for one in list(self._waiters.values()) for channel in one.channels}
        if not common or self._registrar is None:
            return common
        return common | {waiting_channel(self._prefix, c) for c in common} | {self.inbox}

    def hears(self, channel: str) -> bool:
        """Return whether at least one node has confirmed the subscription to a channel."""
        return self.subscriptions(channel) > 0

    @property
    def hears_names(self) -> bool:
        """Whether at least one node can name this process."""
        return self.hears(self.inbox)

    def subscriptions(self, channel: str) -> int:
        """Return how many nodes have confirmed the subscription to a channel."""
        return sum(channel in subscriber.confirmed for subscriber in self._subscribers)

    def heard(self, channel: str, word: str = "", node: int = 0) -> None:
        """Wake the first waiter that a message concerns. word: "" as a subscription begins."""
        if channel == self.inbox:
            self._heard_name(word, node)
        elif not word.endswith(FOR_EARLIER_VERSIONS) or not self.hears_names:
            for first in _firsts(channel, self.line(channel)).values():
                first.wake_for(None)

    def _heard_name(self, word: str, node: int) -> None:
        named = Named.parse(word)
        if not word:
            self._registered.clear()  # the node may have lost its memory
            self._register(list({c for one in list(self._waiters.values()) for c in one.channels}))
        elif named is not None:
            with self._counting:
                turns = self._namings.turns(named, node)
            if turns is None:
                return
            if self._since(named.channel) is None:
                self._unregister(named.channel)  # a registration came late, or one was not undone
            turn = self._platform.clock.now() + turns * TURN
            for first in _firsts(named.channel, self.line(named.channel), named.release).values():
                first.wake_for(turn, turns, named.release)

    def close(self) -> None:
        """Close the connections for ever, and wake all waiters."""
        for waiter in list(self._waiters.values()):
            waiter.decide()
        for subscriber in self._subscribers:
            subscriber.close()


def process_name(host: str, token: str = "") -> str:
    """Return a name for this process as a waiter, which no other process has."""
    return f"{host}:{os.getpid()}:{(token or new_token())[:8]}"


def _firsts(channel: str, line: Sequence[Waiter], release: str = "") -> dict[int, Waiter]:
    """Return the first waiter of each limit that a message on this channel concerns.

    release: the id of the release that names this process. If a waiter for one of several permits
    has another release to use, the next waiter is to use this one.
    """
    firsts: dict[int, Waiter] = {}
    for waiter in line:
        if waiter.awaits not in ("", channel):
            continue
        if release and waiter.limit > 1 and waiter.release not in ("", release):
            continue
        firsts.setdefault(waiter.limit, waiter)
    return firsts
