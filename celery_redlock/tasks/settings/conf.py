"""Reads an app's `redlock_*` settings, and what the broker's own settings say of a Redis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery_redlock.errors import SettingsError
from celery_redlock.lock.validation import (
    check_drift,
    check_guard,
    check_nodes,
    check_prefix,
    check_seconds,
)
from celery_redlock.tasks.settings.app import CELERY_PREFIX, DEFAULT_MAX_TTL, AppSettings
from celery_redlock.tasks.settings.options import APP_ONLY, OPTIONS, check_options, did_you_mean
from celery_redlock.tasks.settings.sources import (
    OptionSource,
    app_source,
    pattern_source,
    tasks_source,
)

DEFAULT_PREFIX = "redlock"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what an exporter is for; the setting may name a host
LONGEST_MARK = 600.0  # s, where `redlock_done_ttl` does not say it: each mark takes memory


def read_app(conf: Mapping[str, Any], namespace: str | None = None) -> AppSettings:
    """Return what an app's configuration says; raises SettingsError.

    conf: `app.conf`, or any mapping with its look-up. namespace: as given to
    `config_from_object`; its prefix stands before the names that iteration gives.
    """
    check_known_names(conf, namespace)
    level = "app"

    def value(name: str, default: Any) -> Any:
        return conf.get(f"redlock_{name}", default)

    timeout = check_seconds(level, "redlock_node_timeout", value("node_timeout", 0.2))
    nodes, nodes_from = _nodes(conf, value("nodes", None))
    check_nodes(level, nodes_from, nodes, timeout)
    done_ttl = _done_ttl(conf, level, value("done_ttl", None))
    bare = AppSettings(
        nodes=tuple(nodes),
        prefix=check_prefix(level, "redlock_prefix", value("prefix", DEFAULT_PREFIX)),
        node_timeout=timeout,
        clock_drift=check_drift(level, "redlock_clock_drift", value("clock_drift", 0.01)),
        max_ttl=check_seconds(level, "redlock_max_ttl", value("max_ttl", DEFAULT_MAX_TTL)),
        restart_guard=check_guard(level, "redlock_restart_guard", value("restart_guard", "auto")),
        done_ttl=done_ttl,
        options={},
        queues={},
        tasks={},
        # so that a copy which waits looks again while it is known that another one is done
        countdown_cap=min(_visibility(conf) / 4, done_ttl / 2),
        metrics=_metrics(level, value("metrics", None)),
        nodes_from=nodes_from,
    )
    queues = _by_pattern("queue", value("queues", None) or {}, bare, travels=True)
    tasks = _by_pattern("task", value("tasks", None) or {}, bare, travels=False)
    for pattern in tasks:
        if pattern.startswith(CELERY_PREFIX):
            hint = "Celery's own tasks are never locked: name tasks of your own or of others"
            raise tasks_source(pattern).wrong(tasks[pattern], hint)
    return replace(bare, options=_app_options(conf, bare), queues=queues, tasks=tasks)


def check_known_names(conf: Mapping[str, Any], namespace: str | None = None) -> None:
    """Raise SettingsError for a redlock_* setting that does not exist."""
    known = [f"redlock_{name}" for name in (*OPTIONS, *APP_ONLY)]
    before = f"{namespace.lower()}_" if namespace else ""
    for written in conf:
        name, start = str(written).lower(), ""
        if before and name.startswith(before):
            name, start = name[len(before) :], str(written)[: len(before)]
        if name.startswith("redlock_") and name not in known:
            is_upper = str(written).isupper()
            as_written = [start + (one.upper() if is_upper else one) for one in known]
            hint = f"is not a setting{did_you_mean(written, as_written)}"
            raise OptionSource("app", str(written)).wrong(conf[written], hint)


def _app_options(conf: Mapping[str, Any], app: AppSettings) -> Mapping[str, Any]:
    missing = object()
    given = {name: conf.get(f"redlock_{name}", missing) for name in OPTIONS}
    given = {name: value for name, value in given.items() if value is not missing}
    return check_options(given, app, app_source, travels=False)


def _by_pattern(
    kind: str, given: Any, app: AppSettings, *, travels: bool
) -> Mapping[str, Mapping[str, Any]]:
    """Return the options of queues or tasks by name or glob, checked. kind: "queue" or "task"."""
    whole = OptionSource("app", f"redlock_{kind}s")
    if not isinstance(given, Mapping):
        raise whole.wrong(given, f"must map {kind} names or globs to options")
    result = {}
    for pattern, options in given.items():
        if not isinstance(pattern, str) or not isinstance(options, Mapping):
            hint = f"must map a {kind}'s name or glob to its options"
            raise whole.wrong({pattern: options}, hint)
        source = pattern_source(kind, pattern)
        result[pattern] = check_options(options, app, source, travels=travels)
    return result


def _metrics(level: str, given: Any) -> tuple[str, int] | None:
    """Return where metrics are served: a port of all interfaces, or "host:port"."""
    if given is None:
        return None
    host, _, port = str(given).rpartition(":")
    if isinstance(given, bool) or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        hint = 'must be a port, or "host:port", 0 for any that is free; None for no metrics'
        raise SettingsError(level, "redlock_metrics", repr(given), hint)
    return host.strip("[]") or EVERYWHERE, int(port)


def _done_ttl(conf: Mapping[str, Any], level: str, given: Any) -> float:
    """Return the s for which a run is known as done: until no other delivery is to be expected."""
    if given is None:
        return min(_visibility(conf) + 60.0, LONGEST_MARK)
    return check_seconds(level, "redlock_done_ttl", given)


VISIBILITY = 3600.0  # s: kombu's own, where `visibility_timeout` is not set


def _nodes(conf: Mapping[str, Any], given: Any) -> tuple[Any, str]:
    """Return the nodes to use and the name of the setting that they come from."""
    if given is not None:
        return given, "redlock_nodes"
    of_broker = one_redis(_url(conf, "broker_url"))
    for name in ("broker_write_url", "broker_url", "result_backend"):
        url = one_redis(_url(conf, name))
        if url is not None and conf.get("broker_use_ssl"):
            hint = "broker_use_ssl is set, which nodes do not take over: name them with rediss://"
            raise SettingsError("app", "redlock_nodes", "None", hint)
        if url is not None:  # Celery's own default of the one for writes is the other one
            return [url], "broker_url" if url == of_broker else name
    hint = (
        "neither the broker nor the result backend is one Redis: name the lock's own nodes, "
        'as redlock_nodes = ["redis://a", "redis://b", "redis://c"]'
    )
    raise SettingsError("app", "redlock_nodes", "None", hint)


def _url(conf: Mapping[str, Any], name: str) -> Any:
    return getattr(conf, name, None) or conf.get(name)


def one_redis(url: Any) -> str | None:
    """Return a broker's or backend's URL as redis-py takes it, None where it is not one Redis."""
    if isinstance(url, (list, tuple)) and len(url) == 1:
        url = url[0]
    if not isinstance(url, str) or ";" in url:
        return None
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("redis", "rediss", "redis+socket", "unix"):
        return None
    if scheme in ("redis", "rediss"):
        parts = urlsplit(url)
        # "redis://" alone means this machine to Celery, and CERT_REQUIRED is "required" to redis-py
        query = re.sub(r"(?<=ssl_cert_reqs=)CERT_(\w+)", lambda m: m[1].lower(), parts.query)
        return urlunsplit(parts._replace(netloc=parts.netloc or "localhost", query=query))
    path, _, query = rest.partition("?")
    database = [p.split("=")[1] for p in query.split("&") if p.startswith("virtual_host=")]
    return f"unix://{path}" + (f"?db={database[0].strip('/')}" if database else "")


def _visibility(conf: Mapping[str, Any]) -> float:
    """Return the s after which a broker takes a message for lost; countdowns stay well below.

    Source: kombu's Redis and SQS transports deliver again what is not acknowledged within
    `visibility_timeout`; a message that waits is not acknowledged.
    """
    options = conf.get("broker_transport_options") or {}
    timeout = options.get("visibility_timeout", VISIBILITY)
    return float(timeout) if isinstance(timeout, (int, float)) and timeout > 0 else VISIBILITY
