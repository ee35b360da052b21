"""Rules about tasks together: what they share, and what one worker does for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from celery_redlock.operate.lints.model import (
    ADVICE,
    DEFAULT_PREFETCH,
    WARNING,
    Facts,
    Lint,
    TaskFacts,
    TaskInQueue,
    listed,
)
from celery_redlock.tasks.settings.sources import EffectiveOptions

# Options in which tasks that share a lock should agree: the level of the lint, and the consequence.
MUST_AGREE = {
    "limit": (
        WARNING,
        "A task with a higher limit runs beside one that is meant to run alone: set one limit",
    ),
    "fencing": (
        WARNING,
        "A run without a token may follow one with a token, which the storage cannot see: set it "
        "for all",
    ),
    "ttl": (
        ADVICE,
        "How long a dead worker's lock stays depends on the task that it ran: set one ttl",
    ),
}


def lint_tasks_together(facts: Facts, tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Give the lints of several tasks. tasks: those whose options in their queue are valid."""
    yield from _without_unique_for([one.options for one in tasks])
    yield from _shared_locks(tasks)
    yield from _acknowledgement(facts.tasks)
    deferred = [
        one.task for one in tasks if one.options["on_conflict"].value not in ("skip", "fail")
    ]
    yield from _memory(facts, deferred)


def _without_unique_for(tasks: Sequence[EffectiveOptions]) -> Iterator[Lint]:
    """Give options of deduplication without `unique_for`.

    An option of the app or a queue is meant for those tasks that have a `unique_for`, if any has.
    """
    used = any(options["unique_for"].value is not None for options in tasks)
    for options in tasks:
        if options["unique_for"].value is not None:
            continue
        for option in (options["unique_until"], options["on_duplicate"]):
            is_own = option.source.level.startswith("task ")
            if option.source.level != "built-in" and (is_own or not used):
                hint = "has no effect without unique_for: every send is published. Set that, too"
                yield Lint(WARNING, str(option.source), repr(option.value), hint)


def _shared_locks(tasks: Sequence[TaskInQueue]) -> Iterator[Lint]:
    """Give options in which tasks differ that may lock the same resource."""
    sharing: dict[str, list[EffectiveOptions]] = {}
    for one in tasks:
        config, queue = one.task.config, one.task.queue
        for shape in dict.fromkeys(config.keys.shapes(config.options_for(queue), queue)):
            sharing.setdefault(shape, []).append(one.options)
    for shape, several in sharing.items():
        for name, (level, consequence) in MUST_AGREE.items():
            by_value: dict[Any, list[str]] = {}
            for options in several:
                by_value.setdefault(options[name].value, []).append(options.task)
            if len(by_value) > 1:
                of_each = "; ".join(f"{name}={v!r}: {listed(t)}" for v, t in by_value.items())
                values = " and ".join(map(repr, by_value))
                yield Lint(level, f"lock {shape!r}: {name}", values, f"{of_each}. {consequence}")


def _acknowledgement(tasks: Sequence[TaskFacts]) -> Iterator[Lint]:
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
        hint = f"{listed(dropped)}: a run whose child is killed ends as FAILURE: set it, too"
        yield Lint(ADVICE, "reject_on_worker_lost", "False", hint)


def _memory(facts: Facts, deferred: Sequence[TaskFacts]) -> Iterator[Lint]:
    """Give settings by which deferred messages pile up in a worker. deferred: tasks that may be."""
    if facts.prefetch == 0 and deferred:
        hint = (
            f"{listed([task.name for task in deferred])}: a worker fetches its whole queue, and "
            "all messages that wait for their locks stay in its memory: set 1 or more"
        )
        yield Lint(WARNING, "app: worker_prefetch_multiplier", "0", hint)
    for queue in facts.prefetch_is_fixed if 0 < facts.prefetch <= DEFAULT_PREFETCH else ():
        names = [task.name for task in deferred if task.queue == queue]
        if names:
            hint = (
                f"{listed(names)}: if RabbitMQ has a quorum queue, deferred messages fill a "
                "worker's prefetch and block the messages behind them: use a topic exchange "
                "(task_default_exchange_type), or a worker_prefetch_multiplier above the number "
                "of messages that may wait"
            )
            yield Lint(WARNING, f"queue {queue!r}", "on a direct exchange", hint)
