"""What is wrong with a configuration, or could be better, and the way out. Prints nothing.

`lint` is a pure function of facts, which `facts_of` collects from an app. What cannot be meant at
all raises when the app finalizes; a worker logs the warnings once at its start, when all its tasks
are known.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from celery._state import connect_on_app_finalize
from celery.signals import worker_ready

from celery_redlock.errors import SettingsError
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.tasks.gate import ENTRY, config_of
from celery_redlock.tasks.routes import has_quorum_queues
from celery_redlock.tasks.runtime import settings_of
from celery_redlock.tasks.settings import (
    CELERY_PREFIX,
    DEFAULT_PREFIX,
    AppSettings,
    EffectiveOptions,
    TaskLockConfig,
    did_you_mean,
    is_glob,
    one_redis,
    pattern_for,
    pattern_source,
    says_what,
    templates_of,
)
from celery_redlock.tasks.task import LockedTask, locked_tasks

logger = logging.getLogger(__name__)

ERROR, WARNING, ADVICE = "error", "warning", "advice"
PREFETCH = 4  # Celery's default of the multiplier
NAMED = 5  # tasks, at the most, in one lint
# s: kombu's own, by transport; other transports have no such timeout
VISIBILITIES = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


# by the setting of a Redis, what `global_keyprefix` stands in
TRANSPORT_OPTIONS = {
    "broker_url": "broker_transport_options",
    "result_backend": "result_backend_transport_options",
}

# where tasks share a lock: the level at which it is said that they differ, and what comes of it
MUST_AGREE = {
    "limit": (
        WARNING,
        "A task with a higher limit runs beside one that means to be alone: give them all one",
    ),
    "fencing": (
        WARNING,
        "A run without a token may follow, unseen by the storage, one that has one: give it to all",
    ),
    "ttl": (
        ADVICE,
        "How long a dead worker keeps the others out depends on which task it ran: give them one",
    ),
}


@dataclass(frozen=True)
class Lint:
    """One thing that is wrong, or could be better.

    level: "error", "warning" or "advice". setting: where it stands, value: its text. hint: what
    comes of it, and what to do.
    """

    level: str
    setting: str
    value: str
    hint: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.hint}"


@dataclass(frozen=True)
class TaskFacts:
    """One locked task. queue: that of its own routing. Times in s.

    retries_after: where it retries by itself. takes_entry: it goes by an entry of `redlock_tasks`.
    """

    plan: TaskLockConfig
    queue: str
    acks_late: bool = False
    reject_on_worker_lost: bool = False
    time_limit: float | None = None
    soft_time_limit: float | None = None
    retries_after: float | None = None
    takes_entry: bool = False

    @property
    def name(self) -> str:
        """The task's name."""
        return self.plan.task_name


@dataclass(frozen=True)
class Facts:
    """What an app is configured to do.

    visibility: s, None where the broker takes no message for lost by time. queues: declared ones.
    prefetch: `worker_prefetch_multiplier`. names: all tasks'. counts: prometheus-client is there.
    key_prefixes: `global_keyprefix` by the setting whose Redis it is of. on_nodes: those of these
    settings whose Redis is a lock node.
    """

    settings: AppSettings
    visibility: float | None = None
    queues: Sequence[str] = ("celery",)
    creates_queues: bool = True
    prefetch: int = PREFETCH
    prefetch_is_fixed: Sequence[str] = ()
    names: Sequence[str] = ()
    tasks: Sequence[TaskFacts] = field(default=())
    counts: bool = True
    key_prefixes: Mapping[str, str] = field(default_factory=dict)
    on_nodes: Sequence[str] = ()


def lint(facts: Facts) -> tuple[Lint, ...]:
    """Return what there is to say, errors first; each thing once, however many tasks it is of."""
    found: dict[Lint, None] = {}
    for one in _all(facts):
        found.setdefault(one)
    levels = (ERROR, WARNING, ADVICE)
    return tuple(sorted(found, key=lambda one: levels.index(one.level)))


