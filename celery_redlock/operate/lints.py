"""What `doctor` and a worker's start report about the settings of an app.

`lint` checks an app with all its tasks; each function below yields the lints of one kind. Not here:
wrong values of single settings, which `tasks/settings` refuses when the app finalizes; the state of
the nodes, which `operate/cli` shows; open decisions, and the log lines (`start_report.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import metadata
from typing import Any, TypeAlias

from celery_redlock.errors import SettingsError, first_names
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.lock.transport.credentials import redact_url
from celery_redlock.tasks.declaration import ENTRY_ATTRIBUTE, config_of
from celery_redlock.tasks.delivery.route import driver_of, has_quorum_queues, routed_queue
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.settings.app import (
    CELERY_PREFIX,
    DEFAULT_PREFIX,
    OptionSource,
    did_you_mean,
    is_glob,
    pattern_for,
)
from celery_redlock.tasks.settings.levels import (
    KEY_LIMIT_OPTIONS,
    KEY_OPTIONS,
    decides_key,
    declared_queues,
    one_redis,
    time_limit_of,
    visibility_timeout,
)
from celery_redlock.tasks.settings.options import EffectiveOptions, OptionValue
from celery_redlock.tasks.settings.templates import templates_of
from celery_redlock.tasks.startup import FOREIGN_OPTIONS, locked_tasks, locks_tasks, takes_lock
from celery_redlock.tasks.task import LockedTask

logger = logging.getLogger(__name__)

LEVELS = ERROR, WARNING, ADVICE = "error", "warning", "advice"
# kombu's drivers that remove a message from the queue as soon as a worker receives it
NEVER_REDELIVERING = frozenset(
    ("filesystem", "sql", "mongodb", "consul", "etcd", "zookeeper", "azurestoragequeues")
)
DEFAULT_PREFETCH = 4  # Celery's default of worker_prefetch_multiplier
_EXTRAS = {  # the extras of kombu whose name differs from the scheme of the URL
    **dict.fromkeys(("rediss", "sentinel"), "redis"),
    "sqla": "sqlalchemy",
    "kafka": "confluentkafka",
}
# a locked task, and the options in force in the queue of its own routing
TaskInQueue: TypeAlias = tuple[LockedTask, EffectiveOptions]


@dataclass(frozen=True)
class Lint:
    """A wrong setting, or one that could be better.

    level: one of `LEVELS`. setting: the name, after the place where it is set. value: its text.
    hint: the consequence, and what to do.
    """

    level: str
    setting: str
    value: str
    hint: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.hint}"


def refuse_errors(app: Any) -> None:
    """Raise SettingsError for the first error in `redlock_queues` if the app has locked tasks."""
    patterns = app.conf.get("redlock_queues")
    conf = app.conf
    if isinstance(patterns, Mapping) and locks_tasks(app):
        for finding in _unknown_queues(map(str, patterns), declared_queues(conf), conf):
            if finding.level == ERROR:
                raise SettingsError("app", "redlock_queues", finding.value, finding.hint)


def lint(app: Any) -> tuple[Lint, ...]:
    """Return the distinct lints of an app, errors first. Raises SettingsError."""
    return tuple(
        sorted(dict.fromkeys(_all_lints(app)), key=lambda finding: LEVELS.index(finding.level))
    )


def _all_lints(app: Any) -> Iterator[Lint]:
    queues = settings_of(app).queues
    yield from _unknown_queues(queues, tuple(app.amqp.queues), app.conf)
    yield from _task_entries(app)
    yield from _key_prefixes(app)
    tasks = []
    for task in locking_tasks(app):
        config = config_of(task)
        queue = queue_of_task(task)
        try:
            options = config.effective_options(queue)
            pattern = pattern_for(queue, config.app.queues)
            # the task may not fill the key of a queue
            if pattern is not None and not decides_key(config.options):
                source_of = partial(OptionSource.at, "queues", of=pattern)
                config.check_level(config.app.queues[pattern], source_of)
        except SettingsError as error:
            hint = f"every run of {task.name} there ends as FAILURE: {error.hint}"
            yield Lint(WARNING, f"{error.level}: {error.name}", error.value, hint)
        else:
            tasks.append((task, options))
    for task, options in tasks:
        yield from _ineffective_options(task, options)
        yield from _names_as_templates(task, options)
        yield from _time_limits(task, options)
        on_unreachable = options["on_unreachable"]
        if on_unreachable.value == "run" and options["fencing"].value:
            hint = "a run without its lock has no fencing token: use 'defer' or 'fail'"
            yield Lint(WARNING, str(on_unreachable.source), "'run'", hint)
    yield from _shared_limits(tasks)
    yield from _limits_without_key(app, tasks)
    yield from _inherited_limits(tasks)
    yield from _acknowledgements(locking_tasks(app))
    yield from _broker_settings(app, tasks)


def locking_tasks(app: Any) -> list[LockedTask]:
    return [task for task in locked_tasks(app) if takes_lock(task, queue_of_task(task))]


def queue_of_task(task: LockedTask) -> str:
    """Return the queue that routing gives a task; the default queue if that is unknown."""
    queue = routed_queue(task)
    if queue is None:  # a router of the user's own, which may look at arguments
        fields = {"event": "queue_unknown", "task": task.name}
        logger.debug("The queue of %s is unknown without a send", task.name, extra=fields)
    return queue or str(task.app.conf.task_default_queue)


def _unknown_queues(patterns: Iterable[str], declared: Sequence[str], conf: Any) -> Iterator[Lint]:
    """Yield names in `redlock_queues` that no queue has."""
    creates = bool(conf.task_create_missing_queues)
    for pattern in patterns:
        if is_glob(pattern) or pattern in declared:
            continue
        suggestion = did_you_mean(pattern, declared).removeprefix("; ")
        hint = f"is not in task_queues, so these options apply to no task; {suggestion}"
        if creates:
            hint = f"is not in task_queues; {suggestion}. Ignore this if a call creates it"
        yield Lint(WARNING if creates else ERROR, "app: redlock_queues", repr(pattern), hint)


def _bounded_queues(app: Any) -> Iterator[Lint]:
    """Yield the queues of RabbitMQ that drop their oldest message when they are full."""
    # Source: RabbitMQ, "Queue Length Limit": the default. A policy of the server is unknown here
    for queue in app.amqp.queues.values():
        arguments = queue.queue_arguments or {}
        limits = (queue.max_length, queue.max_length_bytes)
        is_bounded = limits != (None, None) or {"x-max-length", "x-max-length-bytes"} & {*arguments}
        if is_bounded and arguments.get("x-overflow", "drop-head") == "drop-head":
            hint = (
                "a deferral displaces the oldest message of a full queue: give the queue the "
                "argument x-overflow='reject-publish', or no x-max-length"
            )
            yield Lint(WARNING, "app: task_queues", repr(str(queue.name)), hint)


def _task_entries(app: Any) -> Iterator[Lint]:
    """Yield entries of `redlock_tasks` that lock no task."""
    entries = settings_of(app).tasks
    names = [name for name in app.tasks if not name.startswith(CELERY_PREFIX)]
    matched = {pattern_for(name, entries) for name in names}
    class_tasks = [
        task.name for task in locking_tasks(app) if ENTRY_ATTRIBUTE not in type(task).__dict__
    ]
    class_task_of = {pattern_for(name, entries): name for name in class_tasks}
    for pattern in entries:
        if pattern not in matched:
            yield _unmatched_entry(pattern, entries, names)
        elif pattern in class_task_of:
            task = class_task_of[pattern]
            hint = f"does not apply to {task}, a LockedTask: its own lock_* options do"
            yield Lint(ADVICE, "app: redlock_tasks", repr(pattern), hint)


def _unmatched_entry(pattern: str, entries: Mapping[str, Any], names: Sequence[str]) -> Lint:
    """Return why an entry applies to no task. names: the app's tasks."""
    shadowing = [pattern_for(name, entries) for name in names if pattern_for(name, [pattern])]
    level = WARNING
    if shadowing:
        hint = f"applies to no task, because {shadowing[0]!r} comes first: name it before that"
    elif is_glob(pattern):
        level = ADVICE
        hint = "matches no task of this worker"
    else:
        suggestion = did_you_mean(pattern, names).removeprefix("; ")
        hint = f"is not a task of this worker; {suggestion}"
    return Lint(level, "app: redlock_tasks", repr(pattern), hint)


