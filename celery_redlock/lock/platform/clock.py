"""The clock, which is the only source of time, and the platform that a `Redlock` uses."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from celery_redlock.lock.platform.threads import (
    DeadlineTimer,
    Mutex,
    PerFlow,
    Sleeper,
    TryLock,
    Waker,
    get_ident,
    gevent_here,
    new_mutex,
    new_poll,
    new_sleeper,
    pause,
    pause_keeping_gil,
    start_thread,
)


class Clock(Protocol):
    """A monotonic clock that can sleep."""

    @property
    def resolution(self) -> float:
        """The least difference in seconds between two different readings of `now`."""

    def now(self) -> float:
        """Return monotonic seconds; only differences are meaningful."""

    def wall_us(self) -> int:
        """Return microseconds since 1970 by the wall clock, which may be set back."""

    def sleep(self, seconds: float) -> None:
        """Sleep for this many seconds; other greenlets may run meanwhile."""


class SystemClock:
    """The machine's clock. If possible, it also runs while the machine is suspended.

    Source: clock_gettime(2), CLOCK_BOOTTIME. CLOCK_MONOTONIC stops during suspend, so the lease of
    a laptop or a migrated virtual machine would outlive the nodes' keys. On macOS, CLOCK_MONOTONIC
    runs on and time.monotonic stops.
    """

    now: Callable[[], float]

    def __init__(self) -> None:
        clock_name = "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
        clock_id = getattr(time, clock_name, None)
        if clock_id is None:
            self.now = time.monotonic
            self.resolution = time.get_clock_info("monotonic").resolution
        else:
            self.now = functools.partial(time.clock_gettime, clock_id)
            self.resolution = time.clock_getres(clock_id)

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def sleep(self, seconds: float) -> None:
        gevent = gevent_here()
        (time if gevent is None else gevent).sleep(seconds)


def new_token() -> str:
    """Return 128 random bits in hex, new for each round. They identify the owner of a key."""
    return os.urandom(16).hex()


@dataclass(frozen=True)
class Platform:
    """What the lock uses of the interpreter and the operating system: time, threads, wake-ups.

    All parts of a `Redlock` get the same value, so that a simulation can pass its own.
    new_poll: takes `native`, as `new_poll` does. new_local: returns a `PerFlow`.
    """

    clock: Clock
    start_thread: Callable[[Callable[[], None]], None] = start_thread
    pause: Callable[[float], None] = pause
    pause_keeping_gil: Callable[[float], None] = pause_keeping_gil
    get_ident: Callable[[], int] = get_ident
    new_mutex: Callable[[], Mutex] = new_mutex
    new_poll: Callable[[bool], Any] = new_poll
    new_waker: Callable[[], Any] = Waker
    new_sleeper: Callable[[], Sleeper] = new_sleeper
    new_local: Callable[[Callable[[], Any]], Any] = PerFlow
    new_token: Callable[[], str] = new_token
    new_subscriber: Callable[..., Any] | None = None  # None: the package's own connection

    def try_lock(self) -> TryLock:
        return TryLock(self.get_ident, self.pause)

    def deadline_timer(self) -> DeadlineTimer:
        return DeadlineTimer(self.new_mutex)


# By `Address.server`, for every later `Redlock` that names it; empty except in tests. A lock on a
# node with a clock of its own uses that clock, so the holder's lease ends together with the key.
installed: dict[str, Platform] = {}


def platform_for(addresses: Iterable[Any]) -> Platform:
    """Return the platform of the first address that has one, else the machine's."""
    for address in addresses:
        platform: Platform | None = address.platform or installed.get(address.server)
        if platform is not None:
            return platform
    return Platform(SystemClock())
