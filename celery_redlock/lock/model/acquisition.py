"""What one acquire holds: all its keys or none. A record without clock and I/O.

An acquisition is renewed and released as a unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any
from weakref import ref

from celery_redlock.errors import LockLost, SettingsError
from celery_redlock.label import is_of_run
from celery_redlock.lock.model.key_lease import KeyLease, LockKey
from celery_redlock.lock.model.lease import HELD, LOST, NOT_RENEWED
from celery_redlock.lock.model.options import LockOptions

RENEWED_TOGETHER = 10  # renewals that are due within one tenth of a ttl go in one batch
# the owner: process id, thread or greenlet (a `reentrancy.Flow`), and asyncio task
Owner = tuple[int, Any, object]
_numbers = itertools.count(1)


class Acquisition:
    """One acquisition, from its first request to its end.

    keys: one for each resource, in the order of `keys.in_order`. owner: the process, thread or
    greenlet, and task that acquires. The watchdog uses `renew_at`, the monotonic second of the next
    renewal (inf: none). It may renew up to `leeway` seconds earlier, in one batch with others.
    """

    __slots__ = ("_at_risk_told", "_last_renewal", "_loss_told", "_reclaim_at", "_users",
                 "abandoned", "acquired_at", "ended_at", "key_leases", "keys", "leeway", "number",
                 "options", "owner", "releases", "renew_at", "was_split")  # fmt: skip

    def __init__(self, options: LockOptions, keys: Sequence[LockKey], owner: Owner) -> None:
        self.options, self.keys, self.owner = options, keys, owner
        self.number = next(_numbers)  # unique in this process
        self.key_leases: list[KeyLease] = []
        self.leeway = options.ttl / RENEWED_TOGETHER
        self._users: list[ref[Any]] = []
        self.abandoned = False  # True: its owner may not take it again
        self.renew_at = self._reclaim_at = math.inf
        self.acquired_at = 0.0
        self._last_renewal = -math.inf  # monotonic seconds up to which it may be renewed
        self.ended_at: float | None = None  # monotonic seconds: the end of the run under the lock
        self._at_risk_told = self._loss_told = False
        self.releases: list[Any] = []  # of its keys, while they are written
        self.was_split = False  # it was refused, although no other client got a quorum either

    # users: the holds of this process that rely on it

    def join(self, user: object) -> None:
        """Add a user. The acquisition is released after the last user has left.

        The reference is weak: if an exception interrupted an acquire or a release, no code can
        release the acquisition. The watchdog must not renew it for ever then.
        """
        self._users.append(ref(user))

    def part(self, user: object) -> None:
        """Remove a user. A second call has no effect."""
        its = ref(user)
        if its in self._users:
            self._users.remove(its)

    @property
    def users(self) -> int:
        """The number of users that can still release it."""
        count = 0
        for user in self._users:  # no comprehension: read at each release and renewal
            if user() is not None:
                count += 1
        return count

    def abandon(self) -> bool:
        """Mark it as abandoned if it has no users; return whether it has none.

        The owner cannot take an abandoned acquisition again. This sets `abandoned` before it reads
        `users`; a new user joins before it reads `abandoned`. At least one of them sees the other's
        write.
        """
        self.abandoned = True
        if self.users:
            self.abandoned = False
        return self.abandoned

    # its state

    @property
    def resource(self) -> str:
        """The names of the resources, for people."""
        return ", ".join(dict.fromkeys(key.resource for key in self.keys))

    def held(self, now: float) -> bool:
        """Return whether every key is held at the monotonic second `now`, by arithmetic alone."""
        for one in self.key_leases:
            if not one.lease.held(now):
                return False
        return bool(self.key_leases)

    def lost(self, now: float) -> bool:
        """Return whether it was held and has ended without a release."""
        leases = [one.lease for one in self.key_leases]
        return any(
            lease.state is LOST or (lease.state is HELD and not lease.held(now)) for lease in leases
        )

    @property
    def reason(self) -> str:
        """Why it is lost, as text."""
        reasons = (one.lease.reason for one in self.key_leases if one.lease.reason)
        return next(reasons, NOT_RENEWED)

    def held_for(self, now: float) -> float:
        """Return the seconds since it was acquired."""
        return now - self.acquired_at

    def remaining(self, now: float) -> float:
        """Return the seconds of validity left without a renewal; 0.0 once it is over."""
        return min((one.lease.remaining(now) for one in self.key_leases), default=0.0)

    @property
    def fencing_token(self) -> int:
        """The fencing token; before it is chosen, the greatest known counter; 0 without fencing."""
        fences = [one.fence for one in self.key_leases if one.fence]
        return max((fence.token or fence.greatest for fence in fences), default=0)

    def check_covers(self, resource: str, options: LockOptions, now: float) -> None:
        """Raise if this acquisition does not cover a nested acquire of the same resource.

        Raises LockLost if it is lost, SettingsError if it promises less than `options`.
        """
        if not self.held(now):
            raise LockLost(resource, self.reason)
        own = self.options
        if own.limit > options.limit:
            hint = f"is held here as one of {own.limit} permits, which excludes nobody: nest it "
            raise SettingsError("Lock", "limit", f"{options.limit}", hint + "with the same limit")
        if options.fencing and not own.fencing:
            hint = f"{resource!r} is held here without a fencing token: take the outer one with"
            raise SettingsError("Lock", "fencing", "True", f"{hint} fencing=True")

    @property
    def is_redelivery(self) -> bool:
        """Whether the first delivery of its message may still run."""
        return self.options.marker is not None and self.options.marker.is_redelivered

    def is_own_run(self, holder: str) -> bool:
        """Return whether a holder is this same run, in another delivery of its message."""
        return self.options.marker is not None and is_of_run(holder, self.options.marker.run)

    # its deadline

    @property
    def deadline(self) -> float:
        """When to check it next, because it may be at risk or lost then; inf if never.

        Monotonic seconds.
        """
        if self._loss_told:
            return math.inf
        soonest, all_held = math.inf, True
        for one in self.key_leases:
            lease = one.lease
            if lease.state is LOST:
                return -math.inf
            all_held = all_held and lease.state is HELD
            before = lease.margin if self._at_risk_told else lease.ttl / 3
            soonest = min(soonest, lease.valid_until - before)
        return soonest if all_held else math.inf

    def expire(self, now: float) -> str | None:
        """Mark it as lost if its validity is over at `now`; return the reason, None if not lost.

        If one of several keys is lost, all of them are.
        """
        leases = [one.lease for one in self.key_leases]
        for lease in leases:
            lease.expire(now)
        lost = next((lease for lease in leases if lease.state is LOST), None)
        if lost is None:
            return None
        for lease in leases:
            lease.lose(lost.reason)
        return lost.reason

    def mark_loss_told(self) -> bool:
        """Return True for the first call: that caller reports the loss."""
        told, self._loss_told = self._loss_told, True
        return not told

    def mark_risk_told(self, now: float) -> bool:
        """Return True if it is at risk at `now`, but only once after each confirmed renewal."""
        if self._at_risk_told or not any(one.lease.at_risk(now) for one in self.key_leases):
            return False
        self._at_risk_told = True
        return True

    # its renewals

    def plan_renewals(self, started: float) -> None:
        """Set the first renewal. started: monotonic seconds, before the first request."""
        options = self.options
        if options.renew:
            longest = math.inf if options.max_hold is None else options.max_hold
            self._last_renewal = started + longest
        self._schedule(started + options.ttl / 3)

    def begin_renewal(self, now: float) -> bool:
        """Return whether it is still held. Due reclaims are done with the renewal."""
        if not self.held(now):
            self.renew_at = math.inf
            return False
        self._reclaim_at = math.inf
        return True

    def renewal_reached(self, sent: float) -> None:
        """Set the next renewal after a renewal that a quorum confirmed. sent: monotonic seconds."""
        self._at_risk_told = False
        self._schedule(sent + self.options.ttl / 3)

    def renewal_failed(self, now: float, soonest: float) -> None:
        """Set the next renewal after one without a quorum. soonest: seconds, the least pause."""
        pause = min(self.options.ttl / 3, max(soonest, self.remaining(now) / 4))
        self._schedule(now + pause)

    def reclaim_by(self, moment: float) -> None:
        """Renew by the monotonic second `moment` if a key may be reclaimed on a node by then."""
        if any(one.lease.to_reclaim(moment) for one in self.key_leases):
            self._reclaim_at = moment
            self._schedule(min(moment, self.renew_at))

    def _schedule(self, moment: float) -> None:
        if self._reclaim_at < moment:
            moment = self._reclaim_at
        self.renew_at = moment if moment <= self._last_renewal else math.inf
