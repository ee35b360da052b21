"""Lists the locks on the nodes with their holders, and breaks a lock for an operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.lock.client import Redlock
from celery_redlock.lock.model.grace_period import grace_period
from celery_redlock.lock.model.keys import (
    broken_key,
    inbox_channel,
    lock_key,
    parts_of,
    resource_of,
    waiting_key,
    wake_channel,
)
from celery_redlock.lock.node_status import ask_each
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
class Standing:
    """A lock on the nodes: one value of one key.

    permit: number of a semaphore's permit. holder: the holder's label. since: seconds since 1970 by
    the holder's clock; None if another program wrote the value. ttl: seconds of the holder's lease;
    None likewise. votes: by node, the seconds until the key expires; inf for never. needed: size of
    a quorum.
    """

    resource: str
    permit: int
    holder: str
    since: float | None
    ttl: float | None
    votes: Mapping[str, float]
    needed: int
    key: Any = field(repr=False)
    value: Any = field(repr=False)

    @property
    def held(self) -> bool:
        """Whether a quorum has the key. If not, the lock changes hands or is about to expire."""
        return len(self.votes) >= self.needed

    @property
    def valid_for(self) -> float:
        """Seconds for which a quorum keeps the key without a renewal; 0.0 if none has it."""
        return sorted(self.votes.values(), reverse=True)[self.needed - 1] if self.held else 0.0

    @property
    def since_renewal(self) -> float | None:
        """Seconds since the last renewal, or the grant; None if that is not known.

        A living holder renews every third of its ttl.
        """
        return None if self.ttl is None else max(0.0, self.ttl - max(self.votes.values()))


@dataclass(frozen=True)
class Sight:
    """The locks on the nodes that answer. failing: by node, the cause of its failure.

    needed: the number of nodes that must answer; with fewer, a lock may be held that none of them
    knows.
    """

    locks: tuple[Standing, ...]
    failing: Mapping[str, str]
    asked: int
    needed: int

    @property
    def is_known(self) -> bool:
        """Whether enough nodes answered to tell which locks are held."""
        return self.asked - len(self.failing) >= self.needed


def look_at_locks(redlock: Redlock, resource: str | None = None) -> Sight:
    """Return all locks on the nodes, or those of one resource.

    Scans each node's keys in parts, so that no other client waits.
    """
    prefix, needed = redlock.prefix, redlock.session.node_set.size
    beginning = lock_key(prefix, "")

    def look(connection: Any) -> list[tuple[Any, Any, float]]:
        return list(_values(connection, list(set(names_on(connection, beginning)))))

    found, failing = ask_each(redlock, look)
    votes: dict[tuple[Any, Any], dict[str, float]] = {}
    for node, values in found.items():
        for key, value, left in values:
            votes.setdefault((key, value), {})[node] = left
    standing = [_standing(prefix, key, value, on, needed) for (key, value), on in votes.items()]
    of_it = [lock for lock in standing if resource in (None, lock.resource)]
    return Sight(
        tuple(sorted(of_it, key=lambda lock: (lock.resource, lock.permit, -len(lock.votes)))),
        failing,
        len(redlock.session.node_set.nodes),
        needed,
    )


def _standing(
    prefix: str, key: Any, value: Any, votes: Mapping[str, float], needed: int
) -> Standing:
    resource, permit = resource_of(prefix, text_of(key))
    text = "" if value is None else text_of(value)
    holder, since, ttl = parts_of(text)
    if not text:
        holder = "no lock, but a key of another type"
    return Standing(resource, permit, holder, since, ttl, votes, needed, key, value)


def break_lock(redlock: Redlock, lock: Standing) -> tuple[Mapping[str, bool], Mapping[str, str]]:
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
    channel, inbox = wake_channel(redlock.prefix, lock.resource), inbox_channel(redlock.prefix, "")

    def break_it(connection: Any) -> bool:
        return force_unlock(connection, keys, lock.value, lasting, encoded(channel), encoded(inbox))

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
