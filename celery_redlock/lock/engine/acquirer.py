"""Acquires all keys of an acquisition or none: one round for each key.

Source: redis.io "Distributed Locks with Redis" (Redlock), made exact. Each node has a deadline,
counted from before the request left. A round ends as soon as the votes decide it. Each round has a
new value. A release goes to every node, on the connection that the request used.
"""

from __future__ import annotations

import functools
import os
import random
import socket
from collections.abc import Callable, Sequence
from itertools import chain

from celery_redlock.errors import LockTaken, NodeError, QuorumUnreachable, RedlockError
from celery_redlock.lock.engine.events import Events
from celery_redlock.lock.engine.releaser import Releaser
from celery_redlock.lock.engine.renewer import Renewer
from celery_redlock.lock.engine.rounds import AcquireRound
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.fencing import Fence, proposal
from celery_redlock.lock.model.key_lease import KeyLease, LockKey
from celery_redlock.lock.model.keys import parts_of, value_of
from celery_redlock.lock.model.lease import MARGIN, Lease
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.model.votes import is_split
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.server.error_hints import causes_of
from celery_redlock.lock.server.guard import Core
from celery_redlock.lock.server.requests import GRANT
from celery_redlock.lock.transport.command import Command

IMPLAUSIBLE = "FENCE is far ahead of the other nodes"
ROUNDS_IN_TTL = 4  # number of rounds that must fit into a ttl

Failure = LockTaken | QuorumUnreachable


class AlreadyCompletedError(RedlockError):
    """A node reports that the run has ended already, so it must not run again."""


class SupersededError(RedlockError):
    """The same task was sent again meanwhile, and the later send runs instead."""