def _ineffective_options(task: LockedTask, options: EffectiveOptions) -> Iterator[Lint]:
    """Yield options without effect: of deduplication without it, and of other plugins."""
    if options["unique_for"].value is options["debounce"].value is None:
        for name in sorted(config_of(task).options.keys() & {"on_duplicate", "unique_until"}):
            option = options[name]
            hint = "has no effect without lock_unique_for"
            yield Lint(WARNING, str(option.source), repr(option.value), hint)
    for name in sorted(FOREIGN_OPTIONS.keys() & vars(type(task)).keys()):
        hint = f"does not change the lock: {FOREIGN_OPTIONS[name]}"
        yield Lint(WARNING, f"task {task.name!r}: {name}", repr(vars(type(task))[name]), hint)


def _key_prefixes(app: Any) -> Iterator[Lint]:
    """Yield a `global_keyprefix` that separates deployments on a Redis; lock keys lack it."""
    conf = app.conf
    settings = settings_of(app)
    if settings.prefix != DEFAULT_PREFIX:
        return
    nodes = {parse_address(node, "app", "nodes").server for node in settings.nodes}
    key_prefixes = []  # each: whether its server is a lock node, the setting, the prefix
    for name, url, option in (
        ("broker_url", conf.broker_write_url or conf.broker_url, "broker_transport_options"),
        ("result_backend", conf.result_backend, "result_backend_transport_options"),
    ):
        key_prefix = (conf.get(option) or {}).get("global_keyprefix")
        if key_prefix:
            server = one_redis(url)
            is_node = bool(server) and parse_address(server, "app", name).server in nodes
            key_prefixes.append((is_node, option, str(key_prefix)))
    if not key_prefixes:
        return
    # the first one on a lock node, else the first one
    is_node, option, key_prefix = max(key_prefixes, key=lambda entry: entry[0])
    suggestion = f"{key_prefix.strip(':-_./{}') or 'own'}-{settings.prefix}"
    relation = "uses this Redis" if is_node else "names these redlock_nodes"
    hint = (
        f"lock keys do not carry {option}'s global_keyprefix={key_prefix!r}: "
        f"another deployment that {relation} shares these locks. Set redlock_prefix={suggestion!r}"
    )
    level = WARNING if is_node else ADVICE
    yield Lint(level, "app: redlock_prefix", repr(settings.prefix), hint)


