"""The fencing token of a key: proposed by a client, counted by the nodes, confirmed by a majority.

Reads no clock. `lock/engine/renewer.py` asks the nodes to confirm a token.
"""

from __future__ import annotations

MAX_PROPOSAL = 2**52  # the greatest fencing token that a client proposes
MAX_TOKEN = 2**53  # Lua's numbers are doubles: adding 1 to this one changes nothing
# µs: by which a counter may be ahead of a client's clock on one node alone
MAX_CLOCK_LEAD = 86_400_000_000
MAX_QUORUM_LEAD = 2**20  # by which a counter that is further ahead may exceed those of a quorum


def proposal(wall_us: int) -> int:
    """Return the least token to ask for: the wall clock in microseconds, read after `sent`.

    So tokens grow even after nodes have lost their counters, if the wall clocks are right.
    """
    return min(wall_us, MAX_PROPOSAL)


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
        self._counters[node] = max(counter, self._counters.get(node, 0))

    def withdraw(self, node: int) -> None:
        self._counters.pop(node, None)

    @property
    def max_counter(self) -> int:
        counters = sorted(self._counters.copy().values(), reverse=True)
        quorum_counter = counters[self._quorum - 1] if len(counters) >= self._quorum else 0
        return max(self.proposed + MAX_CLOCK_LEAD, quorum_counter + MAX_QUORUM_LEAD)

    @property
    def implausible(self) -> list[int]:
        max_counter = self.max_counter
        return [node for node, counter in self._counters.copy().items() if counter > max_counter]

    def _plausible(self) -> list[int]:
        max_counter = self.max_counter
        return [counter for counter in self._counters.copy().values() if counter <= max_counter]

    @property
    def has_quorum(self) -> bool:
        """Whether the counters of a quorum count, so that `greatest` may be a token."""
        return len(self._plausible()) >= self._quorum

    @property
    def greatest(self) -> int:
        return max(self._plausible(), default=0)

    def choose(self, token: int) -> None:
        self.token = max(self.token, token)

    @property
    def usable(self) -> bool:
        """Whether a quorum of nodes has reached the token."""
        reached_nodes = sum(counter >= self.token for counter in self._plausible())
        return self.token > 0 and reached_nodes >= self._quorum
