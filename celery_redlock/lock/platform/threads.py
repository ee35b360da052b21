"""Real threads, whatever is patched: locks, wake-ups, and what each of them has for itself."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from celery_redlock.lock.platform.greenlets import original

T = TypeVar("T")


class PerFlow(Generic[T]):
    """What each thread and each greenlet has for itself, whatever is patched.

    make: makes it for one that has none yet. `threading.local` is a thread's alone unless gevent
    patched it before, and greenlets need no gevent.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of_thread = original("_thread", "_local")()
        self._of_greenlets: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()

    def get(self, *, in_task: bool) -> T:
        """Return the caller's own value.

        in_task: called in an asyncio task. A greenlet that a task drives is a part of it, as in
        SQLAlchemy's `run_sync`; one that a hub drives is never a part of another.
        """
        getcurrent = getattr(sys.modules.get("greenlet"), "getcurrent", None)
        if getcurrent is not None:  # it is there, and imported to the end
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
    """Return the greenlet of a hub, or the thread's main one, that a greenlet gives way to."""
    hubs = sys.modules.get("gevent._hub_local")
    hub = None if hubs is None else hubs.get_hub_if_exists()
    while greenlet.parent is not None and greenlet.parent is not hub:
        greenlet = greenlet.parent
    return greenlet


class Mutex(Protocol):
    """A lock of the operating system, as `_thread.allocate_lock` gives it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire; return False if it was not free in time."""

    def release(self) -> None:
        """Release; RuntimeError if nobody had it."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *exc_info: object) -> None: ...


def new_mutex() -> Mutex:
    """Return a real lock, also under gevent."""
    mutex: Mutex = original("_thread", "allocate_lock")()
    return mutex


get_ident: Callable[[], int] = original("_thread", "get_ident")  # of the real thread that calls


def pause(seconds: float) -> None:
    """Let other real threads run for this many seconds, but no greenlets of this one."""
    original("time", "sleep")(seconds)


def start_thread(run: Callable[[], None]) -> None:
    """Run a function in a real thread that does not keep the process alive."""
    original("_thread", "start_new_thread")(run, ())


class DeadlineTimer:
    """A timer that one real thread sleeps on, and other threads move to an earlier moment.

    The thread wakes at the earliest moment that was requested, also if that request is obsolete. So
    of many short locks only the first costs a system call: the later ones request later moments.
    """

    __slots__ = ("_bell", "_due", "_wanted")

    def __init__(self, new_mutex: Callable[[], Mutex] = new_mutex) -> None:
        self._bell = new_mutex()
        self._bell.acquire()
        self._due = self._wanted = float("inf")

    def by(self, moment: float) -> None:
        """Let the thread wake at the monotonic second `moment` at the latest."""
        if moment < self._wanted:
            self._wanted = moment
        if moment < self._due:
            self.ring()

    def look(self, now: float) -> None:
        """Begin a pass over the work: each request from now on rings."""
        self._due = float("inf")
        if self._wanted <= now:
            self._wanted = float("inf")

    def rest(self, until: float, now: float) -> None:
        """Sleep until rung, or until the earliest requested moment, `until` at the latest."""
        self._due = min(until, self._wanted)
        self.sleep(self._due - now)

    def is_late(self, now: float) -> bool:
        """Return whether the thread should have woken before `now`: it waits for the GIL."""
        return self._due < now

    def ring(self) -> None:
        """Wake the thread now; a second ring before it wakes adds nothing."""
        try:
            self._bell.release()
        except RuntimeError:
            return  # it rings already

    def sleep(self, seconds: float) -> bool:
        """Sleep until rung, or for this many seconds (inf: until rung); return whether it was rung.

        Not for longer than a day at a time: what a platform can wait for has a limit.
        """
        return self._bell.acquire(True, min(seconds, 86_400.0) if seconds > 0 else 0.0)


class Waker:
    """A pipe that a waiter polls together with its sockets, so that other threads can wake it."""

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
        # not before the last caller of `wake` is gone: the number of a closed descriptor is reused
        for name in ("descriptor", "_write_end"):
            if hasattr(self, name):  # else an exception interrupted `__init__`
                os.close(getattr(self, name))
