"""The locks on the nodes, as tables."""

from __future__ import annotations

from collections.abc import Mapping

from celery_redlock.lock.held_locks import LockReport, Sight
from celery_redlock.lock.waiting_processes import WaitingSight
from celery_redlock.operate.cli.render import Table, format_duration

LOCKS_UNKNOWN = "Which locks are held cannot be known."


def lock_name(lock: LockReport) -> str:
    """Return the resource of a lock, with the permit if it is not the first one."""
    return f"{lock.resource} (permit {lock.permit})" if lock.permit else lock.resource


def lock_table(sight: Sight) -> Table:
    """Return a table with a row for each lock."""
    rows = []
    for lock in sight.locks:
        held_for = "" if lock.held_for is None else format_duration(lock.held_for)
        valid_for = format_duration(lock.valid_for) if lock.held else "not held: no quorum"
        ago = lock.since_renewal
        renewed = "" if ago is None else f"{format_duration(ago)} ago"
        votes = f"{len(lock.votes)}, {lock.needed} needed"
        holder = lock.holder
        names = (holder.task or holder.label, holder.task_id, holder.worker)
        rows.append((lock_name(lock), *names, held_for, renewed, valid_for, votes))
    heads = ("RESOURCE", "HOLDER", "ID", "WORKER", "HELD FOR", "RENEWED", "VALID FOR", "VOTES")
    return Table(heads, rows, "No locks are held." if sight.is_known else LOCKS_UNKNOWN)


def vote_table(lock: LockReport, sight: Sight) -> Table:
    """Return a table of the nodes that have the key of a lock, and of those that failed."""
    rows = [(node, format_duration(left)) for node, left in lock.votes.items()]
    return Table(("NODE", "KEY EXPIRES IN"), [*rows, *sight.failing.items()], "")


def failing_lines(failing: Mapping[str, str]) -> list[str]:
    """Return a line for each node that could not be queried. failing: the causes by node."""
    return [f"{node} cannot be queried: {cause}" for node, cause in failing.items()]


def unknown_lines(sight: Sight | WaitingSight) -> list[str]:
    """Return a line if too few nodes answered for the list above to be complete."""
    if sight.is_known:
        return []
    answered = sight.asked - len(sight.failing)
    text = f"{answered} of {sight.asked} nodes answered, {sight.needed} needed"
    return [f"{text}: what is not listed here may be held, or wait, all the same"]
