"""Pollers: each waiter polls the sockets of all nodes, and its own waker."""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Any

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.transport.connection import POISONED
from celery_redlock.lock.transport.node_client import NodeClient

SPARE_POLLERS, SPARED_FOR = 2, 3.0  # free pollers that are kept; seconds until others are dropped


class Poller:
    """The poll object of one waiter: the socket of every node, and the waiter's own waker.

    native: for a real thread, also if greenlets are in use. parked: whether `wake` wakes the
    waiter, who sets it before it reads whether its round is decided. The deciding thread does both
    in the other order: at least one of them sees the other's write, so no wake-up is lost.
    """

    def __init__(self, platform: Platform, *, native: bool) -> None:
        self._platform, self.native = platform, native
        self._waker = platform.new_waker()
        self._topology = -1
        self._poll: Any = None
        self._by_descriptor: dict[int, NodeClient] = {}
        self.parked = False

    def wake(self) -> None:
        """Wake the waiter if it is parked in `poll`. Never waits."""
        if self.parked:
            self._waker.wake()

    def poll(self, nodes: Sequence[NodeClient], topology: int, seconds: float) -> list[NodeClient]:
        """Return the nodes whose sockets are ready, after this many seconds at most.

        topology: of `PollerPool`. If it has changed, a new poll object is made.
        """
        if topology != self._topology:
            self._topology = -1  # first: if an exception interrupts the next line, this is repeated
            self._topology = topology if self._arrange(nodes) else -1
        ready = self._poll.poll(math.ceil(seconds * 1000))
        self.parked = False
        by_descriptor, found = self._by_descriptor, []
        for descriptor, _ in ready:  # no comprehension: in Python 3.11 each is a call
            if descriptor in by_descriptor:
                found.append(by_descriptor[descriptor])
        if len(found) < len(ready):
            self._waker.clear()
        return found

    def _arrange(self, nodes: Sequence[NodeClient]) -> bool:
        """Make a new poll object; return whether it is valid until the connections change."""
        lasts = True
        self._poll = self._platform.new_poll(self.native)
        self._poll.register(self._waker.descriptor, select.POLLIN)
        self._by_descriptor = {}
        for node in nodes:
            if node.jobs:
                node.go_on()
            connection = node.connection
            if connection is None:
                continue
            descriptor = connection.socket.fileno()
            if connection.poisoned or descriptor < 0:
                node.drop(connection, POISONED)
                continue
            self._by_descriptor[descriptor] = node
            self._poll.register(
                descriptor, select.POLLIN | (select.POLLOUT if connection.write_buffer else 0)
            )
            if connection.write_buffer:
                lasts = False  # the next poll checks whether it is empty by then
        return lasts


class PollerPool:
    """The pollers of a set of nodes: in use, or free.

    topology: counts the changes of the connections; after a change, a poller makes a new poll
    object. taken: the pollers in use, by id.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.topology = 0
        self.taken: dict[int, Poller] = {}
        self._free: dict[bool, list[Poller]] = {False: [], True: []}  # by `native`
        self._unneeded = {False: 0, True: 0}  # how many were free since the last `drop_spare`
        self._spared_until = 0.0  # monotonic seconds

    def take(self, *, native: bool) -> Poller:
        """Return a poller that is not in use."""
        free = self._free[native]
        try:
            poller = free.pop()
        except IndexError:
            poller = Poller(self._platform, native=native)
        if len(free) < self._unneeded[native]:
            self._unneeded[native] = len(free)
        self.taken[id(poller)] = poller
        return poller

    def put_back(self, poller: Poller) -> None:
        """Keep a poller that is not in use any more."""
        self._free[poller.native].append(poller)

    def rearm(self) -> None:
        """Make every waiter look at the connections again."""
        self.topology += 1
        for poller in list(self.taken.values()):
            poller.wake()

    def drop_spare(self, now: float) -> float:
        """Drop pollers that a peak of waiters has left; return when to call this again.

        Drops only pollers that were free since the last call, so that frequent waits make no new
        pollers.
        """
        if now >= self._spared_until:
            for native, free in self._free.items():
                del free[: max(0, self._unneeded[native] - SPARE_POLLERS)]
                self._unneeded[native] = len(free)
            self._spared_until = now + SPARED_FOR
        has_spare = any(len(free) > SPARE_POLLERS for free in self._free.values())
        return self._spared_until if has_spare else math.inf
