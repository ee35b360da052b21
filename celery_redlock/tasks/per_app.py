"""What a process keeps for each app: its settings, one `Redlock`, and how far it has finalized."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from celery import Celery

from celery_redlock.errors import SettingsError
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.validation import check_nodes
from celery_redlock.tasks.settings.app import APP_SETTING, AppSettings
from celery_redlock.tasks.settings.levels import find_nodes, read_app
from celery_redlock.tasks.settings.options import OPTION
from celery_redlock_entry import without_proxy

logger = logging.getLogger(__name__)

# The settings that may name the nodes, in the order in which `find_nodes` reads them. A change of a
# setting is heeded if it named the nodes, or would go before the one that did.
_NODE_SETTINGS = ("redlock_nodes", "broker_write_url", "broker_url", "result_backend")
_CHECKED_FOR_NODES = {
    name: _NODE_SETTINGS[: place + 1] for place, name in enumerate(_NODE_SETTINGS)
}
_OTHER_SETTINGS = tuple(f"redlock_{name}" for name in (*APP_SETTING, *OPTION) if name != "nodes")
# by app: the values of the settings when they were read
_read_values: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_settings: weakref.WeakKeyDictionary[Any, AppSettings] = weakref.WeakKeyDictionary()
_redlocks: weakref.WeakKeyDictionary[Any, Redlock] = weakref.WeakKeyDictionary()
# Apps that have finalized and were checked: later tasks are, as they are added. Until then nothing
# is to be raised.
checked: weakref.WeakSet[Any] = weakref.WeakSet()
# Apps with a locked task of their own, and not only those that all apps share. A task that is
# declared after the app has finalized counts as one that is shared.
owners: weakref.WeakSet[Any] = weakref.WeakSet()
# Apps whose worker leaves nothing on the nodes but its locks: not the settings that it has, either.
guests: weakref.WeakSet[Any] = weakref.WeakSet()
_creation_mutex = (
    threading.RLock()
)  # a finalizer or a signal handler may interrupt the thread that has it
_is_worker = False


# Called with the app of each locked task that is bound. The module `wiring` sets it, for it knows
# all that a process needs for its first locked task, and is above the class of these tasks.
on_locked_task: Callable[[Any], object] = id  # which does nothing


def settings_of(app: Any) -> AppSettings:
    """Return an app's settings, read once; raises SettingsError at each call if they are wrong.

    Without nodes they are read at each call: a setting may still name some.
    """
    settings = _settings.get(app)
    if settings is None:
        settings = read_app(app.conf, app.namespace)
        if settings.nodes:
            _read_values[app] = _values_of(app.conf, (*_NODE_SETTINGS, *_OTHER_SETTINGS))
            _settings[app] = settings
    return settings


def _values_of(conf: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of settings, copied: the app may change a list or mapping in place."""
    return {name: _copy(conf.get(name)) for name in names}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [*map(_copy, value)] if isinstance(value, (list, tuple)) else value


def redlock_as_set(app: Any) -> Redlock:
    """Return the app's `Redlock`, on the nodes that its settings name at this moment.

    A test, or Django's `override_settings`, may change them after they were read. Raises
    SettingsError if they have changed while this process holds a lock of the app. A worker does not
    read them again: Celery's settings are slow to read, and each run would pay for it.
    """
    settings = None if _is_worker else _settings.get(app)
    if settings is not None:
        read_values = _read_values[app]
        for name in _CHECKED_FOR_NODES[settings.nodes_from]:
            value = app.conf.get(name)
            if (
                value != read_values[name] and _copy(value) != read_values[name]
            ):  # a tuple is not its copy
                _change_nodes(app, settings)
                break
    return redlock_of(app)


def _change_nodes(app: Any, settings: AppSettings) -> None:
    """Replace the nodes of an app by those that its settings name now, and nothing else."""
    nodes, nodes_from = find_nodes(app.conf)
    checked = check_nodes("app", nodes_from, nodes)
    redlock = _redlocks.get(app)
    if redlock is not None and redlock.session.watchdog.watched and not redlock.session.is_closed:
        before = ", ".join(node.name for node in redlock.session.nodes.all)
        hint = (
            f"has changed from {before} while this process holds a lock there: change it when no "
            "lock is held"
        )
        raise SettingsError("app", nodes_from, ", ".join(node.name for node in checked), hint)
    with _creation_mutex:
        _read_values[app] = {**_read_values[app], **_values_of(app.conf, _NODE_SETTINGS)}
        _settings[app] = replace(settings, nodes=tuple(nodes), nodes_from=nodes_from)
        _redlocks.pop(app, None)  # it closes itself once nothing uses it


def _warn_of_late_changes(app: Any) -> None:
    """Log which settings, other than the nodes, have changed since they were read."""
    values = _read_values.get(app, {})
    values_now = _values_of(app.conf, _OTHER_SETTINGS) if values else {}
    if changed := [name for name in values_now if values_now[name] != values[name]]:
        logger.warning(
            "%s: changed after this process had read it, so it changes no lock here: set it "
            "before the app finalizes",
            ", ".join(changed), extra={"event": "settings_late"},
        )  # fmt: skip


def redlock_of_given(app: Any) -> Redlock:
    """Return the `Redlock` of an app that a user passes, also of the proxy `celery.current_app`."""
    app = without_proxy(app)
    if not isinstance(app, Celery):
        raise SettingsError("Redlock.of", "app", repr(app), "must be a Celery app")
    return redlock_as_set(app)


def redlock_of(app: Any) -> Redlock:
    """Return the app's `Redlock` in this process, made at the first call, and again once closed.

    It connects with its first lock, so a worker that forks has no open connection; a forked child
    connects anew by itself. `redlock_as_set` heeds nodes that the settings name since then. Raises
    SettingsError, also if no setting names a node.
    """
    redlock = _redlocks.get(app)
    if redlock is None or redlock.session.is_closed:
        settings = settings_of(app)
        if not settings.nodes:
            find_nodes(app.conf)  # raises
        with _creation_mutex:
            redlock = _redlocks.get(app)
            if redlock is None or redlock.session.is_closed:
                closed = _redlocks.pop(app, None)
                if closed is None:
                    _warn_of_late_changes(app)
                new = Redlock(
                    settings.nodes,
                    prefix=settings.prefix,
                    node_timeout=settings.node_timeout,
                    clock_drift=settings.clock_drift,
                    max_ttl=settings.max_ttl,
                    restart_guard=settings.restart_guard,
                )
                new.session.events.tells_of_new_nodes = not _is_worker
                new.session.warns = False  # of not being closed: the app keeps it
                redlock = _redlocks.setdefault(app, new)  # an interrupting call may have made one
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