def _all(facts: Facts) -> Iterator[Lint]:
    yield from lint_queues(facts.settings.queues, facts.queues, creates=facts.creates_queues)
    yield from _entries(facts)
    yield from _nodes(facts.settings)
    yield from _prefixes(facts)
    if facts.settings.metrics is not None and not facts.counts:
        hint = "no metrics from here: it needs pip install 'celery_redlock[metrics]'"
        yield Lint(WARNING, "app: redlock_metrics", repr(facts.settings.metrics[1]), hint)
    told: list[tuple[TaskFacts, EffectiveOptions]] = []
    for task in facts.tasks:
        try:
            rules = task.plan.told(task.queue)
            pattern = pattern_for(task.queue, facts.settings.queues)
            of_queue = facts.settings.queues[pattern] if pattern else {}
            if not says_what(task.plan.options):
                task.plan.check_what(of_queue, pattern_source("queue", pattern or ""))
        except SettingsError as error:
            hint = f"every run of {task.name} there ends as FAILURE: {error.hint}"
            yield Lint(WARNING, f"{error.level}: {error.name}", error.value, hint)
            continue
        told.append((task, rules))
        yield from _names_as_templates(task, rules)
        yield from _delays(facts, task, rules)
        yield from _limits(task, rules)
        yield from _without_effect(rules)
    yield from _without_window([rules for _, rules in told])
    yield from _shared(told)
    yield from _acknowledgement(facts.tasks)
    yield from _memory(facts, [
        task for task, rules in told if rules["on_conflict"].value not in ("skip", "fail")
    ])  # fmt: skip


def lint_queues(
    patterns: Iterable[str], declared: Sequence[str], *, creates: bool
) -> Iterator[Lint]:
    """Give what is to be said of `redlock_queues`' names. creates: a send may make a new queue."""
    for pattern in patterns:
        if is_glob(pattern) or pattern in declared:
            continue
        found = did_you_mean(pattern, declared).removeprefix("; ")
        hint = f"is no queue of task_queues, so that these options hold nowhere; {found}"
        if creates:
            hint = f"is no queue of task_queues; {found}. Right if a send makes it"
        yield Lint(WARNING if creates else ERROR, "app: redlock_queues", repr(pattern), hint)


def _entries(facts: Facts) -> Iterator[Lint]:
    """Give entries of `redlock_tasks` that lock nothing."""
    setting, names = (
        "app: redlock_tasks",
        [n for n in facts.names if not n.startswith(CELERY_PREFIX)],
    )
    taken = {pattern_for(name, facts.settings.tasks) for name in names}
    own = {pattern_for(task.name, facts.settings.tasks): task.name
           for task in facts.tasks if not task.takes_entry}  # fmt: skip
    for pattern in facts.settings.tasks:
        if pattern not in taken and is_glob(pattern):
            yield Lint(ADVICE, setting, repr(pattern), "fits no task that is known here")
        elif pattern not in taken:
            found = did_you_mean(pattern, names).removeprefix("; ")
            yield Lint(WARNING, setting, repr(pattern), f"is no task that is known here; {found}")
        elif pattern in own:
            hint = f"does not hold for {own[pattern]}, a LockedTask: it goes by its own lock_*"
            yield Lint(ADVICE, setting, repr(pattern), hint)


def _nodes(settings: AppSettings) -> Iterator[Lint]:
    count = len(settings.nodes)
    if count % 2 == 0:
        hint = f"an even number bears no more losses than {count - 1}: add one, or take one away"
        yield Lint(ADVICE, "app: redlock_nodes", f"{count} nodes", hint)


def _prefixes(facts: Facts) -> Iterator[Lint]:
    """Give a prefix that tells deployments apart on a Redis, and that locks do not carry."""
    prefix = facts.settings.prefix
    if prefix != DEFAULT_PREFIX:
        return
    shared = [name for name in facts.key_prefixes if name in facts.on_nodes]
    for name in shared[:1] or [*facts.key_prefixes][:1]:
        given = facts.key_prefixes[name]
        own = f"{given.strip(':-_./{}') or 'own'}-{prefix}"
        which = "uses this Redis" if shared else "names these redlock_nodes"
        hint = (
            f"lock keys do not carry {TRANSPORT_OPTIONS[name]}'s global_keyprefix={given!r}: "
            f"another deployment that {which} shares these locks. Set redlock_prefix={own!r}"
        )
        level = WARNING if shared else ADVICE
        yield Lint(level, "app: redlock_prefix", repr(prefix), hint)


def _names_as_templates(task: TaskFacts, rules: EffectiveOptions) -> Iterator[Lint]:
    """Give texts of a key that are one lock for all arguments, and may be meant as an argument."""
    place = rules["key"].place
    args = "args".join(place.name.rsplit("key", 1))  # the same level's other option
    for text in templates_of(rules["key"].value):
        if text in task.plan.signature.parameters:
            hint = (
                f"is one lock for all arguments of {task.name}, which has an argument of that "
                f"name: did you mean {args}=[{text!r}] or {'{' + text + '}'!r}?"
            )
            yield Lint(WARNING, str(place), repr(text), hint)


