"""Options from five levels, merged, checked and frozen; and the key that they make of arguments.

Built-in < app.conf.redlock_<name> < redlock_queues[...]["<name>"] < task.lock_<name>, or for a task
of others redlock_tasks[...]["<name>"] < call.
Nothing here does I/O.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import difflib
import enum
import fnmatch
import functools
import hashlib
import inspect
import json
import re
import string
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery_redlock.errors import ArgumentsError, SettingsError
from celery_redlock.lock.engine.acquirer import ROUNDS_IN_TTL
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.transport.encoding import encoded
from celery_redlock.lock.validation import (
    check_drift,
    check_guard,
    check_limit,
    check_nodes,
    check_permits,
    check_prefix,
    check_seconds,
    check_ttl,
    check_wait,
)
from celery_redlock.tasks.backoff import Backoff

DEFAULT_TTL, DEFAULT_MAX_TTL = 30.0, 60.0  # s
DEFAULT_PREFIX = "redlock"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what an exporter is for; the setting may name a host
LONGEST_MARK = 600.0  # s, where `redlock_done_ttl` does not say it: each mark takes memory
VISIBILITY = 3600.0  # s: kombu's own, where `visibility_timeout` is not set
CELERY_PREFIX = "celery."  # what the names of Celery's own tasks begin with


@dataclass(frozen=True)
class OptionSource:
    """Where an option stands, for errors: the level in words, and the name as written there."""

    level: str
    name: str

    def __str__(self) -> str:
        return self.level if self.level == "built-in" else f"{self.level}: {self.name}"

    def wrong(self, value: object, hint: str) -> SettingsError:
        """Return the error for a value that stands here."""
        shown = "..." if "://" in repr(value) else repr(value)  # a URL may hold a password
        return SettingsError(self.level, self.name, shown, hint)


@dataclass(frozen=True)
class AppSettings:
    """What holds for a whole app. Times in s. metrics: host and port where a worker serves them.

    nodes_from: the setting that the nodes come from, as "broker_url".
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
    nodes_from: str = "redlock_nodes"

    @property
    def built_in_ttl(self) -> float:
        """The ttl where nobody sets one."""
        return min(DEFAULT_TTL, self.max_ttl)

    def for_queue(self, queue: str) -> Mapping[str, Any]:
        """Return the options of a queue: an exact name goes before globs, those in their order."""
        return self.queues.get(pattern_for(queue, self.queues) or "", {})


def pattern_for(name: str, patterns: Iterable[str]) -> str | None:
    """Return the name or glob that a name goes by, None where there is none.

    An exact name goes before globs, and of globs the first one that fits.
    """
    patterns = list(patterns)
    if name in patterns:
        return name
    return next((glob for glob in patterns if fnmatch.fnmatchcase(name, glob)), None)


def is_glob(pattern: str) -> bool:
    """Tell a glob from a plain name."""
    return any(sign in pattern for sign in "*?[")


@dataclass(frozen=True)
class TaskLockOptions:
    """The options in force for one run; times in s. The README's table says what each means."""

    key: Any
    args: tuple[str, ...] | None
    ttl: float
    renew: bool
    max_hold: float | None
    wait: float
    on_conflict: Any
    backoff: Backoff
    max_wait: float | None
    max_deferrals: int | None
    on_give_up: str
    on_lost: str
    on_unreachable: str
    limit: int
    fencing: bool
    unique_for: float | None
    unique_until: str
    on_duplicate: str


@dataclass(frozen=True)
class OptionValue:
    """One option in force: its value, and where that stands."""

    name: str
    value: Any
    place: OptionSource


@dataclass(frozen=True)
class EffectiveOptions:
    """The options in force for a task in a queue, for people; as text a table."""

    task: str
    queue: str
    options: tuple[OptionValue, ...]

    def __getitem__(self, name: str) -> OptionValue:
        """Return one option."""
        return next(option for option in self.options if option.name == name)

    def __str__(self) -> str:
        shown = {option.name: _shown(option.value) for option in self.options}
        if self["key"].value is None and self["args"].value is None:
            shown["key"] = "all arguments"
        rows = [(option.name, shown[option.name], str(option.place)) for option in self.options]
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c}" for a, b, c in rows]
        return "\n".join([f"{self.task} in queue {self.queue}", *lines])


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return repr(list(value))  # as people write it
    return str(getattr(value, "__qualname__", value)) if callable(value) else repr(value)


