"""Who holds locks, what is used of rates, and who waits, as the nodes know it; breaks both.

Not here: the status of the nodes (`node_status.py`), and the names on one node (`server/admin.py`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import redis

from celery_redlock.label import Holder
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import (
    MOST_DIGITS,
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
from celery_redlock.lock.validation import MOST_PERMITS

ASKED_AT_ONCE = 500  # keys in one write
GONE = -2  # Source: the Redis command PTTL
_Scores = Mapping[Any, float]  # by member: of waiters, since when each waits
_Starts = Mapping[str, tuple[str, _Scores]]  # by resource: the stored rate, ages in s by permit
_STORED_RATE = re.compile(rf"([0-9]{{1,{MOST_DIGITS}}}) (.*)", re.DOTALL)  # by lua/take.lua


def list_locks(session: Session, resource: str | None = None) -> LockList:
    """Return all locks and rates on the nodes, or those of one resource."""
    prefix = session.options.prefix
    nodes = session.nodes

    def ask(connection: Any) -> tuple[list[tuple[Any, Any, float]], _Starts]:
        if resource is not None:  # without a search of the whole database
            permits = range(MOST_PERMITS)
            keys = [encoded(lock_key(prefix, resource, permit)) for permit in permits]
            return list(values_on(connection, keys)), _starts_on(connection, prefix, [resource])
        locks = lock_key(prefix, "")
        rates = rate_keys(prefix, "")[0]
        names = map(text_of, set(names_on(connection, rates)))
        starts = _starts_on(connection, prefix, [name.removeprefix(rates) for name in names])
        return list(values_on(connection, list(set(names_on(connection, locks))))), starts

    found, failing = ask_each(nodes, ask)
    votes: dict[tuple[Any, Any], dict[str, float]] = {}
    keys = Counter[Any]()  # by key: on how many nodes it is
    for node, (values, _) in found.items():
        for key, value, left in values:
            votes.setdefault((key, value), {})[node] = left
            keys[key] += 1
    taken = [key for key, count in keys.items() if len(found) - count < nodes.quorum]
    used = Counter(resource_of(prefix, text_of(key))[0] for key in taken)
    locks = [_report(session, key, value, on, used) for (key, value), on in votes.items()]
    locks.sort(key=lambda lock: (lock.resource, lock.permit, -len(lock.votes)))
    rates = _rates(session, {node: starts for node, (_, starts) in found.items()})
    return LockList(tuple(locks), rates, failing, len(nodes.all), nodes.quorum)


def _report(
    session: Session, key: Any, value: Any, votes: Mapping[str, float], used: Mapping[str, int]
) -> LockReport:
    resource, permit = resource_of(session.options.prefix, text_of(key))
    text = "" if value is None else text_of(value)
    label, since, ttl, limit = parts_of(text)
    needed = session.nodes.quorum
    left = sorted(votes.values(), reverse=True)
    held = len(votes) >= needed
    return LockReport(
        resource,
        permit,
        limit,
        used.get(resource, 0),
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


def _rates(session: Session, found: Mapping[str, _Starts]) -> tuple[RateReport, ...]:
    """Return the rates of which starts are used, in order. found: by node that answers."""
    by_resource: dict[str, list[tuple[str, _Scores]]] = {}
    for starts in found.values():
        for resource, stored in starts.items():
            by_resource.setdefault(resource, []).append(stored)
    reports = (_rate(session, resource, len(found), of) for resource, of in by_resource.items())
    shown = (report for report in reports if report is not None and report.used)
    return tuple(sorted(shown, key=lambda report: report.resource))


def _rate(
    session: Session, resource: str, answering: int, stored: Sequence[tuple[str, _Scores]]
) -> RateReport | None:
    """Return what is used of a rate; None if another program wrote it.

    answering: the number of nodes that do. stored: on each node that has it.
    """
    nodes = session.nodes
    wall = session.clock.wall_us() / 1e6
    read = _STORED_RATE.fullmatch(Counter(text for text, _ in stored).most_common(1)[0][0])
    rate = None if read is None else Rate.parse(read[2])
    if read is None or rate is None:
        return None
    kept = int(read[1]) / 1000
    waits = []
    for permit in {permit for _, ages in stored for permit in ages}:
        if not permit.isdecimal() or int(permit) >= rate.starts:
            continue
        ends = [max(0.0, kept - max(0.0, ages[permit])) for _, ages in stored if permit in ages]
        ends += [0.0] * (answering - len(ends)) + [math.inf] * (len(nodes.all) - answering)
        wait = expires_in(ends, nodes.quorum)
        waits.append(math.inf if wait is None else wait)
    used = sum(wait > 0 for wait in waits)
    next_in = min(waits) if used == rate.starts else 0.0
    next_start = None if math.isinf(next_in) else in_iso(wall + next_in)
    return RateReport(resource, str(rate), used, rate.starts, next_in, next_start, int(read[1]))


def break_lock(session: Session, lock: LockReport) -> BrokenLock:
    """Delete a lock if its value is still the same, and prevent that its holder reclaims it.

    The holder notices this at its next renewal. Until then it may run together with a new holder.
    """
    prefix = session.options.prefix
    broken = broken_key(text_of(lock.key), text_of(lock.value))
    waiting = waiting_key(prefix, name_of_lock(lock.resource))
    # milliseconds; a holder reclaims for no longer than its lease
    lasting = str(int(session.options.guard.grace_period * 1000))
    inbox = encoded(inbox_channel(prefix, ""))
    keys = "3", lock.key, encoded(broken), encoded(waiting)
    force_unlock = "EVAL", BREAK.source, *keys, lock.value, lasting, inbox
    deleted, failing = ask_each(
        session.nodes, lambda connection: bool(read_number(reply_of(connection, *force_unlock)))
    )
    return BrokenLock(lock, tuple(node for node, gone in deleted.items() if gone), failing)


def break_rate(session: Session, rate: RateReport) -> FreedRate:
    """Give all starts of a rate back, and wake who waits for one.

    Bodies that have started run on, so more may start in a period than the rate says.
    """
    prefix = session.options.prefix
    waiting = waiting_key(prefix, name_of_rate(rate.resource))
    keys = map(encoded, (*rate_keys(prefix, rate.resource), waiting))
    # the same text on each node: a waiter acts on an announcement of a quorum
    words = "", new_token(), encoded(inbox_channel(prefix, "")), str(rate.kept_ms)
    cancel = "EVAL", CANCEL.source, "3", *keys, *words
    found, failing = ask_each(
        session.nodes, lambda connection: read_number(reply_of(connection, *cancel))
    )
    return FreedRate(rate, found, failing)


def _parts(names: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield names in parts, as many as one write asks about."""
    for first in range(0, len(names), ASKED_AT_ONCE):
        yield names[first : first + ASKED_AT_ONCE]


