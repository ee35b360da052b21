"""The clock of fake nodes: it goes on as the machine's does, and a test makes it jump."""

from __future__ import annotations

import contextlib
import datetime as dt
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_redlock.lock.client import sessions
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.platform.threads import new_mutex

LEAST_JUMP = 0.001  # s: less than that is the noise of two clocks


@dataclass(frozen=True)
class Sample:
    """What a virtual clock has last compared. Times in s.

    real: monotonic. wall: since 1970, as a test says. depth: how many tools hold the clock.
    ahead: by how much the virtual clock is. left: the wall of what held the clock before.
    """

    real: float
    wall: float
    depth: int = 0
    ahead: float = 0.0
    left: float | None = None

    def jump(self, real: float, wall: float, depth: int) -> float:
        """Return the s by which the clock has jumped ahead since.

        Whoever lets go of the clock lets no time pass by that; who holds it next goes on from
        where that was, or from the machine's time, whichever means that time has passed.
        """
        gained = (wall - self.wall) - (real - self.real)
        if depth < self.depth:
            return 0.0
        if depth > self.depth and gained < 0 and self.left is not None:
            return max(0.0, wall - self.left)
        return max(0.0, gained)

    def says_the_same(self, real: float, wall: float, depth: int) -> bool:
        """Tell whether nobody has touched the clock since."""
        gained = (wall - self.wall) - (real - self.real)
        return depth == self.depth and abs(gained) < LEAST_JUMP


class VirtualClock:
    """What time it is for fake nodes, and for whoever locks on them in this process.

    It goes on as the machine's clock does, and never stops: threads that wait do not hang. It
    jumps ahead by `advance`, and whenever freezegun (`freezer.tick(31)`, `move_to`) or time-machine
    (`traveller.shift(31)`, `move_to`) moves the time ahead; that they freeze it, or set it back, or
    let go of it, does not touch it. A jump is what a suspended machine has: who held a lease has
    lost it.
    """

    resolution = 0.0

    def __init__(self) -> None:
        self._machine = SystemClock()
        self._last = Sample(*self._read())
        self._epoch = self._last.wall - self._last.real
        self._mutex = new_mutex()
        self._jumps = self._told = 0

    def now(self) -> float:
        """Return monotonic s. Never waits: a signal handler may ask."""
        last = self._last
        real, wall, depth = self._read()
        if last.says_the_same(real, wall, depth):
            return real + last.ahead
        jump = last.jump(real, wall, depth)
        if self._mutex.acquire(False):
            if self._last is last:  # else another thread has just noticed the same
                left = last.wall if depth < last.depth else last.left
                self._last = Sample(real, wall, depth, last.ahead + jump, left)
                self._jumps += jump > 0
            self._mutex.release()
        return real + last.ahead + jump

    def _read(self) -> tuple[float, float, int]:
        """Return the machine's monotonic s, and the wall and its depth as of one moment."""
        for _ in range(5):
            before, depth = self._machine.now(), held_by()
            wall = wall_clock()
            after = self._machine.now()
            if after - before < LEAST_JUMP / 2 and held_by() == depth:
                break  # else the thread was stopped in between
        return after, wall, depth

    def wall_us(self) -> int:
        """Return the us since 1970, as a test says."""
        return int(wall_clock() * 1e6)

    def node_ms(self) -> int:
        """Return the ms since 1970 of the nodes, which are never set back."""
        return int((self._epoch + self.now()) * 1000)

    def sleep(self, seconds: float) -> None:
        """Let so many s pass."""
        self._machine.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Jump so many s ahead, for all nodes that go by this clock and all who lock on them."""
        self.now()
        with self._mutex:
            self._last = replace(self._last, ahead=self._last.ahead + seconds)
            self._jumps += 1
        self.tell()

    def tell(self) -> None:
        """Wake what sleeps by this clock, where it has jumped since the last time."""
        self.now()
        jumps = self._jumps
        if self._told == jumps:
            return
        with contextlib.suppress(RuntimeError):  # one was made meanwhile: the next time
            for session in sessions():
                if session.clock is self:
                    session.watchdog.look()
                    for channel in session.wait_queue.channels():
                        session.wait_queue.heard(channel)
            self._told = jumps


def _frozen() -> Sequence[Any]:
    """Return what freezegun goes by, the innermost last.

    Its own fakes of `time` are of no use here: what is called near the top of a threading.Thread
    is given the real time, by the modules on the stack.
    """
    return getattr(sys.modules.get("freezegun.api"), "freeze_factories", ())


def held_by() -> int:
    """Return how many of freezegun and time-machine hold the clock, each freeze counted."""
    machine = sys.modules.get("time_machine")
    return len(_frozen()) + (machine is not None and machine.escape_hatch.is_travelling())


def wall_clock() -> float:
    """Return the s since 1970 as a test says.

    Source: time-machine moves CLOCK_REALTIME, freezegun does not; neither moves CLOCK_BOOTTIME.
    """
    for factory in _frozen()[-1:]:
        steps = hasattr(factory, "step_width")  # auto_tick_seconds: each look moves it; not ours
        frozen: dt.datetime = factory.time_to_freeze if steps else factory()
        return frozen.replace(tzinfo=dt.timezone.utc).timestamp()
    return time.clock_gettime(time.CLOCK_REALTIME)
