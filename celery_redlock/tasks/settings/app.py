"""The settings of a whole app: their table, and their values, checked and frozen."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.lock.validation import (
    check_drift,
    check_guard,
    check_prefix,
    check_seconds,
)
from celery_redlock.tasks.settings.sources import OptionSource

DEFAULT_TTL, DEFAULT_MAX_TTL = 30.0, 60.0  # seconds
DEFAULT_PREFIX = "redlock"
CELERY_PREFIX = "celery."  # the start of the names of Celery's own tasks
LOOPBACK = "127.0.0.1"  # metrics have no password: others see them only if a host is named


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of a table of settings. The tables of the documentation are made from these rows.

    name: without a prefix, as "ttl". default: the built-in value; shown_default: that in words, if
    its text is not enough. unit: "s" for seconds. values: the allowed values; doc: the meaning in
    one sentence; details: further sentences; these three are Markdown for users.
    """

    name: str
    default: Any
    values: str
    doc: str
    details: str = ""
    unit: str = ""
    shown_default: str = ""


@dataclass(frozen=True, kw_only=True)
class AppSetting(Setting):
    """A setting `redlock_<name>` of the whole app.

    check: takes the source and the value; returns the value to use or raises SettingsError. None
    for a value that is checked together with others, in `conf.py`.
    """

    check: Callable[[OptionSource, Any], Any] | None = None


@dataclass(frozen=True)
class AppSettings:
    """The settings of a whole app. Times in seconds.

    nodes: empty if no setting names one. options: for all tasks; queues, tasks: options by name or
    glob. countdown_cap: the longest delay of a deferral. metrics: host and port at which a worker
    serves them. call_options: those that a message may carry, None for all. nodes_from: the setting
    that names the nodes, as "broker_url".
    """

    nodes: tuple[Any, ...] = field(repr=False)  # URLs may hold passwords
    prefix: str
    node_timeout: float
    clock_drift: float
    max_ttl: float
    restart_guard: str
    done_ttl: float
    options: Mapping[str, Any]
    queues: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[str, Mapping[str, Any]]
    countdown_cap: float
    metrics: tuple[str, int] | None = None
    call_options: frozenset[str] | None = None
    nodes_from: str = "redlock_nodes"

    @property
    def built_in_ttl(self) -> float:
        """The ttl in seconds if no level sets one."""
        return min(DEFAULT_TTL, self.max_ttl)

    def may_carry(self, option: str) -> bool:
        """Return whether a message may set an option."""
        return self.call_options is None or option in self.call_options

    def for_queue(self, queue: str) -> Mapping[str, Any]:
        """Return the options of a queue: of its exact name, else of the first glob that matches."""
        return self.queues.get(pattern_for(queue, self.queues) or "", {})


def pattern_for(name: str, patterns: Iterable[str]) -> str | None:
    """Return the pattern that applies to a name, None if none does.

    An exact name goes before globs; of the globs the first that matches applies.
    """
    patterns = list(patterns)
    if name in patterns:
        return name
    return next((glob for glob in patterns if fnmatch.fnmatchcase(name, glob)), None)


def is_glob(pattern: str) -> bool:
    """Return whether a pattern is a glob and not a plain name."""
    return any(sign in pattern for sign in "*?[")


def _seconds(source: OptionSource, value: Any) -> float:
    return check_seconds(source.level, source.name, value)


def _seconds_or_none(source: OptionSource, value: Any) -> float | None:
    return None if value is None else _seconds(source, value)


def _listen_address(source: OptionSource, value: Any) -> tuple[str, int] | None:
    """Return the host and port to listen on: a port alone means this machine alone."""
    if value is None:
        return None
    host, _, port = str(value).rpartition(":")
    if isinstance(value, bool) or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        hint = 'must be a port, or "host:port", 0 for any that is free; None for no metrics'
        raise source.wrong(value, hint)
    return host.strip("[]") or LOOPBACK, int(port)