def _names_as_templates(task: LockedTask, options: EffectiveOptions) -> Iterator[Lint]:
    """Yield templates without braces that are the name of an argument."""
    source = options["key"].source
    args = "args".join(source.name.rsplit("key", 1))  # the same level's other option
    for text in templates_of(options["key"].value):
        if text in config_of(task).signature.parameters:
            hint = (
                f"is one lock for all arguments of {task.name}, which has an argument of that "
                f"name: did you mean {args}=[{text!r}] or {'{' + text + '}'!r}?"
            )
            yield Lint(WARNING, str(source), repr(text), hint)


def _time_limits(task: LockedTask, options: EffectiveOptions) -> Iterator[Lint]:
    """Yield retries that outlast the visibility timeout, and locks that end before the body."""
    visibility = visibility_timeout(task.app.conf)
    retry_delay = task.default_retry_delay if getattr(task, "autoretry_for", ()) else None
    if visibility is not None and retry_delay is not None and retry_delay > visibility:
        hint = (
            f"a retry that waits for longer than the broker's visibility timeout, "
            f"{visibility:g} s, is delivered twice: lower it, or raise visibility_timeout"
        )
        yield Lint(WARNING, f"task {task.name!r}: default_retry_delay", f"{retry_delay:g}", hint)
    ttl = options["ttl"].value
    time_limit = time_limit_of(task)
    source = str(options["renew"].source)
    if options["renew"].value:
        return
    if time_limit is None:
        hint = (
            f"a body of {task.name} that runs for longer than ttl={ttl:g} loses its lock, and "
            "no time limit ends it: set a time_limit below the ttl, or renew"
        )
        yield Lint(ADVICE, source, "False", hint)
    elif time_limit > ttl:
        hint = (
            f"{task.name} may run for {time_limit:g} s, and its lock ends after ttl={ttl:g}: lower "
            "the time limit, raise the ttl, or renew"
        )
        yield Lint(WARNING, source, "False", hint)


