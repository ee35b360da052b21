"""What `doctor` and a worker's start report about the settings of an app.

Not here: values that are wrong in themselves, which `tasks/settings` refuses when the app
finalizes; how the nodes are, which `operate/cli` shows; what the defaults leave open, and the log
lines (`start_report.py`). `lint` reads an app with all its tasks; each function below gives the
lints of one kind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import metadata
from typing import Any, TypeAlias

from celery_redlock.errors import SettingsError
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.lock.transport.credentials import redact_url
from celery_redlock.tasks.declaration import ENTRY, config_of
from celery_redlock.tasks.delivery.route import driver_of, has_quorum_queues, queue_asked
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
    KEY_OPTIONS,
    OF_THE_KEY,
    decides_key,
    declared_queues,
    one_redis,
    time_limit_of,
    visibility_timeout,
)
from celery_redlock.tasks.settings.options import EffectiveOptions, OptionValue
from celery_redlock.tasks.settings.templates import templates_of
from celery_redlock.tasks.startup import OF_OTHERS, locked_tasks, locks_tasks, takes_lock
from celery_redlock.tasks.task import LockedTask

logger = logging.getLogger(__name__)

LEVELS = ERROR, WARNING, ADVICE = "error", "warning", "advice"
# kombu's kinds of brokers whose transport takes a message out of the queue as a worker receives it
FORGETFUL = frozenset(
    ("filesystem", "sql", "mongodb", "consul", "etcd", "zookeeper", "azurestoragequeues")
)
DEFAULT_PREFETCH = 4  # Celery's default of worker_prefetch_multiplier
# kombu's extras for schemes that have another name
_EXTRAS = {
    **dict.fromkeys(("rediss", "sentinel"), "redis"),
    "sqla": "sqlalchemy",
    "kafka": "confluentkafka",
}
_NAMED = 5  # the most tasks that one lint names
# a locked task, and the options in force in the queue of its own routing
TaskInQueue: TypeAlias = tuple[LockedTask, EffectiveOptions]


@dataclass(frozen=True)
class Lint:
    """One thing that is wrong with the settings, or could be better.

    level: one of `LEVELS`. setting, value: what is set, and where. hint: the consequence, and what
    to do.
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
        for one in _unknown_queues(map(str, patterns), declared_queues(conf), conf):
            if one.level == ERROR:
                raise SettingsError("app", "redlock_queues", one.value, one.hint)


def lint(app: Any) -> tuple[Lint, ...]:
    """Return the lints of an app, errors first, each once; SettingsError for a wrong setting."""
    return tuple(sorted(dict.fromkeys(_all(app)), key=lambda one: LEVELS.index(one.level)))


def _all(app: Any) -> Iterator[Lint]:
    queues = settings_of(app).queues
    yield from _unknown_queues(queues, tuple(app.amqp.queues), app.conf)
    yield from _entries(app)
    yield from _prefixes(app)
    tasks = []
    for task in locking(app):
        config = config_of(task)
        queue = queue_of_task(task)
        try:
            options = config.effective_options(queue)
            pattern = pattern_for(queue, config.app.queues)
            if pattern is not None and not decides_key(config.options):  # the task may not fill it
                source_of = partial(OptionSource.at, "queues", of=pattern)
                config.check_level(config.app.queues[pattern], source_of)
        except SettingsError as error:
            hint = f"every run of {task.name} there ends as FAILURE: {error.hint}"
            yield Lint(WARNING, f"{error.level}: {error.name}", error.value, hint)
        else:
            tasks.append((task, options))
    for task, options in tasks:
        yield from _without_effect(task, options)
        yield from _names_as_templates(task, options)
        yield from _times(task, options)
        on_unreachable = options["on_unreachable"]
        if on_unreachable.value == "run" and options["fencing"].value:
            hint = "a run without its lock has no fencing token: use 'defer' or 'fail'"
            yield Lint(WARNING, str(on_unreachable.source), "'run'", hint)
    yield from _shared_limits(tasks)
    yield from _of_all_arguments(app, tasks)
    yield from _inherited(tasks)
    yield from _acknowledgement(locking(app))
    yield from _of_the_broker(app, tasks)


def locking(app: Any) -> list[LockedTask]:
    return [one for one in locked_tasks(app) if takes_lock(one, queue_of_task(one))]


