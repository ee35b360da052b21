"""What a worker knows of releases: when to act on one, and which one a message has missed. Pure.

Every node announces each release to each subscribed worker. The worker acts on a release once, when
a majority has announced it: the lock's keys on the other nodes are still there before. A message
may also be on its way to the worker when its release is announced, so the worker remembers the
last releases of each channel. All of that is a hint: a dispatched message takes the lock like any
other, or is deferred again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

MESSAGE_IDS = 4096  # remembered: a node may announce hundreds of releases before the next one's do
RELEASE_HISTORY = 16  # releases of a channel that are remembered for messages on their way


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
        # by message id, least recent first: how many nodes announced it; None: it was acted on
        self._counts: dict[str, int | None] = {}
        self._begun: set[str] = set()  # channels to which a subscription has begun

    def is_decided(self, release: Release, subscriptions: int) -> bool:
        """Count one node's message; return whether to act on the release, which is once.

        subscriptions: how many nodes announce the releases of this channel to this worker.
        """
        if release.is_announced:
            return self._count(release, subscriptions)
        if release.channel == self._quorum_channel:
            return subscriptions >= self._majority  # so many nodes are up, one more than before
        is_first = subscriptions == 1 or release.channel not in self._begun
        self._begun.add(release.channel)
        return is_first

    def _count(self, release: Release, subscriptions: int) -> bool:
        needed = max(1, min(subscriptions, self._majority))
        if release.channel == self._quorum_channel:
            needed = 1  # an operator's `trust` is announced after all its nodes have done it
        count = self._counts.pop(release.message_id, 0)
        if count is not None:
            count += 1
        is_decided = count is not None and count >= needed
        self._counts[release.message_id] = None if is_decided else count
        if len(self._counts) > MESSAGE_IDS:
            del self._counts[next(iter(self._counts))]
        return is_decided

    def keep(self, channels: set[str]) -> None:
        """Forget the subscriptions to all other channels."""
        self._begun &= channels

    def clear(self) -> None:
        """Forget everything, when the room closes."""
        self._counts.clear()
        self._begun.clear()


@dataclass
class _Past:
    """A release that was acted on: monotonic seconds, and who was dispatched for it."""

    at: float
    receivers: set[Hashable] = field(default_factory=set)


class ReleaseHistory:
    """The last releases of each channel, for messages that were on their way to the worker.

    A release dispatches one message of each receiver: of locks a receiver is a limit, as each limit
    has a queue of its own; of a quorum each message is one. opened_at: monotonic seconds, when the
    room opened, as an earlier release may have been missed; None if the subscription's begin is
    enough.
    """

    def __init__(self, opened_at: float | None) -> None:
        self._opened_at = opened_at
        self._releases: dict[str, deque[_Past]] = {}

    def record(self, channel: str, at: float, receivers: set[Hashable]) -> None:
        """Remember a release, and the receivers that have had a message dispatched for it."""
        self._of(channel).append(_Past(at, receivers))

    def claim(self, channel: str, receiver: Hashable, refused_at: float, count: int) -> bool:
        """Return whether a message missed a release on its way here, and take that release.

        The release is then for this message and for no later one of its receiver. refused_at:
        monotonic seconds. count: how many of the last releases matter: of permits several may have
        been released, of a plain lock the last release alone matters.
        """
        for past in list(self._of(channel))[-count:]:
            if receiver not in past.receivers and past.at >= refused_at:
                past.receivers.add(receiver)
                return True
        return False

    def keep(self, channels: set[str]) -> None:
        """Forget all other channels."""
        self._releases = {c: past for c, past in self._releases.items() if c in channels}

    def _of(self, channel: str) -> deque[_Past]:
        if channel not in self._releases:
            opened = [] if self._opened_at is None else [_Past(self._opened_at)]
            self._releases[channel] = deque(opened, maxlen=RELEASE_HISTORY)
        return self._releases[channel]


class FollowUps:
    """The release of each channel after which the heads try once more, if no other one follows.

    A release that dispatches messages in three workers may give each of them a node and none of
    them a majority. A dispatched message may also be refused another lock, and then announces
    nothing. clocks_differ: seconds, at the most, between the wall clocks of two workers.
    """

    def __init__(self, clocks_differ: float) -> None:
        self._clocks_differ = clocks_differ
        self._pending: dict[str, float] = {}  # monotonic seconds of the latest release, by channel

    def expect(self, channel: str, released_at: float) -> None:
        """Note a release, in monotonic seconds; the follow-up of an earlier one is off."""
        self._pending[channel] = released_at

    def take(self, channel: str, released_at: float) -> bool:
        """Return whether the follow-up of a release is still to happen, and note that it does."""
        if self._pending.get(channel) != released_at:
            return False
        del self._pending[channel]
        return True

    def may_still_be_free(self, refused_at: float, released_at: float) -> bool:
        """Return whether no message of a queue was refused after a release.

        Both in monotonic seconds; the refusal is another worker's, by its wall clock.
        """
        return refused_at < released_at - self._clocks_differ
