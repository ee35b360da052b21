"""How LockLost is raised in a running body: by a signal, by a greenlet's hub, or not at all.

In a main thread the handler of a real-time signal raises it, in a greenlet the hub. Both look at
the stack first. In other threads nothing is raised. Python's own way, PyThreadState_SetAsyncExc,
wakes no thread that sleeps, and may strike Celery after the body's end.
"""

from __future__ import annotations

import signal
import sys
import threading

# `signal.getsignal` makes an enum of what this returns, which is too dear for each run
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock.errors import LockLost
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.platform.threads import start_thread

PREFERRED_SIGNAL = 5  # above SIGRTMIN: the first number that is tried


class Interruptible(Protocol):
    """What an interrupter needs of a running body."""

    lock: Lock
    interrupter: Interrupter
    interrupted: bool  # LockLost was raised in it

    @property
    def pending_loss(self) -> LockLost | None:
        """The error that is still to be raised in it."""

    def is_interruptible_at(self, frame: FrameType | None) -> bool:
        """Return whether LockLost may be raised while this frame is on top of the stack."""

    def on_loss(self) -> None:
        """Start to report the loss, and to raise it in the body. Does not wait for either."""


running_bodies: dict[int, Interruptible] = {}  # of this process, by `id`


class Interrupter:
    """Raises LockLost in the thread or greenlet of a body; this one, of any thread, cannot."""

    def interrupt(self, body: Interruptible) -> bool:
        """Try to interrupt a body; return False if that can never succeed."""
        return False

    def run_beside(self, do: Callable[[], None]) -> None:
        """Call a function soon, outside of the body, where it may block."""
        start_thread(do)


class SignalInterrupter(Interrupter):
    """For the main thread of a process: a signal whose handler looks at the stack.

    Source: signal(2): a handler runs in the main thread, between two of its bytecodes, so it cannot
    race with the end of the body; a system call in which the thread sleeps returns early.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._handler = self._raise_loss  # one object, for it is compared at each run

    def is_ready(self) -> bool:
        """Return whether the handler is installed; install it for a signal that is free.

        In the main thread only.
        """
        number = self._number  # as in `_is_installed`, without a call: at each run
        if number is not None and getsignal(number) is self._handler:
            return True
        least, most = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", 0)
        for number in range(least + PREFERRED_SIGNAL, most + 1) if least else ():
            if getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._handler)
                self._number = number
                return True
        return False

    def _is_installed(self) -> bool:
        return self._number is not None and getsignal(self._number) is self._handler

    def interrupt(self, body: Interruptible) -> bool:
        """Send the signal, unless another handler has replaced ours meanwhile."""
        if self._number is None or not self._is_installed():
            return False
        signal.pthread_kill(threading.main_thread().ident or 0, self._number)
        return True

    def _raise_loss(self, number: int, frame: FrameType | None) -> None:
        """Raise LockLost if the signal struck a body whose lock is lost."""
        if _is_ending(sys.exc_info()[1]):
            return
        for body in list(running_bodies.values()):
            loss = body.pending_loss if body.interrupter is self else None
            if loss is not None and body.is_interruptible_at(frame):
                body.interrupted = True
                raise loss


def _is_ending(error: BaseException | None) -> bool:
    """Return whether a soft time limit or a shutdown ends the body already: it cleans up now."""
    while error is not None:
        if isinstance(error, SoftTimeLimitExceeded) or not isinstance(error, Exception):
            return True
        error = error.__context__
    return False


class GreenletInterrupter(Interrupter):
    """For a greenlet: its hub throws into it, so nothing runs between the look and the throw.

    A body that never yields to the hub cannot be interrupted. call_in_hub: calls a function in the
    hub, from any thread. spawn: starts a greenlet, in the hub.
    """

    def __init__(
        self,
        greenlet: Any,
        call_in_hub: Callable[..., object],
        spawn: Callable[[Callable[[], object]], object],
    ) -> None:
        self._greenlet, self._call_in_hub, self._spawn = greenlet, call_in_hub, spawn

    def interrupt(self, body: Interruptible) -> bool:
        """Let the hub look at the stack, and throw."""
        self._call_in_hub(self._throw, body)
        return True

    def _throw(self, body: Interruptible) -> None:
        loss = body.pending_loss
        if loss is not None and body.is_interruptible_at(self._greenlet.gr_frame):
            body.interrupted = True
            self._greenlet.throw(loss)

    def run_beside(self, do: Callable[[], None]) -> None:
        """Call a function in a greenlet of its own: connections belong to the hub of a thread."""
        self._call_in_hub(self._spawn, do)


def current_interrupter() -> Interrupter:
    """Return the interrupter for the thread or greenlet that calls this."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        gevent = sys.modules["gevent"]
        call = gevent.get_hub().loop.run_callback_threadsafe
        return GreenletInterrupter(gevent.getcurrent(), call, gevent.spawn)
    is_main = threading.get_ident() == threading.main_thread().ident
    return _main_thread if is_main and _main_thread.is_ready() else _any_thread


_main_thread, _any_thread = SignalInterrupter(), Interrupter()