def values_on(connection: Any, names: Sequence[Any]) -> Iterator[tuple[Any, Any, float]]:
    """Yield the name, the value and the remaining seconds of each key that exists."""
    for part in _parts(names):
        connection.send_packed_command(
            connection.pack_commands([("MGET", *part), ("EXISTS", *part)])
        )
        values = read_list(connection.read_response(), len(part))
        asked = [pair for pair in zip(part, values, strict=True) if pair[1] is not None]
        if read_number(connection.read_response()) > len(asked):  # MGET has none of another type
            asked = list(zip(part, values, strict=True))
        connection.send_packed_command(
            connection.pack_commands([("PTTL", name) for name, _ in asked])
        )
        for name, value in asked:
            ms = read_number(connection.read_response())
            if ms != GONE:
                if value is not None:
                    read_text(value)
                yield name, value, math.inf if ms < 0 else ms / 1000


def _starts_on(connection: Any, prefix: str, resources: Sequence[str]) -> _Starts:
    """Return the starts of resources on one node: the stored rate, and the age of each start."""
    found: dict[str, tuple[str, _Scores]] = {}
    for part in _parts(resources):
        keys = [[encoded(key) for key in rate_keys(prefix, resource)] for resource in part]
        asked: list[tuple[Any, ...]] = [("TIME",)]
        asked += [("ZRANGE", taken, "0", "-1", "WITHSCORES") for taken, _ in keys]
        asked += [("HGET", tokens, "rate") for _, tokens in keys]
        connection.send_packed_command(connection.pack_commands(asked))
        seconds, microseconds = map(int, read_list(connection.read_response(), 2))
        now = seconds + microseconds / 1e6
        taken_at = [_scores_of(_next_reply(connection)) for _ in part]
        rates = [_next_reply(connection) for _ in part]
        for resource, scores, stored in zip(part, taken_at, rates, strict=True):
            if scores and stored is not None:
                ages = {text_of(permit): now - at / 1000 for permit, at in scores.items()}
                found[resource] = read_text(stored), ages
    return found


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


