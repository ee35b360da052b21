"""Fencing tokens: each holder's is larger, so that storage can reject an earlier holder's write."""

from __future__ import annotations

GREATEST_TOKEN = 2**52  # the greatest token that a client proposes
LAST_TOKEN = 2**53  # Lua's numbers are doubles: adding 1 to this one changes nothing
AHEAD = 86_400_000_000  # µs: by which a counter may be ahead of a client's clock on one node alone
APART = 2**20  # by which a counter that is further ahead may exceed those of a quorum


class Fence:
    """The fencing token of one key, and the known counters of the nodes.

    Each node has its own counter. The token is the largest counter of a quorum. It may be used once
    a quorum of nodes, asked for this key, has reached it. Every later holder of the key then asks
    at least one of these nodes, so the later token is larger.

    A counter that is far ahead of the clock and of a quorum was written by another program. It does
    not count, as if the node had not answered: else one node could end the tokens of all others.
    proposed: the least token that was asked for.
    """

    __slots__ = ("_counters", "_quorum", "proposed", "token")

    def __init__(self, quorum: int) -> None:
        self._quorum = quorum
        self._counters: dict[int, int] = {}
        self.token = self.proposed = 0

    def counted(self, node: int, counter: int) -> None:
        """Record a node's counter, from its reply to an acquire or a renewal."""
        self._counters[node] = max(counter, self._counters.get(node, 0))

    def withdraw(self, node: int) -> None:
        """Forget the counter of a node whose vote does not count any more."""
        self._counters.pop(node, None)

    @property
    def bound(self) -> int:
        """The greatest plausible counter."""
        counters = sorted(self._counters.copy().values(), reverse=True)
        agreed = counters[self._quorum - 1] if len(counters) >= self._quorum else 0
        return max(self.proposed + AHEAD, agreed + APART)

    @property
    def implausible(self) -> list[int]:
        """The nodes whose counters do not count."""
        bound = self.bound
        return [node for node, counter in self._counters.copy().items() if counter > bound]

    @property
    def has_quorum(self) -> bool:
        """Whether the counters of a quorum count, so that `greatest` may be a token."""
        return len(self._counters) - len(self.implausible) >= self._quorum

    @property
    def greatest(self) -> int:
        """The largest known counter that is plausible."""
        bound = self.bound
        counters = self._counters.copy()
        return max((counter for counter in counters.values() if counter <= bound), default=0)

    def choose(self, token: int) -> None:
        """Set the token, unless it is greater already."""
        self.token = max(self.token, token)

    @property
    def usable(self) -> bool:
        """Whether a quorum of nodes has reached the token."""
        token, bound = self.token, self.bound
        counters = self._counters.copy()  # another thread may add a late counter meanwhile
        reached = sum(token <= counter <= bound for counter in counters.values())
        return token > 0 and reached >= self._quorum


def proposal(wall_us: int) -> int:
    """Return the least token to ask for: the wall clock in microseconds, read after `sent`.

    So tokens grow even after nodes have lost their counters, if the wall clocks are right.
    """
    return min(wall_us, GREATEST_TOKEN)
