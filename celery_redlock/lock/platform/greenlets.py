"""What gevent replaces in Python, and the originals of it.

gevent replaces Python's threads and locks by cooperative ones. A renewal must not wait until a busy
body gives way, so it runs in a real thread, and what it shares with the body is guarded by real
locks. They are held only for moments in which nothing waits.
"""

from __future__ import annotations

import select
import sys
from importlib import import_module
from typing import Any


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
