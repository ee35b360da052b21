"""How LockLost is raised in a running body: by a signal, by a hub, or not at all.

In a main thread a real-time signal of our own raises it, in a greenlet its hub. Both look at the
stack first. In other threads nothing is raised: Python's own way to do that wakes nobody who
sleeps, and may strike Celery after the body's end.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock.errors import LockLost
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.platform.threads import start_thread

PREFERRED_SIGNAL = 5  # above SIGRTMIN: the first that we take if nobody else has


class Interruptible(Protocol):
    """What an interrupter asks a running body."""

    lock: Lock
    interrupter: Interrupter
    struck: bool  # LockLost was raised in it

    @property
    def pending(self) -> LockLost | None:
        """What is still to be raised in it."""

    def is_under(self, frame: FrameType | None) -> bool:
        """Return whether LockLost may be raised at this frame."""

    def hear(self) -> None:
        """Have the loss reported, and raised in the body. Does not wait for either."""


running: dict[int, Interruptible] = {}  # the bodies of this process, by id


class Interrupter:
    """Where a body runs. This is one in which nothing can be raised: a thread like any other."""

    def interrupt(self, body: Interruptible) -> bool:
        """Have a body struck if it can be done now; False where it never can."""
        return False

    def run_beside(self, do: Callable[[], None]) -> None:
        """Call a function soon, where it may block and sees what the body sees."""
        start_thread(do)


class SignalInterrupter(Interrupter):
    """The main thread of a process: a signal of our own, whose handler looks at the stack.

    Source: signal(2): a handler runs in the main thread, between two steps of what it does, so it
    cannot race with the end of the body; and a system call in which it sleeps is cut short.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    def is_ready(self) -> bool:
        """Tell whether the signal is ours; take it where nobody has it. In the main thread only."""
        if self._is_ours():
            return True
        least, most = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", 0)
        for number in range(least + PREFERRED_SIGNAL, most + 1) if least else ():
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._raise_loss)
                self._number = number
                return True
        return False

    def _is_ours(self) -> bool:
        return self._number is not None and signal.getsignal(self._number) == self._raise_loss

    def interrupt(self, body: Interruptible) -> bool:
        """Send the signal; a handler that replaced ours meanwhile is not ours to call."""
        if self._number is None or not self._is_ours():
            return False
        signal.pthread_kill(threading.main_thread().ident or 0, self._number)
        return True

    def _raise_loss(self, number: int, frame: FrameType | None) -> None:
        """Raise LockLost if a body whose lock is lost is what runs now."""
        if _is_cut(sys.exc_info()[1]):
            return
        for body in list(running.values()):
            lost = body.pending if body.interrupter is self else None
            if lost is not None and body.is_under(frame):
                body.struck = True
                raise lost


def _is_cut(error: BaseException | None) -> bool:
    """Tell whether somebody else ends the body already, and it cleans up."""
    while error is not None:
        if isinstance(error, SoftTimeLimitExceeded) or not isinstance(error, Exception):
            return True
        error = error.__context__
    return False


class GreenletInterrupter(Interrupter):
    """A greenlet. Its hub throws into it, so that nothing runs between the look and the throw.

    Only where it waits: a body that never gives way cannot be told.

    call_in_hub: has a function called there; safe to be called in any thread. spawn: starts a
    greenlet, in the hub.
    """

    def __init__(
        self,
        greenlet: Any,
        call_in_hub: Callable[..., object],
        spawn: Callable[[Callable[[], object]], object],
    ) -> None:
        self._greenlet, self._call_in_hub, self._spawn = greenlet, call_in_hub, spawn

    def interrupt(self, body: Interruptible) -> bool:
        """Have the hub look and throw."""
        self._call_in_hub(self._throw, body)
        return True

    def _throw(self, body: Interruptible) -> None:
        lost = body.pending
        if lost is not None and body.is_under(self._greenlet.gr_frame):
            body.struck = True
            self._greenlet.throw(lost)

    def run_beside(self, do: Callable[[], None]) -> None:
        """Call it in a greenlet of its own: connections belong to the hub of their thread."""
        self._call_in_hub(self._spawn, do)


def current_interrupter() -> Interrupter:
    """Return where this is called."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        gevent = sys.modules["gevent"]
        call = gevent.get_hub().loop.run_callback_threadsafe
        return GreenletInterrupter(gevent.getcurrent(), call, gevent.spawn)
    is_main = threading.get_ident() == threading.main_thread().ident
    return _main_thread if is_main and _main_thread.is_ready() else _any_thread


_main_thread, _any_thread = SignalInterrupter(), Interrupter()
