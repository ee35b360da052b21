"""Bodies that run under a lock in this process, and learn of its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from celery_redlock.errors import LockLost
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.platform.interrupts import is_uninterruptible
from celery_redlock.lock.platform.threads import DeadlineTimer, start_thread
from celery_redlock.lock.release import loss_of
from celery_redlock.tasks.body.interrupt import current_interrupter, running

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25  # s: between tries to tell a body that is not to be struck
# Modules in which nothing is raised, though a body called them: they would swallow LockLost, or
# the error that they are about to raise. A run inside a body (`apply`) is there, too, and ends
# first; and so is what gives back other locks. Their acquire is made to be cut.
UNTOUCHED = ("billiard.", "celery.app.trace.", "celery.utils.dispatch.", "celery_redlock.tasks.",
             "logging.")  # fmt: skip


class MonitoredBody:
    """A body that runs under a lock, and hears when that is lost.

    abort: LockLost is raised in it, once, where its place allows that. report: called with the
    loss, once, where it may block; tells monitors.
    """

    __slots__ = ("_reports", "abort", "interrupter", "lock", "struck")

    def __init__(self, lock: Lock, *, abort: bool, report: Callable[[LockLost], object]) -> None:
        self.lock, self.abort = lock, abort
        self.interrupter = current_interrupter()
        self.struck = False
        self._reports = [report]  # taken out by the one that calls it

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run it. Raises LockLost instead where the lock is lost by now, and abort says so."""
        running[id(self)] = self
        try:
            lost = loss_of(self.lock)  # before it stood there, nobody could have told it
            if lost is not None and self.abort:
                raise lost
            return call(*args, **kwargs)
        finally:
            running.pop(id(self), None)

    def report_loss(self) -> None:
        """Tell monitors where the lock is lost, unless that is done."""
        lost = loss_of(self.lock)
        if lost is not None and self._reports:
            try:
                report = self._reports.pop()
            except IndexError:
                return  # another thread was faster
            report(lost)

    def hear(self) -> None:
        """Have the loss reported, and raised in the body. Does not wait for either."""
        if self._reports:
            self.interrupter.run_beside(self.report_loss)
        if self.abort:
            start_thread(self._interrupt)

    def _interrupt(self) -> None:
        """Try until it is struck or over; in a thread of its own."""
        alarm, pause = DeadlineTimer(), FIRST_PAUSE
        while id(self) in running and self.pending is not None:
            if not self.interrupter.interrupt(self):
                return
            alarm.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    @property
    def pending(self) -> LockLost | None:
        """What is still to be raised in it.

        Once only: a body that catches it is not struck again while it cleans up.
        """
        return loss_of(self.lock) if self.abort and not self.struck else None

    def is_under(self, frame: FrameType | None) -> bool:
        """Tell whether a stack leads from this body to its top, through nothing untouched."""
        code, called = MonitoredBody.run.__code__, False
        while frame is not None:
            if frame.f_code is code and frame.f_locals["self"] is self:
                return called
            if _is_untouched(frame):
                return False
            frame, called = frame.f_back, True
        return False


def _is_untouched(frame: FrameType) -> bool:
    code, module = frame.f_code, f"{frame.f_globals.get('__name__', '')}."
    releases = is_uninterruptible(code) or code.co_name == "__del__"
    return releases or module.startswith(UNTOUCHED)


def notify_bodies() -> None:
    """Have every body whose lock is lost hear of it; called by the watchdog, and does not wait."""
    for body in list(running.values()):
        if loss_of(body.lock) is not None:
            body.hear()
