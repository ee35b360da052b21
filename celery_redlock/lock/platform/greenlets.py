"""The parts of Python that gevent replaces, and their originals.

gevent replaces Python's threads and locks by cooperative ones. A renewal must not wait until a busy
body yields, so it runs in a real thread. Real locks guard the state that it shares with the body.
No code waits while it holds one of these locks.
"""

from __future__ import annotations

import contextlib
import select
import sys
from importlib import import_module
from typing import Any

LONGEST_SLEEP = 86_400.0  # seconds; platforms limit the time that a thread can wait


def original(module: str, name: str) -> Any:
    """Return a module's attribute as it was before gevent replaced it."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched(module):
        return gevent.get_original(module, name)
    __import__(module)
    return getattr(sys.modules[module], name)


def gevent_here() -> Any:
    """Return gevent if its hub runs or will run in this thread, even if unpatched; else None.

    A blocking system call stops all greenlets of the thread. If it waits for one of them, it never
    returns.
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
    if patcher is None:
        return False
    return any(patcher.is_monkey_patched(module) for module in ("socket", "thread"))


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
        """Watch a descriptor; events: as for poll, the same as for epoll."""
        self._epoll.register(descriptor, events)

    def poll(self, milliseconds: int) -> Any:
        """Return the descriptors that are ready within this time; other greenlets may run."""
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
        """Wake the greenlet now, or end its next sleep at once. Any thread may call this."""
        self._woken[None] = True  # first: `sleep` makes its watcher and then reads this
        with contextlib.suppress(Exception):  # None or closed: it does not sleep any more
            self._watcher.send()

    def sleep(self, seconds: float) -> bool:
        """Sleep until `wake`, for at most this many seconds; return whether it was woken."""
        signal = import_module("gevent.event").Event()
        watcher = self._watcher = self._loop.async_(ref=False)
        try:
            watcher.start(signal.set)
            if not self._woken:
                signal.wait(max(0.0, min(seconds, LONGEST_SLEEP)))
            return self._woken.pop(None, False)
        finally:
            self._watcher = None
            watcher.close()
