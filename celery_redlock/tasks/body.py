"""A body that runs under a lock, and how LockLost is raised in it if that lock is lost.

Not here: how a loss is found (`lock/engine/watchdog.py`), and what a run ends with then
(`tasks/execution`). In a main thread the handler of a real-time signal raises LockLost, in a
greenlet the hub. Both look at the stack first. In other threads nothing is raised. Python's own
way, PyThreadState_SetAsyncExc, wakes no thread that sleeps, and may strike Celery after the body's
end.
"""

from __future__ import annotations

import signal
import sys
import threading

# `signal.getsignal` makes an enum of what this returns, which is too dear for each run
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock.errors import LockLost
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.platform.threads import DeadlineTimer, is_uninterruptible, start_thread

# seconds between tries to interrupt a body
FIRST_RAISE_PAUSE = 0.005
LONGEST_RAISE_PAUSE = 0.25
# Nothing is raised below a frame of these modules, though a body called them: they would swallow
# LockLost, or it would replace the error that they are about to raise. A run inside a body
# (`apply`) ends first for the same reason, and so does a release of another lock. To acquire one
# may be interrupted: see `lock/platform/threads.py`.
UNINTERRUPTIBLE_MODULES = ("billiard", "celery.app.trace", "celery.utils.dispatch",
                           "celery_redlock.signals", "celery_redlock.tasks", "logging")  # fmt: skip
_PREFIXES = tuple(f"{name}." for name in UNINTERRUPTIBLE_MODULES)  # with the dot: no "logging_x"
PREFERRED_SIGNAL = 5  # above SIGRTMIN: the first number that is tried


running_bodies: dict[int, MonitoredBody] = {}  # of this process, by `id`


class MonitoredBody:
    """A body that runs under a lock, and is interrupted if that lock is lost.

    abort: LockLost is raised in the body, once, if its thread or greenlet allows that. report:
    called with the loss, once, where it may block.
    """

    __slots__ = ("_report_callbacks", "abort", "interrupted", "interrupter", "lock")

    def __init__(self, lock: Lock, *, abort: bool, report: Callable[[LockLost], object]) -> None:
        self.lock = lock
        self.abort = abort
        self.interrupter = current_interrupter()
        self.interrupted = False
        self._report_callbacks = [report]  # popped by the thread that calls it

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the body. With `abort`, raise LockLost instead if the lock is lost by now."""
        running_bodies[id(self)] = self
        try:
            # after the registration above: before it the watchdog would not find this body
            loss = self.lock.ownership.loss()
            if loss is not None and self.abort:
                raise loss
            return call(*args, **kwargs)
        finally:
            running_bodies.pop(id(self), None)

    def report_loss(self) -> None:
        """Call `report` if the lock is lost, unless that was done."""
        loss = self.lock.ownership.loss()
        if loss is not None and self._report_callbacks:
            try:
                report = self._report_callbacks.pop()
            except IndexError:
                return  # another thread was faster
            report(loss)

    def on_loss(self) -> None:
        """Start to report the loss, and to raise it in the body. Does not wait for either."""
        if self._report_callbacks:
            self.interrupter.run_beside(self.report_loss)
        if self.abort:
            start_thread(self._interrupt)

    def _interrupt(self) -> None:
        """Try until the body is interrupted or has ended; in a thread of its own."""
        timer = DeadlineTimer()
        pause = FIRST_RAISE_PAUSE
        while id(self) in running_bodies and self.pending_loss is not None:
            if not self.interrupter.interrupt(self):
                return
            timer.sleep(pause)
            pause = min(LONGEST_RAISE_PAUSE, 2 * pause)

    @property
    def pending_loss(self) -> LockLost | None:
        """The error that is still to be raised in the body.

        Once only: a body that catches it is not interrupted again while it cleans up.
        """
        return self.lock.ownership.loss() if self.abort and not self.interrupted else None

    def is_interruptible_at(self, frame: FrameType | None) -> bool:
        """Return whether all frames from this body to the top of the stack are interruptible."""
        code = MonitoredBody.run.__code__
        is_above_body = False
        while frame is not None:
            if frame.f_code is code and frame.f_locals["self"] is self:
                return is_above_body
            frame_code = frame.f_code
            module = f"{frame.f_globals.get('__name__', '')}."
            is_release = is_uninterruptible(frame_code) or frame_code.co_name == "__del__"
            if is_release or module.startswith(_PREFIXES):
                return False
            frame = frame.f_back
            is_above_body = True
        return False


def notify_bodies() -> None:
    """Tell each body whose lock is lost; called by the watchdog, and does not wait."""
    for body in list(running_bodies.values()):
        if body.lock.ownership.loss() is not None:
            body.on_loss()


class Interrupter:
    """Raises LockLost in the thread or greenlet of a body; this one, for other threads, cannot."""

    def interrupt(self, body: MonitoredBody) -> bool:
        """Try to interrupt a body; return False if that can never succeed."""
        return False

    def run_beside(self, callback: Callable[[], None]) -> None:
        """Call a function soon in a thread or greenlet of its own, where it may block."""
        start_thread(callback)


class SignalInterrupter(Interrupter):
    """For the main thread of a process: a signal whose handler looks at the stack.

    Source: signal(2): a handler runs in the main thread, between two of its bytecodes, so it cannot
    race with the end of the body; a system call in which the thread sleeps returns early.
    """

    def __init__(self) -> None:
        self._signal_number: int | None = None
        self._handler = self._raise_loss  # one object, for it is compared at each run

    def is_ready(self) -> bool:
        """Return whether the handler is installed; install it for a signal that is free."""
        number = self._signal_number
        if number is not None and getsignal(number) is self._handler:
            return True
        first = getattr(signal, "SIGRTMIN", 0)
        last = getattr(signal, "SIGRTMAX", 0)
        for number in range(first + PREFERRED_SIGNAL, last + 1) if first else ():
            if getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._handler)
                self._signal_number = number
                return True
        return False

    def interrupt(self, body: MonitoredBody) -> bool:
        """Send the signal, unless another handler has replaced ours meanwhile."""
        number = self._signal_number
        if number is None or getsignal(number) is not self._handler:
            return False
        signal.pthread_kill(threading.main_thread().ident or 0, number)
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
    """For a greenlet: its hub throws into it, so nothing runs between the check and the throw.

    A body that never yields to the hub cannot be interrupted.
    """

    def __init__(self, gevent: Any) -> None:
        self._greenlet = gevent.getcurrent()
        self._spawn = gevent.spawn
        # may be called by any thread
        self._call_in_hub = gevent.get_hub().loop.run_callback_threadsafe

    def interrupt(self, body: MonitoredBody) -> bool:
        """Have the hub check the stack, and throw."""
        self._call_in_hub(self._throw, body)
        return True

    def _throw(self, body: MonitoredBody) -> None:
        loss = body.pending_loss
        if loss is not None and body.is_interruptible_at(self._greenlet.gr_frame):
            body.interrupted = True
            self._greenlet.throw(loss)

    def run_beside(self, callback: Callable[[], None]) -> None:
        """Call a function in a greenlet of its own: connections belong to the hub of a thread."""
        self._call_in_hub(self._spawn, callback)


def current_interrupter() -> Interrupter:
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return GreenletInterrupter(sys.modules["gevent"])
    is_main = threading.get_ident() == threading.main_thread().ident
    return _main_thread if is_main and _main_thread.is_ready() else _any_thread


_main_thread = SignalInterrupter()
_any_thread = Interrupter()
