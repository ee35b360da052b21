"""Who is named by a release, and when it is its turn. Pure.

A release names up to three waiters, in order, on each node. All of that is a hint: a waiter whose
turn it is takes the lock like any other, or is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from celery_redlock.lock.model.keys import waiting_key

TURN = 0.1  # seconds between the turns of two waiters that one release names
RELEASES = 4096  # remembered: a node may announce hundreds of releases before the next one's do

# bounded: anybody who may publish on a node can write such a message
_NAMED = re.compile(r"(?P<rank>[0-9]{1,2}) (?P<release>[^ ]{0,100}) (?P<waiting>.*)", re.DOTALL)


@dataclass(frozen=True)
class Registration:
    """What the nodes keep of one waiter.

    waiter: the name of its process, new in each process. since: seconds since 1970, when its first
    caller or message began to wait. limit: of the lock that it waits for. passed: how many waiters
    before it have had their turn.
    """

    waiter: str
    resource: str
    since: float
    limit: int = 1
    passed: int = 0


@dataclass(frozen=True)
class Named:
    """One node's message: a release names this waiter.

    rank: 0 for the first. release: the same text from every node. resource: what is released.
    """

    rank: int
    release: str
    resource: str

    @classmethod
    def parse(cls, message: str, prefix: str) -> Named | None:
        """Return a message of lua/announce.lua; None for any other text."""
        found, beginning = _NAMED.fullmatch(message), waiting_key(prefix, "")
        if found is None or not found["waiting"].startswith(beginning):
            return None
        return cls(int(found["rank"]), found["release"], found["waiting"][len(beginning) :])


class Namings:
    """Counts the nodes that name this waiter, and decides how many turns it is to wait.

    majority: of all nodes. A waiter may act once a majority has announced the release: before that
    the lock's keys on the other nodes are still there.
    """

    def __init__(self, majority: int) -> None:
        self._majority = majority
        # by release, least recent first: the ranks that nodes told, by node; None: it is decided
        self._ranks: dict[str, dict[int, int] | None] = {}

    def turns(self, named: Named, node: int) -> int | None:
        """Count one node's message; return the turns to wait from now on, None if nothing changes.

        If the nodes differ, it waits one turn more than the lowest rank says: another waiter may be
        named first elsewhere. A waiter that one node alone names first waits one turn, in case that
        no waiter is named first by a majority.
        """
        by_node = self._ranks.pop(named.release, {})
        if by_node is None or node in by_node:
            self._remember(named.release, by_node)
            return None
        by_node[node] = named.rank
        ranks = list(by_node.values())
        is_decided = len(ranks) >= self._majority
        self._remember(named.release, None if is_decided else by_node)
        if is_decided:
            return ranks[0] if len(set(ranks)) == 1 else min(ranks) + 1
        return 1 if named.rank == 0 and ranks.count(0) == 1 else None

    def _remember(self, release: str, ranks: dict[int, int] | None) -> None:
        self._ranks[release] = ranks
        if len(self._ranks) > RELEASES:
            del self._ranks[next(iter(self._ranks))]

    def clear(self) -> None:
        """Forget all releases."""
        self._ranks.clear()


@dataclass(frozen=True)
class Standing:
    """How a waiter stands. rank: how many waiters are before it, -1 if a node keeps no waiters.

    free_in: seconds until a key of the lock is free; 0 now, inf if none expires.
    """

    rank: int
    free_in: float

    @property
    def is_free(self) -> bool:
        """Whether a key of the lock is free now."""
        return self.free_in <= 0


def merged(standings: Collection[Standing], quorum: int) -> Standing | None:
    """Return what a quorum of nodes says together; None if fewer have replied.

    If the nodes differ about the rank, one waiter more than the lowest says may be before this one.
    If none of them keeps waiters, each is the first: no release names any.
    """
    if len(standings) < quorum:
        return None
    ranks = {one.rank for one in standings if one.rank >= 0} or {0}
    rank = min(ranks) + (len(ranks) > 1)
    return Standing(rank, sorted(one.free_in for one in standings)[quorum - 1])


def free_in(ms: int) -> float:
    """Return the seconds that a node's reply says; -1: no key expires."""
    return math.inf if ms < 0 else ms / 1000
