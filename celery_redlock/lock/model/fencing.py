"""Fencing tokens: each holder's is larger, so that storage can reject an earlier holder's write."""

from __future__ import annotations

GREATEST_TOKEN = 2**52  # the greatest token that a client proposes
LAST_TOKEN = 2**53  # Lua's numbers are doubles: adding 1 to this one changes nothing


class Fence:
    """The fencing token of one key, and the known counters of the nodes.

    Each node has its own counter. The token is the largest counter of a quorum. It may be used once
    a quorum of nodes, asked for this key, has reached it. Every later holder of the key then asks
    at least one of these nodes, so the later token is larger.
    """

    __slots__ = ("_counters", "_quorum", "token")

    def __init__(self, quorum: int) -> None:
        self._quorum = quorum
        self._counters: dict[int, int] = {}
        self.token = 0

    def counted(self, node: int, counter: int) -> None:
        """Record a node's counter, from its reply to an acquire or a renewal."""
        self._counters[node] = max(counter, self._counters.get(node, 0))

    @property
    def greatest(self) -> int:
        """The largest known counter."""
        return max(self._counters.values(), default=0)

    def choose(self, token: int) -> None:
        """Set the token, unless it is greater already."""
        self.token = max(self.token, token)

    @property
    def usable(self) -> bool:
        """Whether a quorum of nodes has reached the token."""
        token = self.token
        counters = self._counters.copy()  # another thread may add a late counter meanwhile
        reached = sum(counter >= token for counter in counters.values())
        return token > 0 and reached >= self._quorum


def proposal(wall_us: int) -> int:
    """Return the least token to ask for: the wall clock in microseconds, read after `sent`.

    So tokens grow even after nodes have lost their counters, if the wall clocks are right.
    """
    return min(wall_us, GREATEST_TOKEN)
