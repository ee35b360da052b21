"""The one seam for time; and the operating system's own threads, whatever patches Python's.

gevent replaces Python's threads and locks by cooperative ones. A renewal must not
wait until a busy body gives way, so it runs in a real thread, and what it shares with the body is
guarded by real locks. They are held only for moments in which nothing waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import socket
import ssl
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


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


def original(module: str, name: str) -> Any:
    """Return a module's attribute as it was before gevent replaced it."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched(module):
        return gevent.get_original(module, name)
    __import__(module)
    return getattr(sys.modules[module], name)


def gevent_here() -> Any:
    """Return gevent if its hub runs in this thread, or is to, also if nothing is patched; or None.

    A wait of the operating system would stop all greenlets of the thread, and so for ever the one
    that it waits for.
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
    """Return whether eventlet has replaced Python's sockets or threads, which no lock stands."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is None:
        return False
    return any(patcher.is_monkey_patched(module) for module in ("socket", "thread"))


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
        """Return what belongs to whoever calls.

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
        """Take it; False where it was not free (in time)."""

    def release(self) -> None:
        """Give it back; RuntimeError where nobody had it."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *exc_info: object) -> None: ...


def new_mutex() -> Mutex:
    """Return a real lock, also under gevent."""
    mutex: Mutex = original("_thread", "allocate_lock")()
    return mutex


get_ident: Callable[[], int] = original("_thread", "get_ident")  # of the real thread that calls


def pause(seconds: float) -> None:
    """Let other real threads run for so many s, and no other greenlets of this one."""
    original("time", "sleep")(seconds)


def new_token() -> str:
    """Return 128 random bits in hex: the proof that a key is ours. Fresh for each round."""
    return os.urandom(16).hex()


