"""Lists the locks on the nodes with their holders, and breaks a lock for an operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.label import Holder
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.model.keys import (
    broken_key,
    inbox_channel,
    lock_key,
    parts_of,
    resource_of,
    waiting_key,
)
from celery_redlock.lock.model.options import grace_period
from celery_redlock.lock.node_status import ask_each, in_iso
from celery_redlock.lock.server.admin import force_unlock, names_on
from celery_redlock.lock.transport.encoding import (
    encoded,
    read_list,
    read_number,
    read_text,
    text_of,
)

ASKED_AT_ONCE = 500  # keys
GONE = -2  # Source: the Redis command PTTL


@dataclass(frozen=True)
class LockReport:
    """A lock on the nodes: one value of one key. Its fields are those of the documented JSON.

    permit: number of a semaphore's permit. since: a moment by the holder's clock, in ISO 8601.
    held_for: seconds since then. since_renewal: seconds since the last renewal, or the grant; a
    living holder renews every third of its ttl. These three are None if another program wrote the
    value. held: whether a quorum has the key; if not, the lock changes hands or is about to expire.
    valid_for: seconds for which a quorum keeps the key without a renewal; 0.0 if none has it.
    votes: by node, the seconds until the key expires; inf for never. needed: size of a quorum.
    """

    resource: str
    permit: int
    holder: Holder
    since: str | None
    held_for: float | None
    since_renewal: float | None
    held: bool
    valid_for: float
    votes: Mapping[str, float]
    needed: int
    key: Any = field(repr=False)
    value: Any = field(repr=False)


@dataclass(frozen=True)
class Sight:
    """The locks on the nodes that answer. failing: by node, the cause of its failure.

    asked: the number of nodes. needed: how many must answer; with fewer, a lock may be held that
    none of them knows.
    """

    locks: tuple[LockReport, ...]
    failing: Mapping[str, str]
    asked: int = field(repr=False)
    needed: int = field(repr=False)

    @property
    def is_known(self) -> bool:
        """Whether enough nodes answered to tell which locks are held."""
        return self.asked - len(self.failing) >= self.needed


def look_at_locks(redlock: Redlock, resource: str | None = None) -> Sight:
    """Return all locks on the nodes, or those of one resource.

    Scans each node's keys in parts, so that no other client waits.
    """
    beginning, nodes = lock_key(redlock.prefix, ""), redlock.session.nodes

    def look(connection: Any) -> list[tuple[Any, Any, float]]:
        return list(_values(connection, list(set(names_on(connection, beginning)))))

    found, failing = ask_each(redlock, look)
    votes: dict[tuple[Any, Any], dict[str, float]] = {}
    for node, values in found.items():
        for key, value, left in values:
            votes.setdefault((key, value), {})[node] = left
    reports = [_report(redlock, key, value, on) for (key, value), on in votes.items()]
    of_it = [lock for lock in reports if resource in (None, lock.resource)]
    of_it.sort(key=lambda lock: (lock.resource, lock.permit, -len(lock.votes)))
    return Sight(tuple(of_it), failing, len(nodes.all), nodes.quorum)


def _report(redlock: Redlock, key: Any, value: Any, votes: Mapping[str, float]) -> LockReport:
    session, (resource, permit) = redlock.session, resource_of(redlock.prefix, text_of(key))
    text = "" if value is None else text_of(value)
    label, since, ttl = parts_of(text)
    if not text:
        label = "no lock, but a key of another type"
    needed = session.nodes.quorum
    left = sorted(votes.values(), reverse=True)
    held = len(votes) >= needed
    return LockReport(
        resource,
        permit,
        Holder.of(label),
        since=in_iso(since),
        held_for=None if since is None else max(0.0, session.clock.wall_us() / 1e6 - since),
        since_renewal=None if ttl is None else max(0.0, ttl - left[0]),
        held=held,
        valid_for=left[needed - 1] if held else 0.0,
        votes=votes,
        needed=needed,
        key=key,
        value=value,
    )


def break_lock(redlock: Redlock, lock: LockReport) -> tuple[Mapping[str, bool], Mapping[str, str]]:
    """Delete a lock, and record the break so that the holder cannot reclaim it.

    The holder notices this at its next renewal. Until then it may run together with a new holder. A
    key that has another value by now stays unchanged. Returns by node whether the node had the
    lock, and the causes by failed node.
    """
    keys = (
        lock.key,
        encoded(broken_key(text_of(lock.key), text_of(lock.value))),
        encoded(waiting_key(redlock.prefix, lock.resource)),
    )
    # milliseconds; a holder reclaims for no longer than its lease
    lasting = str(int(grace_period(redlock.max_ttl) * 1000))
    inbox = encoded(inbox_channel(redlock.prefix, ""))

    def break_it(connection: Any) -> bool:
        return force_unlock(connection, keys, lock.value, lasting, inbox)

    return ask_each(redlock, break_it)


def _values(connection: Any, names: Sequence[Any]) -> Iterator[tuple[Any, Any, float]]:
    """Yield the name, the value and the remaining seconds of each key that exists."""
    for first in range(0, len(names), ASKED_AT_ONCE):
        part = names[first : first + ASKED_AT_ONCE]
        connection.send_packed_command(
            connection.pack_commands([("MGET", *part), *(("PTTL", name) for name in part)])
        )
        values = read_list(connection.read_response(), len(part))
        left = [read_number(connection.read_response()) for _ in part]
        for name, value, ms in zip(part, values, left, strict=True):
            if ms != GONE:
                if value is not None:
                    read_text(value)
                yield name, value, math.inf if ms < 0 else ms / 1000
