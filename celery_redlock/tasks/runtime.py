"""What one process owns for each app: its settings and its one `Redlock`."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from celery_redlock.lock.redlock import Redlock
from celery_redlock.tasks.settings import AppSettings, read_app

_settings: weakref.WeakKeyDictionary[Any, AppSettings] = weakref.WeakKeyDictionary()
_redlocks: weakref.WeakKeyDictionary[Any, Redlock] = weakref.WeakKeyDictionary()
_making = threading.Lock()


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
                redlock = _redlocks[app] = Redlock(
                    settings.nodes,
                    prefix=settings.prefix,
                    node_timeout=settings.node_timeout,
                    clock_drift=settings.clock_drift,
                    max_ttl=settings.max_ttl,
                    restart_guard=settings.restart_guard,
                )
    return redlock