class Turn:
    """What one caller at a time may have, and nobody waits for.

    A finalizer or a signal handler that interrupts whoever has it would wait for itself, for ever,
    if this were a mutex. Here it is turned away, and leaves its work to the one that it interrupts.
    """

    __slots__ = ("_get_ident", "_looked_at", "_looks", "_seen", "taken")

    def __init__(self, get_ident: Callable[[], int] = get_ident) -> None:
        self._get_ident = get_ident
        self.taken: dict[None, list[int]] = {}  # by nobody, or what the one made that has it
        self._seen: list[int] | None = None
        self._looks, self._looked_at = 0, 0.0

    def run(self, work: Callable[..., object], *arguments: object) -> bool:
        """Call a function in the turn; False, without a call, if another has it."""
        taken, mine = self.taken, [self._get_ident()]
        try:
            if taken.setdefault(None, mine) is not mine:  # in one step: one caller is first
                return False
            work(*arguments)
        finally:  # without a call: no exception from outside strikes here
            try:
                if taken[None] is mine:
                    del taken[None]
            except KeyError:  # it was cut before it took the turn
                pass
        return True

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller interrupts the one that has it, and so keeps it from going on."""
        owner = self.taken.get(None)
        return owner is not None and owner[0] == self._get_ident()

    def is_stuck(self, now: float, seconds: float, looks: int) -> bool:
        """Tell whether one caller had it at so many looks, each so many s after the last one.

        now: monotonic s. By looks as well: a process that was stopped has used up one of them.
        """
        owner = self.taken.get(None)
        if owner is None or owner is not self._seen:
            self._seen, self._looks, self._looked_at = owner, 0, now
        elif now - self._looked_at >= seconds:
            self._looks, self._looked_at = self._looks + 1, now
        return self._looks >= looks


def start_thread(run: Callable[[], None]) -> None:
    """Run a function in a real thread that does not keep the process alive."""
    original("_thread", "start_new_thread")(run, ())


_libc = ctypes.PyDLL(None, use_errno=True)  # its calls keep the interpreter's lock (GIL)


def pause_keeping_gil(seconds: float) -> None:
    """Let so many s pass in which no other thread of Python runs; far below 1 ms."""
    _libc.usleep(int(seconds * 1e6))


class UnyieldingSocket:
    """The `send` and `recv` of a socket, without giving up the interpreter's lock (GIL).

    Python's own give it up in each call, and get it back when the thread that took it lets go: next
    to C code that keeps it for a second, each call takes a second. These cost a microsecond more.
    sock: does not block, so that a call is a copy and no more.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send, self._recv = _libc.send, _libc.recv
        for call in (self._send, self._recv):
            call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
            call.restype = ctypes.c_ssize_t

    def send(self, data: bytes) -> int:
        """Return how many bytes the system took. Raises OSError, BlockingIOError for none."""
        flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
        return _checked(self._send(self._socket.fileno(), data, len(data), flags))

    def recv(self, size: int) -> bytes:
        """Return what has come. Raises OSError, BlockingIOError for nothing."""
        return self._received(size, socket.MSG_DONTWAIT)

    def _received(self, size: int, flags: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        count = _checked(self._recv(self._socket.fileno(), buffer, size, flags))
        return buffer.raw[:count]


class UnyieldingTlsSocket(UnyieldingSocket):
    """The same for TLS, which gives the GIL up once for what is sent, and for what has come."""

    _socket: ssl.SSLSocket

    def send(self, data: bytes) -> int:
        """Return how many bytes TLS took. Raises OSError, also for none."""
        return self._socket.send(data)

    def recv(self, size: int) -> bytes:
        """Return what has come. Raises OSError, BlockingIOError for nothing."""
        if not self._socket.pending():
            self._received(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        return self._socket.recv(size)

    def pending(self) -> int:
        """Return how many bytes are decrypted and not read yet."""
        return self._socket.pending()


def _checked(count: int) -> int:
    """Return what a call of the C library returned; raises the OSError of one that failed."""
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count


class Alarm:
    """What one real thread sleeps on, and others wake it by.

    It wakes by itself at the earliest moment that anybody wanted, also where that one has lost
    interest since. So of many short holds only the first costs a system call: those that come
    later want later moments, and find the thread's waking early enough.
    """

    __slots__ = ("_bell", "_due", "_wanted")

    def __init__(self, new_mutex: Callable[[], Mutex] = new_mutex) -> None:
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

    def is_late(self, now: float) -> bool:
        """Return whether the thread was to look around before `now`: it waits for the GIL."""
        return self._due < now

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
    """What a waiter polls together with its sockets, and others wake it by: a pipe of its own."""

    __slots__ = ("_write_end", "descriptor")

    def __init__(self) -> None:
        self.descriptor, self._write_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write_end, False)

    def ring(self) -> None:
        """Make the descriptor readable. Never waits."""
        with contextlib.suppress(BlockingIOError):  # full: it has been rung often enough
            os.write(self._write_end, b"!")

    def hush(self) -> None:
        """Take note of all rings so far. Never waits."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)

    def __del__(self) -> None:
        # with the last one that may ring, and not before: a descriptor's number is used again
        for name in ("descriptor", "_write_end"):
            if hasattr(self, name):  # else it was cut while it was made
                os.close(getattr(self, name))


def new_poll(native: bool) -> Any:
    """Return a poll object; one that lets other greenlets run unless `native`."""
    if native:
        return original("select", "poll")()
    try:
        return PollBehindHub()
    except AttributeError:  # no epoll: there libev takes a closed descriptor for an error
        return import_module("gevent.select").poll()


class PollBehindHub:
    """poll's face for gevent, whose hub watches a single descriptor for it: an epoll object's.

    A node's socket may be closed at any time, by any thread. If libev meets a closed descriptor
    among those that it watches, it aborts the process. Nobody closes the epoll object's meanwhile,
    and a socket that is closed leaves it by itself. Raises AttributeError if there is no epoll.
    """

    def __init__(self) -> None:
        self._epoll = original("select", "epoll")()

    def register(self, descriptor: int, events: int) -> None:
        """Watch a descriptor; events: as of poll, which are epoll's own."""
        self._epoll.register(descriptor, events)

    def poll(self, milliseconds: int) -> Any:
        """Return what is ready, after so many ms at the most; other greenlets run meanwhile."""
        waiting = import_module("gevent.select").poll()  # of this thread's hub, and for one wait
        waiting.register(self._epoll.fileno(), select.POLLIN)
        waiting.poll(milliseconds)
        return self._epoll.poll(0)

    def __del__(self) -> None:
        if hasattr(self, "_epoll"):
            self._epoll.close()


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
    new_bell: Callable[[], Any] = Bell
    new_local: Callable[[Callable[[], Any]], Any] = PerFlow
    new_token: Callable[[], str] = new_token
    new_subscriber: Callable[..., Any] | None = None  # None: the package's own connection

    def turn(self) -> Turn:
        """Return a new turn, which nobody has."""
        return Turn(self.get_ident)

    def alarm(self) -> Alarm:
        """Return a new alarm, on which no thread sleeps."""
        return Alarm(self.new_mutex)


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