Check = Callable[[OptionSource, Any, AppSettings], Any]


def _one_of(*words: str, callables: bool = False) -> Check:
    def check(place: OptionSource, value: Any, app: AppSettings) -> Any:
        if callables and callable(value):
            return value
        if not isinstance(value, str) or value not in words:
            more = " or a callable that returns one of them" if callables else ""
            raise place.wrong(value, f"must be one of {', '.join(map(repr, words))}{more}")
        return value

    return check


def _seconds_or_none(place: OptionSource, value: Any, app: AppSettings) -> float | None:
    return None if value is None else check_seconds(place.level, place.name, value)


def _count_or_none(place: OptionSource, value: Any, app: AppSettings) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise place.wrong(value, "must be a whole number, 0 or more, or None")
    return value


def _bool(place: OptionSource, value: Any, app: AppSettings) -> bool:
    if not isinstance(value, bool):
        raise place.wrong(value, "must be True or False")
    return value


def _backoff(place: OptionSource, value: Any, app: AppSettings) -> Backoff:
    if isinstance(value, Mapping):
        try:
            return Backoff.from_message(value)
        except SettingsError as error:
            raise place.wrong(dict(value), str(error)) from None
    if not isinstance(value, Backoff):
        raise place.wrong(value, "must be a Backoff, as Backoff(first=0.25, cap=30)")
    return value


def _ttl(place: OptionSource, value: Any, app: AppSettings) -> float:
    return check_ttl(place.level, place.name, value, app.node_timeout, app.max_ttl)


def _wait(place: OptionSource, value: Any, app: AppSettings) -> float:
    return check_wait(place.level, place.name, value)


def _limit(place: OptionSource, value: Any, app: AppSettings) -> int:
    return check_limit(place.level, place.name, value)


def _key(place: OptionSource, value: Any, app: AppSettings) -> Any:
    if value is None or value is False or callable(value):
        return value
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not entries:
        raise place.wrong(value, "must be a template, a list of templates, a callable or False")
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise place.wrong(value, "a list holds templates only, none of them empty")
    return entries[0] if len(entries) == 1 else tuple(entries)


def _args(place: OptionSource, value: Any, app: AppSettings) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        raise place.wrong(value, f"must be a list of argument names: write [{value!r}]")
    if not isinstance(value, (list, tuple)):
        raise place.wrong(value, 'must be a list of argument names, as ["sku"], or None')
    if not all(isinstance(name, str) and name for name in value):
        raise place.wrong(value, "a list holds argument names only, none of them empty")
    if any("{" in name for name in value):
        raise place.wrong(value, "takes names without braces; templates stand in the option key")
    return tuple(dict.fromkeys(value))


def templates_of(key: Any) -> tuple[str, ...]:
    """Return the templates of a key, one for each resource; none where it is something else."""
    if isinstance(key, str):
        return (key,)
    return key if isinstance(key, tuple) else ()


OPTIONS: Mapping[str, Check] = {
    "key": _key,
    "args": _args,
    "ttl": _ttl,
    "renew": _bool,
    "max_hold": _seconds_or_none,
    "wait": _wait,
    "on_conflict": _one_of("defer", "skip", "fail", callables=True),
    "backoff": _backoff,
    "max_wait": _seconds_or_none,
    "max_deferrals": _count_or_none,
    "on_give_up": _one_of("fail", "skip"),
    "on_lost": _one_of("abort", "warn"),
    "on_unreachable": _one_of("defer", "fail", "run"),
    "limit": _limit,
    "fencing": _bool,
    "unique_for": _seconds_or_none,
    "unique_until": _one_of("started", "finished", "expired"),
    "on_duplicate": _one_of("existing", "fail", "replace"),
}
BUILT_IN: Mapping[str, Any] = {
    "key": None,
    "args": None,
    "renew": True,
    "max_hold": None,
    "wait": 0.0,
    "on_conflict": "defer",
    "backoff": Backoff(),
    "max_wait": None,
    "max_deferrals": None,
    "on_give_up": "fail",
    "on_lost": "abort",
    "on_unreachable": "defer",
    "limit": 1,
    "fencing": False,
    "unique_for": None,
    "unique_until": "finished",
    "on_duplicate": "existing",
}
APP_ONLY = (
    "nodes",
    "prefix",
    "node_timeout",
    "clock_drift",
    "max_ttl",
    "restart_guard",
    "done_ttl",
    "metrics",
    "queues",
    "tasks",
)
# what other locks call it: by its spelling alone, `timeout` would be taken for `limit`
ELSEWHERE = {
    **dict.fromkeys(("timeout", "expire", "expires", "expiry", "lease"), "ttl"),
    **dict.fromkeys(("blocking_timeout", "acquire_timeout"), "wait"),
}
TEMPLATE_NAMES = ("task", "queue", "digest")  # beside the arguments, whose names win
WHAT = ("key", "args")  # two ways to say what is locked: a level that names one decides both
ANY_ARGUMENTS = "any-arguments"  # instead of a digest, where no argument makes the key


