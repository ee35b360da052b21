"""One key of a lock, and what each node is known to keep of it: for how long a lock is valid.

Arithmetic on one deadline for each node; reads no clock. Not here: what one acquire holds, all its
keys or none (`acquisition.py`), its fencing token (`fencing.py`), and how the nodes are asked
(`lock/engine`).
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from celery_redlock.lock.model.fencing import Fence
from celery_redlock.lock.model.keys import lock_key, name_of_lock, waiting_key
from celery_redlock.lock.transport.command import encode_bulk, encode_text

MARGIN = 0.002  # seconds by which a lease is shortened for the clocks' granularity, and at its end
NOT_RENEWED = "no quorum of nodes renewed it in time"
UNKNOWN = -math.inf  # the deadline of a node that is not known to keep our key
_PACKED_ONE = encode_bulk(b"1")


class State(enum.Enum):
    """The state of a lease. LOST and RELEASED are final."""

    ACQUIRING = "acquiring"
    HELD = "held"
    LOST = "lost"
    RELEASED = "released"


# module names, for speed: an attribute of the class costs as much as the rest (Python 3.11)
ACQUIRING, HELD, LOST, RELEASED = State


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


class LockKey:
    """One key that a lock may take, with the constant parts of its requests.

    limit: number of permits. permit: number of the one that the lock has; 0 for a plain lock, and
    until the nodes have chosen one. base: the key of permit 0. ttl: seconds.
    """

    __slots__ = ("_base", "base", "limit", "name", "packed_limit", "packed_name", "permit",
                 "resource", "ttl", "ttl_ms", "waiting")  # fmt: skip

    def __init__(self, prefix: str, resource: str, ttl: float, limit: int = 1) -> None:
        self.resource = resource
        self.ttl = ttl
        self.limit = limit
        self.permit = 0
        self._base = lock_key(prefix, resource)
        self.name = self._base
        self.base = self.packed_name = encode_text(self.name)
        self.packed_limit = _PACKED_ONE if limit == 1 else encode_bulk(b"%d" % limit)
        self.waiting = encode_text(waiting_key(prefix, name_of_lock(resource)))
        self.ttl_ms = _encode_ttl(ttl)

    def choose(self, permit: int) -> None:
        """Become the key of a permit: the one that a quorum of nodes has granted.

        A second call has no effect: an exception may have cut the first one.
        """
        self.permit = permit
        self.name = f"{self._base}#{permit}" if permit else self._base
        self.packed_name = encode_text(self.name)


@functools.lru_cache(maxsize=64)  # a program has few of them, and each lock asks
def _encode_ttl(ttl: float) -> bytes:
    return encode_bulk(b"%d" % math.ceil(ttl * 1000))


class Probation(NamedTuple):
    """A node that renewed our key after its deadline, maybe by a reclaim: it is not counted yet."""

    since: float  # monotonic seconds
    confirmed: set[int]  # other nodes that renewed on requests sent after that


class Lease:
    """All that is known of one key on each node, from its request to its release or loss.

    nodes: number of nodes. drift: fraction by which clocks may differ in speed. margin: the lease
    ends this many seconds before its validity. guarded: whether restarted nodes abstain for a grace
    period, so that their promises stay true. fence: its fencing token. Times are arguments.
    sent: monotonic seconds, read before the request was written. granted: indexes of nodes that
    granted the key. never_asked: of nodes that the request certainly did not reach. asked_again: of
    nodes where an older request may still run later.
    """

    __slots__ = ("_guarded", "asked_again", "ends", "fence", "granted", "key",
                 "margin", "never_asked", "packed_release", "packed_renewal", "packed_value",
                 "probation", "quorum", "reason", "reclaims", "runs", "sent", "span", "state",
                 "ttl", "valid_until", "value")  # fmt: skip

    def __init__(
        self,
        key: LockKey,
        value: str,
        nodes: int,
        quorum: int,
        drift: float,
        margin: float = MARGIN,
        guarded: bool = False,
        fence: Fence | None = None,
    ) -> None:
        self.key = key
        self.value = value
        self.fence = fence
        self.quorum = quorum
        self._guarded = guarded
        self.ttl = key.ttl
        self.margin = margin
        # seconds until the node may drop the key. Counted from before the first byte of its request
        # left, so the node's ttl cannot have begun earlier.
        # Source: redis.io "Distributed Locks with Redis", made exact for each node, not for a round
        self.span = key.ttl * (1.0 - drift) - MARGIN
        self.sent = 0.0  # also of a repetition: an old fencing proposal must not get a newer lease
        self.ends = [UNKNOWN] * nodes
        self.runs = [""] * nodes  # the run id of the server behind each deadline
        self.granted: set[int] = set()
        self.never_asked: set[int] = set()
        self.asked_again: set[int] = set()
        self.probation: dict[int, Probation] = {}
        # nodes without our key, and the monotonic second from which we may set it again
        self.reclaims: dict[int, float] = {}
        self.valid_until = UNKNOWN
        self.state = ACQUIRING
        self.reason = ""
        self.packed_value = encode_text(value)
        self.packed_release = self.packed_renewal = b""  # encoded once, at the first use

    def confirm(self, node: int, sent_at: float, run_id: str = "") -> None:
        """Count a node that granted a request sent at `sent_at`. run_id: of its server."""
        if self.state is ACQUIRING or self.state is HELD:
            ends = self.ends
            end = sent_at + self.span
            self.runs[node] = run_id
            if end >= ends[node]:  # also equal: an exception may have cut the first call
                ends[node] = end
                if self.probation:
                    self._recount()
                else:
                    self.valid_until = validity(ends, self.quorum)

    def renewed(self, node: int, sent_at: float, now: float, run_id: str = "") -> bool:
        """Extend the deadline of one node. If it had already passed, the node goes on probation.

        A reclaim sets the key even during the node's grace period, so another client may still rely
        on that node. A node on probation is not counted until a quorum of other nodes confirms the
        lock. Return whether the node is counted; False once the lease is over.
        """
        if self.state is not HELD or (now >= self.valid_until - self.margin and self.expire(now)):
            return False
        ends = self.ends
        end = sent_at + self.span
        self.runs[node] = run_id
        if self.reclaims:
            self.reclaims.pop(node, None)
        previous_end = ends[node]
        if previous_end <= now:
            self.probation[node] = Probation(now, set())
        if end > previous_end:
            ends[node] = end
        if not self.probation:
            if end > self.valid_until:  # otherwise the quorum-th largest end stays the same
                self.valid_until = validity(ends, self.quorum)
            return True
        self._confirm_others(node, sent_at)
        self._recount()
        return node not in self.probation

    @staticmethod
    def renew_each(
        leases: Sequence[Lease],
        items: Sequence[Any],
        node: int,
        sent_at: float,
        now: Callable[[], float],
        run_id: str,
    ) -> list[int]:
        """Extend the deadline of one node in each lease that the node renewed in the plain case.

        items: of the node's reply, 1 for a renewed key. The plain case is that of `renewed` without
        a probation, a reclaim or a deadline that has passed; inline, because a process renews
        thousands of leases a second. Return the indexes of the others, for which nothing was done.
        """
        others = []
        for index, lease in enumerate(leases):
            # the clock is read each time: a thread that was stopped here must not revive a lease
            moment = now()
            ends = lease.ends
            if (
                items[index] != 1
                or lease.state is not HELD
                or moment >= lease.valid_until - lease.margin
                or lease.probation
                or lease.reclaims
                or ends[node] <= moment
            ):
                others.append(index)
                continue
            end = sent_at + lease.span
            lease.runs[node] = run_id
            if end > ends[node]:
                ends[node] = end
            if end > lease.valid_until:  # also if the line above was done by a call that was cut
                lease.valid_until = sorted(ends)[-lease.quorum]
        return others

    def _confirm_others(self, node: int, sent_at: float) -> None:
        """Let the reply of a counted node confirm the nodes on probation."""
        if node in self.probation:
            return
        for other_node, probation in list(self.probation.items()):
            if sent_at > probation.since:
                probation.confirmed.add(node)
                if len(probation.confirmed) >= self.quorum:
                    del self.probation[other_node]

    def missing(self, node: int, now: float, run_id: str = "") -> None:
        """Record that a node replied that it has no such key."""
        if self.expire(now) or self.state is not HELD:
            return
        if self.keeps_its_promise(node, run_id):
            self.reclaims[node] = UNKNOWN  # we may reclaim the key at once
            return
        # it was deleted or evicted, or the node's clock was set forward: only after the deadline
        self.reclaims[node] = max(self.ends[node], self.reclaims.get(node, UNKNOWN))
        causes = "an operator broke it, or it was deleted or evicted"
        self._stop_counting(node, f"its key is gone from the nodes: {causes}")
        self.expire(now)  # a late grant must not revive it

    def keeps_its_promise(self, node: int, run_id: str) -> bool:
        """Return whether a node's promise is still true although the node has no key of ours.

        run_id: of the server that replied. A server that restarted since the promise abstains.
        """
        granting_run = self.runs[node]
        return bool(self._guarded and granting_run and run_id and run_id != granting_run)

    def denied(self, node: int, now: float) -> None:
        if self.expire(now) or self.state is not HELD:
            return
        self.reclaims.pop(node, None)
        self._stop_counting(node, "another token took its key")
        self.expire(now)

    def replaced(self, replaced_at: dict[int, float]) -> list[int]:
        """Return the nodes whose replacement was detected after they were asked for this key.

        replaced_at: monotonic seconds of the detection, by node.
        """
        replacements = replaced_at.copy().items()
        return [node for node, detected_at in replacements if detected_at >= self.sent]

    def withdraw(self, node: int) -> None:
        """Stop counting a node whose server was replaced by another server for a while."""
        self.granted.discard(node)
        if self.fence is not None:
            self.fence.withdraw(node)
        if self.state is ACQUIRING or self.state is HELD:
            self._stop_counting(node, "another server has served under a node's address")

    def _stop_counting(self, node: int, reason: str) -> None:
        if self.ends[node] > UNKNOWN:
            self.reason = reason
        self.ends[node] = UNKNOWN
        self.probation.pop(node, None)
        self._recount()

    def _recount(self) -> None:
        ends = self.ends
        if self.probation:
            ends = [UNKNOWN if node in self.probation else end for node, end in enumerate(ends)]
        self.valid_until = validity(ends, self.quorum)

    def to_reclaim(self, now: float) -> Collection[int]:
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
        """Mark it as lost with the others of its acquisition, for one reason."""
        if self.state is HELD or self.state is LOST:
            self.state = LOST
            self.reason = reason

    def end(self) -> bool:
        """End the lease, before a release is sent; return whether it was still held."""
        was_held = self.state is HELD
        if self.state is not LOST:
            self.state = RELEASED
        self.ends = [UNKNOWN] * len(self.ends)
        self.valid_until = UNKNOWN
        return was_held
