"""The waiters of this process, and which of them a release wakes.

The nodes know that this process waits for a resource, and a release names the first processes. A
release message is only a hint: a woken waiter makes an ordinary round. A waiter without a message
tries again by itself, at the latest when the other holder's lease ends. A process has one
subscriber connection to each node, made for its first waiter, with one channel: its inbox.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Iterable, Iterator, Sequence

from celery_redlock.lock.engine.registrar import Registrar
from celery_redlock.lock.model.handoff import TURN, Named, Namings, Registration, Standing
from celery_redlock.lock.model.keys import inbox_channel
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.platform.clock import Platform, new_token
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import Round
from celery_redlock.lock.transport.subscriber import Subscriber


class Waiter(Round):
    """A caller that waits until a lock may be free.

    resources: that it waits for. limit: of its lock, because a resource may be free for a higher
    limit only. since: seconds since 1970. awaits: the resource that refused it last; "" for any.
    turn: the monotonic second from which it may try, if a release has named its process; None if it
    is to ask first. turns: how many others were named before it. release: the id of the release
    that it is to use, "" for none.
    """

    awaits = ""
    turn: float | None = None
    turns = 0
    release = ""

    def __init__(self, resources: Sequence[str], limit: int = 1, since: float = 0.0) -> None:
        super().__init__()
        self.resources, self.limit, self.since = resources, limit, since

    def take(self) -> bool:
        """Return whether the waiter was woken since the last call."""
        woken, self.decided = self.decided, False
        return woken

    def wake_for(self, turn: float | None, turns: int = 0, release: str = "") -> None:
        """Wake the waiter for its turn. turn, turns, release: as of the class."""
        self.turn, self.turns, self.release = turn, turns, release
        self.decide()


class WaitQueue:
    """The waiters of this process in order of arrival; listens on every node while there are any.

    A release wakes only the first waiter of each limit, because more waiters would only collide.
    Each change is atomic and needs no mutex. So a finalizer or a signal handler may interrupt a
    change and wait for a lock, too. registrar: of the waiters, None for a queue without nodes.
    inbox: the channel on which releases name this process.

    An inbox that opens on a node may have missed releases there. Then the process registers its
    waiters, and the first ones ask the nodes.
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
        self._registered: dict[str, float] = {}  # by resource: since when, as the nodes know it
        # the subscribers' threads count alone
        self._counting = self._platform.new_mutex()
        self._namings = Namings(quorum_of(len(self._addresses)))

    @contextlib.contextmanager
    def waiting(self, resources: Sequence[str], limit: int = 1) -> Iterator[Waiter]:
        """Wait for resources. An inbox that opens and each message to it wake the waiter."""
        waiter = Waiter(resources, limit, self._platform.clock.wall_us() / 1e6)
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
        if self.is_listening:  # before, a release would take it for dead
            self._register(waiter.resources)
            waiter.decide()  # the waiter may have missed a release before it joined
        self._attend()

    def _leave(self, waiter: Waiter) -> None:
        self._waiters.pop(id(waiter), None)
        if waiter.decided:  # the next waiter gets a wake-up that this waiter did not use
            for resource in waiter.resources:
                for first in _firsts(resource, self.line(resource)).values():
                    first.wake_for(waiter.turn, waiter.turns, waiter.release)
        self._register(waiter.resources)
        self._attend()

    # what the nodes know

    def _register(self, resources: Iterable[str]) -> None:
        """Let the nodes know since when the first waiter for each resource waits."""
        if self._registrar is None:
            return
        for resource in resources:
            since = self._since(resource)
            if since is None:
                if self._registered.pop(resource, None) is not None:
                    self._unregister(resource)
            elif self._registered.get(resource) != since:
                self._registered[resource] = since
                self._registrar.register(Registration(self._name, resource, since))

    def _unregister(self, resource: str) -> None:
        if self._registrar is not None:
            self._registrar.unregister(self._name, resource)
            if self._since(resource) is not None:  # another thread has begun to wait meanwhile
                self._registered.pop(resource, None)  # it may have registered before
                self._register([resource])

    def _since(self, resource: str) -> float | None:
        """Return since when the first waiter waits that a release of a resource concerns."""
        waits = [one.since for one in self.line(resource) if one.awaits in ("", resource)]
        return waits[0] if waits else None

    def ask(self, waiter: Waiter, passed: int) -> Standing | None:
        """Ask the nodes whose turn it is; return None if they do not say. Waits for them.

        passed: how many other processes have had their turn. They leave the nodes' sets if the lock
        is free. None if the waiter waits for any of several resources, or if no release would name
        this process.
        """
        resources = [waiter.awaits] if waiter.awaits else waiter.resources
        since = self._since(resources[0])
        if self._registrar is None or len(resources) > 1 or since is None or not self.is_listening:
            return None
        self._registered[resources[0]] = since
        registration = Registration(self._name, resources[0], since, waiter.limit, passed)
        return self._registrar.standing(registration)

    def was_refused(self, waiter: Waiter) -> None:
        """Register a waiter again: another one may have taken it for dead."""
        for resource in waiter.resources:
            if waiter.awaits in ("", resource):  # of another one the nodes are to know no more
                self._registered.pop(resource, None)
        if self.is_listening:
            self._register(waiter.resources)

    # who is woken

    def _attend(self) -> None:
        for subscriber in self._subscribers:
            subscriber.resubscribe()

    @property
    def _subscribers(self) -> list[Subscriber]:
        return self._made.get(None, [])

    def line(self, resource: str) -> list[Waiter]:
        """Return the waiters for a resource, in order of arrival."""
        return [one for one in list(self._waiters.values()) if resource in one.resources]

    def channels(self) -> set[str]:
        """Return the channels to subscribe to: the inbox, if anybody waits."""
        return {self.inbox} if self._waiters else set()

    @property
    def listeners(self) -> int:
        """How many nodes can name this process: they have confirmed the subscription."""
        return sum(self.inbox in subscriber.confirmed for subscriber in self._subscribers)

    @property
    def is_listening(self) -> bool:
        """Whether at least one node can name this process."""
        return self.listeners > 0

    def heard(self, channel: str, message: str = "", node: int = 0) -> None:
        """Wake the first waiter that a node's message concerns. message: "" as the inbox opens."""
        if not message:
            self.look_again()
            return
        named = Named.parse(message, self._prefix)
        if named is None:
            return
        with self._counting:
            turns = self._namings.turns(named, node)
        if turns is None:
            return
        if self._since(named.resource) is None:
            self._unregister(named.resource)  # a registration came late, or one was not undone
        turn = self._platform.clock.now() + turns * TURN
        line = self.line(named.resource)
        for first in _firsts(named.resource, line, named.release).values():
            first.wake_for(turn, turns, named.release)

    def look_again(self) -> None:
        """Register all waiters, and wake the first ones: a node may have forgotten this process.

        Of waiters for permits all are woken: more than one permit may be free.
        """
        resources = {name for one in list(self._waiters.values()) for name in one.resources}
        self._registered.clear()
        self._register(resources)
        for resource in resources:
            line = self.line(resource)
            for_permits = [waiter for waiter in line if waiter.limit > 1]
            for waiter in (*_firsts(resource, line).values(), *for_permits):
                waiter.decide()

    def close(self) -> None:
        """Close the connections for ever, and wake all waiters."""
        for waiter in list(self._waiters.values()):
            waiter.decide()
        for subscriber in self._subscribers:
            subscriber.close()


def process_name(host: str, token: str = "") -> str:
    """Return a name for this process as a waiter, which no other process has."""
    return f"{host}:{os.getpid()}:{(token or new_token())[:8]}"


def _firsts(resource: str, line: Sequence[Waiter], release: str = "") -> dict[int, Waiter]:
    """Return the first waiter of each limit that a release of this resource concerns.

    release: the id of the release that names this process. If a waiter for one of several permits
    has another release to use, the next waiter is to use this one.
    """
    firsts: dict[int, Waiter] = {}
    for waiter in line:
        if waiter.awaits not in ("", resource):
            continue
        if release and waiter.limit > 1 and waiter.release not in ("", release):
            continue
        firsts.setdefault(waiter.limit, waiter)
    return firsts
