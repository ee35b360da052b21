"""Who holds locks, what is used of rates, and who waits, as the nodes know it; breaks both.

Not here: the status of the nodes (`node_status.py`), and the names on one node (`server/admin.py`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from celery_redlock.label import Holder
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import (
    MAX_DIGITS,
    broken_key,
    inbox_channel,
    lock_key,
    name_of_lock,
    name_of_rate,
    parts_of,
    rate_keys,
    resource_of,
    waiting_for,
    waiting_key,
)
from celery_redlock.lock.model.lease import expires_in
from celery_redlock.lock.model.rate import Rate
from celery_redlock.lock.node_status import in_iso
from celery_redlock.lock.platform.clock import new_token
from celery_redlock.lock.reports import (
    BrokenLock,
    FreedRate,
    LockList,
    LockReport,
    RateReport,
    WaitingList,
    WaitingProcess,
)
from celery_redlock.lock.server.admin import ask_each, names_on, reply_of
from celery_redlock.lock.server.requests import BREAK, CANCEL
from celery_redlock.lock.transport.command import (
    encoded,
    read_list,
    read_number,
    read_text,
    text_of,
)
from celery_redlock.lock.validation import MAX_PERMITS

MAX_KEYS_PER_WRITE = 500
KEY_MISSING = -2  # Source: the Redis command PTTL
_Scores = Mapping[Any, float]  # by member of a sorted set
_Starts = Mapping[str, tuple[str, _Scores]]  # by resource: the stored rate, ages in s by permit
_Awaited = tuple[str, bool]  # a resource, and whether a process waits for a start of its rate
_Registrations = Mapping[Any, Mapping[str, float]]  # by waiter and node: since when it waits
_STORED_RATE = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}}) (.*)", re.DOTALL)  # by lua/take.lua


def list_locks(session: Session, resource: str | None = None) -> LockList:
    """Return all locks and rates on the nodes, or those of one resource."""
    prefix = session.options.prefix
    nodes = session.nodes

    def read_locks(connection: Any) -> tuple[list[tuple[Any, Any, float]], _Starts]:
        if resource is not None:  # without a search of the whole database
            permits = range(MAX_PERMITS)
            keys = [encoded(lock_key(prefix, resource, permit)) for permit in permits]
            return list(values_on(connection, keys)), _starts_on(connection, prefix, [resource])
        rate_prefix = rate_keys(prefix, "")[0]
        rate_names = map(text_of, set(names_on(connection, rate_prefix)))
        resources = [name.removeprefix(rate_prefix) for name in rate_names]
        starts = _starts_on(connection, prefix, resources)
        lock_names = list(set(names_on(connection, lock_key(prefix, ""))))
        return list(values_on(connection, lock_names)), starts

    replies, failures = ask_each(nodes, read_locks)
    votes: dict[tuple[Any, Any], dict[str, float]] = {}  # by key and value, then by node
    node_counts = Counter[Any]()  # by key
    for node, (values, _) in replies.items():
        for key, value, remaining in values:
            votes.setdefault((key, value), {})[node] = remaining
            node_counts[key] += 1
    # a permit is taken if fewer than a quorum of nodes have it free
    taken_keys = [key for key, count in node_counts.items() if len(replies) - count < nodes.quorum]
    used_permits = Counter(resource_of(prefix, text_of(key))[0] for key in taken_keys)
    locks = [
        _report(session, key, value, node_votes, used_permits)
        for (key, value), node_votes in votes.items()
    ]
    locks.sort(key=lambda lock: (lock.resource, lock.permit, -len(lock.votes)))
    rates = _rates(session, {node: starts for node, (_, starts) in replies.items()})
    return LockList(tuple(locks), rates, failures, len(nodes.all), nodes.quorum)


def _report(
    session: Session,
    key: Any,
    value: Any,
    votes: Mapping[str, float],
    used_permits: Mapping[str, int],
) -> LockReport:
    """Return the report of one value of a key.

    votes: by node, the seconds until the key expires. used_permits: by resource.
    """
    resource, permit = resource_of(session.options.prefix, text_of(key))
    text = "" if value is None else text_of(value)
    label, since, ttl, limit = parts_of(text)
    quorum = session.nodes.quorum
    remaining = sorted(votes.values(), reverse=True)
    is_held = len(votes) >= quorum
    return LockReport(
        resource,
        permit,
        limit,
        used_permits.get(resource, 0),
        Holder.of(label if text else "no lock, but a key of another type"),
        since=in_iso(since),
        held_for=None if since is None else max(0.0, session.clock.wall_us() / 1e6 - since),
        since_renewal=None if ttl is None else max(0.0, ttl - remaining[0]),
        held=is_held,
        valid_for=remaining[quorum - 1] if is_held else 0.0,
        votes=votes,
        needed=quorum,
        key=key,
        value=value,
    )


def _rates(session: Session, starts_by_node: Mapping[str, _Starts]) -> tuple[RateReport, ...]:
    """Return the rates of which starts are used, by resource and in order."""
    by_resource: dict[str, list[tuple[str, _Scores]]] = {}
    for starts in starts_by_node.values():
        for resource, stored in starts.items():
            by_resource.setdefault(resource, []).append(stored)
    reports = []
    for resource, copies in sorted(by_resource.items()):
        report = _rate(session, resource, len(starts_by_node), copies)
        if report is not None and report.used:
            reports.append(report)
    return tuple(reports)


def _rate(
    session: Session, resource: str, node_count: int, copies: Sequence[tuple[str, _Scores]]
) -> RateReport | None:
    """Return the report of a rate; None if another program wrote its text.

    node_count: the number of nodes that replied. copies: what each node that has the rate stores:
    the text of the rate, and the ages of its starts by permit.
    """
    nodes = session.nodes
    now = session.clock.wall_us() / 1e6
    text, _ = Counter(text for text, _ in copies).most_common(1)[0]
    match = _STORED_RATE.fullmatch(text)
    rate = None if match is None else Rate.parse(match[2])
    if match is None or rate is None:
        return None
    kept_ms = int(match[1])
    silent_nodes = [math.inf] * (len(nodes.all) - node_count)
    waits = []  # seconds until each permit that a node counts is free
    for permit in {permit for _, by_permit in copies for permit in by_permit}:
        if not permit.isdecimal() or int(permit) >= rate.starts:
            continue
        ages = [by_permit[permit] for _, by_permit in copies if permit in by_permit]
        counting_nodes = [max(0.0, kept_ms / 1000 - max(0.0, age)) for age in ages]
        free_nodes = [0.0] * (node_count - len(ages))
        wait = expires_in([*counting_nodes, *free_nodes, *silent_nodes], nodes.quorum)
        waits.append(math.inf if wait is None else wait)
    used = sum(wait > 0 for wait in waits)
    next_in = min(waits) if used == rate.starts else 0.0
    next_start = None if math.isinf(next_in) else in_iso(now + next_in)
    return RateReport(resource, str(rate), used, rate.starts, next_in, next_start, kept_ms)


def break_lock(session: Session, lock: LockReport) -> BrokenLock:
    """Delete a lock if its value is still the same, and prevent that its holder reclaims it.

    The holder notices this at its next renewal. Until then it may run together with a new holder.
    """
    prefix = session.options.prefix
    broken = broken_key(text_of(lock.key), text_of(lock.value))
    waiting = waiting_key(prefix, name_of_lock(lock.resource))
    # milliseconds; a holder reclaims for no longer than its lease
    record_ttl = str(int(session.options.guard.grace_period * 1000))
    inbox = encoded(inbox_channel(prefix, ""))
    keys = "3", lock.key, encoded(broken), encoded(waiting)
    force_unlock = "EVAL", BREAK.source, *keys, lock.value, record_ttl, inbox
    deleted, failures = ask_each(
        session.nodes, lambda connection: bool(read_number(reply_of(connection, *force_unlock)))
    )
    gone_from = tuple(node for node, is_deleted in deleted.items() if is_deleted)
    return BrokenLock(lock, gone_from, failures)


def break_rate(session: Session, rate: RateReport) -> FreedRate:
    """Give all starts of a rate back, and wake the waiters of that rate.

    Bodies that have started run on, so more bodies may start in a period than the rate allows.
    """
    prefix = session.options.prefix
    waiting = waiting_key(prefix, name_of_rate(rate.resource))
    keys = map(encoded, (*rate_keys(prefix, rate.resource), waiting))
    # the same text on each node: a waiter acts on an announcement of a quorum
    words = "", new_token(), encoded(inbox_channel(prefix, "")), str(rate.kept_ms)
    cancel = "EVAL", CANCEL.source, "3", *keys, *words
    starts_from, failures = ask_each(
        session.nodes, lambda connection: read_number(reply_of(connection, *cancel))
    )
    return FreedRate(rate, starts_from, failures)


def _parts(names: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield names in parts of at most `MAX_KEYS_PER_WRITE`."""
    for first in range(0, len(names), MAX_KEYS_PER_WRITE):
        yield names[first : first + MAX_KEYS_PER_WRITE]


