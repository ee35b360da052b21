"""Real time, what happens in it, and threads that rest in it.

Nothing here knows of locks. One event happens at a time, and a thread (a greenlet) runs until it
rests, so that the same seed always gives the same schedule.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

STALE = object()  # what an event returns that has become nothing meanwhile
SPINS = 100  # looks at one moment after which another thread goes on
LATE = 1e-6  # s by which a timer is late: sleeping until a moment must not end before it


class World:
    """One schedule: its real time in s, the events to come, and counts of what happened."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.witness: Any = None  # of `invariants`: sees what happens
        self.threads: list[Thread] = []
        self.hub = getcurrent()
        self.closed = False
        self.is_mute = False  # every message of a node is lost
        self.copies, self.lateness = 1, 0.0  # of each message; s by which it comes later
        self.lines: list[str] | None = [] if trace else None
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, moment: float, do: Callable[..., object], *args: Any) -> None:
        """Let something happen at a real s; what is due at one moment happens in this order."""
        if moment < math.inf:
            self._number += 1
            heapq.heappush(self._events, (moment, self._number, do, args))

    def run(self, until: float, check: Callable[[], None], most: int = 100_000) -> None:
        """Let happen what is due by a real s, `most` events at the most; check after each."""
        events, pop = self._events, heapq.heappop
        done = 0
        while events and events[0][0] <= until and done < most:
            moment, _, do, args = pop(events)
            self.now = moment
            if do(*args) is not STALE:
                done += 1
                check()
        self.counts["events"] += done
        if done < most:
            self.now = max(self.now, min(until, 1e9))

    def note(self, text: str, *args: object) -> None:
        """Keep a line of what happens, where somebody wants to read it."""
        if self.lines is not None:
            self.lines.append(f"{self.now:9.4f}  {text % args}")

    def close(self) -> None:
        """End every thread where it rests."""
        self.closed = True
        self._events.clear()
        for thread in self.threads:
            if thread:  # started and not ended
                thread.throw(GreenletExit)
        self.threads.clear()


class Killed(GreenletExit):
    """The world ended, or the process did."""


class Thread(greenlet):
    """One thread of a simulated process. cut_in: I/O steps until it is interrupted, 0: never."""

    process: Any
    cut_in = 0
    _spins, _spun_at = 0, 0.0

    def __init__(self, world: World, process: Any, run: Callable[[], object]) -> None:
        super().__init__(run, world.hub)
        self.world, self.process = world, process
        self._ticket = 0  # which rest this is; a wake-up belongs to one of them
        self._resting = False
        world.threads.append(self)
        world.at(world.now, self._resume, 0, True)

    def rest(self, until: float = math.inf) -> bool:
        """Sleep until woken (True), or until a real s (False)."""
        if self.world.closed:
            raise Killed
        self._resting = True
        self.world.at(until + LATE, self._resume, self._ticket, False)
        woken: bool = self.world.hub.switch()
        return woken

    def spin(self) -> None:
        """Do something in no time; once in a while let other threads go on, as a system does."""
        self._spins = self._spins + 1 if self._spun_at == self.world.now else 0
        self._spun_at = self.world.now
        if self._spins > SPINS:
            self.rest(self.world.now)

    def wake(self) -> None:
        """Let it go on, once it has been given the processor."""
        if self._resting:
            self._resting = False
            self.world.at(self.world.now, self._resume, self._ticket, True)

    def go_on(self) -> None:
        """Let it go on at once; for whoever is no thread itself."""
        if self._resting:
            self._resume(self._ticket, True)

    def _resume(self, ticket: int, woken: bool) -> object:
        if ticket != self._ticket or self.process.dead:
            return STALE  # it has gone on meanwhile
        until = self.process.stopped_until
        if until > self.world.now:
            self.world.at(until, self._resume, ticket, woken)
            return STALE
        self._resting = False
        self._ticket += 1
        if ticket:
            self.switch(woken)
        else:
            self.switch()  # its begin
        return None


def running() -> Thread | None:
    """Return the thread that runs, None while the world is being made or looked at."""
    current = getcurrent()
    return current if isinstance(current, Thread) else None
