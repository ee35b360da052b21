"""For how long a node that lost its data must not vote, and the script arguments for that."""

from __future__ import annotations

import math
from dataclasses import dataclass


def grace_period(max_ttl: float) -> float:
    """Return the seconds for which a node that lost its data must not vote.

    Longer than any lease that the node may have forgotten. The extra second allows for differences
    of the clients' wall clocks, so that proposed fencing tokens stay in order, too.
    Source: RFC 7530, section 9.6.2: after a restart an NFS server grants no new locks for a while.
    """
    return max_ttl + 1.0


@dataclass(frozen=True)
class Guard:
    """The restart guard: a node that may have forgotten locks abstains for a grace period.

    word: the mode. "strict": a node that does not know this prefix abstains, unless an operator
    trusted it. "off": every node votes. prefix: of the guard's keys. grace_period: seconds.
    """

    word: str
    prefix: str
    grace_period: float

    def arguments(self, run_id: str) -> tuple[str, str]:
        """Return the guard's arguments of the scripts: the server's run id, the period in ms."""
        if self.word == "off":
            return "", ""
        return run_id, str(math.ceil(self.grace_period * 1000))