APP_SETTINGS = (
    AppSetting(
        name="nodes",
        default=None,
        shown_default="the broker, else the result backend, if it is one Redis",
        values="URLs (`redis://`, `rediss://`, `unix://`, `sentinel://`) or redis-py clients",
        doc="The lock nodes: independent primaries, best three or five.",
        details=(
            "Without the setting, the broker is the only node if it is one Redis, else the result "
            "backend. With `broker_use_ssl` the setting is required. See [three lock "
            "nodes](docs/getting-started/three-nodes.md)."
        ),
    ),
    AppSetting(
        name="prefix",
        default=DEFAULT_PREFIX,
        values="a text without braces, not empty",
        doc="The start of all key names on the nodes.",
        details=(
            "Clients with the same prefix share their locks. They must also have the same nodes, "
            "`redlock_max_ttl` and `redlock_restart_guard`. A `global_keyprefix` of the broker or "
            "the result backend does not apply to lock keys."
        ),
        check=lambda source, value: check_prefix(source.level, source.name, value),
    ),
    AppSetting(
        name="node_timeout",
        default=0.2,
        unit="s",
        values="seconds, above 0",
        doc="The time for one node to answer a request.",
        details=(
            "Every `ttl` must be at least four times this value, the built-in one too. So "
            "`redlock_node_timeout = 60` requires a `redlock_ttl` and a `redlock_max_ttl` of 240 s."
            " An acquire that has to connect may take 2 s, unless a quorum answers sooner. A node "
            "that a connect has failed to costs later acquires no more than this value."
        ),
        check=_seconds,
    ),
    AppSetting(
        name="clock_drift",
        default=0.01,
        values="a fraction from 0 to below 0.5",
        doc="How much the clocks of two machines may differ in speed; 0.01 is 1 %.",
        details="It is subtracted from the time for which a lease is valid.",
        check=lambda source, value: check_drift(source.level, source.name, value),
    ),
    AppSetting(
        name="max_ttl",
        default=DEFAULT_MAX_TTL,
        unit="s",
        values="seconds, above 0",
        doc="The longest `ttl` of any client of the prefix.",
        details=(
            "A new or restarted node grants no locks for this time and one second. Raise the "
            "setting in all clients before you raise a `ttl`."
        ),
        check=_seconds,
    ),
    AppSetting(
        name="restart_guard",
        default="auto",
        values='`"auto"`, `"strict"` or `"off"`',
        doc="Which nodes wait before they grant locks, since they may have lost some.",
        details=(
            '`"strict"`: a new or restarted node waits for `redlock_max_ttl` and one second. '
            '`"off"`: no node waits. `"auto"`: `"strict"` with two nodes or more, `"off"` with one.'
        ),
        check=lambda source, value: check_guard(source.level, source.name, value),
    ),
    AppSetting(
        name="done_ttl",
        default=None,
        shown_default="the broker's visibility timeout and 60 s, at most 600 s",
        values="seconds, above 0, or `None` for the default",
        doc="How long the nodes remember a finished run, to drop its redelivered message.",
        details=(
            "It matters to tasks that acknowledge late. A completion marker takes about 150 bytes "
            "on each node."
        ),
        check=_seconds_or_none,
    ),
    AppSetting(
        name="metrics",
        default=None,
        values='a port, `"host:port"`, or `None` for no metrics',
        doc="Where a worker serves its Prometheus [metrics](docs/operations/monitoring.md).",
        details=(
            'A port alone is for this machine. `"0.0.0.0:9808"` listens on all interfaces, without '
            "a password. Port 0 is any free port. It needs the extra `celery_redlock[metrics]`."
        ),
        check=_listen_address,
    ),
    AppSetting(
        name="call_options",
        default=None,
        shown_default="all",
        values="a list of [options](docs/reference/options.md#options), `[]`, or `None` for all",
        doc="The options that a call may set in its message.",
        details=(
            "Each client that may send to the broker can set them. A send with another option "
            "raises a `SettingsError`. A run ignores another option of a message, with a WARNING. "
            "See [messages](docs/operations/security.md#messages)."
        ),
    ),
    AppSetting(
        name="queues",
        default=None,
        values="a mapping from queue names or globs to options",
        doc="The [options](docs/reference/options.md#options) of a queue's tasks.",
        details="A value cannot be a callable.",
    ),
    AppSetting(
        name="tasks",
        default=None,
        values="a mapping from task names or globs to options",
        doc="Locks [tasks of others](docs/reference/options.md#tasks-of-others), by name or glob.",
    ),
)
APP_SETTING: Mapping[str, AppSetting] = {setting.name: setting for setting in APP_SETTINGS}