def queue_of_task(task: LockedTask) -> str:
    """Return the queue of a task's own routing, the app's default queue if that is unknown."""
    queue = queue_asked(task)
    if queue is None:  # a router of the user's own, which may look at arguments
        fields = {"event": "queue_unknown", "task": task.name}
        logger.debug("The queue of %s is unknown without a send", task.name, extra=fields)
    return queue or str(task.app.conf.task_default_queue)


def _unknown_queues(patterns: Iterable[str], declared: Sequence[str], conf: Any) -> Iterator[Lint]:
    """Give names in `redlock_queues` that no queue has."""
    creates = bool(conf.task_create_missing_queues)
    for pattern in patterns:
        if is_glob(pattern) or pattern in declared:
            continue
        found = did_you_mean(pattern, declared).removeprefix("; ")
        hint = f"is not in task_queues, so these options apply to no task; {found}"
        if creates:
            hint = f"is not in task_queues; {found}. Ignore this if a call creates it"
        yield Lint(WARNING if creates else ERROR, "app: redlock_queues", repr(pattern), hint)


def _bounded_queues(app: Any) -> Iterator[Lint]:
    """Give the queues of RabbitMQ that drop their oldest message for a new one if they are full."""
    # Source: RabbitMQ, "Queue Length Limit": so they do by default. A policy is not seen here
    for queue in app.amqp.queues.values():
        given = queue.queue_arguments or {}
        limits = (queue.max_length, queue.max_length_bytes)
        is_bounded = limits != (None, None) or {"x-max-length", "x-max-length-bytes"} & {*given}
        if is_bounded and given.get("x-overflow", "drop-head") == "drop-head":
            hint = (
                "a deferral displaces the oldest message of a full queue: give the queue the "
                "argument x-overflow='reject-publish', or no x-max-length"
            )
            yield Lint(WARNING, "app: task_queues", repr(str(queue.name)), hint)


def _entries(app: Any) -> Iterator[Lint]:
    """Give entries of `redlock_tasks` that lock no task."""
    setting = "app: redlock_tasks"
    entries = settings_of(app).tasks
    names = [name for name in app.tasks if not name.startswith(CELERY_PREFIX)]
    matched = {pattern_for(name, entries) for name in names}
    own_tasks = (one.name for one in locking(app) if ENTRY not in type(one).__dict__)
    own = {pattern_for(name, entries): name for name in own_tasks}
    for pattern in entries:
        earlier = [pattern_for(name, entries) for name in names if pattern_for(name, [pattern])]
        if pattern not in matched and earlier:
            hint = f"applies to no task, because {earlier[0]!r} comes first: name it before that"
            yield Lint(WARNING, setting, repr(pattern), hint)
        elif pattern not in matched and is_glob(pattern):
            yield Lint(ADVICE, setting, repr(pattern), "matches no task of this worker")
        elif pattern not in matched:
            found = did_you_mean(pattern, names).removeprefix("; ")
            yield Lint(WARNING, setting, repr(pattern), f"is not a task of this worker; {found}")
        elif pattern in own:
            hint = f"does not apply to {own[pattern]}, a LockedTask: its own lock_* options do"
            yield Lint(ADVICE, setting, repr(pattern), hint)


def _without_effect(task: LockedTask, options: EffectiveOptions) -> Iterator[Lint]:
    """Give attributes of another plugin, and what becomes of duplicates that are not looked for."""
    if options["unique_for"].value is options["debounce"].value is None:
        for name in sorted(config_of(task).options.keys() & {"on_duplicate", "unique_until"}):
            one = options[name]
            hint = "has no effect without lock_unique_for"
            yield Lint(WARNING, str(one.source), repr(one.value), hint)
    for name in sorted(OF_OTHERS.keys() & vars(type(task)).keys()):
        hint = f"does not change the lock: {OF_OTHERS[name]}"
        yield Lint(WARNING, f"task {task.name!r}: {name}", repr(vars(type(task))[name]), hint)