def _delays(facts: Facts, task: TaskFacts, rules: EffectiveOptions) -> Iterator[Lint]:
    """Give delays that the broker does not bear, and those that have no time to come about."""
    cap, allowed = rules["backoff"].value.cap, facts.settings.countdown_cap
    if cap > allowed:
        bound = "a quarter of the broker's visibility timeout"
        raised = "visibility_timeout in broker_transport_options"
        if allowed == facts.settings.done_ttl / 2:
            bound = "half of redlock_done_ttl, after which nobody knows that another copy is done"
            raised = "redlock_done_ttl"
        hint = f"delays are cut to {allowed:g} s, {bound}: lower the cap, or raise {raised}"
        yield Lint(WARNING, str(rules["backoff"].place), f"Backoff(cap={cap:g})", hint)
    after = task.retries_after
    if facts.visibility is not None and after is not None and after > facts.visibility:
        hint = (
            f"a retry that waits for longer than the broker's visibility timeout, "
            f"{facts.visibility:g} s, is delivered twice: lower it, or raise visibility_timeout"
        )
        yield Lint(WARNING, f"task {task.name!r}: default_retry_delay", f"{after:g}", hint)
    wait, most = rules["wait"].value, rules["max_wait"].value
    if wait and most is not None and most <= wait:
        hint = f"is over before wait={wait:g} is, so that nothing is ever put back: raise it"
        yield Lint(WARNING, str(rules["max_wait"].place), f"{most:g}", hint)
    limit = _first(task.soft_time_limit, task.time_limit)
    if limit is not None and wait >= limit:
        hint = f"the time limit of {limit:g} s strikes while {task.name} waits: lower it"
        yield Lint(WARNING, str(rules["wait"].place), f"{wait:g}", hint)


