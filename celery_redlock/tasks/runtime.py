"""What one process owns for each app: its settings and its one `Redlock`; and its running bodies.

A body is told in mid-run that its lock is lost, as LockLost raised inside of it, where that can be
done without striking anything else: in a main thread by a real-time signal of our own, in a
greenlet by its hub. Both look at the stack first. In other threads nothing is raised: Python's
own way to do that wakes nobody who sleeps, and may strike Celery after the body's end.
"""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

import click
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import worker_init, worker_process_init

from celery_redlock.errors import LockLost
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.platform.interrupts import is_uninterruptible
from celery_redlock.lock.platform.threads import DeadlineTimer, start_thread
from celery_redlock.lock.release import loss_of
from celery_redlock.tasks.settings import AppSettings, read_app

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25  # s: between tries to tell a body that is not to be struck
PREFERRED_SIGNAL = 5  # above SIGRTMIN: the first that we take if nobody else has
# Modules in which nothing is raised, though a body called them: they would swallow LockLost, or
# the error that they are about to raise. A run inside a body (`apply`) is there, too, and ends
# first; and so is what gives back other locks. Their acquire is made to be cut.
UNTOUCHED = ("billiard.", "celery.app.trace.", "celery.utils.dispatch.", "celery_redlock.tasks.",
             "logging.")  # fmt: skip

_settings: weakref.WeakKeyDictionary[Any, AppSettings] = weakref.WeakKeyDictionary()
_redlocks: weakref.WeakKeyDictionary[Any, Redlock] = weakref.WeakKeyDictionary()
_making = threading.RLock()  # a finalizer, or a signal handler, may come in between
_is_worker = False
_bodies: dict[int, MonitoredBody] = {}  # that run in this process, by id


def settings_of(app: Any) -> AppSettings:
    """Return an app's settings, read once; raises SettingsError each time while they are wrong."""
    settings = _settings.get(app)
    if settings is None:
        settings = _settings[app] = read_app(app.conf, app.namespace)
    return settings


def redlock_of(app: Any) -> Redlock:
    """Return the app's `Redlock` in this process, made at the first call.

    It connects with the first lock, so before a worker forks nothing is open; a forked child
    connects anew by itself.
    """
    redlock = _redlocks.get(app)
    if redlock is None:
        settings = settings_of(app)
        with _making:
            redlock = _redlocks.get(app)
            if redlock is None:
                made = Redlock(
                    settings.nodes,
                    prefix=settings.prefix,
                    node_timeout=settings.node_timeout,
                    clock_drift=settings.clock_drift,
                    max_ttl=settings.max_ttl,
                    restart_guard=settings.restart_guard,
                )
                made.session.events.tells_of_new_nodes = not _is_worker
                made.session.warns = False  # nobody but the app could close it
                redlock = _redlocks.setdefault(app, made)  # one that came in between was first
    return redlock


@worker_init.connect(weak=False)
@worker_process_init.connect(weak=False)
def _note_worker(**_: Any) -> None:
    """Have this process say nothing of each new node: a worker says so of all of them at once."""
    global _is_worker
    _is_worker = True


def name_of(app: Any) -> str:
    """Return what `celery -A` takes for an app; "" where that is not known.

    As the command line of this process says it, else the module in which the app stands.
    Source: celery.bin.celery keeps the option as it was written, or the app where that was given.
    """
    context = click.get_current_context(silent=True)
    written = None if context is None else context.find_root().params.get("app")
    if isinstance(written, str):
        return written
    for module, found in list(sys.modules.items()):
        if module != "__main__":
            for name, value in list(vars(found).items()) if isinstance(found, ModuleType) else ():
                if value is app:
                    return f"{module}:{name}"
    return ""


def forget(app: Any) -> None:
    """Read an app's settings anew and connect anew: they have changed. For tests."""
    _settings.pop(app, None)
    redlock = _redlocks.pop(app, None)
    if redlock is not None:
        redlock.close()


class MonitoredBody:
    """A body that runs under a lock, and hears when that is lost.

    abort: LockLost is raised in it, once, where its place allows that. report: called with the
    loss, once, where it may block; tells monitors.
    """

    __slots__ = ("_reports", "abort", "lock", "place", "struck")

    def __init__(self, lock: Lock, *, abort: bool, report: Callable[[LockLost], object]) -> None:
        self.lock, self.abort = lock, abort
        self.place = current_interrupter()
        self.struck = False
        self._reports = [report]  # taken out by the one that calls it

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run it. Raises LockLost instead where the lock is lost by now, and abort says so."""
        _bodies[id(self)] = self
        try:
            lost = loss_of(self.lock)  # before it stood there, nobody could have told it
            if lost is not None and self.abort:
                raise lost
            return call(*args, **kwargs)
        finally:
            _bodies.pop(id(self), None)

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
            self.place.run_beside(self.report_loss)
        if self.abort:
            start_thread(self._interrupt)

    def _interrupt(self) -> None:
        """Try until it is struck or over; in a thread of its own."""
        alarm, pause = DeadlineTimer(), FIRST_PAUSE
        while id(self) in _bodies and self.pending is not None:
            if not self.place.interrupt(self):
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
    for body in list(_bodies.values()):
        if loss_of(body.lock) is not None:
            body.hear()


class Interrupter:
    """Where a body runs. This is one in which nothing can be raised: a thread like any other."""

    def interrupt(self, body: MonitoredBody) -> bool:
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

    def interrupt(self, body: MonitoredBody) -> bool:
        """Send the signal; a handler that replaced ours meanwhile is not ours to call."""
        if self._number is None or not self._is_ours():
            return False
        signal.pthread_kill(threading.main_thread().ident or 0, self._number)
        return True

    def _raise_loss(self, number: int, frame: FrameType | None) -> None:
        """Raise LockLost if a body whose lock is lost is what runs now."""
        if _is_cut(sys.exc_info()[1]):
            return
        for body in list(_bodies.values()):
            lost = body.pending if body.place is self else None
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

    def interrupt(self, body: MonitoredBody) -> bool:
        """Have the hub look and throw."""
        self._call_in_hub(self._throw, body)
        return True

    def _throw(self, body: MonitoredBody) -> None:
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
