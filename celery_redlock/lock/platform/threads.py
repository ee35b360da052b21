"""Real threads, also if gevent patched Python: locks, timers, wake-ups and local values.

gevent replaces Python's threads and locks by cooperative ones. A renewal must not wait until a busy
body yields, so it runs in a real thread. Real locks guard the state that it shares with the body.
No code waits while it holds one of these locks. Last come functions that no exception may cut,
and mutual exclusion in which no caller waits for another (`TryLock`, `JobQueue`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from types import CodeType
from typing import Any, Generic, Protocol, TypeVar

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
keeping_gil = ctypes.PyDLL(None, use_errno=True)  # calls of libc that keep the GIL
MAX_SLEEP = 86_400.0  # seconds; platforms limit the time that a thread can wait


def original(module: str, name: str) -> Any:
    """Return a module's attribute as it was before gevent replaced it."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched(module):
        return gevent.get_original(module, name)
    __import__(module)
    return getattr(sys.modules[module], name)


def gevent_here() -> Any:
    """Return gevent if its hub runs or will run in this thread, even if unpatched; else None.

    A blocking system call would stop all its greenlets, also the one that it waits for.
    """
    hubs = sys.modules.get("gevent._hub_local")
    if hubs is None:
        return None
    gevent = sys.modules["gevent"]
    if hubs.get_hub_if_exists() is not None:
        return gevent
    monkey = sys.modules.get("gevent.monkey")
    return None if monkey is None or not monkey.is_module_patched("select") else gevent


def is_patched_by_eventlet() -> bool:
    """Return whether eventlet has replaced Python's sockets or threads, which is unsupported."""
    patcher = sys.modules.get("eventlet.patcher")
    return patcher is not None and any(map(patcher.is_monkey_patched, ("socket", "thread")))


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
                greenlet_value = self._of_greenlets.get(greenlet)
                return greenlet_value or self._of_greenlets.setdefault(greenlet, self._make())
        try:
            value: T = self._of_thread.value
        except AttributeError:
            value = self._of_thread.value = self._make()
        return value


def _driver(greenlet: Any) -> Any:
    """Return the outermost greenlet: a direct child of the hub, or the thread's main greenlet."""
    hubs = sys.modules.get("gevent._hub_local")
    hub = None if hubs is None else hubs.get_hub_if_exists()
    while greenlet.parent is not None and greenlet.parent is not hub:
        greenlet = greenlet.parent
    return greenlet