def _first(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _limits(task: TaskFacts, rules: EffectiveOptions) -> Iterator[Lint]:
    """Give leases that end before the time limit of the body does."""
    ttl, most = rules["ttl"].value, rules["max_hold"].value
    limit = task.soft_time_limit if task.time_limit is None else task.time_limit
    if not rules["renew"].value:
        place = str(rules["renew"].place)
        if most is not None:
            hint = "has no effect, for renew=False never renews: leave one of them out"
            yield Lint(WARNING, str(rules["max_hold"].place), f"{most:g}", hint)
        if limit is None:
            hint = (
                f"a body of {task.name} that runs for longer than ttl={ttl:g} loses its lock, and "
                "no time limit ends it: set a time_limit below the ttl, or renew"
            )
            yield Lint(ADVICE, place, "False", hint)
        elif limit > ttl:
            hint = (
                f"{task.name} may run for {limit:g} s, and its lock ends after ttl={ttl:g}: lower "
                "the time limit, raise the ttl, or renew"
            )
            yield Lint(WARNING, place, "False", hint)
    elif most is not None and limit is not None and most < limit:
        hint = (
            f"{task.name} may run for {limit:g} s, and its lock is lost within ttl={ttl:g} after "
            "that: raise it above the time limit"
        )
        yield Lint(WARNING, str(rules["max_hold"].place), f"{most:g}", hint)


def _without_effect(rules: EffectiveOptions) -> Iterator[Lint]:
    """Give options that another one leaves nothing to do, or turns into harm."""
    on_conflict, on_unreachable = rules["on_conflict"].value, rules["on_unreachable"].value
    budget = [rules[name] for name in ("max_wait", "max_deferrals")]
    if on_conflict in ("skip", "fail") and on_unreachable != "defer":
        for rule in budget:
            if rule.value is not None:
                both = f"on_conflict={on_conflict!r} and on_unreachable={on_unreachable!r}"
                hint = f"has no effect: with {both} nothing is ever put back"
                yield Lint(WARNING, str(rule.place), f"{rule.value:g}", hint)
    on_give_up = rules["on_give_up"]
    if on_give_up.place.level != "built-in" and all(rule.value is None for rule in budget):
        hint = "has no effect without max_wait or max_deferrals: a run never gives up"
        yield Lint(WARNING, str(on_give_up.place), repr(on_give_up.value), hint)
    if on_unreachable == "run" and rules["fencing"].value:
        hint = "a run without its lock has no fencing token: take 'defer' or 'fail'"
        yield Lint(WARNING, str(rules["on_unreachable"].place), "'run'", hint)


def _without_window(told: Sequence[EffectiveOptions]) -> Iterator[Lint]:
    """Give options of deduplication where nothing is deduplicated.

    What stands for the app or a queue is for those of its tasks that have a window, if any has.
    """
    used = any(rules["unique_for"].value is not None for rules in told)
    for rules in told:
        if rules["unique_for"].value is not None:
            continue
        for rule in (rules["unique_until"], rules["on_duplicate"]):
            is_own = rule.place.level.startswith("task ")
            if rule.place.level != "built-in" and (is_own or not used):
                hint = "has no effect without unique_for: every send goes out. Set that, too"
                yield Lint(WARNING, str(rule.place), repr(rule.value), hint)


def _shared(told: Sequence[tuple[TaskFacts, EffectiveOptions]]) -> Iterator[Lint]:
    """Give options in which tasks differ that may lock the same resource."""
    sharing: dict[str, list[EffectiveOptions]] = {}
    for task, rules in told:
        for shape in dict.fromkeys(task.plan.shapes(task.plan.rules(task.queue), task.queue)):
            sharing.setdefault(shape, []).append(rules)
    for shape, several in sharing.items():
        for name, (level, meaning) in MUST_AGREE.items():
            tasks: dict[Any, list[str]] = {}
            for rules in several:
                tasks.setdefault(rules[name].value, []).append(rules.task)
            if len(tasks) > 1:
                of_each = "; ".join(f"{name}={v!r}: {_listed(t)}" for v, t in tasks.items())
                values = " and ".join(map(repr, tasks))
                yield Lint(level, f"lock {shape!r}: {name}", values, f"{of_each}. {meaning}")


def _acknowledgement(tasks: Sequence[TaskFacts]) -> Iterator[Lint]:
    early = [task.name for task in tasks if not task.acks_late]
    if early:
        hint = (
            f"{_listed(early)}: a message is lost where its worker dies in the body, or between "
            "acknowledging it and putting it back: set it, unless that may be"
        )
        yield Lint(ADVICE, "acks_late", "False", hint)
    dropped = [task.name for task in tasks if task.acks_late and not task.reject_on_worker_lost]
    if dropped:
        hint = f"{_listed(dropped)}: a run whose child is killed ends as FAILURE: set it, too"
        yield Lint(ADVICE, "reject_on_worker_lost", "False", hint)


def _memory(facts: Facts, waiting: Sequence[TaskFacts]) -> Iterator[Lint]:
    """Give what lets messages that wait pile up in a worker. waiting: tasks that are put back."""
    if facts.prefetch == 0 and waiting:
        hint = (
            f"{_listed([task.name for task in waiting])}: a worker takes in its whole queue, and "
            "all that wait for their locks stay in its memory: set 1 or more"
        )
        yield Lint(WARNING, "app: worker_prefetch_multiplier", "0", hint)
    for queue in facts.prefetch_is_fixed if 0 < facts.prefetch <= PREFETCH else ():
        names = [task.name for task in waiting if task.queue == queue]
        if names:
            hint = (
                f"{_listed(names)}: where RabbitMQ has a quorum queue, what waits fills a worker's "
                "prefetch and holds up what is behind it: take a topic exchange "
                "(task_default_exchange_type), or a worker_prefetch_multiplier above the number "
                "that may wait"
            )
            yield Lint(WARNING, f"queue {queue!r}", "on a direct exchange", hint)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(sorted(names)[:NAMED]) + (f" and {more} more" if more > 0 else "")


def facts_of(app: Any) -> Facts:
    """Collect what `lint` looks at, from an app with all its tasks; raises SettingsError."""
    conf = app.conf
    return Facts(
        settings=settings_of(app),
        visibility=visibility_of(conf),
        queues=tuple(app.amqp.queues),
        creates_queues=bool(conf.task_create_missing_queues),
        prefetch=conf.worker_prefetch_multiplier,
        prefetch_is_fixed=_fixed(app),
        names=tuple(app.tasks),
        tasks=tuple(
            _task_facts(task)
            for task in locked_tasks(app)
            if config_of(task).options.get("key") is not False
        ),
        counts=find_spec("prometheus_client") is not None,
        key_prefixes=_key_prefixes(conf),
        on_nodes=_on_nodes(conf, settings_of(app)),
    )


def _key_prefixes(conf: Any) -> dict[str, str]:
    """Return `global_keyprefix` by the setting whose Redis it is of."""
    found = {name: conf.get(options) or {} for name, options in TRANSPORT_OPTIONS.items()}
    given = {name: options.get("global_keyprefix") for name, options in found.items()}
    return {name: str(prefix) for name, prefix in given.items() if prefix}


def _on_nodes(conf: Any, settings: AppSettings) -> tuple[str, ...]:
    """Return which of the broker and the result backend is a server that is a lock node, too."""
    timeout = settings.node_timeout
    servers = {parse_address(node, "app", "nodes", timeout).server for node in settings.nodes}
    urls = {
        "broker_url": conf.broker_write_url or conf.broker_url,
        "result_backend": conf.result_backend,
    }
    return tuple(
        name
        for name, url in urls.items()
        if (one := one_redis(url)) and parse_address(one, "app", name, timeout).server in servers
    )


def _fixed(app: Any) -> tuple[str, ...]:
    """Return the queues whose delayed messages neither RabbitMQ keeps nor a greater prefetch.

    Source: celery.worker.consumer.tasks: with any quorum queue the prefetch is each consumer's own.
    """
    if not has_quorum_queues(app):
        return ()
    return tuple(q.name for q in app.amqp.queues.values() if q.exchange.type == "direct")


def _task_facts(task: LockedTask) -> TaskFacts:
    # Celery before 5.7 leaves the app's limits to the pool, and None on its tasks
    soft, hard = task.app.conf.task_soft_time_limit, task.app.conf.task_time_limit
    return TaskFacts(
        plan=config_of(task),
        queue=_queue_of(task),
        acks_late=bool(task.acks_late),
        reject_on_worker_lost=bool(task.reject_on_worker_lost),
        time_limit=hard if task.time_limit is None else task.time_limit,
        soft_time_limit=soft if task.soft_time_limit is None else task.soft_time_limit,
        retries_after=task.default_retry_delay if getattr(task, "autoretry_for", ()) else None,
        takes_entry=ENTRY in type(task).__dict__,
    )


def _queue_of(task: LockedTask) -> str:
    try:
        return task._own_queue((), {})
    except Exception as error:  # a router of the user's own, which may look at arguments
        told = {"event": "queue_unknown", "task": task.name}
        logger.debug("the queue of %s depends on its arguments: %s", task.name, error, extra=told)
        return str(task.app.conf.task_default_queue)


def visibility_of(conf: Mapping[str, Any]) -> float | None:
    """Return the s after which the broker delivers anew what is not acknowledged; None: never."""
    url = conf.get("broker_read_url") or conf.get("broker_url") or ""
    scheme = str(url[0] if isinstance(url, (list, tuple)) else url).partition("://")[0]
    own = VISIBILITIES.get(scheme.partition("+")[0])
    given = (conf.get("broker_transport_options") or {}).get("visibility_timeout", own)
    return None if own is None or not isinstance(given, (int, float)) else float(given)


def declared_queues(conf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the queues that the settings declare, without any made by a send."""
    queues, default = conf.get("task_queues"), str(conf.get("task_default_queue"))
    return tuple(str(getattr(queue, "name", queue)) for queue in queues or [default])


@connect_on_app_finalize
def _refuse_errors(app: Any) -> None:
    """Raise SettingsError for the first error that the settings alone show."""
    patterns, conf = app.conf.get("redlock_queues"), app.conf
    if isinstance(patterns, Mapping):
        creates = bool(conf.task_create_missing_queues)
        for one in lint_queues(map(str, patterns), declared_queues(conf), creates=creates):
            if one.level == ERROR:
                raise SettingsError("app", "redlock_queues", one.value, one.hint)


_said: weakref.WeakSet[Any] = weakref.WeakSet()  # apps whose worker has said it


@worker_ready.connect(weak=False)
def _say_at_start(sender: Any = None, **_: Any) -> None:
    """Log the warnings, once: a consumer that connects anew is ready anew."""
    app = sender.app
    if app in _said:
        return
    _said.add(app)
    if not locked_tasks(app):
        return
    try:
        found = lint(facts_of(app))
    except SettingsError:
        return  # said where the nodes are looked at
    for one in found:
        if one.level != ADVICE:
            level = logging.ERROR if one.level == ERROR else logging.WARNING
            logger.log(level, "%s", one, extra={"event": "lint"})