def _send(connection: Any, commands: Sequence[tuple[Any, ...]]) -> None:
    """Write commands to a node in one go. `_next_reply` reads their replies, in order."""
    connection.send_packed_command(connection.pack_commands(commands))


def values_on(connection: Any, names: Sequence[Any]) -> Iterator[tuple[Any, Any, float]]:
    """Yield the name, the value and the remaining seconds of each key that exists.

    The value is None for a key of another type. The seconds are inf for a key that never expires.
    """
    for part in _parts(names):
        _send(connection, [("MGET", *part), ("EXISTS", *part)])
        pairs = list(zip(part, read_list(connection.read_response(), len(part)), strict=True))
        texts = [pair for pair in pairs if pair[1] is not None]
        key_count = read_number(connection.read_response())
        # MGET has no value for a missing key, and none for a key of another type
        existing = pairs if key_count > len(texts) else texts
        _send(connection, [("PTTL", name) for name, _ in existing])
        for name, value in existing:
            ttl_ms = read_number(connection.read_response())
            if ttl_ms == KEY_MISSING:
                continue
            if value is not None:
                read_text(value)  # raises UnexpectedReplyError for what is no text
            yield name, value, math.inf if ttl_ms < 0 else ttl_ms / 1000


def _starts_on(connection: Any, prefix: str, resources: Sequence[str]) -> _Starts:
    """Return the starts of resources on one node: the stored rate, and the age of each start."""
    starts: dict[str, tuple[str, _Scores]] = {}
    for part in _parts(resources):
        keys = [[encoded(key) for key in rate_keys(prefix, resource)] for resource in part]
        read_permits = [("ZRANGE", taken, "0", "-1", "WITHSCORES") for taken, _ in keys]
        read_rates = [("HGET", tokens, "rate") for _, tokens in keys]
        _send(connection, [("TIME",), *read_permits, *read_rates])
        seconds, microseconds = map(int, read_list(connection.read_response(), 2))
        now = seconds + microseconds / 1e6
        permits = [_scores_of(_next_reply(connection)) for _ in part]
        rates = [_next_reply(connection) for _ in part]
        for resource, taken_at, rate in zip(part, permits, rates, strict=True):
            if taken_at and rate is not None:
                ages = {text_of(permit): now - ms / 1000 for permit, ms in taken_at.items()}
                starts[resource] = read_text(rate), ages
    return starts


