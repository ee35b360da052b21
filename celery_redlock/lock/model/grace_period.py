"""For how long a node that lost its memory must not vote, and what a server is told of that."""

from __future__ import annotations

import math
from dataclasses import dataclass


def grace_period(max_ttl: float) -> float:
    """Return the seconds for which a node that lost its memory must not vote.

    Longer than any lease that it may have forgotten, by what clients' wall clocks may differ: the
    proposals of fencing tokens stay in order, too.
    Source: RFC 7530, section 9.6.2: after a restart an NFS server grants no new locks for a while.
    """
    return max_ttl + 1.0


@dataclass(frozen=True)
class Guard:
    """The restart guard: it keeps a node from voting that may have forgotten what it granted.

    word: "strict": a node that does not know this prefix abstains, unless an operator trusted it;
    "on": unless it has been up for longer than the grace period; "off". prefix: of its notes.
    grace_period: seconds.
    """

    word: str
    prefix: str
    grace_period: float

    def arguments(self, run_id: str, uptime: float) -> tuple[str, ...]:
        """Return what a server is told of itself: its run id, and for how long it abstains if new.

        uptime: whole seconds, as a server says it.
        """
        if self.word == "off":
            return ("", "", "")
        changed = math.ceil(self.grace_period * 1000)
        known_for = 0 if self.word == "strict" else max(0, math.floor((uptime - 1) * 1000))
        return run_id, str(max(0, changed - known_for)), str(changed)