class Mutex(Protocol):
    """A lock of the operating system, as `_thread.allocate_lock` returns it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

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


def pause_keeping_gil(seconds: float) -> None:
    """Sleep while no other Python thread runs; for times far below a millisecond."""
    keeping_gil.usleep(int(seconds * 1e6))


class Sleeper(Protocol):
    """What one thread or greenlet, its maker, sleeps on. Needs no file descriptor of its own."""

    def wake(self) -> None:
        """Wake the maker, or end its next `sleep` at once. In any thread; never waits."""

    def sleep(self, seconds: float) -> bool:
        """Sleep for at most this many seconds, and a day; return whether `wake` ended it."""


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

    def schedule_by(self, moment: float) -> None:
        """Make the thread wake at the monotonic second `moment` at the latest."""
        if moment < self._wanted:
            self._wanted = moment
        if moment < self._due:
            self.wake()

    def begin_pass(self, now: float) -> None:
        """Begin a pass over the work: each request from now on wakes the thread."""
        self._due = float("inf")
        if self._wanted <= now:
            self._wanted = float("inf")

    def wait_until(self, until: float, now: float) -> None:
        """Sleep until `wake`, or until the earliest requested moment, `until` at the latest."""
        self._due = min(until, self._wanted)
        self.sleep(self._due - now)

    def is_late(self, now: float) -> bool:
        """Return whether the thread should have woken before `now`: it waits for the GIL."""
        return self._due < now

    def wake(self) -> None:
        try:
            self._signal.release()
        except RuntimeError:
            return  # an earlier call has not woken the thread yet

    def sleep(self, seconds: float) -> bool:
        return self._signal.acquire(True, min(seconds, MAX_SLEEP) if seconds > 0 else 0.0)


def new_sleeper() -> Sleeper:
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


def new_poll(native: bool) -> Any:
    """Return a poll object. Unless `native`, other greenlets run while it waits."""
    if native:
        return original("select", "poll")()
    try:
        return PollBehindHub()
    except AttributeError:  # no epoll: there libev reports a closed descriptor as an error
        return import_module("gevent.select").poll()


class PollBehindHub:
    """A poll object for gevent; the hub watches one descriptor, that of an epoll object.

    Any thread may close a node's socket at any time. If libev watches a closed descriptor, it
    aborts the process. The epoll object stays open during a wait, and a closed socket leaves it
    automatically. Raises AttributeError if there is no epoll.
    """

    def __init__(self) -> None:
        self._epoll = original("select", "epoll")()

    def register(self, descriptor: int, events: int) -> None:
        self._epoll.register(descriptor, events)  # the events are the same as for poll

    def poll(self, milliseconds: int) -> Any:
        waiting = import_module("gevent.select").poll()  # new for each wait: it belongs to this hub
        waiting.register(self._epoll.fileno(), select.POLLIN)
        waiting.poll(milliseconds)
        return self._epoll.poll(0)

    def __del__(self) -> None:
        if hasattr(self, "_epoll"):
            self._epoll.close()


class HubSleeper:
    """What a greenlet sleeps on while other greenlets run. It needs no descriptor of its own.

    All watchers of a loop that other threads may wake share one descriptor. Made and slept on in
    the hub's thread.
    """

    __slots__ = ("_loop", "_watcher", "_woken")

    def __init__(self) -> None:
        self._loop = import_module("gevent").get_hub().loop
        self._watcher: Any = None  # of the greenlet that sleeps
        self._woken: dict[None, bool] = {}

    def wake(self) -> None:
        self._woken[None] = True  # first: `sleep` makes its watcher and then reads this
        with contextlib.suppress(Exception):  # None or closed: it does not sleep any more
            self._watcher.send()

    def sleep(self, seconds: float) -> bool:
        signal = import_module("gevent.event").Event()
        watcher = self._watcher = self._loop.async_(ref=False)
        try:
            watcher.start(signal.set)
            if not self._woken:
                signal.wait(max(0.0, min(seconds, MAX_SLEEP)))
            return self._woken.pop(None, False)
        finally:
            self._watcher = None
            watcher.close()


# Functions that an asynchronous exception must not interrupt, because they release locks. A body
# that loses its lock is interrupted by an exception that is raised between two of its lines. If
# that happened inside a release, the release would be lost.
_codes: set[CodeType] = set()


def uninterruptible(function: F) -> F:
    """Register a function and return it; `is_uninterruptible` then recognizes its frames."""
    _codes.add(function.__code__)
    return function


def is_uninterruptible(code: CodeType) -> bool:
    return code in _codes


# How a thread waits for the end of another thread's turn: pauses in seconds, number of tries.
TURN_PAUSE = 0.0001  # seconds
TURN_TRIES = 1000


def call_with(work: Callable[..., object], arguments: Sequence[object]) -> None:
    work(*arguments)


class TryLock:
    """Mutual exclusion without waiting: one caller at a time runs its function, others are refused.

    With a mutex, a finalizer or a signal handler that interrupts the owner would deadlock. Here it
    is refused, and leaves its work to the owner. The owner has the turn.
    """

    __slots__ = ("_get_ident", "_pause", "taken")

    def __init__(
        self, get_ident: Callable[[], int] = get_ident, pause: Callable[[float], None] = pause
    ) -> None:
        self._get_ident = get_ident
        self._pause = pause
        self.taken: dict[None, list[int]] = {}  # empty, or the owner's own list

    def run(self, work: Callable[..., object], *arguments: object) -> bool:
        """Call a function in the turn. If another caller has the turn, return False at once."""
        return self.run_pair(call_with, work, arguments)

    def run_pair(self, work: Callable[[A, B], object], first: A, second: B) -> bool:
        """As `run`, with two arguments: a call with `*arguments` takes several times as long."""
        taken = self.taken
        own_entry = [self._get_ident()]
        try:
            # atomic: only one caller takes the turn
            owner_entry = taken.setdefault(None, own_entry)
            if owner_entry is not own_entry:
                return False
            work(first, second)
            del taken[None]
        except BaseException:  # without a call, so that no asynchronous exception is raised here
            try:
                if taken[None] is own_entry:
                    del taken[None]
            except KeyError:  # an exception interrupted this before it took the turn, or at its end
                pass
            raise
        return True

    def run_within(self, tries: int, work: Callable[[A, B], object], first: A, second: B) -> bool:
        """As `run_pair`, with short pauses between tries; return False if the lock stays taken."""
        for number in range(tries):
            if number:
                self._pause(TURN_PAUSE)
            if self.run_pair(work, first, second):
                return True
            if self.is_interrupted:  # its turn ends only after this call
                return False
        return False

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller runs in the owner's thread, and so interrupts the owner."""
        owner = self.taken.get(None)
        return owner is not None and owner[0] == self._get_ident()


class JobQueue:
    """Jobs in order, each done by the caller that has the lock.

    A caller that finds the lock taken queues its job and continues. The owner of the lock does
    queued jobs before it ends. So a finalizer or a signal handler may add a job during a job.
    pending: what is left to do. wake: called if an exception interrupts a job, so that a waiting
    caller continues with the queue.
    """

    __slots__ = ("_wake", "lock", "pending")

    def __init__(self, lock: TryLock, wake: Callable[[], None]) -> None:
        self.lock = lock
        self._wake = wake
        self.pending: deque[Callable[[], object]] = deque()

    def do(self, job: Callable[[], object]) -> None:
        """Do a job now, or queue it for the owner of the lock."""
        self.pending.append(job)
        self.go_on()

    def go_on(self) -> None:
        """Do the remaining jobs: an exception may have interrupted their caller.

        The loop is a function of its own: CPython 3.12 and 3.13 compile some jumps of a loop
        without the handlers around it, so what a signal raises there would pass them by.
        """
        try:
            self._do_rest()
        except BaseException:
            self._wake()  # a waiting caller continues with the jobs
            raise

    def _do_rest(self) -> None:
        while self.pending and self.lock.run(self._do_all):
            pass  # again: a job may have been queued as the owner ended

    def _do_all(self) -> None:
        jobs = self.pending
        while jobs:
            jobs[0]()
            jobs.popleft()  # last: an interrupted job is done again, and no job is lost
