"""Lists the processes that are registered on the nodes as waiters, in the order of their turns.

The nodes know them even if they do not answer: a stopped process, or one that was killed. It stays
registered until a release passes it over, or nobody waits for the resource any more.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from celery_redlock.lock.client import Redlock
from celery_redlock.lock.model.keys import MOST_DIGITS, inbox_channel, waiting_key
from celery_redlock.lock.node_status import ask_each, in_iso
from celery_redlock.lock.server.admin import names_on, reply_of
from celery_redlock.lock.transport.encoding import encoded, read_list, read_text, text_of

ASKED_AT_ONCE = 500  # sets


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
class WaitingSight:
    """The waiting processes on the nodes that answer, by resource and in order."""

    processes: tuple[WaitingProcess, ...]
    # by resource: the nodes on which a key of another program has the name of the set of waiters
    wrong_type: Mapping[str, tuple[str, ...]]
    failing: Mapping[str, str]  # by node, the cause
    asked: int = field(repr=False)  # the number of nodes
    needed: int = field(repr=False)  # how many must answer

    @property
    def is_known(self) -> bool:
        """Whether enough nodes answered to tell which processes wait."""
        return self.asked - len(self.failing) >= self.needed


def look_at_waiting(redlock: Redlock) -> WaitingSight:
    """Return all processes that wait for a lock.

    Scans each node's keys in parts, so that no other client waits.
    """
    beginning = waiting_key(redlock.prefix, "")

    def look(
        connection: Any,
    ) -> tuple[list[tuple[str, Mapping[Any, float] | None]], set[Any] | None]:
        names = list(set(names_on(connection, beginning)))
        sets = [(text_of(n).removeprefix(beginning), on) for n, on in _sets(connection, names)]
        waiters = {waiter for _, scores in sets for waiter in scores or ()}
        return sets, _listening(connection, redlock.prefix, sorted(waiters))

    found, failing = ask_each(redlock, look)
    heard = [listening for _, listening in found.values() if listening is not None]
    nodes = redlock.session.nodes
    listens = None if len(heard) < nodes.quorum else set().union(*heard)
    registered: dict[str, dict[Any, dict[str, float]]] = {}
    wrong_type: dict[str, tuple[str, ...]] = {}
    for node, (sets, _) in found.items():
        for resource, scores in sets:
            if scores is None:
                wrong_type[resource] = (*wrong_type.get(resource, ()), node)
                continue
            for waiter, since in scores.items():
                registered.setdefault(resource, {}).setdefault(waiter, {})[node] = since
    lines = (
        _in_order(resource, waiters, listens) for resource, waiters in sorted(registered.items())
    )
    processes = tuple(itertools.chain(*lines))
    return WaitingSight(processes, wrong_type, failing, len(nodes.all), nodes.quorum)


def _in_order(
    resource: str, waiters: Mapping[Any, Mapping[str, float]], listens: Collection[Any] | None
) -> list[WaitingProcess]:
    """Return the waiters of one resource in the order in which the nodes keep them.

    waiters: by name, since when on each node. listens: those that are connected, None if no node
    can tell.
    """
    order = sorted((_agreed(on.values()), waiter) for waiter, on in waiters.items())
    return [
        WaitingProcess(
            resource,
            rank,
            *_name_of(text_of(waiter)),
            text_of(waiter),
            in_iso(since),
            tuple(waiters[waiter]),
            listens is None or waiter in listens,
        )
        for rank, (since, waiter) in enumerate(order)
    ]


def _name_of(waiter: str) -> tuple[str, int | None]:
    parts = waiter.rsplit(":", 2)  # as engine/inbox.py: Inbox.forget
    if len(parts) != 3 or not parts[1].isdecimal() or len(parts[1]) > MOST_DIGITS:
        return waiter, None
    return parts[0], int(parts[1])


def _agreed(since: Iterable[float]) -> float:
    """Return what most nodes say; of several, the earliest. A node may lack the last write."""
    votes = Counter(since)
    return min(votes, key=lambda one: (-votes[one], one))


def _sets(
    connection: Any, names: Sequence[Any]
) -> Iterator[tuple[Any, Mapping[Any, float] | None]]:
    """Yield the name of each set, and since when each member waits; None for another type."""
    for first in range(0, len(names), ASKED_AT_ONCE):
        part = names[first : first + ASKED_AT_ONCE]
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
            words = read_list(reply, len(reply) if isinstance(reply, list) else -1)
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
