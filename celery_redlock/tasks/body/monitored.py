"""A body that runs under a lock, and is interrupted if the lock is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from celery_redlock.errors import LockLost
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.platform.threads import DeadlineTimer, is_uninterruptible, start_thread
from celery_redlock.lock.release import loss_of
from celery_redlock.tasks.body.interrupt import current_interrupter, running_bodies

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25  # seconds between tries to interrupt a body
# Nothing is raised below a frame of these modules, though a body called them: they would swallow
# LockLost, or it would replace the error that they are about to raise. A run inside a body
# (`apply`) ends first for the same reason, and so does a release of another lock. To acquire one
# may be interrupted: see `lock/platform/threads.py`.
UNINTERRUPTIBLE_MODULES = ("billiard", "celery.app.trace", "celery.utils.dispatch",
                           "celery_redlock.tasks", "logging")  # fmt: skip
_PREFIXES = tuple(f"{name}." for name in UNINTERRUPTIBLE_MODULES)  # with the dot: no "logging_x"


class MonitoredBody:
    """A body that runs under a lock, and is interrupted if that lock is lost.

    abort: LockLost is raised in the body, once, if its thread or greenlet allows that. report:
    called with the loss, once, where it may block; it tells monitors.
    """

    __slots__ = ("_reports", "abort", "interrupted", "interrupter", "lock")

    def __init__(self, lock: Lock, *, abort: bool, report: Callable[[LockLost], object]) -> None:
        self.lock, self.abort = lock, abort
        self.interrupter = current_interrupter()
        self.interrupted = False
        self._reports = [report]  # popped by the thread that calls it

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the body. With `abort`, raise LockLost instead if the lock is lost by now."""
        running_bodies[id(self)] = self
        try:
            loss = loss_of(self.lock)  # before the line above the watchdog could not tell it
            if loss is not None and self.abort:
                raise loss
            return call(*args, **kwargs)
        finally:
            running_bodies.pop(id(self), None)

    def report_loss(self) -> None:
        """Call `report` if the lock is lost, unless that was done."""
        loss = loss_of(self.lock)
        if loss is not None and self._reports:
            try:
                report = self._reports.pop()
            except IndexError:
                return  # another thread was faster
            report(loss)

    def on_loss(self) -> None:
        """Start to report the loss, and to raise it in the body. Does not wait for either."""
        if self._reports:
            self.interrupter.run_beside(self.report_loss)
        if self.abort:
            start_thread(self._interrupt)

    def _interrupt(self) -> None:
        """Try until the body is interrupted or has ended; in a thread of its own."""
        timer, pause = DeadlineTimer(), FIRST_PAUSE
        while id(self) in running_bodies and self.pending_loss is not None:
            if not self.interrupter.interrupt(self):
                return
            timer.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    @property
    def pending_loss(self) -> LockLost | None:
        """The error that is still to be raised in the body.

        Once only: a body that catches it is not interrupted again while it cleans up.
        """
        return loss_of(self.lock) if self.abort and not self.interrupted else None

    def is_interruptible_at(self, frame: FrameType | None) -> bool:
        """Return whether all frames from this body to the top of the stack are interruptible."""
        code, called = MonitoredBody.run.__code__, False
        while frame is not None:
            if frame.f_code is code and frame.f_locals["self"] is self:
                return called
            if _is_uninterruptible(frame):
                return False
            frame, called = frame.f_back, True
        return False


def _is_uninterruptible(frame: FrameType) -> bool:
    code, module = frame.f_code, f"{frame.f_globals.get('__name__', '')}."
    releases = is_uninterruptible(code) or code.co_name == "__del__"
    return releases or module.startswith(_PREFIXES)


def notify_bodies() -> None:
    """Tell each body whose lock is lost; called by the watchdog, and does not wait."""
    for body in list(running_bodies.values()):
        if loss_of(body.lock) is not None:
            body.on_loss()