def list_waiting(session: Session, resource: str | None = None) -> WaitingList:
    """Return all processes that wait for a lock or a start of a rate, or those of one resource."""
    prefix = session.options.prefix
    nodes = session.nodes
    beginning = waiting_key(prefix, "")
    names = []
    if resource is not None:
        names = [name_of_lock(resource), name_of_rate(resource)]
    keys = [encoded(waiting_key(prefix, name)) for name in names]

    def ask(connection: Any) -> tuple[list[tuple[str, _Scores | None]], set[Any] | None, _Starts]:
        sets = [
            (text_of(name).removeprefix(beginning), scores)
            for name, scores in _sets(connection, keys or set(names_on(connection, beginning)))
        ]
        waiters = {waiter for _, scores in sets for waiter in scores or ()}
        listening = _listening(connection, prefix, sorted(waiters))
        awaited = [waiting_for(name) for name, _ in sets]
        rated = [resource for resource, is_rate in awaited if is_rate]
        return sets, listening, _starts_on(connection, prefix, rated)

    found, failing = ask_each(nodes, ask)
    heard = [listening for _, listening, _ in found.values() if listening is not None]
    listens = None if len(heard) < nodes.quorum else set().union(*heard)
    # by what is waited for and waiter: since, by node
    registered: dict[tuple[str, bool], dict[Any, dict[str, float]]] = {}
    wrong_type: dict[str, tuple[str, ...]] = {}
    for node, (sets, _, _) in found.items():
        for name, scores in sets:
            awaited = waiting_for(name)
            if scores is None:
                wrong_type[awaited[0]] = (*wrong_type.get(awaited[0], ()), node)
            for waiter, since in (scores or {}).items():
                registered.setdefault(awaited, {}).setdefault(waiter, {})[node] = since
    rates = _rates(session, {node: starts for node, (_, _, starts) in found.items()})
    next_starts = {rate.resource: rate.next_start for rate in rates}
    processes = []
    for (resource, is_rate), waiters in sorted(registered.items()):
        order = sorted((_agreed(on.values()), waiter) for waiter, on in waiters.items())
        for rank, (since, waiter) in enumerate(order):  # as the nodes keep them
            text = text_of(waiter)
            on = tuple(waiters[waiter])
            moment = in_iso(since or None)  # None of a hold, which waits before all others
            named = "rate" if is_rate else "lock", rank, *_name_of(text), text, moment, on
            is_there = listens is None or waiter in listens
            until = next_starts.get(resource) if is_rate else None
            processes.append(WaitingProcess(resource, *named, is_there, until))
    return WaitingList(tuple(processes), wrong_type, failing, len(nodes.all), nodes.quorum)


def _name_of(waiter: str) -> tuple[str, int | None]:
    parts = waiter.rsplit(":", 2)  # a name as Inbox makes it
    if len(parts) != 3 or not parts[1].isdecimal() or len(parts[1]) > MOST_DIGITS:
        return waiter, None
    return parts[0], int(parts[1])


def _agreed(since: Iterable[float]) -> float:
    """Return what most nodes say; of several, the earliest. A node may lack the last write."""
    votes = Counter(since)
    return min(votes, key=lambda one: (-votes[one], one))


def _sets(connection: Any, names: Collection[Any]) -> Iterator[tuple[Any, _Scores | None]]:
    """Yield the name of each set, and since when each member waits; None for another type."""
    for part in _parts(list(names)):
        connection.send_packed_command(
            connection.pack_commands([("ZRANGE", name, "0", "-1", "WITHSCORES") for name in part])
        )
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
