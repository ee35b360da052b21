"""Options from five levels, merged, checked and frozen; and the key that they make of arguments.

Built-in < app.conf.redlock_<name> < redlock_queues[...]["<name>"] < task.lock_<name>, or for a task
of others redlock_tasks[...]["<name>"] < call.
Nothing here does I/O.
"""

from __future__ import annotations

import datetime as dt
import decimal
import difflib
import enum
import fnmatch
import functools
import hashlib
import inspect
import re
import string
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery_redlock.errors import SettingsError
from celery_redlock.lock.backoff import Backoff
from celery_redlock.lock.keys import in_order
from celery_redlock.lock.redlock import (
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

DEFAULT_TTL, DEFAULT_MAX_TTL = 30.0, 60.0  # s
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what an exporter is for; the setting may name a host
LONGEST_MARK = 600.0  # s, where `redlock_done_ttl` does not say it: each mark takes memory
VISIBILITY = 3600.0  # s: kombu's own, where `visibility_timeout` is not set
CELERYS = "celery."  # what the names of Celery's own tasks begin with


@dataclass(frozen=True)
class Place:
    """Where an option stands, for errors: the level in words, and the name as written there."""

    level: str
    name: str

    def __str__(self) -> str:
        return self.level if self.level == "built-in" else f"{self.level}: {self.name}"

    def wrong(self, value: object, way_out: str) -> SettingsError:
        """Return the error for a value that stands here."""
        shown = "..." if "://" in repr(value) else repr(value)  # a URL may hold a password
        return SettingsError(self.level, self.name, shown, way_out)


@dataclass(frozen=True)
class AppSettings:
    """What holds for a whole app. Times in s. metrics: host and port where a worker serves them."""

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
class Rules:
    """The options in force for one run; times in s. The README's table says what each means."""

    key: Any
    ttl: float
    renew: bool
    max_hold: float | None
    wait: float
    conflict: Any
    backoff: Backoff
    max_wait: float | None
    max_deferrals: int | None
    give_up: str
    lost: str
    unreachable: str
    limit: int
    fencing: bool
    unique_for: float | None
    unique_until: str
    duplicate: str


@dataclass(frozen=True)
class Rule:
    """One option in force: its value, and where that stands."""

    name: str
    value: Any
    place: Place


@dataclass(frozen=True)
class TaskRules:
    """The options in force for a task in a queue, for people; as text a table."""

    task: str
    queue: str
    rules: tuple[Rule, ...]

    def __getitem__(self, name: str) -> Rule:
        """Return the rule of one option."""
        return next(rule for rule in self.rules if rule.name == name)

    def __str__(self) -> str:
        rows = [(rule.name, _shown(rule), str(rule.place)) for rule in self.rules]
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c}" for a, b, c in rows]
        return "\n".join([f"{self.task} in queue {self.queue}", *lines])


def _shown(rule: Rule) -> str:
    if rule.name == "key" and rule.value is None:
        return "all arguments"
    value = rule.value
    return str(getattr(value, "__qualname__", value)) if callable(value) else repr(value)


Check = Callable[[Place, Any, AppSettings], Any]


def _one_of(*words: str, callables: bool = False) -> Check:
    def check(place: Place, value: Any, app: AppSettings) -> Any:
        if callables and callable(value):
            return value
        if not isinstance(value, str) or value not in words:
            more = " or a callable that returns one of them" if callables else ""
            raise place.wrong(value, f"must be one of {', '.join(map(repr, words))}{more}")
        return value

    return check


def _seconds_or_none(place: Place, value: Any, app: AppSettings) -> float | None:
    return None if value is None else check_seconds(place.level, place.name, value)


def _count_or_none(place: Place, value: Any, app: AppSettings) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise place.wrong(value, "must be a whole number, 0 or more, or None")
    return value


def _bool(place: Place, value: Any, app: AppSettings) -> bool:
    if not isinstance(value, bool):
        raise place.wrong(value, "must be True or False")
    return value


def _backoff(place: Place, value: Any, app: AppSettings) -> Backoff:
    if isinstance(value, Mapping):
        try:
            return Backoff.from_message(value)
        except SettingsError as error:
            raise place.wrong(dict(value), str(error)) from None
    if not isinstance(value, Backoff):
        raise place.wrong(value, "must be a Backoff, as Backoff(first=0.25, cap=30)")
    return value


def _ttl(place: Place, value: Any, app: AppSettings) -> float:
    return check_ttl(place.level, place.name, value, app.node_timeout, app.max_ttl)