def checked(
    options: Mapping[str, Any],
    app: AppSettings,
    place: Callable[[str], OptionSource],
    *,
    travels: bool,
) -> dict[str, Any]:
    """Return the options of one level, each checked; raises SettingsError.

    place: from an option's name to where it stands. travels: the level is one that a message
    carries or a queue shares, where a callable cannot stand.
    """
    result = {}
    for name, value in options.items():
        if name not in OPTIONS:
            raise place(str(name)).wrong(value, f"is not an option{_option_meant(name)}")
        if travels and callable(value):
            raise place(name).wrong(value, "callables stand at task and app level only")
        result[name] = OPTIONS[name](place(name), value, app)
    if result.get("key") is not None and result.get("args") is not None:
        hint = (
            f"{place('key').name} is set at the same level, and one of them says what is locked: "
            "leave one out, or set the one that is inherited to None"
        )
        raise place("args").wrong(options["args"], hint)
    return result


def says_what(options: Mapping[str, Any]) -> bool:
    """Tell whether a level says what is locked, so that it decides both `key` and `args`."""
    return any(name in options for name in WHAT)


def merged(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of several levels as one; the nearest level is the last one."""
    result: dict[str, Any] = {}
    for options in levels:
        if says_what(options):
            result.update(dict.fromkeys(WHAT))
        result.update(options)
    return result


def check_outside(options: Mapping[str, Any]) -> None:
    """Refuse options of ours among those of a call: Celery would ignore them; SettingsError."""
    for written, value in options.items():
        name = written.removeprefix("lock_")
        if name != written and name in OPTIONS:
            hint = f'stands in one with the others of a call: lock={{"{name}": ...}}'
            raise SettingsError("call", written, repr(value), hint)


def check_together(level: str, options: Mapping[str, Any]) -> None:
    """Refuse options that are right each by itself and not together; raises SettingsError.

    options: merged so far, each checked; what is missing is as built in.
    """
    whole = {**BUILT_IN, **options}
    limit, fencing = whole["limit"], whole["fencing"]
    check_permits(level, limit=limit, fencing=fencing, resources=templates_of(whole["key"]))


def check_built_in(app: AppSettings, options: Mapping[str, Any]) -> None:
    """Raise SettingsError where the built-in ttl holds, and leaves no time to renew it.

    options: those in force; a ttl that somebody set was checked where it stands.
    """
    least = ROUNDS_IN_TTL * app.node_timeout
    if options.get("key") is False or options["ttl"] >= least:
        return
    longer = " and redlock_max_ttl" if least > app.max_ttl else ""
    hint = (
        f"must be at least {ROUNDS_IN_TTL} x redlock_node_timeout = {least:g} s: set redlock_ttl"
        f"{longer}, or lower redlock_node_timeout={app.node_timeout:g}"
    )
    raise OptionSource("built-in", "ttl").wrong(options["ttl"], hint)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ", did you mean ...?" for a name close to a known one, else the list of known ones."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _option_meant(written: object, prefix: str = "") -> str:
    """Return the same for an option, which may be written as at another level, or elsewhere."""
    bare = str(written).removeprefix("redlock_").removeprefix("lock_")
    meant = ELSEWHERE.get(bare, bare)
    known = [f"{prefix}{option}" for option in OPTIONS]
    return did_you_mean(f"{prefix}{meant}" if meant in OPTIONS else written, known)


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
    return checked(given, app, app_source, travels=False)


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
        place = pattern_source(kind, pattern)
        result[pattern] = checked(options, app, place, travels=travels)
    return result


def pattern_source(kind: str, pattern: str) -> Callable[[str], OptionSource]:
    """Return where options of a queue's or task's name or glob stand. kind: "queue" or "task"."""
    return lambda name: OptionSource(
        f"{kind} {pattern!r}", f"redlock_{kind}s[{pattern!r}][{name!r}]"
    )


def tasks_source(pattern: str) -> OptionSource:
    """Return where what is said of tasks of others stands as a whole."""
    return OptionSource("app", f"redlock_tasks[{pattern!r}]")


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


@dataclass(frozen=True)
class TaskLockConfig:
    """What one task's declaration means: its options, and how its key is made.

    Raises SettingsError when it is compiled. `signature` is the body's, without self.
    """

    task_name: str
    app: AppSettings
    options: Mapping[str, Any]
    signature: inspect.Signature
    place: Callable[[str], OptionSource]  # where an option of the task stands
    queues: dict[tuple[str | None, str], str] = field(
        default_factory=dict, compare=False, repr=False
    )
    _by_queue: dict[str, TaskLockOptions] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def may_be_unique(self) -> bool:
        """Whether any send is deduplicated, but for what a call says."""
        levels = (self.app.options, *self.app.queues.values(), self.options)
        return any(level.get("unique_for") is not None for level in levels)

    @property
    def may_lock(self) -> bool:
        """Whether a run takes a lock, but for what its queue or call says."""
        return merged(self.app.options, self.options).get("key") is not False

    def may_name_queue(self, call: Mapping[str, Any]) -> bool:
        """Tell whether a key depends on the queue; call: the options of one, unchecked yet."""
        return self._names_queue or _names_queue(call.get("key"))

    @functools.cached_property
    def _names_queue(self) -> bool:
        return any(_names_queue(level.get("key")) for level in (self.app.options, self.options))

    def rules(self, queue: str, call: Mapping[str, Any] | None = None) -> TaskLockOptions:
        """Return the options in force in a queue; call: those of the message, unchecked yet."""
        if call:
            return self._merge(queue, self.check_call(call))
        rules = self._by_queue.get(queue)
        if rules is None:
            rules = self._by_queue[queue] = self._merge(queue, {})
        return rules

    def _levels(
        self, queue: str, call: Mapping[str, Any]
    ) -> Iterator[tuple[Mapping[str, Any], Callable[[str], OptionSource]]]:
        """Give the options of each level, the nearest last, and where they stand there."""
        yield (
            {"ttl": self.app.built_in_ttl, **BUILT_IN},
            lambda name: OptionSource("built-in", name),
        )
        yield self.app.options, app_source
        pattern = pattern_for(queue, self.app.queues)
        if pattern is not None:
            yield self.app.queues[pattern], pattern_source("queue", pattern)
        yield self.options, self.place
        yield call, call_source

    def _merge(self, queue: str, call: Mapping[str, Any]) -> TaskLockOptions:
        whole = merged(*(options for options, _ in self._levels(queue, call)))
        check_together(f"task {self.task_name!r} in queue {queue!r}", whole)
        check_built_in(self.app, whole)
        return TaskLockOptions(
            **{name: whole[name] for name in TaskLockOptions.__dataclass_fields__}
        )

    def told(self, queue: str, call: Mapping[str, Any] | None = None) -> EffectiveOptions:
        """Return the options in force in a queue with where each stands; call: unchecked yet."""
        checked_call = self.check_call(call or {})
        places: dict[str, OptionSource] = {}
        for options, place in self._levels(queue, checked_call):
            for name in filter(options.__contains__, WHAT):
                places.update(dict.fromkeys(WHAT, place(name)))
            places.update((name, place(name)) for name in options)
        rules = self._merge(queue, checked_call)
        told = [
            OptionValue(name, getattr(rules, name), places[name])
            for name in TaskLockOptions.__dataclass_fields__
        ]
        return EffectiveOptions(self.task_name, queue, tuple(told))

    def check_call(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call, checked, also beside those of task and app."""
        valid = checked(options, self.app, call_source, travels=True)
        self.check_what(valid, call_source)
        check_together("call", merged(self.app.options, self.options, valid))
        return valid

    def check_what(self, options: Mapping[str, Any], place: Callable[[str], OptionSource]) -> None:
        """Raise SettingsError where a level's `key` or `args` names what the function has not.

        place: from an option's name to where it stands at that level.
        """
        if not says_what(options):
            return
        key, args = options.get("key"), options.get("args")
        if args is not None:
            self._check_names(args, place("args"))
            self._check_defaults(None, args, place("args"))
            return
        templates = templates_of(key)
        names = [name for text in templates for name in template_names(text, place("key"))]
        known = (*self.signature.parameters, *TEMPLATE_NAMES)
        unknown = [name for name in names if name not in known]
        if unknown:
            written = list(key) if isinstance(key, tuple) else key
            raise place("key").wrong(written, self._no_such(unknown[0], known))
        if not callable(key) and key is not False:
            self._check_defaults(key, tuple(self.signature.parameters), place("key"))

    def _check_names(self, args: tuple[str, ...], place: OptionSource) -> None:
        """Raise SettingsError where one of these is no argument of the function."""
        parameters = self.signature.parameters
        unknown = [name for name in args if name not in parameters]
        if unknown:
            raise place.wrong(list(args), self._no_such(unknown[0], parameters))

    def _check_defaults(self, key: Any, names: tuple[str, ...], place: OptionSource) -> None:
        """Raise SettingsError where an argument's default would make another key each time.

        names: the arguments that make the digest where there is no template.
        None is not wrong, nor is a default without the item that a template names: a call may give
        another value.
        """
        parameters, templates = self.signature.parameters, templates_of(key)
        fields = [name for template in templates for name in _fields(template, place)]
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        whole = () if templates else names
        if "digest" in fields and "digest" not in parameters:
            whole = names
        checks: list[tuple[str, Any, Callable[[Any], Any]]]
        checks = [(name, defaults[name], canonical) for name in whole if name in defaults]
        for name in fields:
            with contextlib.suppress(LookupError, TypeError):
                item = _FORMATTER.find(name, defaults)
                checks.append((name, item.value, _for_template))
        for name, value, check in checks:
            try:
                check(value)
            except TypeError as error:
                raise unstable(self.task_name, f"default of {name!r}", value, error) from None

    def _no_such(self, name: str, known: Iterable[str]) -> str:
        return f"{self.task_name} has no argument {name!r}{did_you_mean(name, known)}"

    def resources(
        self,
        rules: TaskLockOptions,
        task: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        queue: str,
    ) -> tuple[str, ...]:
        """Return what a run with these arguments locks: all or none; () where it takes no lock.

        Raises SettingsError where the key cannot be made, and where the arguments do not fit the
        function.
        """
        key = rules.key
        if key is False:
            return ()
        if callable(key):
            return self._called(rules, task, tuple(args), dict(kwargs))
        arguments = self._arguments(args, kwargs)
        if key is not None:
            return tuple(self._filled(text, arguments, queue) for text in templates_of(key))
        if rules.args is None:
            return (f"{self.task_name}:{digest(arguments, self.task_name)}",)
        if not rules.args:
            return (f"{self.task_name}:{ANY_ARGUMENTS}",)
        chosen = {name: value for name, value in arguments.items() if name in rules.args}
        if len(chosen) < len(rules.args):
            # those of a queue cannot be checked against every task when the app finalizes
            place = pattern_source("queue", pattern_for(queue, self.app.queues) or queue)
            self._check_names(rules.args, place("args"))
        return (f"{self.task_name}:{digest(chosen, self.task_name)}",)

    def shapes(self, rules: TaskLockOptions, queue: str) -> tuple[str, ...]:
        """Return what a run's resources look like, {} for each argument; () where none is known.

        Tasks with the same shape may lock the same resource. Without a template it names the task.
        """
        if rules.key is None or rules.key is False or callable(rules.key):
            return ()
        blank = dict.fromkeys(self.signature.parameters, "{}")
        known = {"task": self.task_name, "queue": queue, "digest": "{digest}", **blank}
        shapes = []
        for template in templates_of(rules.key):
            parts = _FORMATTER.parse(template)
            fields = [(text, (name or "").partition("[")[0]) for text, name, _, _ in parts]
            shapes.append("".join(text + known.get(name, "") for text, name in fields))
        return tuple(shapes)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return every argument by its name, defaults included."""
        names = self._plain
        if names is not None and not kwargs and len(args) == len(names):
            return dict(zip(names, args, strict=True))  # as below, at a third of its cost
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:  # no retry of it: Celery publishes none that does not fit
            raise self._misfit(error, args, kwargs) from None
        bound.apply_defaults()
        return bound.arguments

    def _misfit(
        self, error: TypeError, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ArgumentsError:
        """Return the error for arguments that do not fit the function; it shows none of them."""
        bare = [p.replace(annotation=p.empty) for p in self.signature.parameters.values()]
        named = f", {', '.join(sorted(kwargs))} by name" if kwargs else ""
        hint = (
            f"do not fit {self.task_name}{inspect.Signature(bare)}: {error}. A send and lock_for "
            "give all that a run takes. Where the message was sent for another version of the "
            "task, let a worker of that version run it, or let the function take both: give a new "
            "argument a default, keep an old one while messages have it"
        )
        level = f"task {self.task_name!r}"
        return ArgumentsError(level, "arguments", f"({len(args)} by position{named})", hint)

    @functools.cached_property
    def _plain(self) -> Sequence[str] | None:
        """The names of the parameters where each can stand by position or name, else None."""
        parameters = self.signature.parameters.values()
        all_plain = all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
        return tuple(self.signature.parameters) if all_plain else None

    def _called(self, rules: TaskLockOptions, task: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
        place, key = self.place("key"), rules.key
        try:
            returned = key(task, args, kwargs)
        except Exception as error:
            raise place.wrong(
                key, f"the callable raised {type(error).__name__}: {error}"
            ) from error
        found = returned if isinstance(returned, (list, tuple)) else [returned]
        if not found or not all(isinstance(resource, str) and resource for resource in found):
            got = f"got {type(returned).__name__}"
            raise place.wrong(key, f"must return a text or a list of texts, not empty; {got}")
        resources = in_order(found)
        check_permits(place.level, limit=rules.limit, fencing=rules.fencing, resources=resources)
        return resources

    def _filled(self, template: str, arguments: Mapping[str, Any], queue: str) -> str:
        place = self.place("key")
        known = _Arguments(self.task_name, queue, arguments)
        try:
            text = _FORMATTER.vformat(template, (), known)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            hint = f"cannot be filled ({type(error).__name__}: {error}); is an argument missing?"
            raise place.wrong(template, hint) from error
        if not text:
            raise place.wrong(template, "gives an empty text for these arguments")
        return text


_QUEUE = re.compile(r"\{queue[}!:\[]")


def _names_queue(key: Any) -> bool:
    return not callable(key) and _QUEUE.search(repr(key)) is not None


class _Arguments(dict[str, Any]):
    """The names that a template knows; the digest is made only where it is asked for."""

    def __init__(self, task: str, queue: str, arguments: Mapping[str, Any]) -> None:
        super().__init__({"task": task, "queue": queue, **arguments})
        self._task, self._arguments = task, arguments

    def __missing__(self, name: str) -> str:
        if name == "digest":
            return digest(self._arguments, self._task)
        raise KeyError(name)


class _Value:
    """An argument of which a template may name an item: one of a mapping by its key as in JSON."""

    def __init__(self, value: Any) -> None:
        self.value = _reduced(value)

    def __getitem__(self, name: int | str) -> _Value:
        if not isinstance(self.value, Mapping):
            return _Value(self.value[name])
        found = [item for key, item in self.value.items() if _json_key(key) == str(name)]
        if not found:
            raise KeyError(name)
        return _Value(found[-1])  # of keys that JSON makes one, the last is what it keeps


def _for_template(value: Any) -> Any:
    """Return what a format may be applied to; TypeError for a value without a stable text.

    value: reduced. Sets and mappings show what they hold in order. What an object of another class
    says of itself is its author's matter, but the text that Python gives it names its address.
    """
    if isinstance(value, _CONTAINERS):
        return _Shown(canonical(value))
    kind: Any = type(value)
    if value is None or isinstance(value, (*_NATIVE, *_BY_TEXT)):
        return value
    if kind.__str__ is object.__str__ and kind.__format__ is object.__format__:
        raise TypeError(f"a {kind.__name__} is not a plain value and has no text of its own")
    return value


class _Shown(str):
    """A text that is its own repr: what is shown of a list does not depend on the conversion."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Formatter(string.Formatter):
    """str.format, without attributes (the wire keeps none) and without None."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return _Value(super().get_value(key, args, kwargs))

    def find(self, field_name: str, known: Mapping[str, Any]) -> _Value:
        """Return what a field names; LookupError or TypeError where there is no such item."""
        found: _Value = super().get_field(field_name, (), known)[0]
        return found

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value = kwargs[field_name] if field_name in kwargs else self.find(field_name, kwargs).value
        if type(value) in _MOST:
            return value, field_name
        value = _reduced(value)
        if value is None:
            raise ValueError(f"{field_name} is None")
        return _for_template(value), field_name


_FORMATTER = _Formatter()
_FIELD = re.compile(r"[^.\[\]]*(\[[^\[\]]*\])*")


def template_names(template: str, place: OptionSource) -> list[str]:
    """Return the first name of each {field} of a template; raises SettingsError."""
    roots = []
    for name in _fields(template, place):
        root = name.partition("[")[0]
        if not root.isidentifier() or not _FIELD.fullmatch(name):
            hint = "name arguments in braces, as {sku}, {rest[0]}, {options[sku]}; no attributes"
            raise place.wrong(template, hint)
        roots.append(root)
    return roots


def _fields(template: str, place: OptionSource) -> Iterator[str]:
    """Give what stands in the braces of a template, also of those in a format; SettingsError."""
    try:
        for _, name, form, _ in _FORMATTER.parse(template):
            if name is not None:
                yield name
                yield from _fields(form or "", place)
    except ValueError as error:
        raise place.wrong(template, f"is not a template: {error}") from None


def app_source(name: str) -> OptionSource:
    """Return where an option of the whole app stands."""
    return OptionSource("app", f"redlock_{name}")


def call_source(name: str) -> OptionSource:
    """Return where an option of a single call stands."""
    return OptionSource("call", f"lock={{{name!r}}}")


def compile_config(
    app: AppSettings,
    task_name: str,
    attributes: Mapping[str, Any],
    signature: inspect.Signature,
    others: Sequence[str] = (),
) -> TaskLockConfig:
    """Return the plan of a task; raises SettingsError.

    attributes: its lock_* attributes by their full names, functions unbound.
    others: names of lock_* attributes that are methods or properties, and so no options.
    """
    level = f"task {task_name!r}"
    options = {}
    for written, value in attributes.items():
        name = written.removeprefix("lock_")
        if name not in OPTIONS:
            if callable(value) or written in others:
                continue
            hint = f"is not an option{_option_meant(written, 'lock_')}"
            raise SettingsError(level, written, repr(value), hint)
        options[name] = value

    def place(name: str) -> OptionSource:
        return OptionSource(level, f"lock_{name}")

    options = checked(options, app, place, travels=False)
    return _planned(TaskLockConfig(task_name, app, options, signature, place))


def compile_adopted_config(
    app: AppSettings, task_name: str, pattern: str, signature: inspect.Signature
) -> TaskLockConfig:
    """Return the plan of a task that `redlock_tasks` locks; raises SettingsError.

    pattern: the entry that it goes by. What the task itself says of `lock_*` is not about locks.
    """
    if pattern not in app.tasks:
        hint = "came after the settings had been read: set it before the app finalizes"
        raise tasks_source(pattern).wrong("...", hint)
    place = pattern_source("task", pattern)
    return _planned(TaskLockConfig(task_name, app, app.tasks[pattern], signature, place))


def _planned(plan: TaskLockConfig) -> TaskLockConfig:
    """Return a plan whose key its function can fill, and whose options go together."""
    if says_what(plan.options):
        plan.check_what(plan.options, plan.place)
    elif says_what(plan.app.options) or not any(map(says_what, plan.app.queues.values())):
        plan.check_what({"key": None, **plan.app.options}, app_source)
    of_task = merged(plan.app.options, plan.options)
    check_together(f"task {plan.task_name!r}", of_task)
    of_all_queues = plan.app.for_queue("")  # what a glob for any name says
    built_in = {"ttl": plan.app.built_in_ttl}
    check_built_in(plan.app, merged(built_in, plan.app.options, of_all_queues, plan.options))
    unique_for = plan.options.get("unique_for")
    if plan.options.get("key") is False and unique_for is not None:
        hint = "deduplicates by the lock's key, and key=False makes none: name a key"
        raise plan.place("unique_for").wrong(unique_for, hint)
    return plan


def digest(arguments: Mapping[str, Any], task: str) -> str:
    """Return 32 hex digits that are the same wherever these arguments are equal.

    The same before and after the message: what JSON makes one (tuple and list, an enum and its
    value, a dict's keys) is one here; what it keeps apart ("1" and 1, 1 and True) stays apart.
    Raises SettingsError for a value without a stable form.
    """
    parts = []
    for name, value in arguments.items():
        try:
            text = repr(value) if type(value) in _MOST else canonical(value)
            parts.append(f"{name}={text}")
        except TypeError as error:
            raise unstable(task, f"argument {name!r}", value, error) from None
    return hashlib.sha256(encoded("\x00".join(parts))).hexdigest()[:32]


def unstable(task: str, what: str, value: Any, error: TypeError) -> SettingsError:
    """Return the error for a value that makes another key each time. what: where it stands."""
    hint = (
        f"has no stable form ({error}): name the arguments that make the key, as "
        'lock_args=["id"] or lock_key="thing:{id}"'
    )
    return SettingsError(f"task {task!r}", what, f"a {type(value).__name__}", hint)


_MOST = (int, str)  # what most arguments are, and nothing derived from it: as below, but sooner
_NATIVE = (bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, Mapping)
_DATES = (dt.datetime, dt.date, dt.time)  # a datetime is a date, too
_BY_TEXT = (*_DATES, decimal.Decimal, uuid.UUID, dt.timedelta)


def canonical(value: Any) -> str:
    """Return a text that equal values share and others do not; TypeError for an unstable one."""
    if type(value) in _MOST:
        return repr(value)
    value = _reduced(value)
    if value is None or isinstance(value, _NATIVE):
        return repr(value)
    if isinstance(value, _DATES):
        return f"{type(value).__name__}:{value.isoformat()}"
    if isinstance(value, _BY_TEXT):
        return f"{type(value).__name__}:{value}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set({', '.join(sorted(map(canonical, value)))})"
    if isinstance(value, Mapping):
        pairs = sorted(f"{canonical(_json_key(k))}: {canonical(v)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def _reduced(value: Any) -> Any:
    """Return a value as it comes out of a message, whose items are not looked at.

    Source: kombu.utils.json: JSONEncoder.default asks `__json__` first, but never for what derives
    from str, int, float, list, tuple and dict; a date keeps its offset, and not the zone's name.
    """
    if value is None or type(value) in _NATIVE or isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    reduce = getattr(value, "__json__", None)
    if callable(reduce):
        return _reduced(reduce())
    if isinstance(value, enum.Enum):
        return _reduced(value.value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return _of_own_kind(value)


def _of_own_kind(value: Any) -> Any:
    """Return a moment or number whose class may derive from Python's own as one of that."""
    if isinstance(value, dt.datetime):
        return dt.datetime.fromisoformat(dt.datetime.isoformat(value))
    if isinstance(value, dt.date):
        return dt.date.fromisoformat(dt.date.isoformat(value))
    if isinstance(value, dt.time):
        return dt.time.fromisoformat(dt.time.isoformat(value))
    if isinstance(value, uuid.UUID):
        return uuid.UUID(int=value.int)
    if isinstance(value, decimal.Decimal):
        return decimal.Decimal(value)
    if isinstance(value, dt.timedelta):
        return dt.timedelta(value.days, value.seconds, value.microseconds)
    return value


def _json_key(key: Any) -> Any:
    """Return a dict's key as JSON writes it."""
    key = _reduced(key)
    return json.dumps(key) if key is None or isinstance(key, (bool, int, float)) else key
