"""For how long a lock is valid: arithmetic on one deadline for each node. Reads no clock."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence

MARGIN = 0.002  # seconds by which a lease is shortened for the clocks' granularity, and at its end
NOT_RENEWED = "no quorum of nodes renewed it in time"
UNKNOWN = -math.inf  # the deadline of a node that is not known to keep our key


class State(enum.Enum):
    """The state of a lease. LOST and RELEASED are final."""

    ACQUIRING = "acquiring"
    HELD = "held"
    LOST = "lost"
    RELEASED = "released"


# module names, for speed: an attribute of the class costs as much as the rest (Python 3.11)
ACQUIRING, HELD, LOST, RELEASED = State


def lease_end(sent: float, ttl: float, drift: float) -> float:
    """Return the earliest monotonic second at which a node may drop a key.

    sent: read before the first byte left, so the node's ttl cannot have begun earlier. ttl:
    seconds. drift: the fraction by which clocks may differ in speed.
    Source: redis.io "Distributed Locks with Redis", made exact for each node instead of a round.
    """
    return sent + ttl * (1.0 - drift) - MARGIN


def validity(ends: Sequence[float], quorum: int) -> float:
    """Return the monotonic second until which a quorum keeps the key: the quorum-th largest end.

    ends: one for each node, -inf if the node is not known to keep our key.
    """
    return sorted(ends)[-quorum]


def expires_in(waits: Sequence[float], quorum: int) -> float | None:
    """Return the seconds until a quorum of nodes is free, None if unknown.

    waits: seconds for each node: 0 if it is free, inf if unknown.
    """
    wait = sorted(waits)[quorum - 1]
    return None if math.isinf(wait) else max(0.0, wait)


class Probation:
    """A node that renewed our key after its deadline, maybe by a reclaim: it is not counted yet.

    since: monotonic seconds. confirmed: other nodes that renewed on requests sent after that.
    """

    __slots__ = ("confirmed", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.confirmed: set[int] = set()


class Lease:
    """What each node is known to keep of one key, from the request to the release or loss.

    nodes: number of nodes. ttl: seconds. drift: fraction. margin: the lease ends this many seconds
    before its validity. guarded: whether restarted nodes abstain for a grace period, so that their
    promises stay true. Times are arguments and never read here.
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
        "reclaims",
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
        self._span = lease_end(0.0, ttl, drift)  # seconds from a request to its deadline
        self.ends = [UNKNOWN] * nodes
        self._runs = [""] * nodes  # the run id of the server behind each deadline
        self.probation: dict[int, Probation] = {}
        # nodes without our key, and the monotonic second from which we may set it again
        self.reclaims: dict[int, float] = {}
        self.valid_until = UNKNOWN
        self.state = ACQUIRING
        self.reason = ""

    def confirm(self, node: int, sent: float, run_id: str = "") -> None:
        """Count a node that granted a request sent at `sent`. run_id: of its server."""
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
        """Extend the deadline of one node. If it had already passed, the node goes on probation.

        A reclaim sets the key even during the node's grace period, so another client may still rely
        on that node. A node on probation is not counted until a quorum of other nodes confirms the
        lock. Return whether the node is counted; False once the lease is over.
        """
        if self.state is not HELD or (now >= self.valid_until - self.margin and self.expire(now)):
            return False
        ends, end = self.ends, sent + self._span
        self._runs[node] = run_id
        if self.reclaims:
            self.reclaims.pop(node, None)
        before = ends[node]
        if before <= now:
            self.probation[node] = Probation(now)
        if end > before:
            ends[node] = end
        if not self.probation:
            if end > self.valid_until:  # otherwise the quorum-th largest end stays the same
                self.valid_until = validity(ends, self._quorum)
            return True
        self._confirm_others(node, sent)
        self._recount()
        return node not in self.probation

    def _confirm_others(self, node: int, sent: float) -> None:
        """Let the reply of a counted node confirm the nodes on probation."""
        if node in self.probation:
            return
        for other, probation in list(self.probation.items()):
            if sent > probation.since:
                probation.confirmed.add(node)
                if len(probation.confirmed) >= self._quorum:
                    del self.probation[other]

    def missing(self, node: int, now: float, run_id: str = "") -> None:
        """Record that a node replied that it has no such key.

        After a restart, the node's grace period keeps its promise true, so we may reclaim the key
        at once. The promise is broken if the key was deleted or evicted, or the node's clock was
        set forward. Then we may reclaim the key only after the promised deadline.
        """
        if self.expire(now) or self.state is not HELD:
            return
        if self.keeps_its_promise(node, run_id):
            self.reclaims[node] = UNKNOWN
            return
        self.reclaims[node] = max(self.ends[node], self.reclaims.get(node, UNKNOWN))
        causes = "an operator broke it, or it was deleted or evicted"
        self._stop_counting(node, f"its key is gone from the nodes: {causes}")
        self.expire(now)  # a late grant must not revive it

    def keeps_its_promise(self, node: int, run_id: str) -> bool:
        """Return whether a node's promise is still true although the node has no key of ours.

        run_id: of the server that replied. A server that restarted since the promise abstains.
        """
        before = self._runs[node]
        return bool(self._guarded and before and run_id and run_id != before)

    def denied(self, node: int, now: float) -> None:
        """Stop counting a node where our key has another value."""
        if self.expire(now) or self.state is not HELD:
            return
        self.reclaims.pop(node, None)
        self._stop_counting(node, "another token took its key")
        self.expire(now)

    def withdraw(self, node: int) -> None:
        """Stop counting a node whose server was replaced by another server for a while."""
        if self.state is ACQUIRING or self.state is HELD:
            self._stop_counting(node, "another server has served under a node's address")

    def _stop_counting(self, node: int, reason: str) -> None:
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

    def to_reclaim(self, now: float) -> Collection[int]:
        """Return the nodes on which we may reclaim our key now."""
        if not self.reclaims:
            return ()
        return [node for node, since in self.reclaims.copy().items() if since <= now]

    def begin(self, now: float) -> bool:
        """Turn a quorum of grants into a held lease; return False if it came too late."""
        if now >= self.valid_until - self.margin:
            return False
        self.state = HELD
        return True

    def held(self, now: float) -> bool:
        """Return whether the lock is held at `now`, by arithmetic alone."""
        return self.state is HELD and now < self.valid_until - self.margin

    def remaining(self, now: float) -> float:
        """Return the seconds of validity left; 0.0 once lost or released."""
        return max(0.0, self.valid_until - self.margin - now) if self.state is HELD else 0.0

    def at_risk(self, now: float) -> bool:
        """Return whether the renewals of the last two thirds of the ttl all failed."""
        return self.state is HELD and now >= self.valid_until - self.ttl / 3

    def expire(self, now: float) -> bool:
        """Mark the lease as lost if its validity is over; return whether this call did it."""
        valid_until = self.valid_until  # first: `end`, in another thread, sets the state before it
        if self.state is not HELD or now < valid_until - self.margin:
            return False
        self.state = LOST
        self.reason = self.reason or NOT_RENEWED
        return True

    def lose(self, reason: str) -> None:
        """Mark a held lease as lost, because another lease of its acquisition is."""
        if self.state is HELD:
            self.state, self.reason = LOST, reason

    def end(self) -> bool:
        """End the lease, before a release is sent; return whether it was still held."""
        was_held = self.state is HELD
        if self.state is not LOST:
            self.state = RELEASED
        self.ends = [UNKNOWN] * len(self.ends)
        self.valid_until = UNKNOWN
        return was_held
