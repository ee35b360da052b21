"""Real threads, also if gevent patched Python: locks, timers, wake-ups and local values."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from celery_redlock.lock.platform.greenlets import (
    LONGEST_SLEEP,
    HubSleeper,
    gevent_here,
    original,
)

T = TypeVar("T")


class PerFlow(Generic[T]):
    """A local value of each thread and each greenlet, whether or not gevent patched Python.

    make: returns the first value of a thread or greenlet. `threading.local` separates greenlets
    only if gevent has patched it, and greenlets also exist without gevent.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of_thread = original("_thread", "_local")()
        self._of_greenlets: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()

    def get(self, *, in_task: bool) -> T:
        """Return the caller's own value.

        in_task: whether the caller runs in an asyncio task. A greenlet that a task drives shares
        the task's value, as in SQLAlchemy's `run_sync`. A greenlet of a hub has its own.
        """
        getcurrent = getattr(sys.modules.get("greenlet"), "getcurrent", None)
        if getcurrent is not None:  # greenlet is imported completely
            greenlet = _driver(getcurrent()) if in_task else getcurrent()
            if greenlet.parent is not None:
                return self._of_greenlet(greenlet)
        try:
            found: T = self._of_thread.found
        except AttributeError:
            found = self._of_thread.found = self._make()
        return found

    def _of_greenlet(self, greenlet: Any) -> T:
        found = self._of_greenlets.get(greenlet)
        return found or self._of_greenlets.setdefault(greenlet, self._make())


def _driver(greenlet: Any) -> Any:
    """Return the outermost greenlet: a direct child of the hub, or the thread's main greenlet."""
    hubs = sys.modules.get("gevent._hub_local")
    hub = None if hubs is None else hubs.get_hub_if_exists()
    while greenlet.parent is not None and greenlet.parent is not hub:
        greenlet = greenlet.parent
    return greenlet


class Mutex(Protocol):
    """A lock of the operating system, as `_thread.allocate_lock` returns it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire; return False if it was not free in time."""

    def release(self) -> None:
        """Release; raises RuntimeError if it was not acquired."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *exc_info: object) -> None: ...


def new_mutex() -> Mutex:
    """Return a real lock, also under gevent."""
    mutex: Mutex = original("_thread", "allocate_lock")()
    return mutex


get_ident: Callable[[], int] = original("_thread", "get_ident")  # of the calling real thread


def pause(seconds: float) -> None:
    """Let other real threads run for this many seconds, but no greenlets of this thread."""
    original("time", "sleep")(seconds)


def start_thread(run: Callable[[], None]) -> None:
    """Run a function in a real thread that does not keep the process alive."""
    original("_thread", "start_new_thread")(run, ())


class Sleeper(Protocol):
    """What one thread or greenlet, its maker, sleeps on. Needs no file descriptor of its own."""

    def wake(self) -> None:
        """Wake the maker, or end its next `sleep` at once. Any thread may call this; never waits.

        A second call before the maker wakes has no effect.
        """

    def sleep(self, seconds: float) -> bool:
        """Sleep until `wake`, for at most this many seconds; return whether it was woken.

        Never sleeps longer than a day.
        """


class DeadlineTimer:
    """The `Sleeper` of a real thread. Other threads can move its end to an earlier moment.

    The thread wakes at the earliest requested moment, even if that request is obsolete. So of many
    short locks only the first costs a system call: the later ones request later moments.
    """

    __slots__ = ("_due", "_signal", "_wanted")

    def __init__(self, new_mutex: Callable[[], Mutex] = new_mutex) -> None:
        self._signal = new_mutex()  # released: the thread is to wake
        self._signal.acquire()
        self._due = self._wanted = float("inf")

    def by(self, moment: float) -> None:
        """Make the thread wake at the monotonic second `moment` at the latest."""
        if moment < self._wanted:
            self._wanted = moment
        if moment < self._due:
            self.wake()

    def look(self, now: float) -> None:
        """Begin a pass over the work: each request from now on wakes the thread."""
        self._due = float("inf")
        if self._wanted <= now:
            self._wanted = float("inf")

    def rest(self, until: float, now: float) -> None:
        """Sleep until `wake`, or until the earliest requested moment, `until` at the latest."""
        self._due = min(until, self._wanted)
        self.sleep(self._due - now)

    def is_late(self, now: float) -> bool:
        """Return whether the thread should have woken before `now`: it waits for the GIL."""
        return self._due < now

    def wake(self) -> None:
        """Wake the thread now. A second call before it wakes has no effect."""
        try:
            self._signal.release()
        except RuntimeError:
            return  # an earlier call has not woken the thread yet

    def sleep(self, seconds: float) -> bool:
        """Sleep until `wake`, for at most this many seconds; return whether it was woken."""
        return self._signal.acquire(True, min(seconds, LONGEST_SLEEP) if seconds > 0 else 0.0)


def new_sleeper() -> Sleeper:
    """Return a new `Sleeper` of the calling thread or greenlet."""
    return DeadlineTimer() if gevent_here() is None else HubSleeper()


class Waker:
    """A pipe that a waiter polls together with its sockets. Other threads wake the waiter by it."""

    __slots__ = ("_write_end", "descriptor")

    def __init__(self) -> None:
        self.descriptor, self._write_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write_end, False)

    def wake(self) -> None:
        """Make the descriptor readable. Never waits."""
        with contextlib.suppress(BlockingIOError):  # a full pipe is readable already
            os.write(self._write_end, b"!")

    def clear(self) -> None:
        """Make the descriptor unreadable until the next `wake`. Never waits."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)

    def __del__(self) -> None:
        # closed only here: a late caller of `wake` would write to a reused descriptor number
        for name in ("descriptor", "_write_end"):
            if hasattr(self, name):  # otherwise an exception interrupted `__init__`
                os.close(getattr(self, name))