def _next_reply(connection: Any) -> Any:
    """Return the reply to a request that was sent; None if the key is of another type."""
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        return None


def _scores_of(reply: Any) -> _Scores | None:
    """Return the members of a sorted set; None for a key of another type."""
    if reply is None:
        return None
    words = read_list(reply)
    scores = zip(words[::2], words[1::2], strict=True)
    return {member: float(read_text(score)) for member, score in scores}


@dataclass(frozen=True)
class _NodeWaiters:
    """The waiters on one node.

    sets: of each set what its members wait for, and their scores; None for a key of another type.
    listening: the waiters that are connected to the node; None if the node does not say it.
    """

    sets: Sequence[tuple[_Awaited, _Scores | None]]
    listening: set[Any] | None
    starts: _Starts


def list_waiting(session: Session, resource: str | None = None) -> WaitingList:
    """Return all processes that wait for a lock or a start of a rate, or those of one resource."""
    prefix = session.options.prefix
    nodes = session.nodes
    key_prefix = waiting_key(prefix, "")
    keys: list[bytes] = []
    if resource is not None:
        keys = [
            encoded(waiting_key(prefix, name_of_lock(resource))),
            encoded(waiting_key(prefix, name_of_rate(resource))),
        ]

    def read_waiters(connection: Any) -> _NodeWaiters:
        sets = [
            (waiting_for(text_of(key).removeprefix(key_prefix)), scores)
            for key, scores in _sets(connection, keys or set(names_on(connection, key_prefix)))
        ]
        waiters = {waiter for _, scores in sets for waiter in scores or ()}
        listening = _listening(connection, prefix, sorted(waiters))
        rated = [awaited for (awaited, is_rate), _ in sets if is_rate]
        return _NodeWaiters(sets, listening, _starts_on(connection, prefix, rated))

    replies, failures = ask_each(nodes, read_waiters)
    wrong_type: dict[str, tuple[str, ...]] = {}
    for node, reply in replies.items():
        for (name, _), scores in reply.sets:
            if scores is None:
                wrong_type[name] = (*wrong_type.get(name, ()), node)
    rates = _rates(session, {node: reply.starts for node, reply in replies.items()})
    next_starts = {rate.resource: rate.next_start for rate in rates}
    listening = _listening_anywhere(replies.values(), nodes.quorum)
    processes: list[WaitingProcess] = []
    for awaited, registrations in sorted(_registrations(replies).items()):
        processes += _processes(awaited, registrations, listening, next_starts)
    return WaitingList(tuple(processes), wrong_type, failures, len(nodes.all), nodes.quorum)


