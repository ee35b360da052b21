"""How long a lock may be trusted: deadlines a node, arithmetic only, no clock of its own."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence

MARGIN = (
    0.002  # s: what a lease is cut by for the clocks' own granularity, and once more at its end
)
UNKNOWN = -math.inf  # the deadline of a node that is not known to hold anything of ours
GREATEST_TOKEN = 2**52  # that is asked for
LAST_TOKEN = 2**53  # beyond it Lua's numbers stand still


class State(enum.Enum):
    """Where a hold stands. LOST and RELEASED are for ever."""

    ACQUIRING = "acquiring"
    HELD = "held"
    LOST = "lost"
    RELEASED = "released"


# by name: looked up in the class, each costs as much as the rest of the arithmetic (Python 3.11)
ACQUIRING, HELD, LOST, RELEASED = State


def lease_end(sent: float, ttl: float, drift: float) -> float:
    """Return the monotonic second at which a node may drop a key, for us.

    sent: s, read before the first byte left: the node cannot have counted from earlier.
    ttl: s. drift: the fraction by which clocks may differ in speed.
    Source: redis.io "Distributed Locks with Redis", made exact a node instead of a round.
    """
    return sent + ttl * (1.0 - drift) - MARGIN


def validity(ends: Sequence[float], quorum: int) -> float:
    """Return the monotonic second until which a quorum still holds: the quorum-th largest end.

    ends: s, one a node, -inf where nothing is known to be ours.
    """
    return sorted(ends)[-quorum]


def expires_in(waits: Sequence[float], quorum: int) -> float | None:
    """Return the s until a quorum of nodes is free, None where that is not known.

    waits: s, one a node: 0 where free, inf where unknown.
    """
    wait = sorted(waits)[quorum - 1]
    return None if math.isinf(wait) else max(0.0, wait)


def silence(max_ttl: float) -> float:
    """Return the s for which a node that lost its memory must not vote.

    Longer than any lease that it may have forgotten, by what clients' wall clocks may differ:
    then what fencing tokens are made of stays in order, too.
    """
    return max_ttl + 1.0


class Probation:
    """A node that a repair made hold our key again, past its silence: not yet counted.

    since: monotonic s. confirmed: the other nodes that have renewed on requests sent after it.
    """

    __slots__ = ("confirmed", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.confirmed: set[int] = set()


class Hold:
    """One lease from the request to its release or loss: what each node is known to keep.

    nodes: how many. ttl: s. drift: fraction. margin: s before the validity at which it is over.
    guarded: nodes that restart do not vote for a while, so that what they promised stays true.
    Times are given in, never read.
    """

    __slots__ = (
        "_guarded",
        "_quorum",
        "_runs",
        "_span",
        "ends",
        "margin",
        "probation",
        "reason",
        "repairs",
        "state",
        "ttl",
        "valid_until",
    )

    def __init__(
        self,
        nodes: int,
        quorum: int,
        ttl: float,
        drift: float,
        margin: float = MARGIN,
        guarded: bool = False,
    ) -> None:
        self._quorum, self._guarded = quorum, guarded
        self.ttl, self.margin = ttl, margin
        self._span = lease_end(0.0, ttl, drift)  # s from a sending to the end that it earns
        self.ends = [UNKNOWN] * nodes
        self._runs = [""] * nodes  # the run id of the server that earned each end
        self.probation: dict[int, Probation] = {}
        self.repairs: dict[int, float] = {}  # nodes without our key; since when it may be set again
        self.valid_until = UNKNOWN
        self.state = ACQUIRING
        self.reason = ""

    def confirm(self, node: int, sent: float, run_id: str = "") -> None:
        """Count a node that granted on a request sent at `sent`; run_id: of its server."""
        if self.state is ACQUIRING or self.state is HELD:
            ends, end = self.ends, sent + self._span
            self._runs[node] = run_id
            if end > ends[node]:
                ends[node] = end
                if self.probation:
                    self._recount()
                else:
                    self.valid_until = validity(ends, self._quorum)

    def renewed(self, node: int, sent: float, now: float, run_id: str = "") -> bool:
        """Prolong a node's lease; one that had run out before is on probation first.

        Its key may be there by a repair, which passes the node's silence: so another client may
        still count on that node, until a quorum of others has confirmed us after the repair.
        Returns whether the node is counted, as one on probation is not, nor any once it is over.
        """
        if self.state is not HELD or (now >= self.valid_until - self.margin and self.judge(now)):
            return False
        ends, end = self.ends, sent + self._span
        self._runs[node] = run_id
        if self.repairs:
            self.repairs.pop(node, None)
        before = ends[node]
        if before <= now:
            self.probation[node] = Probation(now)
        if end > before:
            ends[node] = end
        if not self.probation:
            if end > self.valid_until:  # else as many ends are as great as before
                self.valid_until = validity(ends, self._quorum)
            return True
        self._confirm_others(node, sent)
        self._recount()
        return node not in self.probation

    def _confirm_others(self, node: int, sent: float) -> None:
        """Let a counted node's answer speak for those on probation."""
        if node in self.probation:
            return
        for other, probation in list(self.probation.items()):
            if sent > probation.since:
                probation.confirmed.add(node)
                if len(probation.confirmed) >= self._quorum:
                    del self.probation[other]

    def missing(self, node: int, now: float, run_id: str = "") -> None:
        """Take a node's word that no key stands there.

        After a restart, which its silence covers, what it promised before is still true, and a
        repair may come at once. Else (deleted, evicted, its clock set forward) nothing is, and a
        repair comes no earlier than the key would have ended.
        """
        if self.judge(now) or self.state is not HELD:
            return
        if self.keeps_its_word(node, run_id):
            self.repairs[node] = UNKNOWN
            return
        self.repairs[node] = max(self.ends[node], self.repairs.get(node, UNKNOWN))
        causes = "an operator broke it, or it was deleted or evicted"
        self._give_up(node, f"its key is gone from the nodes: {causes}")
        self.judge(now)  # a late grant must not revive it

    def keeps_its_word(self, node: int, run_id: str) -> bool:
        """Tell whether what a node promised is still true though no key of ours stands there.

        run_id: of the server that says so. One that restarted since votes for nobody meanwhile.
        """
        before = self._runs[node]
        return bool(self._guarded and before and run_id and run_id != before)

    def denied(self, node: int, now: float) -> None:
        """Stop counting a node on which another token stands."""
        if self.judge(now) or self.state is not HELD:
            return
        self.repairs.pop(node, None)
        self._give_up(node, "another token took its key")
        self.judge(now)

    def withdraw(self, node: int) -> None:
        """Stop counting a node whose server was replaced by another one for a while."""
        if self.state is ACQUIRING or self.state is HELD:
            self._give_up(node, "another server has served under a node's address")

    def _give_up(self, node: int, reason: str) -> None:
        if self.ends[node] > UNKNOWN:
            self.reason = reason
        self.ends[node] = UNKNOWN
        self.probation.pop(node, None)
        self._recount()

    def _recount(self) -> None:
        if self.probation:
            counted = [UNKNOWN if n in self.probation else e for n, e in enumerate(self.ends)]
            self.valid_until = validity(counted, self._quorum)
        else:
            self.valid_until = validity(self.ends, self._quorum)

    def to_repair(self, now: float) -> Collection[int]:
        """Return the nodes on which our key may be set again by now."""
        if not self.repairs:
            return ()
        return [node for node, since in self.repairs.copy().items() if since <= now]

    def begin(self, now: float) -> bool:
        """Turn a quorum of grants into a lock; False where it came too late to be of use."""
        if now >= self.valid_until - self.margin:
            return False
        self.state = HELD
        return True

    def held(self, now: float) -> bool:
        """Tell by arithmetic whether the lock is ours at `now`."""
        return self.state is HELD and now < self.valid_until - self.margin

    def remaining(self, now: float) -> float:
        """Return the s of validity left, 0.0 once lost or released."""
        return max(0.0, self.valid_until - self.margin - now) if self.state is HELD else 0.0

    def at_risk(self, now: float) -> bool:
        """Tell whether the renewals of the last two thirds of the ttl all failed."""
        return self.state is HELD and now >= self.valid_until - self.ttl / 3

    def judge(self, now: float) -> bool:
        """Declare the hold lost where its validity is over; True for the one call that does it."""
        valid_until = self.valid_until  # first: `end` in another thread sets the state before it
        if self.state is not HELD or now < valid_until - self.margin:
            return False
        self.state = LOST
        self.reason = self.reason or "no quorum of nodes renewed it in time"
        return True

    def lose(self, reason: str) -> None:
        """Declare the hold lost, where it is held: it belongs to others, and one of them is."""
        if self.state is HELD:
            self.state, self.reason = LOST, reason

    def end(self) -> bool:
        """Give the lease up for ever, before a release is sent; True where it still was held."""
        was_held = self.state is HELD
        if self.state is not LOST:
            self.state = RELEASED
        self.ends = [UNKNOWN] * len(self.ends)
        self.valid_until = UNKNOWN
        return was_held


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
