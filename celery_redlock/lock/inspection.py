"""Who holds locks and who waits for them, as the nodes know it; breaks a lock for an operator.

Not here: the status of the nodes (`node_status.py`), and the names on one node (`server/admin.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from celery_redlock.label import Holder
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.model.keys import (
    MOST_DIGITS,
    broken_key,
    inbox_channel,
    lock_key,
    parts_of,
    resource_of,
    waiting_key,
)
from celery_redlock.lock.model.options import grace_period
from celery_redlock.lock.node_status import in_iso
from celery_redlock.lock.server.admin import ask_each, names_on, reply_of
from celery_redlock.lock.server.requests import BREAK
from celery_redlock.lock.transport.command import (
    encoded,
    read_list,
    read_number,
    read_text,
    text_of,
)

ASKED_AT_ONCE = 500  # keys in one write
GONE = -2  # Source: the Redis command PTTL
_Scores = Mapping[Any, float]  # by waiter: since when it waits


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
class LockList:
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
        return self.asked - len(self.failing) >= self.needed


def list_locks(redlock: Redlock, resource: str | None = None) -> LockList:
    """Return all locks on the nodes, or those of one resource."""
    beginning, nodes = lock_key(redlock.prefix, ""), redlock.session.nodes
    found, failing = ask_each(nodes, lambda connection: list(_values(connection, beginning)))
    votes: dict[tuple[Any, Any], dict[str, float]] = {}
    for node, values in found.items():
        for key, value, left in values:
            votes.setdefault((key, value), {})[node] = left
    reports = [_report(redlock, key, value, on) for (key, value), on in votes.items()]
    of_it = [lock for lock in reports if resource in (None, lock.resource)]
    of_it.sort(key=lambda lock: (lock.resource, lock.permit, -len(lock.votes)))
    return LockList(tuple(of_it), failing, len(nodes.all), nodes.quorum)


def _report(redlock: Redlock, key: Any, value: Any, votes: Mapping[str, float]) -> LockReport:
    session, (resource, permit) = redlock.session, resource_of(redlock.prefix, text_of(key))
    text = "" if value is None else text_of(value)
    label, since, ttl = parts_of(text)
    needed, left = session.nodes.quorum, sorted(votes.values(), reverse=True)
    held = len(votes) >= needed
    return LockReport(
        resource,
        permit,
        Holder.of(label if text else "no lock, but a key of another type"),
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
    """Delete a lock if its value is still the same, and prevent that its holder reclaims it.

    The holder notices this at its next renewal. Until then it may run together with a new holder.
    Returns by node whether the node had the lock, and the causes by failed node.
    """
    broken = broken_key(text_of(lock.key), text_of(lock.value))
    waiting = waiting_key(redlock.prefix, lock.resource)
    # milliseconds; a holder reclaims for no longer than its lease
    lasting = str(int(grace_period(redlock.max_ttl) * 1000))
    inbox = encoded(inbox_channel(redlock.prefix, ""))
    keys = "3", lock.key, encoded(broken), encoded(waiting)
    force_unlock = "EVAL", BREAK.source, *keys, lock.value, lasting, inbox
    return ask_each(
        redlock.session.nodes,
        lambda connection: bool(read_number(reply_of(connection, *force_unlock))),
    )


def _parts(connection: Any, beginning: str) -> Iterator[list[Any]]:
    """Yield the names of keys that begin like this, each once, as many as one write asks about."""
    names = list(set(names_on(connection, beginning)))
    for first in range(0, len(names), ASKED_AT_ONCE):
        yield names[first : first + ASKED_AT_ONCE]


def _values(connection: Any, beginning: str) -> Iterator[tuple[Any, Any, float]]:
    """Yield the name, the value and the remaining seconds of each key that still exists."""
    for part in _parts(connection, beginning):
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


@dataclass(frozen=True)
class WaitingProcess:
    """A process that waits for a resource, as the nodes know it. The JSON has the same fields."""

    resource: str
    rank: int  # how many processes are before it
    name: str  # of the worker; if a caller with `wait` registered it, of the machine
    pid: int | None  # None if another program wrote the name
    waiter: str  # its name on the nodes, new in each process
    since: str | None  # when its first caller or message began to wait, in ISO 8601
    nodes: tuple[str, ...]  # that have it registered
    listens: bool  # whether it is connected to any node; a process that is gone is not


@dataclass(frozen=True)
class WaitingList:
    """The waiting processes on the nodes that answer, by resource and in order."""

    processes: tuple[WaitingProcess, ...]
    # by resource: the nodes on which a key of another program has the name of the set of waiters
    wrong_type: Mapping[str, tuple[str, ...]]
    failing: Mapping[str, str]  # by node, the cause
    asked: int = field(repr=False)  # the number of nodes
    needed: int = field(repr=False)  # how many must answer

    @property
    def is_known(self) -> bool:
        return self.asked - len(self.failing) >= self.needed


def list_waiting(redlock: Redlock) -> WaitingList:
    """Return all processes that wait for a lock."""
    prefix, nodes = redlock.prefix, redlock.session.nodes
    beginning = waiting_key(prefix, "")

    def ask(connection: Any) -> tuple[list[tuple[Any, _Scores | None]], set[Any] | None]:
        sets = list(_sets(connection, beginning))
        waiters = {waiter for _, scores in sets for waiter in scores or ()}
        return sets, _listening(connection, prefix, sorted(waiters))

    found, failing = ask_each(nodes, ask)
    heard = [listening for _, listening in found.values() if listening is not None]
    listens = None if len(heard) < nodes.quorum else set().union(*heard)
    # by resource and waiter: since, by node
    registered: dict[str, dict[Any, dict[str, float]]] = {}
    wrong_type: dict[str, tuple[str, ...]] = {}
    for node, (sets, _) in found.items():
        for name, scores in sets:
            resource = text_of(name).removeprefix(beginning)
            if scores is None:
                wrong_type[resource] = (*wrong_type.get(resource, ()), node)
            for waiter, since in (scores or {}).items():
                registered.setdefault(resource, {}).setdefault(waiter, {})[node] = since
    processes = []
    for resource, waiters in sorted(registered.items()):
        order = sorted((_agreed(on.values()), waiter) for waiter, on in waiters.items())
        for rank, (since, waiter) in enumerate(order):  # as the nodes keep them
            text, on = text_of(waiter), tuple(waiters[waiter])
            named = resource, rank, *_name_of(text), text, in_iso(since), on
            processes.append(WaitingProcess(*named, listens is None or waiter in listens))
    return WaitingList(tuple(processes), wrong_type, failing, len(nodes.all), nodes.quorum)


def _name_of(waiter: str) -> tuple[str, int | None]:
    parts = waiter.rsplit(":", 2)  # as engine/inbox.py: Inbox.forget
    if len(parts) != 3 or not parts[1].isdecimal() or len(parts[1]) > MOST_DIGITS:
        return waiter, None
    return parts[0], int(parts[1])


def _agreed(since: Iterable[float]) -> float:
    """Return what most nodes say; of several, the earliest. A node may lack the last write."""
    votes = Counter(since)
    return min(votes, key=lambda one: (-votes[one], one))


def _sets(connection: Any, beginning: str) -> Iterator[tuple[Any, _Scores | None]]:
    """Yield the name of each set, and since when each member waits; None for another type."""
    for part in _parts(connection, beginning):
        connection.send_packed_command(
            connection.pack_commands([("ZRANGE", name, "0", "-1", "WITHSCORES") for name in part])
        )
        for name in part:
            try:
                reply = connection.read_response()
            except redis.ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
                yield name, None
                continue
            words = read_list(reply)
            scores = zip(words[::2], words[1::2], strict=True)
            yield name, {waiter: float(read_text(score)) for waiter, score in scores}


def _listening(connection: Any, prefix: str, waiters: Sequence[Any]) -> set[Any] | None:
    """Return the waiters whose inbox has a subscriber; None if the node does not tell it."""
    channels = [encoded(inbox_channel(prefix, text_of(waiter))) for waiter in waiters]
    if not channels:
        return set()
    try:
        counts = read_list(reply_of(connection, "PUBSUB", "NUMSUB", *channels), 2 * len(channels))
    except redis.ResponseError:  # the right to ask is missing
        return None
    return {waiter for waiter, count in zip(waiters, counts[1::2], strict=True) if int(count)}