def _listening_anywhere(replies: Iterable[_NodeWaiters], quorum: int) -> set[Any] | None:
    """Return the waiters that are connected to any node; None if fewer than a quorum say it."""
    known = [reply.listening for reply in replies if reply.listening is not None]
    return None if len(known) < quorum else set().union(*known)


def _registrations(replies: Mapping[str, _NodeWaiters]) -> dict[_Awaited, _Registrations]:
    """Return the waiters by what they wait for."""
    registrations: dict[_Awaited, dict[Any, dict[str, float]]] = {}
    for node, reply in replies.items():
        for awaited, scores in reply.sets:
            for waiter, since in (scores or {}).items():
                by_node = registrations.setdefault(awaited, {}).setdefault(waiter, {})
                by_node[node] = since
    return dict(registrations)


def _processes(
    awaited: _Awaited,
    registrations: _Registrations,
    listening: set[Any] | None,
    next_starts: Mapping[str, str | None],
) -> Iterator[WaitingProcess]:
    """Yield the processes that wait for one thing, in the order in which the nodes keep them.

    listening: the waiters that are connected to a node; None if that is unknown.
    """
    resource, is_rate = awaited
    order = sorted((_agreed(by_node.values()), key) for key, by_node in registrations.items())
    for rank, (since, key) in enumerate(order):
        waiter = text_of(key)
        name, pid = _name_of(waiter)
        yield WaitingProcess(
            resource=resource,
            waits_for="rate" if is_rate else "lock",
            rank=rank,
            name=name,
            pid=pid,
            waiter=waiter,
            since=in_iso(since or None),  # 0 of a hold, which waits before all others
            nodes=tuple(registrations[key]),
            listens=listening is None or key in listening,
            next_start=next_starts.get(resource) if is_rate else None,
        )


def _name_of(waiter: str) -> tuple[str, int | None]:
    parts = waiter.rsplit(":", 2)  # a name as Inbox makes it
    if len(parts) != 3 or not parts[1].isdecimal() or len(parts[1]) > MAX_DIGITS:
        return waiter, None
    return parts[0], int(parts[1])


def _agreed(since: Iterable[float]) -> float:
    """Return the score that most nodes have; of several such, the least.

    A node may lack the last write.
    """
    votes = Counter(since)
    return min(votes, key=lambda score: (-votes[score], score))


def _sets(connection: Any, names: Collection[Any]) -> Iterator[tuple[Any, _Scores | None]]:
    """Yield the name of each set, and since when each member waits; None for another type."""
    for part in _parts(list(names)):
        _send(connection, [("ZRANGE", name, "0", "-1", "WITHSCORES") for name in part])
        for name in part:
            yield name, _scores_of(_next_reply(connection))


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