def _prefixes(app: Any) -> Iterator[Lint]:
    """Give a `global_keyprefix` that keeps deployments apart on a Redis, as lock keys lack it."""
    conf = app.conf
    settings = settings_of(app)
    if settings.prefix != DEFAULT_PREFIX:
        return
    nodes = {parse_address(node, "app", "nodes").server for node in settings.nodes}
    shared = []
    given = []
    for name, url, options in (
        ("broker_url", conf.broker_write_url or conf.broker_url, "broker_transport_options"),
        ("result_backend", conf.result_backend, "result_backend_transport_options"),
    ):
        prefix = (conf.get(options) or {}).get("global_keyprefix")
        server = one_redis(url)
        if prefix:
            given.append((options, str(prefix)))
        if prefix and server and parse_address(server, "app", name).server in nodes:
            shared.append(given[-1])
    if not given:
        return
    options, prefix = (shared or given)[0]
    own = f"{prefix.strip(':-_./{}') or 'own'}-{settings.prefix}"
    which = "uses this Redis" if shared else "names these redlock_nodes"
    hint = (
        f"lock keys do not carry {options}'s global_keyprefix={prefix!r}: "
        f"another deployment that {which} shares these locks. Set redlock_prefix={own!r}"
    )
    level = WARNING if shared else ADVICE
    yield Lint(level, "app: redlock_prefix", repr(settings.prefix), hint)


def _names_as_templates(task: LockedTask, options: EffectiveOptions) -> Iterator[Lint]:
    """Give templates without braces that are the name of an argument."""
    source = options["key"].source
    args = "args".join(source.name.rsplit("key", 1))  # the same level's other option
    for text in templates_of(options["key"].value):
        if text in config_of(task).signature.parameters:
            hint = (
                f"is one lock for all arguments of {task.name}, which has an argument of that "
                f"name: did you mean {args}=[{text!r}] or {'{' + text + '}'!r}?"
            )
            yield Lint(WARNING, str(source), repr(text), hint)


def _times(task: LockedTask, options: EffectiveOptions) -> Iterator[Lint]:
    """Give retries that wait for longer than the broker, and leases that end before the body."""
    visibility = visibility_timeout(task.app.conf)
    after = task.default_retry_delay if getattr(task, "autoretry_for", ()) else None
    if visibility is not None and after is not None and after > visibility:
        hint = (
            f"a retry that waits for longer than the broker's visibility timeout, "
            f"{visibility:g} s, is delivered twice: lower it, or raise visibility_timeout"
        )
        yield Lint(WARNING, f"task {task.name!r}: default_retry_delay", f"{after:g}", hint)
    name = task.name
    ttl = options["ttl"].value
    limit = time_limit_of(task)
    source = str(options["renew"].source)
    if options["renew"].value:
        return
    if limit is None:
        hint = (
            f"a body of {name} that runs for longer than ttl={ttl:g} loses its lock, and "
            "no time limit ends it: set a time_limit below the ttl, or renew"
        )
        yield Lint(ADVICE, source, "False", hint)
    elif limit > ttl:
        hint = (
            f"{name} may run for {limit:g} s, and its lock ends after ttl={ttl:g}: lower "
            "the time limit, raise the ttl, or renew"
        )
        yield Lint(WARNING, source, "False", hint)