def _wait(place: Place, value: Any, app: AppSettings) -> float:
    return check_wait(place.level, place.name, value)


def _limit(place: Place, value: Any, app: AppSettings) -> int:
    return check_limit(place.level, place.name, value)


def _key(place: Place, value: Any, app: AppSettings) -> Any:
    if value is None or value is False or callable(value):
        return value
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not entries:
        raise place.wrong(
            value, "must be a template, a list of templates or of names, a callable or False"
        )
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise place.wrong(value, "a list holds texts only, none of them empty")
    if isinstance(value, str):
        return value
    templates = ["{" in entry for entry in entries]
    if any(templates) and not all(templates):
        way_out = "a list holds either argument names or templates with {braces}, not both"
        raise place.wrong(value, way_out)
    return entries[0] if templates == [True] else tuple(entries)


def templates_of(key: Any) -> tuple[str, ...]:
    """Return the templates of a key, one for each resource; none where it is something else."""
    if isinstance(key, str):
        return (key,)
    return key if isinstance(key, tuple) and "{" in key[0] else ()


OPTIONS: Mapping[str, Check] = {
    "key": _key,
    "ttl": _ttl,
    "renew": _bool,
    "max_hold": _seconds_or_none,
    "wait": _wait,
    "conflict": _one_of("requeue", "skip", "fail", "coalesce", callables=True),
    "backoff": _backoff,
    "max_wait": _seconds_or_none,
    "max_deferrals": _count_or_none,
    "give_up": _one_of("fail", "skip"),
    "lost": _one_of("abort", "warn"),
    "unreachable": _one_of("requeue", "fail", "run"),
    "limit": _limit,
    "fencing": _bool,
    "unique_for": _seconds_or_none,
    "unique_until": _one_of("start", "done", "window"),
    "duplicate": _one_of("existing", "fail", "replace"),
}
BUILT_IN: Mapping[str, Any] = {
    "key": None,
    "renew": True,
    "max_hold": None,
    "wait": 0.0,
    "conflict": "requeue",
    "backoff": Backoff(),
    "max_wait": None,
    "max_deferrals": None,
    "give_up": "fail",
    "lost": "abort",
    "unreachable": "requeue",
    "limit": 1,
    "fencing": False,
    "unique_for": None,
    "unique_until": "done",
    "duplicate": "existing",
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


def checked(
    options: Mapping[str, Any], app: AppSettings, place: Callable[[str], Place], *, travels: bool
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
    return result


def check_outside(options: Mapping[str, Any]) -> None:
    """Refuse options of ours among those of a call: Celery would ignore them; SettingsError."""
    for written, value in options.items():
        name = written.removeprefix("lock_")
        if name != written and name in OPTIONS:
            way_out = f'stands in one with the others of a call: lock={{"{name}": ...}}'
            raise SettingsError("call", written, repr(value), way_out)


def check_together(level: str, options: Mapping[str, Any]) -> None:
    """Refuse options that are right each by itself and not together; raises SettingsError.

    options: merged so far, each checked; what is missing is as built in.
    """
    merged = {**BUILT_IN, **options}
    limit, fencing = merged["limit"], merged["fencing"]
    check_permits(level, limit=limit, fencing=fencing, resources=templates_of(merged["key"]))


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
        prefix=check_prefix(level, "redlock_prefix", value("prefix", "redlock")),
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
    )
    queues = _by_pattern("queue", value("queues", None) or {}, bare, travels=True)
    tasks = _by_pattern("task", value("tasks", None) or {}, bare, travels=False)
    for pattern in tasks:
        if pattern.startswith(CELERYS):
            way_out = "Celery's own tasks are never locked: name tasks of your own or of others"
            raise tasks_place(pattern).wrong(tasks[pattern], way_out)
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
            way_out = f"is not a setting{did_you_mean(written, as_written)}"
            raise Place("app", str(written)).wrong(conf[written], way_out)


def _app_options(conf: Mapping[str, Any], app: AppSettings) -> Mapping[str, Any]:
    missing = object()
    given = {name: conf.get(f"redlock_{name}", missing) for name in OPTIONS}
    given = {name: value for name, value in given.items() if value is not missing}
    return checked(given, app, app_place, travels=False)


def _by_pattern(
    kind: str, given: Any, app: AppSettings, *, travels: bool
) -> Mapping[str, Mapping[str, Any]]:
    """Return the options of queues or tasks by name or glob, checked. kind: "queue" or "task"."""
    whole = Place("app", f"redlock_{kind}s")
    if not isinstance(given, Mapping):
        raise whole.wrong(given, f"must map {kind} names or globs to options")
    result = {}
    for pattern, options in given.items():
        if not isinstance(pattern, str) or not isinstance(options, Mapping):
            way_out = f"must map a {kind}'s name or glob to its options"
            raise whole.wrong({pattern: options}, way_out)
        place = _place_by_pattern(kind, pattern)
        result[pattern] = checked(options, app, place, travels=travels)
    return result


def _place_by_pattern(kind: str, pattern: str) -> Callable[[str], Place]:
    return lambda name: Place(f"{kind} {pattern!r}", f"redlock_{kind}s[{pattern!r}][{name!r}]")


def tasks_place(pattern: str) -> Place:
    """Return where what is said of tasks of others stands as a whole."""
    return Place("app", f"redlock_tasks[{pattern!r}]")


def _nodes(conf: Mapping[str, Any], given: Any) -> tuple[Any, str]:
    """Return the nodes to use and the name of the setting that they come from."""
    if given is not None:
        return given, "redlock_nodes"
    for name in ("broker_write_url", "broker_url", "result_backend"):
        url = one_redis(getattr(conf, name, None) or conf.get(name))
        if url is not None and conf.get("broker_use_ssl"):
            way_out = (
                "broker_use_ssl is set, which nodes do not take over: name them with rediss://"
            )
            raise SettingsError("app", "redlock_nodes", "None", way_out)
        if url is not None:
            return [url], name
    way_out = (
        "neither the broker nor the result backend is one Redis: name the lock's own nodes, "
        'as redlock_nodes = ["redis://a", "redis://b", "redis://c"]'
    )
    raise SettingsError("app", "redlock_nodes", "None", way_out)


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
        way_out = 'must be a port, or "host:port", 0 for any that is free; None for no metrics'
        raise SettingsError(level, "redlock_metrics", repr(given), way_out)
    return host.strip("[]") or EVERYWHERE, int(port)


def _done_ttl(conf: Mapping[str, Any], level: str, given: Any) -> float:
    """Return the s for which a run is known as done: until no other delivery is to be expected."""
    if given is None:
        return min(_visibility(conf) + 60.0, LONGEST_MARK)
    return check_seconds(level, "redlock_done_ttl", given)


@dataclass(frozen=True)
class Plan:
    """What one task's declaration means: its options, and how its key is made.

    Raises SettingsError when it is compiled. `signature` is the body's, without self.
    """

    task_name: str
    app: AppSettings
    options: Mapping[str, Any]
    signature: inspect.Signature
    place: Callable[[str], Place]  # where an option of the task stands
    queues: dict[tuple[str | None, str], str] = field(
        default_factory=dict, compare=False, repr=False
    )
    _by_queue: dict[str, Rules] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def may_be_unique(self) -> bool:
        """Whether any send is deduplicated, but for what a call says."""
        levels = (self.app.options, *self.app.queues.values(), self.options)
        return any(level.get("unique_for") is not None for level in levels)

    def may_name_queue(self, call: Mapping[str, Any] | None) -> bool:
        """Tell whether a key depends on the queue; call: the options of one, unchecked yet."""
        return self._names_queue or (call is not None and _names_queue(call.get("key")))

    @functools.cached_property
    def _names_queue(self) -> bool:
        return any(_names_queue(level.get("key")) for level in (self.app.options, self.options))

    def rules(self, queue: str, call: Mapping[str, Any] | None = None) -> Rules:
        """Return the options in force in a queue; call: those of the message, unchecked yet."""
        if call:
            return self._merge(queue, self.check_call(call))
        rules = self._by_queue.get(queue)
        if rules is None:
            rules = self._by_queue[queue] = self._merge(queue, {})
        return rules

    def _levels(
        self, queue: str, call: Mapping[str, Any]
    ) -> Iterator[tuple[Mapping[str, Any], Callable[[str], Place]]]:
        """Give the options of each level, the nearest last, and where they stand there."""
        built_in = {"ttl": min(DEFAULT_TTL, self.app.max_ttl), **BUILT_IN}
        yield built_in, lambda name: Place("built-in", name)
        yield self.app.options, app_place
        pattern = pattern_for(queue, self.app.queues)
        if pattern is not None:
            yield self.app.queues[pattern], _place_by_pattern("queue", pattern)
        yield self.options, self.place
        yield call, call_place

    def _merge(self, queue: str, call: Mapping[str, Any]) -> Rules:
        merged: dict[str, Any] = {}
        for options, _ in self._levels(queue, call):
            merged.update(options)
        check_together(f"task {self.task_name!r} in queue {queue!r}", merged)
        return Rules(**{name: merged[name] for name in Rules.__dataclass_fields__})

    def told(self, queue: str, call: Mapping[str, Any] | None = None) -> TaskRules:
        """Return the options in force in a queue with where each stands; call: unchecked yet."""
        checked_call = self.check_call(call or {})
        places: dict[str, Place] = {}
        for options, place in self._levels(queue, checked_call):
            places.update((name, place(name)) for name in options)
        rules = self._merge(queue, checked_call)
        told = [
            Rule(name, getattr(rules, name), places[name]) for name in Rules.__dataclass_fields__
        ]
        return TaskRules(self.task_name, queue, tuple(told))

    def check_call(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call, checked, also beside those of task and app."""
        valid = checked(options, self.app, call_place, travels=True)
        self.check_key(valid.get("key"), call_place("key"))
        check_together("call", {**self.app.options, **self.options, **valid})
        return valid

    def check_key(self, key: Any, place: Place) -> None:
        """Raise SettingsError where a key names what the function does not have."""
        parameters, templates = self.signature.parameters, templates_of(key)
        names = [name for template in templates for name in template_names(template, place)]
        unknown = [name for name in names if name not in (*parameters, *TEMPLATE_NAMES)]
        if isinstance(key, tuple) and not templates:
            unknown = [name for name in key if name not in parameters]
        if unknown:
            written = list(key) if isinstance(key, tuple) else key
            raise place.wrong(written, self._no_such(unknown[0]))

    def _no_such(self, name: str) -> str:
        known = [*self.signature.parameters, *TEMPLATE_NAMES]
        return f"{self.task_name} has no argument {name!r}{did_you_mean(name, known)}"

    def resources(
        self, rules: Rules, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any], queue: str
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
        if key is None:
            return (f"{self.task_name}:{digest(arguments, self.task_name)}",)
        templates = templates_of(key)
        if templates:
            return tuple(self._filled(template, arguments, queue) for template in templates)
        missing = [name for name in key if name not in arguments]
        if missing:  # a queue's key, which cannot be checked against every task
            place = Place(f"queue {queue!r}", "key")
            raise place.wrong(list(key), self._no_such(missing[0]))
        chosen = {name: arguments[name] for name in key}
        return (f"{self.task_name}:{digest(chosen, self.task_name)}",)

    def shapes(self, rules: Rules, queue: str) -> tuple[str, ...]:
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
    ) -> SettingsError:
        """Return the error for arguments that do not fit the function; it shows none of them."""
        bare = [p.replace(annotation=p.empty) for p in self.signature.parameters.values()]
        named = f", {', '.join(sorted(kwargs))} by name" if kwargs else ""
        way_out = (
            f"do not fit {self.task_name}{inspect.Signature(bare)}: {error}. A send and lock_for "
            "give all that a run takes. Where the message was sent for another version of the "
            "task, let a worker of that version run it, or let the function take both: give a new "
            "argument a default, keep an old one while messages have it"
        )
        level = f"task {self.task_name!r}"
        return SettingsError(level, "arguments", f"({len(args)} by position{named})", way_out)

    @functools.cached_property
    def _plain(self) -> Sequence[str] | None:
        """The names of the parameters where each can stand by position or name, else None."""
        parameters = self.signature.parameters.values()
        all_plain = all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
        return tuple(self.signature.parameters) if all_plain else None

    def _called(self, rules: Rules, task: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
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
            way_out = f"cannot be filled ({type(error).__name__}: {error}); is an argument missing?"
            raise place.wrong(template, way_out) from error
        if not text:
            raise place.wrong(template, "gives an empty text for these arguments")
        return text


def _names_queue(key: Any) -> bool:
    return not callable(key) and "{queue}" in repr(key)


class _Arguments(dict[str, Any]):
    """The names that a template knows; the digest is made only where it is asked for."""

    def __init__(self, task: str, queue: str, arguments: Mapping[str, Any]) -> None:
        super().__init__({"task": task, "queue": queue, **arguments})
        self._task, self._arguments = task, arguments

    def __missing__(self, name: str) -> str:
        if name == "digest":
            return digest(self._arguments, self._task)
        raise KeyError(name)


class _Formatter(string.Formatter):
    """str.format, without attributes (the wire keeps none) and without None."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if value is None:
            raise ValueError(f"{field_name} is None")
        return _plain(value), first


_FORMATTER = _Formatter()


def _plain(value: Any) -> Any:
    """Return a value as it comes out of a message: templates are filled with that."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {_json_key(key): _plain(item) for key, item in value.items()}
    return value


def template_names(template: str, place: Place) -> list[str]:
    """Return the first name of each {field} of a template; raises SettingsError."""
    try:
        fields = [name for _, name, _, _ in _FORMATTER.parse(template) if name is not None]
    except ValueError as error:
        raise place.wrong(template, f"is not a template: {error}") from None
    roots = []
    for name in fields:
        root = name.partition("[")[0]
        if not root.isidentifier():
            way_out = "name arguments in braces, as {sku}, {rest[0]}, {options[sku]}; no attributes"
            raise place.wrong(template, way_out)
        roots.append(root)
    return roots


def app_place(name: str) -> Place:
    """Return where an option of the whole app stands."""
    return Place("app", f"redlock_{name}")


def call_place(name: str) -> Place:
    """Return where an option of a single call stands."""
    return Place("call", f"lock={{{name!r}}}")


def compile_plan(
    app: AppSettings,
    task_name: str,
    attributes: Mapping[str, Any],
    signature: inspect.Signature,
    others: Sequence[str] = (),
) -> Plan:
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
            way_out = f"is not an option{_option_meant(written, 'lock_')}"
            raise SettingsError(level, written, repr(value), way_out)
        options[name] = value

    def place(name: str) -> Place:
        return Place(level, f"lock_{name}")

    options = checked(options, app, place, travels=False)
    return _planned(Plan(task_name, app, options, signature, place))


def compile_others_plan(
    app: AppSettings, task_name: str, pattern: str, signature: inspect.Signature
) -> Plan:
    """Return the plan of a task that `redlock_tasks` locks; raises SettingsError.

    pattern: the entry that it goes by. What the task itself says of `lock_*` is not about locks.
    """
    if pattern not in app.tasks:
        way_out = "came after the settings had been read: set it before the app finalizes"
        raise tasks_place(pattern).wrong("...", way_out)
    place = _place_by_pattern("task", pattern)
    return _planned(Plan(task_name, app, app.tasks[pattern], signature, place))


def _planned(plan: Plan) -> Plan:
    """Return a plan whose key its function can fill, and whose options go together."""
    plan.check_key(plan.options.get("key"), plan.place("key"))
    if "key" not in plan.options:
        plan.check_key(plan.app.options.get("key"), app_place("key"))
    check_together(f"task {plan.task_name!r}", {**plan.app.options, **plan.options})
    unique_for = plan.options.get("unique_for")
    if plan.options.get("key") is False and unique_for is not None:
        way_out = "deduplicates by the lock's key, and key=False makes none: name a key"
        raise plan.place("unique_for").wrong(unique_for, way_out)
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
            way_out = (
                f"has no stable form ({error}): name the arguments that make the key, as "
                'lock_key=["id"] or lock_key="thing:{id}"'
            )
            raise SettingsError(
                f"task {task!r}", f"argument {name!r}", f"a {type(value).__name__}", way_out
            ) from None
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:32]


_MOST = (int, str)  # what most arguments are, and nothing derived from it: as below, but sooner
_PLAIN = (dt.datetime, dt.date, dt.time)
_BY_TEXT = (decimal.Decimal, uuid.UUID, dt.timedelta)


def canonical(value: Any) -> str:
    """Return a text that equal values share and others do not; TypeError for an unstable one."""
    if isinstance(value, enum.Enum):
        return canonical(value.value)
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, (str, int, float, bytes, bytearray)):
        return _scalar(value)
    if isinstance(value, _PLAIN):
        kind = next(plain for plain in _PLAIN if isinstance(value, plain))
        return f"{kind.__name__}:{value.isoformat()}"
    if isinstance(value, _BY_TEXT):
        text_kind = next(plain for plain in _BY_TEXT if isinstance(value, plain))
        return f"{text_kind.__name__}:{value}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set({','.join(sorted(map(canonical, value)))})"
    if isinstance(value, Mapping):
        pairs = sorted(f"{canonical(_json_key(k))}:{canonical(v)}" for k, v in value.items())
        return f"{{{','.join(pairs)}}}"
    reduce = getattr(value, "__json__", None)
    if callable(reduce):
        return canonical(reduce())
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return repr(str.__str__(value))
    if isinstance(value, (bytes, bytearray)):
        return repr(bytes(value))
    return repr(int(value)) if isinstance(value, int) else repr(float(value))


def _json_key(key: Any) -> Any:
    """Return a dict's key as JSON writes it."""
    if isinstance(key, enum.Enum):
        key = key.value
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return _scalar(key) if isinstance(key, (int, float)) else key
