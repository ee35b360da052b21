"""Rules about an app: its queues, entries for tasks, nodes, prefix and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from celery_redlock.operate.lints.model import (
    ADVICE,
    ERROR,
    TRANSPORT_OPTIONS,
    WARNING,
    Facts,
    Lint,
)
from celery_redlock.tasks.settings.app import (
    CELERY_PREFIX,
    DEFAULT_PREFIX,
    AppSettings,
    is_glob,
    pattern_for,
)
from celery_redlock.tasks.settings.sources import did_you_mean


def lint_app(facts: Facts) -> Iterator[Lint]:
    """Give the lints of an app, apart from its tasks."""
    yield from lint_queues(facts.settings.queues, facts.queues, creates=facts.creates_queues)
    for queue in facts.drops_oldest:
        hint = (
            "a deferral displaces the oldest message of a full queue: give the queue the argument "
            "x-overflow='reject-publish', or no x-max-length"
        )
        yield Lint(WARNING, "app: task_queues", repr(queue), hint)
    yield from _entries(facts)
    yield from _nodes(facts.settings)
    yield from _prefixes(facts)
    if facts.settings.metrics is not None and not facts.counts:
        hint = "this worker serves no metrics: run pip install 'celery_redlock[metrics]'"
        yield Lint(WARNING, "app: redlock_metrics", repr(facts.settings.metrics[1]), hint)


def lint_queues(
    patterns: Iterable[str], declared: Sequence[str], *, creates: bool
) -> Iterator[Lint]:
    """Give names in `redlock_queues` that no queue has. creates: a send may make a new queue."""
    for pattern in patterns:
        if is_glob(pattern) or pattern in declared:
            continue
        found = did_you_mean(pattern, declared).removeprefix("; ")
        hint = f"is no queue of task_queues, so these options apply to no task; {found}"
        if creates:
            hint = f"is no queue of task_queues; {found}. Right if a send creates it"
        yield Lint(WARNING if creates else ERROR, "app: redlock_queues", repr(pattern), hint)


def _entries(facts: Facts) -> Iterator[Lint]:
    """Give entries of `redlock_tasks` that lock no task."""
    setting = "app: redlock_tasks"
    entries = facts.settings.tasks
    names = [name for name in facts.names if not name.startswith(CELERY_PREFIX)]
    matched = {pattern_for(name, entries) for name in names}
    own_tasks = [task.name for task in facts.tasks if not task.takes_entry]
    own = {pattern_for(name, entries): name for name in own_tasks}
    for pattern in entries:
        if pattern not in matched and is_glob(pattern):
            yield Lint(ADVICE, setting, repr(pattern), "matches no task of this worker")
        elif pattern not in matched:
            found = did_you_mean(pattern, names).removeprefix("; ")
            yield Lint(WARNING, setting, repr(pattern), f"is no task of this worker; {found}")
        elif pattern in own:
            hint = f"does not apply to {own[pattern]}, a LockedTask: its own lock_* options do"
            yield Lint(ADVICE, setting, repr(pattern), hint)


def _nodes(settings: AppSettings) -> Iterator[Lint]:
    count = len(settings.nodes)
    if count % 2 == 0:
        hint = (
            f"an even number of nodes tolerates no more failures than {count - 1} do: add one "
            "node, or remove one"
        )
        yield Lint(ADVICE, "app: redlock_nodes", f"{count} nodes", hint)


def _prefixes(facts: Facts) -> Iterator[Lint]:
    """Give a `global_keyprefix` that keeps deployments apart on a Redis, as lock keys lack it."""
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
