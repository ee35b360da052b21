"""Votes of one round, counted: when it is decided, and how."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Vote(enum.Enum):
    """One node's answer to a request for a lock."""

    GRANTED = "granted"
    REFUSED = "refused"  # another token stands there
    SILENT = "silent"  # the node lost its memory and must not vote yet
    FAILED = "failed"  # no answer, or an error


GRANTED, REFUSED, SILENT, FAILED = Vote


def quorum_of(nodes: int) -> int:
    """Return how many of so many nodes are a majority."""
    return nodes // 2 + 1


def is_split(holders: Sequence[str], unheard: int, quorum: int) -> bool:
    """Tell whether rivals share the nodes, as far as one can see, so that nobody has the lock.

    holders: what stands on each node that refused. unheard: nodes whose vote is still due.
    A guess by which to try again soon: one of them may have a quorum with what was not heard.
    """
    most = max((holders.count(holder) for holder in holders), default=0)
    return 0 < most < quorum and (len(set(holders)) > 1 or most + unheard < quorum)


class Tally:
    """The votes of one round.

    nodes: how many were asked. Raises nothing.
    Source: redis.io "Distributed Locks with Redis", for the majority; a round is over as soon as
    the votes still due cannot change its outcome.
    """

    __slots__ = ("granted", "nodes", "quorum", "refused", "withheld")

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.quorum = quorum_of(nodes)
        self.granted = self.refused = 0
        self.withheld = 0  # silent or failed: no vote at all

    def add(self, vote: Vote) -> bool:
        """Count one node's vote; True where the outcome is certain by now."""
        if vote is GRANTED:
            self.granted += 1
        elif vote is REFUSED:
            self.refused += 1
        else:
            self.withheld += 1
        return self.granted >= self.quorum or self.impossible

    @property
    def reached(self) -> bool:
        """A quorum granted."""
        return self.granted >= self.quorum

    @property
    def impossible(self) -> bool:
        """So many nodes did not grant that no quorum can any more (a blocking set)."""
        return self.nodes - self.refused - self.withheld < self.quorum

    @property
    def unheard(self) -> int:
        """Nodes whose vote is still due."""
        return self.nodes - self.granted - self.refused - self.withheld

    def taken(self, *, time_is_up: bool) -> bool:
        """Tell whether a failed round means that others hold the lock, not that nodes are away.

        time_is_up: nodes not yet heard had all the time they get; before that, each of them
        still counts as one that can vote.
        """
        voted = self.granted + self.refused
        able = voted if time_is_up else voted + self.unheard
        return self.refused > 0 and able >= self.quorum


@dataclass(frozen=True)
class HeldByOther:
    """A node's reply that another client holds the lock.

    value: that stands there. expires_in: seconds, inf if it never expires.
    """

    value: str
    expires_in: float