def _shared_limits(tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Yield tasks with different limits that may lock the same resource."""
    sharing: dict[str, dict[int, list[str]]] = {}
    for task, options in tasks:
        config = config_of(task)
        limit = options["limit"].value
        if callable(limit):
            continue
        shapes = config.shapes(config.options_for(options.queue), options.queue)
        by_shape = dict(zip(shapes, templates_of(options["key"].value), strict=True))
        for shape, template in by_shape.items():
            task_limit = limit.get(template, 1) if isinstance(limit, Mapping) else limit
            sharing.setdefault(shape, {}).setdefault(task_limit, []).append(task.name)
    for shape, by_limit in sharing.items():
        if len(by_limit) > 1:
            limits = "; ".join(
                f"limit={number}: {format_names(names)}" for number, names in by_limit.items()
            )
            hint = (
                f"{limits}. A task with a higher limit runs beside one that is meant to run "
                "alone: set one limit"
            )
            yield Lint(WARNING, f"lock {shape!r}: limit", " and ".join(map(str, by_limit)), hint)


def _limits_without_key(app: Any, tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Yield limits, rates and debounces on the default key: each set of arguments has its own."""
    without_key = [task for task, _ in tasks if not decides_key(config_of(task).task_options)]
    affected_options = [
        options[name]
        for task, options in tasks
        if options["key"].value is options["args"].value is None
        for name in (*KEY_LIMIT_OPTIONS, "debounce")
        if _is_split_by_arguments(options[name], task)
    ]
    for pattern, level in settings_of(app).queues.items():
        if not decides_key(level):
            for name in filter(level.__contains__, (*KEY_LIMIT_OPTIONS, "debounce")):
                option = OptionValue(name, level[name], OptionSource.at("queues", name, pattern))
                if any(_is_split_by_arguments(option, task) for task in without_key):
                    affected_options.append(option)
    for option in affected_options:
        key = '"{task}" or "{queue}"' if option.name != "debounce" else '"{task}:{id}"'
        hint = f"no key is set, so it applies to each set of arguments alone: set a key, as {key}"
        yield Lint(WARNING, str(option.source), repr(option.value), hint)


def _is_split_by_arguments(option: OptionValue, task: LockedTask) -> bool:
    """Return whether the default key of a task splits what an option probably means to join."""
    if option.name == "debounce":  # on one argument: the bursts of each of its values
        return option.value is not None and len(config_of(task).signature.parameters) > 1
    return _is_one_number(option)


def _inherited_limits(tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Yield limits and rates of a queue or the app that apply to the key of a single task."""
    inheriting: dict[OptionValue, list[str]] = {}
    for task, options in tasks:
        task_options = config_of(task).options
        if any(task_options.get(name) is not None for name in KEY_OPTIONS):
            for option in map(options.__getitem__, KEY_LIMIT_OPTIONS):
                if option.name not in task_options and _is_one_number(option):
                    inheriting.setdefault(option, []).append(task.name)
    consequences = {
        "limit": "the limit applies to the task's own key, so several runs hold it at once",
        "rate": "the rate applies to the task's own key, and is not shared with other tasks",
    }
    for option, names in inheriting.items():
        consequence = consequences[option.name]
        hint = f"{format_names(names)}: {consequence}: set lock_{option.name} at the task"
        yield Lint(WARNING, str(option.source), repr(option.value), hint)


def _is_one_number(option: OptionValue) -> bool:
    """Return whether an option is a rate or a limit above 1, and no mapping or callable."""
    value = option.value
    return isinstance(value, str) or (type(value) is int and value > 1)


def _acknowledgements(tasks: Sequence[LockedTask]) -> Iterator[Lint]:
    """Yield tasks whose messages or runs are lost when their worker or child dies."""
    early = [task.name for task in tasks if not task.acks_late]
    if early:
        hint = (
            f"{format_names(early)}: a message is lost if its worker dies in the body, or after "
            "acknowledging and before deferring it: set acks_late=True, unless that is acceptable"
        )
        yield Lint(ADVICE, "acks_late", "False", hint)
    dropped = [task.name for task in tasks if task.acks_late and not task.reject_on_worker_lost]
    if dropped:
        hint = (
            f"{format_names(dropped)}: a run whose child is killed ends as FAILURE: set it to True"
        )
        yield Lint(ADVICE, "reject_on_worker_lost", "False", hint)


def _broker_settings(app: Any, tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Yield an unusable transport, and settings with which a broker loses or blocks messages."""
    try:
        driver = driver_of(app)
    except Exception as error:  # each transport has its own
        yield _broken_transport(app, error)
        return
    if driver in NEVER_REDELIVERING:
        hint = (
            "such a broker never redelivers what a worker has not acknowledged: if the worker is "
            "killed, what it runs and what waits in it is lost: use Redis, RabbitMQ or SQS"
        )
        yield Lint(WARNING, "app: broker_url", driver, hint)
    if driver == "amqp":
        yield from _bounded_queues(app)
        yield from _full_prefetch(app, tasks)


def _broken_transport(app: Any, error: Exception) -> Lint:
    """Return the lint for a transport that cannot be imported or created. error: the cause."""
    write = app.conf.broker_write_url
    setting = "broker_url" if write == app.conf.broker_url else "broker_write_url"
    url = (write if isinstance(write, str) else write[0]).split(";")[0]
    scheme = url.partition(":")[0].partition("+")[0].lower()
    extra = _EXTRAS.get(scheme, scheme)
    reason = error.args[0] if type(error) is KeyError else error  # of which str() adds quotes
    cause = f"no message can be sent: {str(reason) or type(error).__name__}"
    if isinstance(error, ImportError):
        if error.name:
            cause = f"its transport cannot import {error.name}"
        extras = metadata("kombu").get_all("Provides-Extra") or ()
        if requirement := f"'kombu[{extra}]'" if extra in extras else error.name:
            cause = f"{cause}: run pip install {requirement}"
    return Lint(ERROR, f"app: {setting}", redact_url(url), cause)


def _full_prefetch(app: Any, tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Yield queues of RabbitMQ whose deferred messages fill a worker's prefetch.

    Source: celery.worker.consumer.tasks: with any quorum queue the prefetch applies to each
    consumer, and is not raised for waiting messages. RabbitMQ delays no message of a direct
    exchange.
    """
    prefetch = app.conf.worker_prefetch_multiplier
    if not (0 < prefetch <= DEFAULT_PREFETCH and has_quorum_queues(app)):
        return
    deferred = [
        options for _, options in tasks if options["on_conflict"].value not in ("skip", "fail")
    ]
    for queue in app.amqp.queues.values():
        names = [options.task for options in deferred if options.queue == queue.name]
        if names and queue.exchange.type == "direct":
            hint = (
                f"{format_names(names)}: if RabbitMQ has a quorum queue, deferred messages fill a "
                "worker's prefetch and block the messages behind them: use a topic exchange "
                "(task_default_exchange_type), or a worker_prefetch_multiplier above the number "
                "of messages that may wait"
            )
            yield Lint(WARNING, f"queue {queue.name!r}", "on a direct exchange", hint)


def format_names(names: Sequence[str]) -> str:
    """Return the first names in alphabetical order, and the number of the others."""
    return first_names(sorted(names))
