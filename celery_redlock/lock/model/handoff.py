"""Who is named by a release, whose turn it is, and what one that waits does next. Pure.

A release names up to three processes that wait, in order, on each node. All of that is a hint: a
process whose turn it is takes the lock like any other, or is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from celery_redlock.lock.model.keys import waiting_key

TURN = 0.1  # seconds between the turns of two processes that one release names
MAX_UNCLEAR_PAUSE = 30.0  # seconds between two tries for a rate whose nodes do not agree
MAX_TURNS = 10  # that one waits at a time for those before it, which may be stopped
MAX_RELEASES = 4096  # remembered: a node may announce hundreds of releases before the next one's do
# why one that waits may act; see LockHandedOffEvent. LOOK: it begins to wait, or to listen
ACTED = "acted"
LADDER = "ladder"
FALLBACK = "fallback"
LOOK = ""

# bounded: anybody who may publish on a node can write such a message
_NAMING_MESSAGE = re.compile(
    r"(?P<rank>[0-9]{1,2}) (?P<release>[^ ]{0,100}) (?P<waiting>.*)", re.DOTALL
)


@dataclass(frozen=True)
class Named:
    """One node's message: a release names this process."""

    rank: int  # 0 for the first
    release: str  # the same text from every node
    resource: str  # what is released

    @classmethod
    def parse(cls, message: str, prefix: str) -> Named | None:
        """Return a message of lua/announce.lua; None for any other text."""
        match = _NAMING_MESSAGE.fullmatch(message)
        key_prefix = waiting_key(prefix, "")
        if match is None or not match["waiting"].startswith(key_prefix):
            return None
        return cls(int(match["rank"]), match["release"], match["waiting"][len(key_prefix) :])


class Namings:
    """Counts the nodes that name this process, and decides how many turns it is to wait.

    majority: of all nodes. A process may act once a majority has announced the release: before that
    the lock's keys on the other nodes are still there.
    """

    def __init__(self, majority: int) -> None:
        self._majority = majority
        # by release, least recent first: the ranks that nodes told, by node; None: it is decided
        self._ranks: dict[str, dict[int, int] | None] = {}

    def turns(self, naming: Named, node: int) -> int | None:
        """Count one node's message; return the turns to wait from now on, None if nothing changed.

        If the nodes differ, it waits one turn more than the lowest rank says: another process may
        be named first elsewhere. A process that one node alone names first waits one turn, in case
        that no process is named first by a majority.
        """
        by_node = self._ranks.pop(naming.release, {})
        self._ranks[naming.release] = by_node  # as the most recent one
        if len(self._ranks) > MAX_RELEASES:
            del self._ranks[next(iter(self._ranks))]
        if by_node is None or node in by_node:
            return None
        by_node[node] = naming.rank
        ranks = list(by_node.values())
        if len(ranks) >= self._majority:
            self._ranks[naming.release] = None
            return ranks[0] if len(set(ranks)) == 1 else min(ranks) + 1
        return 1 if naming.rank == 0 and ranks.count(0) == 1 else None


class Place(NamedTuple):
    """How a process stands among those that wait for a lock."""

    rank: int  # how many are before it, -1 if a node keeps none
    free: int  # how many permits are free now
    free_in: float  # seconds until one is free for it; 0 now, inf if none expires


def place_of_quorum(places: Collection[Place], quorum: int) -> Place | None:
    """Return what a quorum of nodes says together; None if fewer have replied.

    If the nodes differ about the rank, one process more than the lowest says may be before this
    one. If none of them keeps any, each is the first: no release names any.
    """
    if len(places) < quorum:
        return None
    ranks = {place.rank for place in places if place.rank >= 0} or {0}
    free = sorted((place.free for place in places), reverse=True)[quorum - 1]
    free_in = sorted(place.free_in for place in places)[quorum - 1]
    return Place(min(ranks) + (len(ranks) > 1), free, free_in)


def free_in(ms: int) -> float:
    """Return the seconds that a node's reply says; -1: no key expires."""
    return math.inf if ms < 0 else ms / 1000


def unclear_pause(previous_pause: float) -> float:
    """Return the seconds until the next try for a rate of which no quorum shares a permit.

    Each node by itself reports a free permit, so clients would try without a pause. previous_pause:
    seconds of the pause before; 0.0 before the first one.
    """
    return min(2 * previous_pause or TURN, MAX_UNCLEAR_PAUSE)


class Step(NamedTuple):
    """Why one that waits may act."""

    why: str  # a step of `LockHandedOffEvent`, or LOOK
    passed: int = 0  # how many before it have had their turn
    named_at: float | None = None  # monotonic seconds of the release's message
    unless: str | None = None  # id of a message; if its run succeeds, this step is not needed


class AskAgain(NamedTuple):
    """Ask the nodes again after so many seconds, for a step of the ladder."""

    seconds: float
    step: Step


class WaitFree(NamedTuple):
    """Wait for a release, or for so many seconds: until a lease ends, inf if none does."""

    seconds: float


def next_move(place: Place, step: Step) -> AskAgain | WaitFree | None:
    """Return what one that waits does next; None: it tries.

    It tries if a permit is left over for it: those before it take one each, unless they have had
    their turn. Else it waits one turn for each of them, or until a permit is free for it.
    """
    if place.free <= 0:
        return WaitFree(place.free_in)
    waiters_ahead = place.rank - step.passed - place.free + 1
    if waiters_ahead <= 0:
        return None
    turns = min(waiters_ahead, MAX_TURNS)
    return AskAgain(turns * TURN, step._replace(passed=step.passed + turns))
