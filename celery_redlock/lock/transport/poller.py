"""Pollers: a waiter polls the sockets of all nodes, and its own waker.

A poller has up to three descriptors, and each reply wakes every thread that polls. So only some of
many waiters poll, and the others sleep in between.
"""

from __future__ import annotations

import contextlib
import math
import select
from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.threads import TURN_TRIES, Sleeper, gevent_here
from celery_redlock.lock.transport.command import Round
from celery_redlock.lock.transport.connection import POISONED
from celery_redlock.lock.transport.node import Node

MAX_POLLERS = 16  # that are in use; threads of the watchdog get more
MIN_DOZE = 0.001  # seconds between the first two looks of a waiter without a poller
MAX_DOZE = 0.05
SPARE_POLLERS = 2  # free ones that are kept
SPARE_LIFETIME = 3.0  # seconds until others are dropped


class Poller:
    """The poll object of one waiter: the socket of every node, and the waiter's own waker.

    native: for a real thread, also if greenlets are in use. parked: whether `wake` wakes the
    waiter, who sets it before it reads whether its round is decided. The deciding thread does both
    in the other order: at least one of them sees the other's write, so no wake-up is lost.
    """

    def __init__(self, platform: Platform, *, native: bool) -> None:
        self._platform = platform
        self.native = native
        self._waker = platform.new_waker()
        self._topology = -1
        self._poll: Any = None
        self._by_descriptor: dict[int, Node] = {}
        self.parked = False

    def wake(self) -> None:
        """Wake the waiter if it is parked in `poll`. Never waits."""
        if self.parked:
            self._waker.wake()

    def poll(self, nodes: Sequence[Node], topology: int, seconds: float) -> list[Node]:
        """Return the nodes whose sockets are ready, after this many seconds at most.

        topology: of `PollerPool`. If it has changed, a new poll object is made.
        """
        if topology != self._topology:
            self._topology = -1  # first: if an exception interrupts the next line, this is repeated
            self._topology = topology if self._arrange(nodes) else -1
        ready = self._poll.poll(math.ceil(seconds * 1000))
        self.parked = False
        by_descriptor = self._by_descriptor
        ready_nodes = []
        for descriptor, _ in ready:  # no comprehension: in Python 3.11 each is a call
            if descriptor in by_descriptor:
                ready_nodes.append(by_descriptor[descriptor])
        if len(ready_nodes) < len(ready):
            self._waker.clear()
        return ready_nodes

    def _arrange(self, nodes: Sequence[Node]) -> bool:
        """Make a new poll object; return whether it is valid until the connections change."""
        is_stable = True
        self._poll = self._platform.new_poll(self.native)
        self._poll.register(self._waker.descriptor, select.POLLIN)
        self._by_descriptor = {}
        for node in nodes:
            node.jobs.go_on()
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
                is_stable = False  # the next poll checks whether it is empty by then
        return is_stable


class PollerPool:
    """The pollers of a set of nodes: in use, or free.

    topology: counts the changes of the connections; after a change, a poller makes a new poll
    object. taken: the pollers in use, by id. asleep: what waiters without a poller sleep on, by id.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.forget()

    def forget(self) -> None:
        """Reset after a fork: the pollers and their waiters stay with the parent."""
        self.topology = 0
        self.taken: dict[int, Poller] = {}
        self.asleep: dict[int, Sleeper] = {}
        self._free: dict[bool, list[Poller]] = {False: [], True: []}  # by `native`
        self._unneeded = {False: 0, True: 0}  # how many were free since the last `drop_spare`
        self._spared_until = 0.0  # monotonic seconds

    def take(self, *, native: bool) -> Poller | None:
        """Return a poller that is not in use; None if too many are, or no descriptor is left."""
        if len(self.taken) >= MAX_POLLERS and not native:
            return None
        by_poll = native or gevent_here() is None
        free = self._free[by_poll]
        try:
            poller = free.pop()
        except IndexError:
            try:
                poller = Poller(self._platform, native=by_poll)
            except OSError:
                return None
        if len(free) < self._unneeded[by_poll]:
            self._unneeded[by_poll] = len(free)
        self.taken[id(poller)] = poller
        return poller

    def wait_for_one(
        self, round_: Round, until: float, read: Callable[[int], object], *, native: bool
    ) -> Poller | None:
        """Wait without a poller; return one that is free, or None at the end of the round.

        read: reads from all nodes, in so many tries, in case that no other one reads the reply.
        """
        poller = None
        pause = MIN_DOZE
        while poller is None:
            remaining = until - self._platform.clock.now()
            self.doze(round_, min(remaining, pause), native=native)
            read(TURN_TRIES if remaining <= 0 else 2)
            # also if the round is decided: to put the poller back wakes the next one that has none
            poller = self.take(native=native)
            pause = min(pause * 2, MAX_DOZE)
            if remaining <= 0 or round_.decided:
                break
        return poller

    def doze(self, round_: Round, seconds: float, *, native: bool) -> None:
        """Sleep without a descriptor, until the round is decided or a poller is free."""
        platform = self._platform
        wake = round_.wake
        sleeper = platform.deadline_timer() if native else platform.new_sleeper()
        round_.wake = sleeper.wake
        try:
            self.asleep[id(sleeper)] = sleeper
            if not round_.decided:
                sleeper.sleep(seconds)
        finally:
            round_.wake = wake
            self.asleep.pop(id(sleeper), None)

    def put_back(self, poller: Poller) -> None:
        """Keep a poller that is not in use any more, and wake a waiter that has none."""
        self._free[poller.native].append(poller)
        if self.asleep:
            with contextlib.suppress(KeyError):  # it has woken meanwhile
                self.asleep.popitem()[1].wake()

    def rearm(self) -> None:
        self.topology += 1
        for poller in list(self.taken.values()):
            poller.wake()

    def drop_spare(self, now: float) -> float:
        """Drop pollers that a peak of waiters has left; return when to call this again.

        Only those that were free since the last call, so that frequent waits make no new ones.
        """
        if now >= self._spared_until:
            for native, free in self._free.items():
                del free[: max(0, self._unneeded[native] - SPARE_POLLERS)]
                self._unneeded[native] = len(free)
            self._spared_until = now + SPARE_LIFETIME
        has_spare = any(len(free) > SPARE_POLLERS for free in self._free.values())
        return self._spared_until if has_spare else math.inf
