"""Counts the votes of one round, and finds out when and how the round is decided."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Vote(enum.Enum):
    """One node's reply to a request for a lock."""

    GRANTED = "granted"
    REFUSED = "refused"  # the key has another client's value
    ABSTAINED = "abstained"  # the node may have lost data: it is in its grace_period
    FAILED = "failed"  # no reply, or an error


GRANTED, REFUSED, ABSTAINED, FAILED = Vote


def quorum_of(nodes: int) -> int:
    """Return the size of a majority of this many nodes."""
    return nodes // 2 + 1


def is_split(holders: Sequence[str], votes_due: int, quorum: int) -> bool:
    """Return whether rival clients seem to share the nodes, so that none of them has a quorum.

    holders: the lock value on each node that refused. votes_due: number of nodes that have not
    voted. The result is a guess, used to retry soon: a rival may have a quorum with these nodes.
    """
    largest_share = max(map(holders.count, holders), default=0)
    return 0 < largest_share < quorum and (
        len(set(holders)) > 1 or largest_share + votes_due < quorum
    )


class Tally:
    """The votes of one round.

    nodes: the number of nodes that were asked. quorum: of these. A round is decided as soon as the
    votes still due cannot change its outcome.
    Source: redis.io "Distributed Locks with Redis", for the majority.
    """

    __slots__ = ("granted", "nodes", "quorum", "refused", "withheld")

    def __init__(self, nodes: int, quorum: int) -> None:
        self.nodes = nodes
        self.quorum = quorum
        self.granted = self.refused = 0
        self.withheld = 0  # abstained or failed

    def add(self, vote: Vote) -> bool:
        """Count one node's vote; return whether the outcome is certain now."""
        if vote is GRANTED:
            self.granted += 1
        elif vote is REFUSED:
            self.refused += 1
        else:
            self.withheld += 1
        quorum = self.quorum
        return self.granted >= quorum or self.nodes - self.refused - self.withheld < quorum

    @property
    def reached(self) -> bool:
        """Whether a quorum granted."""
        return self.granted >= self.quorum

    @property
    def impossible(self) -> bool:
        """Whether no quorum is possible any more, because too many nodes did not grant."""
        return self.nodes - self.refused - self.withheld < self.quorum

    @property
    def unheard(self) -> int:
        """The number of nodes whose vote is still due."""
        return self.nodes - self.granted - self.refused - self.withheld

    def taken(self, *, time_is_up: bool) -> bool:
        """Return whether a failed round means that others hold the lock, and not that nodes fail.

        time_is_up: whether the node timeout has passed. Before that, a node whose vote is due
        still counts as able to vote.
        """
        voters = self.granted + self.refused
        able_voters = voters if time_is_up else voters + self.unheard
        return self.refused > 0 and able_voters >= self.quorum


class HeldByOther(NamedTuple):
    """A node's reply that another client holds the lock."""

    value: str  # of the key, on the node
    expires_in: float  # seconds, inf if the key never expires
    wall: float  # seconds since 1970 by the node's clock
