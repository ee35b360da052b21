"""The locks on the nodes, as tables and as data for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from celery_redlock.lock.held_locks import Sight, Standing
from celery_redlock.lock.waiting_processes import WaitingSight
from celery_redlock.operate.cli.render import Table, format_duration, seconds_since
from celery_redlock.operate.control import Holder, in_iso

NOTHING_KNOWN = "Which locks are held cannot be known."


def lock_name(lock: Standing) -> str:
    """Return the resource of a lock, with the permit if it is not the first one."""
    return f"{lock.resource} (permit {lock.permit})" if lock.permit else lock.resource


def holder_text(lock: Standing) -> str:
    """Return the holder of a lock in one line."""
    holder = Holder.of(lock.holder)
    return f"{holder.task}[{holder.task_id}] on {holder.worker}" if holder.task else holder.label


def lock_table(locks: Iterable[Standing], sight: Sight) -> Table:
    """Return a table with a row for each lock."""
    rows = []
    for lock in locks:
        holder = Holder.of(lock.holder)
        held_for = "" if lock.since is None else format_duration(seconds_since(in_iso(lock.since)))
        valid_for = format_duration(lock.valid_for) if lock.held else "not held: no quorum"
        ago = lock.since_renewal
        renewed = "" if ago is None else f"{format_duration(ago)} ago"
        votes = f"{len(lock.votes)}, {lock.needed} needed"
        names = (holder.task or holder.label, holder.task_id, holder.worker)
        rows.append((lock_name(lock), *names, held_for, renewed, valid_for, votes))
    heads = ("RESOURCE", "HOLDER", "ID", "WORKER", "HELD FOR", "RENEWED", "VALID FOR", "VOTES")
    return Table(heads, rows, "No locks are held." if sight.is_known else NOTHING_KNOWN)


def vote_table(lock: Standing, sight: Sight) -> Table:
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


def lock_data(lock: Standing) -> dict[str, Any]:
    """Return a lock for JSON."""
    return {
        "resource": lock.resource,
        "permit": lock.permit,
        "holder": asdict(Holder.of(lock.holder)),
        "since": in_iso(lock.since),
        "held_for": None if lock.since is None else seconds_since(in_iso(lock.since)),
        "since_renewal": lock.since_renewal,
        "held": lock.held,
        "valid_for": _finite(lock.valid_for),
        "votes": {node: _finite(left) for node, left in lock.votes.items()},
        "needed": lock.needed,
    }


def locks_data(locks: Iterable[Standing], sight: Sight) -> dict[str, Any]:
    """Return locks, and the nodes that could not be queried, for JSON."""
    return {"locks": [lock_data(lock) for lock in locks], "failing": dict(sight.failing)}


def _finite(seconds: float) -> float | None:
    """Return None for infinity, which JSON cannot express."""
    return None if math.isinf(seconds) else seconds
