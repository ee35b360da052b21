"""The one seam for time; and the operating system's own threads, whatever patches Python's.

gevent and eventlet replace Python's threads and locks by cooperative ones. A renewal must not
wait until a busy body gives way, so it runs in a real thread, and what it shares with the body is
guarded by real locks. They are held only for moments in which nothing waits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol


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
        """Let so many s pass; under gevent and eventlet others run meanwhile."""
        time.sleep(seconds)


# Of servers, by address, that go by a clock which a test moves: whoever locks on them goes by it,
# too, so that a holder's lease ends together with the keys. Always empty outside of tests.
clocks_of_servers: dict[str, Clock] = {}


def clock_for(servers: Iterable[str]) -> Clock | None:
    """Return the clock that one of these servers goes by; None where it is the machine's."""
    found = (clocks_of_servers.get(server) for server in servers)
    return next((clock for clock in found if clock is not None), None)


def original(module: str, name: str) -> Any:
    """Return a module's attribute as it was before gevent or eventlet replaced it."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched(module):
        return gevent.get_original(module, name)
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.already_patched:
        return getattr(eventlet.original(module), name)
    __import__(module)
    return getattr(sys.modules[module], name)


class Mutex(Protocol):
    """A lock of the operating system, as `_thread.allocate_lock` gives it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; False where it was not free (in time)."""

    def release(self) -> None:
        """Give it back; RuntimeError where nobody had it."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *exc_info: object) -> None: ...


def new_mutex() -> Mutex:
    """Return a real lock, also under gevent and eventlet."""
    mutex: Mutex = original("_thread", "allocate_lock")()
    return mutex


def start_thread(run: Callable[[], None]) -> None:
    """Run a function in a real thread that does not keep the process alive."""
    original("_thread", "start_new_thread")(run, ())


class Alarm:
    """What one real thread sleeps on, and others wake it by.

    It wakes by itself at the earliest moment that anybody wanted, also where that one has lost
    interest since. So of many short holds only the first costs a system call: those that come
    later want later moments, and find the thread's waking early enough.
    """

    __slots__ = ("_bell", "_due", "_wanted")

    def __init__(self) -> None:
        self._bell = new_mutex()
        self._bell.acquire()
        self._due = self._wanted = float("inf")

    def by(self, moment: float) -> None:
        """See to it that the thread looks around at the monotonic second `moment`."""
        if moment < self._wanted:
            self._wanted = moment
        if moment < self._due:
            self.ring()

    def look(self, now: float) -> None:
        """Begin to look around; whoever wants something from now on rings."""
        self._due = float("inf")
        if self._wanted <= now:
            self._wanted = float("inf")

    def rest(self, until: float, now: float) -> None:
        """Sleep until rung, or until the earliest moment that is wanted, `until` at the latest."""
        self._due = min(until, self._wanted)
        self.sleep(self._due - now)

    def ring(self) -> None:
        """Wake the thread now; a second ring before it wakes adds nothing."""
        try:
            self._bell.release()
        except RuntimeError:
            return  # it rings already

    def sleep(self, seconds: float) -> bool:
        """Sleep until rung, or for so many s (inf: until rung); True where it was rung.

        Not for longer than a day at a time: what a platform can wait for has a limit.
        """
        return self._bell.acquire(True, min(seconds, 86_400.0) if seconds > 0 else 0.0)


class Bell:
    """What a waiter polls together with its sockets, and others wake it by: a pipe of its own.

    Read and written by the operating system's own calls: eventlet's would give way where the pipe
    is full or empty, in whoever rings, and with whatever that one holds.
    """

    __slots__ = ("_read", "_write", "_write_end", "descriptor")

    def __init__(self) -> None:
        self._read, self._write = original("os", "read"), original("os", "write")
        self.descriptor, self._write_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write_end, False)

    def ring(self) -> None:
        """Make the descriptor readable. Never waits."""
        with contextlib.suppress(BlockingIOError):  # full: it has been rung often enough
            self._write(self._write_end, b"!")

    def hush(self) -> None:
        """Take note of all rings so far. Never waits."""
        with contextlib.suppress(BlockingIOError):
            self._read(self.descriptor, 4096)

    def __del__(self) -> None:
        # with the last one that may ring, and not before: a descriptor's number is used again
        for name in ("descriptor", "_write_end"):
            if hasattr(self, name):  # else it was cut while it was made
                os.close(getattr(self, name))


class HubCalls:
    """Calls that real threads leave for an eventlet hub, which they could not wake by itself.

    Source: eventlet.hubs.hub: timers may be added by the hub's own thread alone; what can be
    watched is a descriptor.
    """

    def __init__(self, hub: Any) -> None:
        self._bell, self._calls = Bell(), deque[Callable[[], object]]()
        hub.add(hub.READ, self._bell.descriptor, self._call_all, lambda _: None, None)

    def __call__(self, do: Callable[..., object], argument: object) -> None:
        """Leave a call."""
        self._calls.append(functools.partial(do, argument))
        self._bell.ring()

    def _call_all(self, _: object) -> None:
        self._bell.hush()
        while self._calls:
            self._calls.popleft()()


_hub_calls: weakref.WeakKeyDictionary[Any, HubCalls] = weakref.WeakKeyDictionary()


def calls_of(hub: Any) -> HubCalls:
    """Return the calls of an eventlet hub; the first time to be called in its thread."""
    calls = _hub_calls.get(hub)
    if calls is None:
        calls = _hub_calls[hub] = HubCalls(hub)
    return calls


def voice() -> Callable[[Callable[[], None]], object]:
    """Return what calls a function that logs, or is a user's, on behalf of a real thread of ours.

    Most simply call it. eventlet's locks, and logging's are some of them, are for the greenlets of
    one thread: a real thread that waited for one would leave it taken for ever. So there it is a
    greenlet of the thread in which this is called.
    """
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is None or not patcher.is_monkey_patched("thread"):
        return _call
    eventlet = sys.modules["eventlet"]
    return functools.partial(calls_of(eventlet.hubs.get_hub()), eventlet.spawn_n)


def _call(do: Callable[[], None]) -> None:
    do()
