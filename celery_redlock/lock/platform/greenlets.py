"""The parts of Python that gevent replaces, and their originals.

gevent replaces Python's threads and locks by cooperative ones. A renewal must not wait until a busy
body yields, so it runs in a real thread. Real locks guard the state that it shares with the body.
No code waits while it holds one of these locks.
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
