"""Reads and checks one level of options at a time, and merges levels: the nearer one wins.

`read_app` reads the `redlock_*` settings of an app; it finds a Redis in the settings of its broker.
Not here: the tables of settings (`app.py`) and of options (`options.py`), and the levels of one
task (`task_config.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery_redlock.errors import SettingsError
from celery_redlock.lock.engine.acquirer import ROUNDS_IN_TTL
from celery_redlock.lock.validation import check_nodes, check_permits, check_rates, check_ttl
from celery_redlock.tasks.settings.app import (
    APP_SETTING,
    CELERY_PREFIX,
    AppSettings,
    OptionSource,
    SourceOf,
    did_you_mean,
)
from celery_redlock.tasks.settings.options import BUILT_IN, NEWEST, OPTION
from celery_redlock.tasks.settings.templates import templates_of

# Other locks' words for these options: by its spelling alone, `timeout` is closest to `limit`.
SYNONYMS = {
    **dict.fromkeys(("timeout", "expire", "expires", "lease"), "ttl"),
    "expiry": "unique_for",  # celery-singleton's lock_expiry
    **dict.fromkeys(("blocking_timeout", "acquire_timeout"), "wait"),
}
KEY_OPTIONS = ("key", "args")  # two ways to name the resource: a level that sets one decides both
KEY_LIMIT_OPTIONS = ("limit", "rate")  # options that limit the runs with one key
LONGEST_DONE_TTL = 600.0  # seconds, by default: each completion marker takes memory on the nodes
# Seconds: kombu's own defaults, by transport; other transports have no such timeout.
VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}
AMQP_SCHEMES = ("", "amqp", "amqps", "pyamqp", "librabbitmq")  # schemes; "": Celery's default
DEFAULT_VISIBILITY_TIMEOUT = 3600.0  # seconds: taken for a broker without a visibility timeout
# The settings that Celery reads beside the URL of a broker, and beside the one of a result backend;
# and the part of a URL in `redlock_nodes` that means the same.
_CONNECTION_SETTINGS = (
    {"broker_use_ssl": "rediss://"},
    {
        "redis_backend_use_ssl": "rediss://", "redis_username": "@", "redis_password": "@",
        "redis_backend_credential_provider": "credential_provider=",
    },
)  # fmt: skip
_LOGINS = {  # what a URL with a login of its own has, and how it looks
    "@": "redis://user:password@",
    "credential_provider=": "?credential_provider=module.Class",
}
# settings whose checked value is the field of the same name
_COPIED_SETTINGS = (
    *("prefix", "node_timeout", "clock_drift", "max_ttl", "restart_guard", "metrics"),
    "store_deferred",
    "beat_scheduler",
    "recovery",
)


def check_options(
    options: Mapping[str, Any], app: AppSettings, source_of: SourceOf, *, travels: bool
) -> dict[str, Any]:
    """Return the options of one level, each checked. travels: no value can be a callable."""
    checked = {}
    for name, value in options.items():
        if name not in OPTION:
            raise source_of(str(name)).wrong(value, f"is not an option{option_meant(name)}")
        if travels and callable(value):
            raise source_of(name).wrong(value, "a callable is allowed at task and app level only")
        checked[name] = OPTION[name].check(*source_of(name), value)
        if name == "ttl":
            check_ttl(*source_of(name), value, app.node_timeout, app.max_ttl)
    if checked.get("key") is not None and checked.get("args") is not None:
        hint = (
            f"{source_of('key').name} is set at the same level, and one of them says what is "
            "locked: leave one out, or set the one that is inherited to None"
        )
        raise source_of("args").wrong(options["args"], hint)
    return checked


def time_limit_of(task: Any) -> float | None:
    """Return the seconds after which a body ends for certain, None for no limit."""
    # Celery before 5.7 leaves the app's limits to the pool, and None on its tasks
    conf = task.app.conf
    soft: float | None = (
        conf.task_soft_time_limit if task.soft_time_limit is None else task.soft_time_limit
    )
    hard: float | None = conf.task_time_limit if task.time_limit is None else task.time_limit
    return soft if hard is None else hard


def declared_queues(conf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the queues in the settings, without queues that a send creates."""
    queues = conf.get("task_queues") or [conf.get("task_default_queue")]
    return tuple(str(getattr(queue, "name", queue)) for queue in queues)


