"""Fencing tokens: numbers that grow with each holder, so that storage can refuse an earlier one."""

from __future__ import annotations

GREATEST_TOKEN = 2**52  # that is asked for
LAST_TOKEN = 2**53  # beyond it Lua's numbers stand still


class Fence:
    """A fencing token on its way to a quorum of nodes, under one key.

    Each node counts on its own, so the largest of a quorum's counters is the token, and it may be
    used once a quorum of nodes, asked under the key, is known to have reached it: every later
    holder of that key meets one of them.
    """

    __slots__ = ("_counters", "_quorum", "token")

    def __init__(self, quorum: int) -> None:
        self._quorum = quorum
        self._counters: dict[int, int] = {}
        self.token = 0

    def counted(self, node: int, counter: int) -> None:
        """Take note of a node's counter, given with a grant or a renewal of ours."""
        self._counters[node] = max(counter, self._counters.get(node, 0))

    @property
    def greatest(self) -> int:
        """The largest counter that is known."""
        return max(self._counters.values(), default=0)

    def choose(self, token: int) -> None:
        """Make a number the token, or leave a greater one."""
        self.token = max(self.token, token)

    @property
    def usable(self) -> bool:
        """Whether a quorum of nodes has reached the token."""
        token = self.token
        counters = self._counters.copy()  # any thread may bring in a late one
        reached = sum(counter >= token for counter in counters.values())
        return token > 0 and reached >= self._quorum


def proposal(wall_us: int) -> int:
    """Return the least token to ask for: the wall clock in us, read after the sending time.

    So tokens grow also past nodes that lost their counters, while wall clocks are right.
    """
    return min(wall_us, GREATEST_TOKEN)
