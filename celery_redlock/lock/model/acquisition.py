"""What one acquire holds, and who relies on it. Records without clock and I/O.

`Acquisition`: all keys or none, each with its `Lease` (`lease.py`); renewed and released as a unit.
`Hold`: one acquire that is not released yet. A nested one relies on acquisitions of outer ones, so
an acquisition counts its holds, and `Flow` finds it for the same owner. Not here: the public object
(`lock/lock.py`), and what acquires and releases (`lock/engine`).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from celery_redlock.errors import LockLost, SettingsError
from celery_redlock.label import Holder
from celery_redlock.lock.model.lease import HELD, LOST, NOT_RENEWED, Lease, LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.model.rate import Start

RENEWAL_BATCHES_PER_TTL = 10  # renewals that are due within one tenth of a ttl go in one batch
SPLIT_TRIES = 6  # tries while rivals that came at once share the nodes, and none has the lock
MAX_SPLIT_PAUSE = 0.25  # seconds, the longest pause between these tries
HOLDER_HUNG = "its process hung, so it was not renewed"
_numbers = itertools.count(1)


class Flow:
    """One thread or greenlet. held: acquisitions, by asyncio task (None outside) and resource."""

    def __init__(self) -> None:
        self.held: dict[tuple[object, str], Acquisition] = {}


Owner = tuple[int, Flow, object]  # process id, thread or greenlet, and asyncio task


class Acquisition:
    """One acquisition, from its first request to its end.

    keys: one for each resource, in the order of `keys.in_order`. owner: the process, thread or
    greenlet, and task that acquires. The watchdog uses `renew_at`, the monotonic second of the next
    renewal (inf: none). It may renew up to `leeway` seconds earlier, in one batch with others.
    """

    __slots__ = ("_last_renewal", "_loss_reported", "_reclaim_at", "_risk_reported", "abandoned",
                 "acquired_at", "ended_at", "holds", "keys", "leases", "leeway", "number",
                 "options", "owner", "releases", "renew_at", "splits", "starts",
                 "was_split")  # fmt: skip

    def __init__(self, options: LockOptions, keys: Sequence[LockKey], owner: Owner) -> None:
        self.options = options
        self.keys = keys
        self.owner = owner
        self.number = next(_numbers)  # unique in this process
        self.leases: list[Lease] = []
        self.starts: list[Start] = []  # of its rates
        self.leeway = options.ttl / RENEWAL_BATCHES_PER_TTL
        # weak: if an exception interrupted an acquire or a release, no code can release this. The
        # watchdog must not renew it for ever then
        self.holds: list[ref[Hold]] = []
        self.abandoned = False  # True: its owner may not take it again
        self.renew_at = self._reclaim_at = math.inf
        self.acquired_at = 0.0
        self._last_renewal = -math.inf  # monotonic seconds up to which it may be renewed
        self.ended_at: float | None = None  # monotonic seconds: the end of the run under the lock
        self._risk_reported = self._loss_reported = False
        self.releases: list[Any] = []  # of its keys, while they are written
        self.splits = 0  # as of its hold when it began
        self.was_split = False  # it was refused, although no other client got a quorum either

    @property
    def users(self) -> int:
        """The number of holds that rely on it, and can still release it."""
        count = 0
        for user in self.holds:  # no comprehension: read at each release and renewal
            if user() is not None:
                count += 1
        return count

    def abandon(self) -> bool:
        """Mark it as abandoned if no hold relies on it; return whether none does."""
        # before `users` is read; a new hold is added before it reads `abandoned`: one of the two
        # sees the other's write
        self.abandoned = True
        if self.users:
            self.abandoned = False
        return self.abandoned

    def nest(self) -> None:
        _, flow, task = self.owner
        for key in self.keys:
            flow.held[task, key.resource] = self

    # its state

    @property
    def resource(self) -> str:
        return ", ".join(dict.fromkeys(key.resource for key in self.keys))

    def held(self, now: float) -> bool:
        """Return whether every key is held at the monotonic second `now`, by arithmetic alone."""
        leases = self.leases
        for lease in leases:  # as `Lease.held`, without its call: asked around each body
            if lease.state is not HELD or now >= lease.valid_until - lease.margin:
                return False
        return bool(leases)

    def lost(self, now: float) -> bool:
        """Return whether it was held and has ended without a release."""
        return any(
            lease.state is LOST or (lease.state is HELD and not lease.held(now))
            for lease in self.leases
        )

    @property
    def reason(self) -> str:
        reason = next((lease.reason for lease in self.leases if lease.reason), NOT_RENEWED)
        if reason != NOT_RENEWED or not self._was_held_as_planned:
            return reason
        if self.options.renew and self.options.max_hold is None:
            return HOLDER_HUNG  # only `renew_until` ends its renewals
        if self.options.renew:
            return f"its max_hold of {self.options.max_hold:g} s is over"
        return f"its ttl of {self.options.ttl:g} s is over, and renew=False"

    @property
    def _was_held_as_planned(self) -> bool:
        """Whether it was valid until after the last renewal that may have been due."""
        valid_until = min(lease.valid_until for lease in self.leases)
        return valid_until >= max(self._last_renewal, self.acquired_at)

    def has_expired(self, now: float) -> bool:
        """Return whether its time is over as planned: without renewals, or after the last one.

        Its owner may acquire the resource anew then.
        """
        return self.lost(now) and self._was_held_as_planned

    def remaining(self, now: float) -> float:
        """Return the seconds of validity left without a renewal; 0.0 once it is over."""
        return min((lease.remaining(now) for lease in self.leases), default=0.0)

    @property
    def fencing_token(self) -> int:
        """The fencing token; before it is chosen, the greatest known counter; 0 without fencing."""
        fences = [lease.fence for lease in self.leases if lease.fence]
        return max((fence.token or fence.greatest for fence in fences), default=0)

    def check_covers(self, resource: str, options: LockOptions, now: float) -> None:
        """Raise if this acquisition does not cover a nested acquire of the same resource.

        Raises LockLost if it is lost, SettingsError if it promises less than `options`.
        """
        if not self.held(now):
            raise LockLost(resource, self.reason)
        outer_options = self.options
        if outer_options.limits:
            outer_limit = outer_options.limits.get(resource, 1)
            nested_limit = (options.limits or {}).get(resource, 1)
            if outer_limit > nested_limit:
                hint = f"{self._held_here(resource)} as one of {outer_limit} permits, which "
                hint += "excludes no other holder: nest it with the same limit"
                raise SettingsError("Lock", "limit", f"{nested_limit}", hint)
        if options.fencing and not outer_options.fencing:
            hint = f"{self._held_here(resource)} without a fencing token: take the outer one with"
            raise SettingsError("Lock", "fencing", "True", f"{hint} fencing=True")

    def _held_here(self, resource: str) -> str:
        """Name the holder: in eager mode it may be the parent of a link, before its release."""
        holder = f" by {Holder.of(self.options.label)}" if self.options.label else ""
        return f"{resource!r} is held here{holder}"

    # its deadline

    @property
    def deadline(self) -> float:
        """When to check it next, because it may be at risk or lost then; inf if never."""
        if self._loss_reported:
            return math.inf
        earliest = math.inf
        all_held = True
        for lease in self.leases:
            if lease.state is not HELD:
                if lease.state is LOST:
                    return -math.inf
                all_held = False
            moment = lease.valid_until - (lease.margin if self._risk_reported else lease.ttl / 3)
            if moment < earliest:  # no `min`: the watchdog asks each lock in each pass
                earliest = moment
        return earliest if all_held else math.inf

    def expire(self, now: float) -> str | None:
        """Mark all its keys as lost if one of them is over; return the reason, None if none is."""
        for lease in self.leases:
            lease.expire(now)
        if all(lease.state is not LOST for lease in self.leases):
            return None
        reason = self.reason
        for lease in self.leases:
            lease.lose(reason)
        return reason

    def mark_loss_reported(self) -> bool:
        """Return True for the first call: that caller reports the loss."""
        was_reported = self._loss_reported
        self._loss_reported = True
        return not was_reported

    def mark_risk_reported(self, now: float) -> bool:
        """Return True if it is at risk at `now`, but only once after each confirmed renewal."""
        if self._risk_reported or not any(lease.at_risk(now) for lease in self.leases):
            return False
        self._risk_reported = True
        return True

    # its renewals

    def plan_renewals(self, started: float) -> None:
        """Set the first renewal. started: monotonic seconds, before the first request."""
        self.acquired_at = started
        options = self.options
        if options.renew:
            max_hold = math.inf if options.max_hold is None else options.max_hold
            self._last_renewal = started + max_hold
        self._schedule(started + options.ttl / 3)

    def renew_until(self, moment: float, now: float) -> None:
        """Set the monotonic second after which it is not renewed; one that was not is due now."""
        self._last_renewal = moment
        if self.renew_at == math.inf:
            self.renew_at = now

    def begin_renewal(self, now: float) -> bool:
        """Return whether it is still held. Due reclaims are done with the renewal."""
        if not self.held(now):
            self.renew_at = math.inf
            return False
        self._reclaim_at = math.inf
        return True

    def renewal_reached(self, sent_at: float) -> None:
        """Set the next renewal after one that a quorum confirmed. sent_at: monotonic seconds."""
        self._risk_reported = False
        self._schedule(sent_at + self.options.ttl / 3)

    def renewal_failed(self, now: float, min_pause: float) -> None:
        """Set the next renewal after one without a quorum. min_pause: seconds, the least pause."""
        pause = min(self.options.ttl / 3, max(min_pause, self.remaining(now) / 4))
        self._schedule(now + pause)

    def reclaim_by(self, moment: float) -> None:
        """Renew by the monotonic second `moment` if a key may be reclaimed on a node by then."""
        if any(lease.to_reclaim(moment) for lease in self.leases):
            self._reclaim_at = moment
            self._schedule(min(moment, self.renew_at))

    def _schedule(self, moment: float) -> None:
        if self._reclaim_at < moment:
            moment = self._reclaim_at
        self.renew_at = moment if moment <= self._last_renewal else math.inf


class Hold:
    """One acquire that is not released yet: its own acquisition, and outer ones that it relies on.

    owner: the owner that acquires. client: the `Redlock`, kept alive while a thread may still
    acquire. end_wait: ends the wait of the acquire, None while it does not wait. splits: number of
    consecutive tries in which rivals shared the nodes. took: seconds that the last try took.
    on_dropped: called with an acquisition if this object is garbage collected before its release;
    in any thread, also within a finalizer.
    """

    __slots__ = ("__weakref__", "acquisitions", "client", "end_wait", "on_dropped", "owner",
                 "splits", "took")  # fmt: skip

    def __init__(
        self, owner: Owner, client: object, on_dropped: Callable[[Acquisition], object]
    ) -> None:
        self.owner = owner
        self.client = client
        self.on_dropped = on_dropped
        self.acquisitions: list[Acquisition] = []
        self.splits = 0
        self.took = 0.0
        self.end_wait: Callable[[], None] | None = None

    def pause_of_split(self) -> float | None:
        """Return the seconds until the next try if rivals share the nodes, else None.

        Random, from a range that doubles, so that soon only one rival tries.
        """
        if not 0 < self.splits < SPLIT_TRIES:
            return None
        return random.uniform(0, min(MAX_SPLIT_PAUSE, self.took * 2**self.splits))  # noqa: S311

    def add(self, acquisition: Acquisition) -> None:
        if acquisition not in self.acquisitions:
            self.acquisitions.append(acquisition)
            notify = self.on_dropped
            acquisition.holds.append(ref(self, lambda _: notify(acquisition)))

    def remove(self, acquisition: Acquisition) -> None:
        self.acquisitions.remove(acquisition)
        self.leave(acquisition)

    def has_others(self, acquisition: Acquisition) -> bool:
        """Return whether another hold relies on an acquisition, too."""
        for user in acquisition.holds:  # no comprehension, as in `Acquisition.users`
            hold = user()
            if hold is not None and hold is not self:
                return True
        return False

    def leave(self, acquisition: Acquisition) -> None:
        """Count as none of its holds. A second call, as in a signal handler, has no effect."""
        try:  # `suppress` would cost three calls at each release
            acquisition.holds.remove(ref(self))
        except ValueError:
            return

    def expired_outer(self, options: LockOptions, now: float) -> list[Acquisition]:
        """Return acquisitions of the owner that have expired, and do not cover a new one."""
        _, flow, task = self.owner
        outer_acquisitions = (flow.held.get((task, resource)) for resource in options.resources)
        return [
            acquisition
            for acquisition in outer_acquisitions
            if acquisition is not None and acquisition.has_expired(now)
        ]

    def add_outer(self, options: LockOptions, now: float) -> dict[str, Acquisition]:
        """Rely on acquisitions that the owner holds already; return them by resource.

        Raises LockLost if one is lost, and SettingsError if one promises less than `options`.
        """
        _, flow, task = self.owner
        outer_acquisitions = {}
        for resource in options.resources:
            outer = flow.held.get((task, resource))
            if outer is None:
                continue
            outer.check_covers(resource, options, now)
            self.add(outer)
            if outer.abandoned:  # its Lock was garbage collected, and it is being released
                self.remove(outer)
            else:
                outer_acquisitions[resource] = outer
        return outer_acquisitions
