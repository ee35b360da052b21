"""What a process keeps for each app: its settings, one `Redlock`, and how far it has finalized."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.utils.functional import noop

from celery_redlock.errors import SettingsError
from celery_redlock.lock.client import Redlock
from celery_redlock.tasks.settings.app import AppSettings
from celery_redlock.tasks.settings.levels import find_nodes, read_app

_settings: weakref.WeakKeyDictionary[Any, AppSettings] = weakref.WeakKeyDictionary()
_redlocks: weakref.WeakKeyDictionary[Any, Redlock] = weakref.WeakKeyDictionary()
# Apps that have finalized and were checked: later tasks are, as they are added. Until then nothing
# is to be raised.
checked: weakref.WeakSet[Any] = weakref.WeakSet()
# Apps with a locked task of their own, and not only those that all apps share. A task that is
# declared after the app has finalized counts as one that is shared.
owners: weakref.WeakSet[Any] = weakref.WeakSet()
_making = threading.RLock()  # a finalizer or a signal handler may interrupt the thread that has it
_is_worker = False


# Called with the app of each locked task that is bound. The module `wiring` sets it, for it knows
# all that a process needs for its first locked task, and is above the class of these tasks.
on_locked_task: Callable[[Any], object] = noop


def settings_of(app: Any) -> AppSettings:
    """Return an app's settings, read once; raises SettingsError at each call if they are wrong.

    Without nodes they are read at each call: a setting may still name some.
    """
    settings = _settings.get(app)
    if settings is None:
        settings = read_app(app.conf, app.namespace)
        if settings.nodes:
            _settings[app] = settings
    return settings


def without_proxy(app: Any) -> Any:
    """Return an app, also for `celery.current_app`, which a class has that no app registered."""
    return app._get_current_object() if hasattr(type(app), "_get_current_object") else app


def redlock_of_given(app: Any) -> Redlock:
    """Return the `Redlock` of what a caller gives as an app; also of `celery.current_app`."""
    app = without_proxy(app)
    if not isinstance(app, Celery):
        raise SettingsError("Redlock.of", "app", repr(app), "must be a Celery app")
    return redlock_of(app)


def redlock_of(app: Any) -> Redlock:
    """Return the app's `Redlock` in this process, made at the first call, and again once closed.

    It connects with its first lock, so a worker that forks has no open connection; a forked child
    connects anew by itself. Raises SettingsError, also if no setting names a node.
    """
    redlock = _redlocks.get(app)
    if redlock is None or redlock.session.is_closed:
        settings = settings_of(app)
        if not settings.nodes:
            find_nodes(app.conf)  # raises
        with _making:
            redlock = _redlocks.get(app)
            if redlock is None or redlock.session.is_closed:
                _redlocks.pop(app, None)
                made = Redlock(
                    settings.nodes,
                    prefix=settings.prefix,
                    node_timeout=settings.node_timeout,
                    clock_drift=settings.clock_drift,
                    max_ttl=settings.max_ttl,
                    restart_guard=settings.restart_guard,
                )
                made.session.events.tells_of_new_nodes = not _is_worker
                made.session.warns = False  # of not being closed: the app keeps it
                redlock = _redlocks.setdefault(app, made)  # an interrupting call may have made one
    return redlock


def time_of_nodes(app: Any) -> float:
    """Return the present time by the clocks of an app's lock nodes, which all its processes share.

    Seconds since 1970; by the own clock if this process has not reached any node.
    """
    return redlock_of(app).session.guard.wall()


def note_worker(**_: Any) -> None:
    """Do not log each new node in this process: a worker logs all of them in one line."""
    global _is_worker
    _is_worker = True


def leave_redlock(app: Any) -> None:
    """Let an app's `Redlock` close itself, since its last worker in this process has ended.

    Only if the process goes on, as that of a test does. A `Redlock` that holds a lock stays.
    """
    # in such a process a worker has a thread of its own
    redlock = _redlocks.get(app)
    if redlock is None or threading.current_thread() is threading.main_thread():
        return
    if not redlock.session.watchdog.watched:
        _redlocks.pop(app, None)  # another worker may end at the same time


def forget(app: Any) -> None:
    """Drop an app's settings, and close its `Redlock`; the next call makes both anew. For tests."""
    _settings.pop(app, None)
    redlock = _redlocks.pop(app, None)
    if redlock is not None:
        redlock.close()