class Acquirer:
    """Runs acquire rounds.

    check_distinct: raises SettingsError if two nodes turned out to be one server.
    """

    def __init__(
        self,
        core: Core,
        platform: Platform,
        events: Events,
        releaser: Releaser,
        renewer: Renewer,
        check_distinct: Callable[[], None],
    ) -> None:
        self._core, self._platform, self._clock = core, platform, core.clock
        self._events, self._releaser, self._renewer = events, releaser, renewer
        self._check_distinct = check_distinct
        self._margin = MARGIN + self._clock.resolution
        self._guarded = core.options.guard.word != "off"
        nodes = core.nodes
        self._counts = len(nodes.all), nodes.quorum, core.options.clock_drift

    def try_acquire(self, acquisition: Acquisition) -> Failure | None:
        """Lock every key or none, without waiting for a release. Return None, or the failure.

        A failure is rolled back. If this raises, the caller releases the acquisition. Raises
        AlreadyCompletedError, SupersededError, and SettingsError if two nodes turn out to be one
        server.
        """
        failure = self._lock_keys(acquisition)
        if failure is None and acquisition.options.fencing:
            failure = self.confirm_fencing_token(acquisition, acquisition.fencing_token)
        if failure is None and len(acquisition.key_leases) > 1:
            failure = self._expired_while_acquiring(acquisition)
        if failure is not None:
            self._releaser.roll_back(acquisition)
        return failure

    def _lock_keys(self, acquisition: Acquisition) -> Failure | None:
        """Lock each key in order, or any single permit.

        A run that may be delivered again also locks its own name, if another delivery of it may
        hold the lock with another limit.
        """
        options = acquisition.options
        marker, is_semaphore = options.marker, options.limit > 1
        keys: Sequence[LockKey] = () if is_semaphore else acquisition.keys
        if marker is not None and (is_semaphore or marker.is_redelivered):
            prefix = self._core.options.prefix
            keys = [LockKey(prefix, f"run:{marker.run}", 0, options.ttl), *keys]
        for key in keys:
            failure = self._lock_key(acquisition, key)
            if failure is not None:
                return failure
        return self._lock_permit(acquisition) if is_semaphore else None

    def _lock_permit(self, acquisition: Acquisition) -> Failure | None:
        """Try each permit once, from a random one on. If all are taken, return the first to expire.

        A redelivery begins at the plain lock's key, because a first delivery with a limit of 1
        holds that key.
        """
        options, prefix = acquisition.options, self._core.options.prefix
        first, soonest = random.randrange(options.limit), None  # noqa: S311 - no secret
        if acquisition.is_redelivery:
            first = 0
        for permit in chain(range(first, options.limit), range(first)):
            key = LockKey(prefix, acquisition.keys[0].resource, permit, options.ttl)
            failure = self._lock_key(acquisition, key)
            if not isinstance(failure, LockTaken) or acquisition.is_own_run(failure.holder):
                return failure
            soonest = _sooner(soonest, failure)
            self._releaser.roll_back_last(acquisition)
        return soonest

    def _lock_key(self, acquisition: Acquisition, key: LockKey) -> Failure | None:
        """Make one round for one key."""
        key_lease = self.new_key_lease(acquisition.options, key)
        acquisition.key_leases.append(key_lease)  # before the request leaves, so it gets released
        self._events.claiming(acquisition, key_lease)
        nodes = self._core.nodes
        marker = acquisition.options.marker
        round_ = AcquireRound(key_lease, len(nodes.all), nodes.send_to, marker)
        failure = self._run(round_, key_lease, acquisition.options)
        tally = round_.tally
        if failure is not None and is_split(round_.holders, tally.unheard, tally.quorum):
            acquisition.was_split = True  # rivals share the nodes, and none has got the lock
        return failure

    def new_key_lease(self, options: LockOptions, key: LockKey, value: str = "") -> KeyLease:
        """Return a new key lease without a request yet. value: of another process's key lease."""
        nodes, quorum, drift = self._counts
        lease = Lease(nodes, quorum, options.ttl, drift, self._margin, self._guarded)
        if not value:
            since_ms = self._clock.wall_us() // 1000
            label = options.label or _process_label(os.getpid())
            token = self._platform.new_token()
            value = value_of(token, since_ms, label, options.ttl)
        return KeyLease(key, value, lease, Fence(quorum) if options.fencing else None)

    def _run(
        self, round_: AcquireRound, key_lease: KeyLease, options: LockOptions
    ) -> Failure | None:
        """Write one request to every node and wait for the votes."""
        core, clock, lease = self._core, self._clock, key_lease.lease
        nodes = core.nodes
        sent = key_lease.sent = clock.now()
        least = None if key_lease.fence is None else proposal(clock.wall_us())
        if key_lease.fence is not None:
            key_lease.fence.proposed = least or 0
        request = core.requests.acquire(key_lease, options, least)
        is_suffixed, is_dated = True, bool(least)
        command = Command(request, round_, GRANT, is_suffixed, is_dated)
        nodes.broadcast(command, sent)
        core.requests.release(key_lease)  # encoded now, while the nodes work
        longest = lease.ttl / ROUNDS_IN_TTL
        nodes.wait(round_, sent + min(core.options.node_timeout, longest))
        if not round_.decided:
            nodes.wait_for_connects(round_, sent, longest=longest)
        time_is_up, round_.decided = not round_.decided, True
        if core.guard.same_server is not None:
            self._check_distinct()
        if round_.completed:
            error = SupersededError if round_.superseded else AlreadyCompletedError
            raise error(key_lease.key.resource)
        if core.guard.replaced_at:
            round_.withdraw_replaced(core.guard.replaced_at)
        # before the token is chosen: it must be as large as the counters of a quorum that counts
        has_counters = key_lease.fence is None or self._has_counters(key_lease.fence, round_)
        if round_.tally.reached and has_counters and lease.begin(clock.now()):
            return None
        return self._failed(round_, key_lease, options.limit, time_is_up=time_is_up)

    def _has_counters(self, fence: Fence, round_: AcquireRound) -> bool:
        """Return whether a quorum's counters count; tell of the nodes whose counters do not."""
        nodes = self._core.nodes
        for node in fence.implausible:
            round_.errors[node] = NodeError("", IMPLAUSIBLE)
            self._core.guard.on_error_reply(nodes.all[node], IMPLAUSIBLE)
        return fence.has_quorum

    def _failed(
        self, round_: AcquireRound, key_lease: KeyLease, limit: int, *, time_is_up: bool
    ) -> Failure:
        for node, other in round_.held_by.items():
            self._core.guard.learn_time(node, other.wall, key_lease.sent)
            self._releaser.release_late_grant(node, other.value)
        resource, nodes = key_lease.key.resource, self._core.nodes
        if round_.tally.taken(time_is_up=time_is_up):
            values = round_.holders  # the one that most of the refusing nodes have is shown
            holder, _, ttl = parts_of(max(values, key=values.count, default=""))
            return LockTaken(resource, holder, round_.expires_in(), ttl=ttl, limit=limit)
        return QuorumUnreachable(
            resource, round_.causes(nodes.all, time_is_up=time_is_up), nodes.quorum
        )

    def confirm_fencing_token(self, acquisition: Acquisition, token: int) -> Failure | None:
        """Have a token confirmed for each key; return None if it may be used, else the failure.

        Several resources share one token, so it must be confirmed for each of them. Otherwise a
        later holder of one resource might get a smaller token.
        """
        core = self._core
        for key_lease in acquisition.key_leases:
            until = self._clock.now() + core.options.node_timeout
            if not self._renewer.confirm_fencing_token(key_lease, token, until):
                causes = causes_of(core.nodes.all)
                return QuorumUnreachable(key_lease.key.resource, causes, core.nodes.quorum)
        return None

    def _expired_while_acquiring(self, acquisition: Acquisition) -> Failure | None:
        """Return a failure if the first keys expired during the rounds for later keys."""
        if acquisition.held(self._clock.now()):
            return None
        return QuorumUnreachable(acquisition.resource, (), self._core.nodes.quorum)


@functools.lru_cache(maxsize=1)
def _process_label(pid: int) -> str:
    return f"pid {pid} on {socket.gethostname()}"


def _sooner(one: LockTaken | None, other: LockTaken) -> LockTaken:
    """Return the failure whose lease ends first. Unknown ends come last."""
    if one is None or one.expires_in is None:
        return other
    return other if other.expires_in is not None and other.expires_in < one.expires_in else one
