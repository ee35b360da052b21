"""All rules together: `lint` is a pure function of the facts that `facts_of` collects.

A value that is wrong in itself raises when the app finalizes. A worker logs errors and warnings
once at its start, when all its tasks are known.
"""

from __future__ import annotations

from collections.abc import Iterator

from celery_redlock.errors import SettingsError
from celery_redlock.operate.lints.app_rules import lint_app
from celery_redlock.operate.lints.model import (
    ADVICE,
    ERROR,
    WARNING,
    Facts,
    Lint,
    TaskFacts,
    TaskInQueue,
    listed,
)
from celery_redlock.operate.lints.shared_rules import lint_tasks_together
from celery_redlock.operate.lints.task_rules import lint_task
from celery_redlock.tasks.settings.app import pattern_for
from celery_redlock.tasks.settings.levels import decides_key
from celery_redlock.tasks.settings.sources import pattern_source


def lint(facts: Facts) -> tuple[Lint, ...]:
    """Return the lints of an app, errors first; each once, however many tasks it concerns."""
    levels = (ERROR, WARNING, ADVICE)
    return tuple(sorted(dict.fromkeys(_all(facts)), key=lambda one: levels.index(one.level)))


def left_open(facts: Facts) -> tuple[Lint, ...]:
    """Return what the defaults leave to the user to decide: at most one line each, as advice."""
    found: list[Lint] = []
    if facts.tasks and len(facts.settings.nodes) == 1 and facts.settings.restart_guard != "strict":
        hint = (
            "if it restarts without its data, a lock that is held is free, and two tasks can run "
            "together: name three nodes, or set redlock_restart_guard='strict'"
        )
        found.append(Lint(ADVICE, "app: redlock_nodes", "1 node", hint))
    unbounded = [task.name for task in facts.tasks if _is_unbounded(task)]
    if unbounded:
        hint = (
            f"{listed(unbounded)}: a body that never ends holds its lock for ever, and messages "
            "wait behind it for ever: set lock_max_hold or a time_limit, or lock_max_wait"
        )
        found.append(Lint(ADVICE, "max_wait, max_hold", "None", hint))
    late = [task.name for task in facts.tasks if task.acks_late]
    if late and facts.visibility is not None:
        hint = (
            f"{listed(late)}: messages that wait in a killed worker run after this time, in "
            "seconds. A task without a lock that runs for longer is run twice"
        )
        setting = "app: broker_transport_options: visibility_timeout"
        found.append(Lint(ADVICE, setting, f"{facts.visibility:g}", hint))
    return tuple(found)


def _is_unbounded(task: TaskFacts) -> bool:
    """Return whether neither an option nor a time limit ends a body, or the wait for its lock."""
    if task.time_limit is not None or task.soft_time_limit is not None:
        return False
    try:
        options = task.config.effective_options(task.queue)
    except SettingsError:  # `lint` tells of it
        return False
    return options["max_wait"].value is None and options["max_hold"].value is None


def _all(facts: Facts) -> Iterator[Lint]:
    yield from lint_app(facts)
    tasks = []
    for task in facts.tasks:
        try:
            tasks.append(_in_its_queue(facts, task))
        except SettingsError as error:
            hint = f"every run of {task.name} there ends as FAILURE: {error.hint}"
            yield Lint(WARNING, f"{error.level}: {error.name}", error.value, hint)
    for one in tasks:
        yield from lint_task(facts, one)
    yield from lint_tasks_together(facts, tasks)


def _in_its_queue(facts: Facts, task: TaskFacts) -> TaskInQueue:
    """Return a task with the options in force in its queue.

    Raises SettingsError if they do not go together, or the task cannot fill the queue's key.
    """
    options = task.config.effective_options(task.queue)
    pattern = pattern_for(task.queue, facts.settings.queues)
    if pattern is not None and not decides_key(task.config.options):
        of_queue = facts.settings.queues[pattern]
        task.config.keys.check(of_queue, pattern_source("queue", pattern))
    return TaskInQueue(task, options)
