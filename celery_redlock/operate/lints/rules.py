"""What is wrong with a configuration, or could be better, and the way out. Prints nothing.

`lint` is a pure function of facts, which `facts_of` collects from an app. What cannot be meant at
all raises when the app finalizes; a worker logs the warnings once at its start, when all its tasks
are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.operate.lints.facts import TRANSPORT_OPTIONS
from celery_redlock.operate.lints.model import (
    ADVICE,
    ERROR,
    PREFETCH,
    WARNING,
    Facts,
    Lint,
    TaskFacts,
)
from celery_redlock.tasks.settings.app import (
    CELERY_PREFIX,
    DEFAULT_PREFIX,
    AppSettings,
    is_glob,
    pattern_for,
)
from celery_redlock.tasks.settings.levels import decides_key
from celery_redlock.tasks.settings.sources import EffectiveOptions, did_you_mean, pattern_source
from celery_redlock.tasks.settings.templates import templates_of

NAMED = 5  # tasks, at the most, in one lint

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
            rules = task.config.effective_options(task.queue)
            pattern = pattern_for(task.queue, facts.settings.queues)
            of_queue = facts.settings.queues[pattern] if pattern else {}
            if not decides_key(task.config.options):
                task.config.keys.check(of_queue, pattern_source("queue", pattern or ""))
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
    place = rules["key"].source
    args = "args".join(place.name.rsplit("key", 1))  # the same level's other option
    for text in templates_of(rules["key"].value):
        if text in task.config.signature.parameters:
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
        yield Lint(WARNING, str(rules["backoff"].source), f"Backoff(cap={cap:g})", hint)
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
        yield Lint(WARNING, str(rules["max_wait"].source), f"{most:g}", hint)
    limit = _first(task.soft_time_limit, task.time_limit)
    if limit is not None and wait >= limit:
        hint = f"the time limit of {limit:g} s strikes while {task.name} waits: lower it"
        yield Lint(WARNING, str(rules["wait"].source), f"{wait:g}", hint)


def _first(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _limits(task: TaskFacts, rules: EffectiveOptions) -> Iterator[Lint]:
    """Give leases that end before the time limit of the body does."""
    ttl, most = rules["ttl"].value, rules["max_hold"].value
    limit = task.soft_time_limit if task.time_limit is None else task.time_limit
    if not rules["renew"].value:
        place = str(rules["renew"].source)
        if most is not None:
            hint = "has no effect, for renew=False never renews: leave one of them out"
            yield Lint(WARNING, str(rules["max_hold"].source), f"{most:g}", hint)
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
        yield Lint(WARNING, str(rules["max_hold"].source), f"{most:g}", hint)


def _without_effect(rules: EffectiveOptions) -> Iterator[Lint]:
    """Give options that another one leaves nothing to do, or turns into harm."""
    on_conflict, on_unreachable = rules["on_conflict"].value, rules["on_unreachable"].value
    budget = [rules[name] for name in ("max_wait", "max_deferrals")]
    if on_conflict in ("skip", "fail") and on_unreachable != "defer":
        for rule in budget:
            if rule.value is not None:
                both = f"on_conflict={on_conflict!r} and on_unreachable={on_unreachable!r}"
                hint = f"has no effect: with {both} nothing is ever put back"
                yield Lint(WARNING, str(rule.source), f"{rule.value:g}", hint)
    on_give_up = rules["on_give_up"]
    if on_give_up.source.level != "built-in" and all(rule.value is None for rule in budget):
        hint = "has no effect without max_wait or max_deferrals: a run never gives up"
        yield Lint(WARNING, str(on_give_up.source), repr(on_give_up.value), hint)
    if on_unreachable == "run" and rules["fencing"].value:
        hint = "a run without its lock has no fencing token: take 'defer' or 'fail'"
        yield Lint(WARNING, str(rules["on_unreachable"].source), "'run'", hint)


def _without_window(told: Sequence[EffectiveOptions]) -> Iterator[Lint]:
    """Give options of deduplication where nothing is deduplicated.

    What stands for the app or a queue is for those of its tasks that have a window, if any has.
    """
    used = any(rules["unique_for"].value is not None for rules in told)
    for rules in told:
        if rules["unique_for"].value is not None:
            continue
        for rule in (rules["unique_until"], rules["on_duplicate"]):
            is_own = rule.source.level.startswith("task ")
            if rule.source.level != "built-in" and (is_own or not used):
                hint = "has no effect without unique_for: every send goes out. Set that, too"
                yield Lint(WARNING, str(rule.source), repr(rule.value), hint)


def _shared(told: Sequence[tuple[TaskFacts, EffectiveOptions]]) -> Iterator[Lint]:
    """Give options in which tasks differ that may lock the same resource."""
    sharing: dict[str, list[EffectiveOptions]] = {}
    for task, rules in told:
        for shape in dict.fromkeys(
            task.config.keys.shapes(task.config.options_for(task.queue), task.queue)
        ):
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
