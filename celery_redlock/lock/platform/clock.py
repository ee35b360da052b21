"""The one seam for time, and the platform that everything of a `Redlock` is made with."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from celery_redlock.lock.platform.gil import pause_keeping_gil
from celery_redlock.lock.platform.greenlets import gevent_here, new_poll
from celery_redlock.lock.platform.threads import (
    DeadlineTimer,
    Mutex,
    PerFlow,
    Waker,
    get_ident,
    new_mutex,
    pause,
    start_thread,
)
from celery_redlock.lock.platform.turns import Turn


class Clock(Protocol):
    """Monotonic seconds, and a way to let them pass. resolution: s, of `now`."""

    @property
    def resolution(self) -> float:
        """The s by which two readings differ at least, if they differ."""

    def now(self) -> float:
        """Return monotonic s; only differences mean anything."""

    def wall_us(self) -> int:
        """Return the us since 1970 as this machine believes; anybody may set it back."""

    def sleep(self, seconds: float) -> None:
        """Let so many s pass; other greenlets may run meanwhile."""


class SystemClock:
    """The machine's clock, one that goes on while the machine is suspended where there is one.

    Source: clock_gettime(2), CLOCK_BOOTTIME; CLOCK_MONOTONIC stands still in suspend, and a
    laptop's or a moved virtual machine's lease would outlive the nodes' keys. On macOS it is
    CLOCK_MONOTONIC that goes on, and time.monotonic that stands still.
    """

    now: Callable[[], float]

    def __init__(self) -> None:
        going_on = "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
        which = getattr(time, going_on, None)
        if which is None:
            self.now = time.monotonic
            self.resolution = time.get_clock_info("monotonic").resolution
        else:
            self.now = functools.partial(time.clock_gettime, which)
            self.resolution = time.clock_getres(which)

    def wall_us(self) -> int:
        """Return the us since 1970 as this machine believes."""
        return time.time_ns() // 1000

    def sleep(self, seconds: float) -> None:
        """Let so many s pass; under gevent other greenlets run meanwhile."""
        gevent = gevent_here()
        (time if gevent is None else gevent).sleep(seconds)


def new_token() -> str:
    """Return 128 random bits in hex: the proof that a key is ours. Fresh for each round."""
    return os.urandom(16).hex()


@dataclass(frozen=True)
class Platform:
    """What the lock takes from the interpreter and the operating system: time, threads, wake-ups.

    One value is handed to everything that a `Redlock` is made of, so that a simulation can hand in
    its own. new_poll: takes `native`, as `new_poll`. new_local: returns a `PerFlow`.
    """

    clock: Clock
    start_thread: Callable[[Callable[[], None]], None] = start_thread
    pause: Callable[[float], None] = pause
    pause_keeping_gil: Callable[[float], None] = pause_keeping_gil
    get_ident: Callable[[], int] = get_ident
    new_mutex: Callable[[], Mutex] = new_mutex
    new_poll: Callable[[bool], Any] = new_poll
    new_waker: Callable[[], Any] = Waker
    new_local: Callable[[Callable[[], Any]], Any] = PerFlow
    new_token: Callable[[], str] = new_token
    new_subscriber: Callable[..., Any] | None = None  # None: the package's own connection

    def turn(self) -> Turn:
        """Return a new turn, which nobody has."""
        return Turn(self.get_ident)

    def deadline_timer(self) -> DeadlineTimer:
        """Return a new alarm, on which no thread sleeps."""
        return DeadlineTimer(self.new_mutex)


_of_servers: dict[str, Platform] = {}  # empty except in tests


def install_platform(server: str, platform: Platform) -> None:
    """Let every `Redlock` of this process that is made with a server use a platform.

    server: as of `Address.server`. So a lock on a node with a clock of its own goes by that clock,
    and the holder's lease ends together with the key.
    """
    _of_servers[server] = platform


def uninstall_platform(server: str) -> None:
    """Undo `install_platform`; nothing happens if there is none."""
    _of_servers.pop(server, None)


def platform_for(addresses: Iterable[Any]) -> Platform:
    """Return the platform of the first address that has one, or else the machine's.

    addresses: each with a `server`, and with a `platform` if it brings its own.
    """
    for address in addresses:
        found = getattr(address, "platform", None) or _of_servers.get(address.server)
        if found is not None:
            platform: Platform = found
            return platform
    return Platform(SystemClock())