def decides_key(options: Mapping[str, Any]) -> bool:
    """Return whether a level sets `key` or `args`, and so decides both."""
    return any(name in options for name in KEY_OPTIONS)


def merge_levels(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of several levels as one; the nearest level comes last."""
    merged: dict[str, Any] = {}
    for options in levels:
        if decides_key(options):
            merged.update(dict.fromkeys(KEY_OPTIONS))
        merged.update(options)
    return merged


def check_outside(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for a `lock_*` option among Celery's own of a call, which ignores it."""
    for keyword, value in options.items():
        name = keyword.removeprefix("lock_")
        if name != keyword and name in OPTION:
            hint = f'belongs in the mapping of a call: lock={{"{name}": ...}}'
            raise SettingsError("call", keyword, repr(value), hint)


def check_together(level: str, options: Mapping[str, Any]) -> None:
    """Raise SettingsError for merged options that are valid one by one, but not together."""
    merged = {**BUILT_IN, **options}
    limit = merged["limit"]
    rate = merged["rate"]
    key = merged["key"]
    templates = templates_of(key)
    # each run asks a callable, and a mapping is of a key
    if not callable(limit) and not (key is False and isinstance(limit, Mapping)):
        check_permits(level, limit=limit, fencing=merged["fencing"], names=templates)
    if key is not False:
        check_rates(level, rate=rate, names=templates)
    if merged["on_duplicate"] == NEWEST:
        _check_newest(level, merged)
    debounce = merged["debounce"]
    debounce_max = merged["debounce_max"]
    if debounce is not None and merged["unique_for"] is not None:
        hint = (
            "cannot be combined with debounce, which deduplicates calls until the run is due: "
            'leave one out, or set it to None, for one call by lock={"debounce": None}'
        )
        raise SettingsError(level, "unique_for", repr(merged["unique_for"]), hint)
    if debounce is not None and debounce_max is not None and debounce_max < debounce:
        hint = f"must be at least debounce={debounce:g}"
        raise SettingsError(level, "debounce_max", repr(debounce_max), hint)


def _check_newest(level: str, merged: Mapping[str, Any]) -> None:
    """Raise SettingsError for options with which no send takes the place of a queued one."""
    if merged["debounce"] is not None:
        wrong = "debounce"
        way_out = "which runs the last call after a pause: leave one of the two out"
    elif merged["unique_for"] is None:
        wrong = "unique_for"
        way_out = 'which needs it, in seconds: set it, or on_duplicate="existing"'
    elif merged["unique_until"] != "started":
        wrong = "unique_until"
        way_out = 'which needs unique_until="started"'
    elif merged["on_conflict"] == "skip":
        wrong = "on_conflict"
        way_out = 'whose last call would be dropped beside a run: take on_conflict="defer"'
    elif merged["limit"] != 1 and not callable(merged["limit"]):
        wrong = "limit"
        way_out = "whose runs follow each other: set limit=1"
    else:
        return
    hint = f'cannot be combined with on_duplicate="newest", {way_out}'
    raise SettingsError(level, wrong, repr(merged[wrong]), hint)


def check_built_in(app: AppSettings, options: Mapping[str, Any]) -> None:
    """Raise SettingsError if the built-in ttl is in force and leaves no time to renew it."""
    min_ttl = ROUNDS_IN_TTL * app.node_timeout
    if options.get("key") is False or options["ttl"] >= min_ttl:
        return
    other_setting = " and redlock_max_ttl" if min_ttl > app.max_ttl else ""
    hint = (
        f"must be at least {ROUNDS_IN_TTL} x redlock_node_timeout = {min_ttl:g} s: set redlock_ttl"
        f"{other_setting}, or lower redlock_node_timeout={app.node_timeout:g}"
    )
    raise OptionSource.at("built-in", "ttl").wrong(options["ttl"], hint)


def option_meant(unknown: object, prefix: str = "") -> str:
    """Return "; did you mean ...?" for an unknown option. prefix: of the names at this level."""
    stem = str(unknown).removeprefix("redlock_").removeprefix("lock_")
    option_name = SYNONYMS.get(stem, stem)
    known = [f"{prefix}{option}" for option in OPTION]
    return did_you_mean(f"{prefix}{option_name}" if option_name in OPTION else unknown, known)


def read_app(conf: Mapping[str, Any], namespace: str | None = None) -> AppSettings:
    """Return the settings of `app.conf`. namespace: that iteration puts before their names."""
    check_known_names(conf, namespace)
    nodes = ()
    nodes_from = ""
    with suppress(SettingsError):  # by the first send or run: an app may share its tasks alone
        nodes, nodes_from = find_nodes(conf)
    if nodes_from:
        check_nodes("app", nodes_from, nodes)
    done_ttl = _value(conf, "done_ttl")
    redelivery_seconds = visibility_timeout(conf) or DEFAULT_VISIBILITY_TIMEOUT
    if done_ttl is None:  # by then no other delivery of the run's message is expected
        done_ttl = min(redelivery_seconds + 60.0, LONGEST_DONE_TTL)
    # so that a redelivery that waits asks again before the marker of the first one expires
    countdown_cap = min(redelivery_seconds / 4, done_ttl / 2)
    app = AppSettings(
        **{name: _value(conf, name) for name in _COPIED_SETTINGS},
        nodes=tuple(nodes), done_ttl=done_ttl, options={}, queues={}, tasks={},
        countdown_cap=countdown_cap, call_options=_call_options(conf), nodes_from=nodes_from,
    )  # fmt: skip
    queues = _by_pattern("queues", conf, app, travels=True)
    tasks = _by_pattern("tasks", conf, app, travels=False)
    for pattern in tasks:
        if pattern.startswith(CELERY_PREFIX):
            hint = "Celery's own tasks are never locked: name tasks of your own or of others"
            raise OptionSource.at("app", f"tasks[{pattern!r}]").wrong(tasks[pattern], hint)
    app_options = {name: conf[f"redlock_{name}"] for name in OPTION if f"redlock_{name}" in conf}
    options = check_options(app_options, app, partial(OptionSource.at, "app"), travels=False)
    if decides_key(options):
        check_together("app", options)
    return replace(app, options=options, queues=queues, tasks=tasks)


def _value(conf: Mapping[str, Any], name: str) -> Any:
    """Return the value of an app-only setting, checked, or its default; raises SettingsError."""
    check, default = APP_SETTING[name]
    return check(*OptionSource.at("app", name), conf.get(f"redlock_{name}", default))


def _call_options(conf: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names of the options that a message may carry; raises SettingsError."""
    source = OptionSource.at("app", "call_options")
    value = _value(conf, "call_options")
    if value is None:
        return None
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise source.wrong(value, 'must be a list of option names, as ["max_wait"], or None')
    unknown = [name for name in value if name not in list(OPTION)]  # a list: it may be unhashable
    if unknown:
        raise source.wrong(value, f"{unknown[0]!r} is not an option{option_meant(unknown[0])}")
    return frozenset(value)


def check_known_names(conf: Mapping[str, Any], namespace: str | None = None) -> None:
    """Raise SettingsError for a redlock_* setting that does not exist, or that nobody reads.

    Celery reads its own settings in upper case, too, but of a plugin's only with the namespace.
    """
    known = [f"redlock_{name}" for name in (*OPTION, *APP_SETTING)]
    namespace_prefix = f"{namespace.lower()}_" if namespace else ""
    for written in conf:
        name = str(written).lower()
        spelled_prefix = ""
        if namespace_prefix and name.startswith(namespace_prefix):
            name = name[len(namespace_prefix) :]
            spelled_prefix = str(written)[: len(namespace_prefix)]
        if name.startswith("redlock_") and name not in known:
            is_upper = str(written).isupper()
            spellings = [
                spelled_prefix + (setting.upper() if is_upper else setting) for setting in known
            ]
            hint = f"is not a setting{did_you_mean(written, spellings)}"
            raise OptionSource("app", str(written)).wrong(conf[written], hint)
        if name in known and name not in conf:
            read = f"{namespace}_{name.upper()}" if namespace else name
            hint = f"is not read: call it {read}"
            raise OptionSource("app", str(written)).wrong(conf[written], hint)


def _by_pattern(
    level: str, conf: Mapping[str, Any], app: AppSettings, *, travels: bool
) -> Mapping[str, Mapping[str, Any]]:
    """Return the options of a level, "queues" or "tasks", by name or glob, checked."""
    entries = _value(conf, level) or {}
    kind = level[:-1]
    source = OptionSource.at("app", level)
    if not isinstance(entries, Mapping):
        raise source.wrong(entries, f"must map {kind} names or globs to options")
    checked = {}
    for pattern, options in entries.items():
        if not isinstance(pattern, str) or not isinstance(options, Mapping):
            hint = f"must map a {kind}'s name or glob to its options"
            raise source.wrong({pattern: options}, hint)
        source_of = partial(OptionSource.at, level, of=pattern)
        checked[pattern] = check_options(options, app, source_of, travels=travels)
        if decides_key(options):
            check_together(source_of("limit").level, checked[pattern])
    return checked


def find_nodes(conf: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the nodes to use, unchecked, and the setting that names them, or SettingsError."""
    nodes = _value(conf, "nodes")
    if nodes is not None:
        return nodes, "redlock_nodes"
    broker_redis = one_redis(_url(conf, "broker_url"))
    for name in ("broker_write_url", "broker_url", "result_backend"):
        url = one_redis(_url(conf, name))
        if url is None:
            continue
        # Celery sets broker_write_url to broker_url by default
        found_in = "broker_url" if url == broker_redis else name
        for setting, url_part in _CONNECTION_SETTINGS[found_in == "result_backend"].items():
            is_in_url = url_part in _LOGINS and url_part in url
            if conf.get(setting) and not is_in_url:  # the URL's own goes first
                form = _LOGINS.get(url_part, url_part)
                hint = f"{setting} is set, which nodes do not take over: name them with {form}"
                raise SettingsError("app", "redlock_nodes", "None", hint)
        return [url], found_in
    hint = (
        "neither the broker nor the result backend is one Redis: name the lock's own nodes, "
        'as redlock_nodes = ["redis://a", "redis://b", "redis://c"] or ["postgresql://a/db"]'
    )
    raise SettingsError("app", "redlock_nodes", "None", hint)


def _url(conf: Mapping[str, Any], name: str) -> Any:
    return getattr(conf, name, None) or conf.get(name)


def one_redis(url: Any) -> str | None:
    """Return a broker's or backend's URL as redis-py takes it, None if it is not one Redis."""
    if isinstance(url, (list, tuple)) and len(url) == 1:
        url = url[0]
    if not isinstance(url, str) or ";" in url:
        return None
    scheme, separator, after_scheme = url.partition("://")
    if not separator or scheme not in ("redis", "rediss", "redis+socket", "unix"):
        return None
    if scheme in ("redis", "rediss"):
        parts = urlsplit(url)
        # "redis://" alone means this machine to Celery, and CERT_REQUIRED is "required" to redis-py
        query = re.sub(
            r"(?<=ssl_cert_reqs=)CERT_(\w+)", lambda match: match[1].lower(), parts.query
        )
        return urlunsplit(parts._replace(netloc=parts.netloc or "localhost", query=query))
    path, _, query = after_scheme.partition("?")
    database = [
        parameter.split("=")[1]
        for parameter in query.split("&")
        if parameter.startswith("virtual_host=")
    ]
    return f"unix://{path}" + (f"?db={database[0].strip('/')}" if database else "")


def visibility_timeout(conf: Mapping[str, Any]) -> float | None:
    """Return the seconds after which the broker delivers an unacknowledged message again, or None.

    Source: kombu's transports for Redis and SQS. Any other one but AMQP may know the option, too.
    """
    url = _url(conf, "broker_read_url") or _url(conf, "broker_url") or ""
    scheme = str(url[0] if isinstance(url, (list, tuple)) else url).partition("://")[0].lower()
    if scheme in AMQP_SCHEMES:
        return None
    default = VISIBILITY_TIMEOUTS.get(scheme.partition("+")[0])
    timeout = (conf.get("broker_transport_options") or {}).get("visibility_timeout")
    return float(timeout) if isinstance(timeout, (int, float)) and timeout > 0 else default
