"""What a worker knows of messages to all waiters, and of quorums that came back. Pure.

A release names its successors (`lock/model/handoff.py`). If no waiter is registered on a node, or
the lock was held by an earlier version, the node announces the release to each subscribed worker.
The worker acts on it once, when a majority has announced it: the lock's keys on the other nodes are
still there before. A message may be on its way to the worker when a quorum comes back, so the
worker remembers when. All of that is a hint: a dispatched message takes the lock like any other, or
is deferred again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

MESSAGE_IDS = 4096  # remembered: a node may announce hundreds of releases before the next one's do
LONGEST_ID = 100  # characters that are remembered; the random ones come first


@dataclass(frozen=True)
class Release:
    """Something that may be free: a lock, or a quorum on the channel of no-quorum waiters.

    message_id: of the announcement, the same from every node; "" if none came and one may have been
    missed: a subscription has just begun, or a message has just arrived.
    """

    channel: str
    message_id: str = ""

    @property
    def is_announced(self) -> bool:
        """Whether nodes have announced it."""
        return bool(self.message_id)


class Announcements:
    """Counts the nodes that announce a release, and decides whether to act on it now.

    majority: of all nodes. quorum_channel: of the waiters for which no quorum voted.
    """

    def __init__(self, majority: int, quorum_channel: str) -> None:
        self._majority, self._quorum_channel = majority, quorum_channel
        # by message id, least recent first: the nodes that announced it; None: it was acted on
        self._announced: dict[str, set[int] | None] = {}
        self._begun: set[str] = set()  # channels to which a subscription has begun

    def is_decided(self, release: Release, node: int, subscriptions: int) -> bool:
        """Count one node's message; return whether to act on the release, which is once.

        subscriptions: how many nodes announce the releases of this channel to this worker.
        """
        if release.is_announced:
            return self._count(release, node, subscriptions)
        if release.channel == self._quorum_channel:
            return subscriptions >= self._majority  # so many nodes are up, one more than before
        is_first = subscriptions == 1 or release.channel not in self._begun
        self._begun.add(release.channel)
        return is_first

    def _count(self, release: Release, node: int, subscriptions: int) -> bool:
        needed = max(1, min(subscriptions, self._majority))
        if release.channel == self._quorum_channel:
            needed = 1  # an operator's `trust` is announced after all its nodes have done it
        id_ = release.message_id[:LONGEST_ID]
        nodes = self._announced.pop(id_, set())
        if nodes is not None:
            nodes.add(node)
        is_decided = nodes is not None and len(nodes) >= needed
        self._announced[id_] = None if is_decided else nodes
        if len(self._announced) > MESSAGE_IDS:
            del self._announced[next(iter(self._announced))]
        return is_decided

    def keep(self, channels: set[str]) -> None:
        """Forget the subscriptions to all other channels."""
        self._begun &= channels

    def clear(self) -> None:
        """Forget everything, when the room closes."""
        self._announced.clear()
        self._begun.clear()


class QuorumHistory:
    """The last moment at which a quorum may have come back, for messages on their way here."""

    def __init__(self) -> None:
        self._at, self._receivers = -math.inf, set[Hashable]()

    def record(self, at: float, receivers: set[Hashable]) -> None:
        """Remember a moment, in monotonic seconds, and the messages dispatched for it."""
        self._at, self._receivers = at, receivers

    def claim(self, receiver: Hashable, refused_at: float) -> bool:
        """Return whether a message missed that moment on its way here, and note that.

        refused_at: monotonic seconds.
        """
        is_missed = receiver not in self._receivers and self._at >= refused_at
        if is_missed:
            self._receivers.add(receiver)
        return is_missed