def _shared_limits(tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Give tasks with different limits that may lock the same resource."""
    sharing: dict[str, dict[int, list[str]]] = {}
    for task, options in tasks:
        config = config_of(task)
        limit = options["limit"].value
        queue = options.queue
        if callable(limit):
            continue
        shapes = config.shapes(config.options_for(queue), queue)
        by_shape = dict(zip(shapes, templates_of(options["key"].value), strict=True))
        for shape, template in by_shape.items():
            own = limit.get(template, 1) if isinstance(limit, Mapping) else limit
            sharing.setdefault(shape, {}).setdefault(own, []).append(task.name)
    for shape, by_limit in sharing.items():
        if len(by_limit) > 1:
            of_each = "; ".join(f"limit={n}: {listed(names)}" for n, names in by_limit.items())
            hint = (
                f"{of_each}. A task with a higher limit runs beside one that is meant to run "
                "alone: set one limit"
            )
            yield Lint(WARNING, f"lock {shape!r}: limit", " and ".join(map(str, by_limit)), hint)


def _of_all_arguments(app: Any, tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Give limits and rates on the default key: calls with other arguments are not counted."""
    without_key = [one for one, _ in tasks if not decides_key(config_of(one).task_options)]
    found = [
        options[name]
        for _, options in tasks
        for name in OF_THE_KEY
        if options["key"].value is None and options["args"].value is None
    ]
    for pattern, level in settings_of(app).queues.items():
        if without_key and not decides_key(level):
            for name in filter(level.__contains__, OF_THE_KEY):
                found.append(
                    OptionValue(name, level[name], OptionSource.at("queues", name, pattern))
                )
    for option in filter(_is_one_number, found):
        hint = (
            "no key is set, so it applies to each set of arguments alone: set a key, as "
            '"{task}" or "{queue}"'
        )
        yield Lint(WARNING, str(option.source), repr(option.value), hint)


def _inherited(tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Give limits and rates of a queue or the app that hold for a key of a task's own."""
    inheriting: dict[OptionValue, list[str]] = {}
    for task, options in tasks:
        own = config_of(task).options
        if any(own.get(name) is not None for name in KEY_OPTIONS):
            for option in map(options.__getitem__, OF_THE_KEY):
                if option.name not in own and _is_one_number(option):
                    inheriting.setdefault(option, []).append(task.name)
    meant = {
        "limit": "the limit applies to the task's own key, so several runs hold it at once",
        "rate": "the rate applies to the task's own key, and is not shared with other tasks",
    }
    for option, names in inheriting.items():
        hint = f"{listed(names)}: {meant[option.name]}: set lock_{option.name} at the task"
        yield Lint(WARNING, str(option.source), repr(option.value), hint)


def _is_one_number(option: OptionValue) -> bool:
    """Return whether it is a limit above 1, or a rate, and no mapping or callable."""
    value = option.value
    return isinstance(value, str) or (type(value) is int and value > 1)


def _acknowledgement(tasks: Sequence[LockedTask]) -> Iterator[Lint]:
    """Give tasks whose messages or runs are lost with their worker or child."""
    early = [task.name for task in tasks if not task.acks_late]
    if early:
        hint = (
            f"{listed(early)}: a message is lost if its worker dies in the body, or after "
            "acknowledging and before deferring it: set acks_late=True, unless that is acceptable"
        )
        yield Lint(ADVICE, "acks_late", "False", hint)
    dropped = [task.name for task in tasks if task.acks_late and not task.reject_on_worker_lost]
    if dropped:
        hint = f"{listed(dropped)}: a run whose child is killed ends as FAILURE: set it to True"
        yield Lint(ADVICE, "reject_on_worker_lost", "False", hint)


def _of_the_broker(app: Any, tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Give a transport that cannot be used, and settings by which a broker loses or keeps back."""
    try:
        driver = driver_of(app)
    except Exception as error:  # each transport has its own
        yield _broken_transport(app, error)
        return
    if driver in FORGETFUL:
        hint = (
            "such a broker never redelivers what a worker has not acknowledged: if the worker is "
            "killed, what it runs and what waits in it is lost: use Redis, RabbitMQ or SQS"
        )
        yield Lint(WARNING, "app: broker_url", driver, hint)
    if driver == "amqp":
        yield from _bounded_queues(app)
        yield from _full_prefetch(app, tasks)


def _broken_transport(app: Any, error: Exception) -> Lint:
    """Return what is missing if the transport of an app's broker cannot be imported or made."""
    write = app.conf.broker_write_url
    setting = "broker_url" if write == app.conf.broker_url else "broker_write_url"
    url = (write if isinstance(write, str) else write[0]).split(";")[0]
    scheme = url.partition(":")[0].partition("+")[0].lower()
    extra = _EXTRAS.get(scheme, scheme)
    said = error.args[0] if type(error) is KeyError else error  # of which str() adds quotes
    cause = f"no message can be sent: {str(said) or type(error).__name__}"
    if isinstance(error, ImportError):
        if error.name:
            cause = f"its transport cannot import {error.name}"
        extras = metadata("kombu").get_all("Provides-Extra") or ()
        if what := f"'kombu[{extra}]'" if extra in extras else error.name:
            cause = f"{cause}: run pip install {what}"
    return Lint(ERROR, f"app: {setting}", redact_url(url), cause)


def _full_prefetch(app: Any, tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Give queues of RabbitMQ whose deferred messages fill a worker's prefetch.

    Source: celery.worker.consumer.tasks: with any quorum queue the prefetch is each consumer's own,
    and is not raised for messages that wait; from a direct exchange RabbitMQ does not delay them.
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
                f"{listed(names)}: if RabbitMQ has a quorum queue, deferred messages fill a "
                "worker's prefetch and block the messages behind them: use a topic exchange "
                "(task_default_exchange_type), or a worker_prefetch_multiplier above the number "
                "of messages that may wait"
            )
            yield Lint(WARNING, f"queue {queue.name!r}", "on a direct exchange", hint)


def listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(sorted(names)[:_NAMED]) + (f" and {more} more" if more > 0 else "")
