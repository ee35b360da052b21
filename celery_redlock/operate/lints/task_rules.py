"""Rules about the options of one task in its queue."""

from __future__ import annotations

from collections.abc import Iterator

from celery_redlock.operate.lints.model import ADVICE, WARNING, Facts, Lint, TaskInQueue
from celery_redlock.tasks.settings.sources import EffectiveOptions
from celery_redlock.tasks.settings.templates import templates_of


def lint_task(facts: Facts, task: TaskInQueue) -> Iterator[Lint]:
    """Give the lints of one task."""
    yield from _names_as_templates(task)
    yield from _delays(facts, task)
    yield from _waits(task)
    yield from _fixed_leases(task)
    yield from _max_hold(task)
    yield from _budgets(task.options)
    yield from _unlocked_fencing(task.options)


def _names_as_templates(one: TaskInQueue) -> Iterator[Lint]:
    """Give templates without braces that are the name of an argument."""
    task, source = one.task, one.options["key"].source
    args = "args".join(source.name.rsplit("key", 1))  # the same level's other option
    for text in templates_of(one.options["key"].value):
        if text in task.config.signature.parameters:
            hint = (
                f"is one lock for all arguments of {task.name}, which has an argument of that "
                f"name: did you mean {args}=[{text!r}] or {'{' + text + '}'!r}?"
            )
            yield Lint(WARNING, str(source), repr(text), hint)


def _delays(facts: Facts, one: TaskInQueue) -> Iterator[Lint]:
    """Give delays that are longer than the broker or the completion markers allow."""
    cap, allowed = one.options["backoff"].value.cap, facts.settings.countdown_cap
    if cap > allowed:
        bound = "a quarter of the broker's visibility timeout"
        raised = "visibility_timeout in broker_transport_options"
        if allowed == facts.settings.done_ttl / 2:
            bound = "half of redlock_done_ttl, for which a finished run is known"
            raised = "redlock_done_ttl"
        hint = f"delays are cut to {allowed:g} s, {bound}: lower the cap, or raise {raised}"
        yield Lint(WARNING, str(one.options["backoff"].source), f"Backoff(cap={cap:g})", hint)
    after = one.task.retries_after
    if facts.visibility is not None and after is not None and after > facts.visibility:
        hint = (
            f"a retry that waits for longer than the broker's visibility timeout, "
            f"{facts.visibility:g} s, is delivered twice: lower it, or raise visibility_timeout"
        )
        yield Lint(WARNING, f"task {one.task.name!r}: default_retry_delay", f"{after:g}", hint)


def _waits(one: TaskInQueue) -> Iterator[Lint]:
    """Give a wait in the worker slot that uses up a budget or a time limit."""
    wait, max_wait = one.options["wait"].value, one.options["max_wait"].value
    if wait and max_wait is not None and max_wait <= wait:
        hint = f"ends before wait={wait:g} does, so that no message is ever deferred: raise it"
        yield Lint(WARNING, str(one.options["max_wait"].source), f"{max_wait:g}", hint)
    limits = (one.task.soft_time_limit, one.task.time_limit)
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is not None and wait >= limit:
        hint = f"the time limit of {limit:g} s ends {one.task.name} while it waits: lower it"
        yield Lint(WARNING, str(one.options["wait"].source), f"{wait:g}", hint)


def _time_limit(one: TaskInQueue) -> float | None:
    """Return the seconds after which a body ends for certain, None for no limit."""
    task = one.task
    return task.soft_time_limit if task.time_limit is None else task.time_limit


def _fixed_leases(one: TaskInQueue) -> Iterator[Lint]:
    """Give fixed leases that may end before the body."""
    name, ttl, limit = one.task.name, one.options["ttl"].value, _time_limit(one)
    if one.options["renew"].value:
        return
    source = str(one.options["renew"].source)
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


def _max_hold(one: TaskInQueue) -> Iterator[Lint]:
    """Give a `max_hold` without effect, or one that ends before the body."""
    max_hold, ttl, limit = one.options["max_hold"], one.options["ttl"].value, _time_limit(one)
    if max_hold.value is None:
        return
    if not one.options["renew"].value:
        hint = "has no effect: renew=False never renews. Leave one of them out"
        yield Lint(WARNING, str(max_hold.source), f"{max_hold.value:g}", hint)
    elif limit is not None and max_hold.value < limit:
        hint = (
            f"{one.task.name} may run for {limit:g} s, and its lock is lost within ttl={ttl:g} "
            "after max_hold: raise it above the time limit"
        )
        yield Lint(WARNING, str(max_hold.source), f"{max_hold.value:g}", hint)


def _budgets(options: EffectiveOptions) -> Iterator[Lint]:
    """Give a budget of deferrals without deferrals, and the end of a budget without a budget."""
    on_conflict, on_unreachable = options["on_conflict"].value, options["on_unreachable"].value
    budget = options["max_wait"]
    if on_conflict in ("skip", "fail") and on_unreachable != "defer" and budget.value is not None:
        both = f"on_conflict={on_conflict!r} and on_unreachable={on_unreachable!r}"
        hint = f"has no effect: with {both} no message is ever deferred"
        yield Lint(WARNING, str(budget.source), f"{budget.value:g}", hint)
    on_give_up = options["on_give_up"]
    if on_give_up.source.level != "built-in" and budget.value is None:
        hint = "has no effect without max_wait: a run never gives up"
        yield Lint(WARNING, str(on_give_up.source), repr(on_give_up.value), hint)


def _unlocked_fencing(options: EffectiveOptions) -> Iterator[Lint]:
    """Give fencing for runs that may run without a lock, and so without a token."""
    on_unreachable = options["on_unreachable"]
    if on_unreachable.value == "run" and options["fencing"].value:
        hint = "a run without its lock has no fencing token: use 'defer' or 'fail'"
        yield Lint(WARNING, str(on_unreachable.source), "'run'", hint)
