"""The clock of fake nodes: it runs at the machine's rate, and a test makes it jump ahead."""

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

MIN_JUMP = 0.001  # seconds: a smaller difference is the noise between two clocks


@dataclass(frozen=True)
class Sample:
    """The last reading of a virtual clock. All times in seconds.

    real: the machine's monotonic clock. wall: since 1970, as freezegun or time-machine sets it.
    freezes: how many freezes of these tools are active. ahead: the sum of all jumps so far.
    exit_wall: the last wall reading inside the freeze that ended last, None if none has ended.
    """

    real: float
    wall: float
    freezes: int = 0
    ahead: float = 0.0
    exit_wall: float | None = None

    def jump(self, real: float, wall: float, freezes: int) -> float:
        """Return by how many seconds the clock has jumped ahead since this sample.

        The end of a freeze is no jump. A new freeze that lies before the machine's time counts from
        the last time of the freeze before it: two freezes in a row are time that passes.
        """
        gained = self.gained(real, wall)
        if freezes < self.freezes:
            return 0.0
        if freezes > self.freezes and gained < 0 and self.exit_wall is not None:
            return max(0.0, wall - self.exit_wall)
        return max(0.0, gained)

    def gained(self, real: float, wall: float) -> float:
        """Return by how many seconds the wall clock has gained on the machine's."""
        return (wall - self.wall) - (real - self.real)


class VirtualClock:
    """The time of fake nodes, and of every lock on them in this process.

    It runs at the machine's rate and never stops, so a waiting thread does not hang. `advance`
    makes it jump ahead, and so do freezegun (`freezer.tick(31)`, `move_to`) and time-machine
    (`traveller.shift(31)`, `move_to`) if they move the time ahead. A freeze, its end, or a clock
    that is set back has no effect. A jump acts like a suspended machine: a lease that ended during
    the jump is lost.
    """

    resolution = 0.0

    def __init__(self) -> None:
        self._machine = SystemClock()
        self._last = Sample(*self._read())
        self._epoch = self._last.wall - self._last.real
        self._mutex = new_mutex()
        self._jumps = self._announced = 0

    def now(self) -> float:
        """Return monotonic seconds. Never blocks, because a signal handler may call it."""
        last = self._last
        real, wall, freezes = self._read()
        if freezes == last.freezes and abs(last.gained(real, wall)) < MIN_JUMP:
            return real + last.ahead  # no tool has moved, frozen or released the clock
        jump = last.jump(real, wall, freezes)
        if self._mutex.acquire(False):
            if self._last is last:  # else another thread has just recorded the same jump
                exit_wall = last.wall if freezes < last.freezes else last.exit_wall
                self._last = Sample(real, wall, freezes, last.ahead + jump, exit_wall)
                self._jumps += jump > 0
            self._mutex.release()
        return real + last.ahead + jump

    def _read(self) -> tuple[float, float, int]:
        """Return the machine's monotonic seconds, the wall clock and the freezes of one moment."""
        for _ in range(5):
            before, freezes = self._machine.now(), active_freezes()
            wall = wall_clock()
            after = self._machine.now()
            if after - before < MIN_JUMP / 2 and active_freezes() == freezes:
                break  # else the thread was suspended between the readings
        return after, wall, freezes

    def wall_us(self) -> int:
        """Return microseconds since 1970, as freezegun or time-machine sets them."""
        return int(wall_clock() * 1e6)

    def node_ms(self) -> int:
        """Return the nodes' milliseconds since 1970, which are never set back."""
        return int((self._epoch + self.now()) * 1000)

    def sleep(self, seconds: float) -> None:
        """Sleep for this many seconds of the machine's time."""
        self._machine.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Jump ahead, for all nodes with this clock and for every lock on them."""
        self.now()
        with self._mutex:
            self._last = replace(self._last, ahead=self._last.ahead + seconds)
            self._jumps += 1
        self.tell()

    def tell(self) -> None:
        """Wake the watchdogs and waiters that use this clock if it jumped since the last call."""
        self.now()
        jumps = self._jumps
        if self._announced == jumps:
            return
        with contextlib.suppress(RuntimeError):  # a new session in the loop: the next call retries
            for session in sessions():
                if session.clock is self:
                    session.watchdog.look()
                    session.callers.on_listening()
            self._announced = jumps


def _freezegun_clocks() -> Sequence[Any]:
    """Return the clocks of freezegun's active freezes, the innermost last.

    Its fakes of `time` do not work here: below a threading.Thread, freezegun chooses by the modules
    on the stack and returns the real time.
    """
    return getattr(sys.modules.get("freezegun.api"), "freeze_factories", ())


def active_freezes() -> int:
    """Return how many freezes of freezegun and time-machine are active."""
    machine = sys.modules.get("time_machine")
    is_travelling = machine is not None and machine.escape_hatch.is_travelling()
    return len(_freezegun_clocks()) + is_travelling


def wall_clock() -> float:
    """Return seconds since 1970, as freezegun or time-machine sets them.

    Source: time-machine moves CLOCK_REALTIME, freezegun does not; neither moves CLOCK_BOOTTIME.
    """
    for factory in _freezegun_clocks()[-1:]:
        # a factory with auto_tick_seconds moves at each call, and the kit's calls must not move it
        ticks = hasattr(factory, "step_width")
        frozen: dt.datetime = factory.time_to_freeze if ticks else factory()
        return frozen.replace(tzinfo=dt.timezone.utc).timestamp()
    return time.clock_gettime(time.CLOCK_REALTIME)
