"""Acquires all keys of an acquisition or none: one round for each key. Then it takes its starts.

Source: redis.io "Distributed Locks with Redis" (Redlock), made exact. Each node has a deadline,
counted from before the request left. A round ends as soon as the votes decide it. Each round has a
new value. A release goes to every node, on the connection that the request used.
"""

from __future__ import annotations

import functools
import os
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from celery_redlock.errors import LockTaken, NodeError, QuorumUnreachable, RedlockError
from celery_redlock.label import is_of_run
from celery_redlock.lock.engine.core import Core
from celery_redlock.lock.engine.permits import PermitRound
from celery_redlock.lock.engine.releaser import Releaser
from celery_redlock.lock.engine.renewer import Renewer
from celery_redlock.lock.engine.rounds import AcquireRound
from celery_redlock.lock.engine.starts import StartRound
from celery_redlock.lock.model.acquisition import Acquisition, Hold
from celery_redlock.lock.model.fencing import Fence, proposal
from celery_redlock.lock.model.keys import HOLD_MARK, name_of_run, parts_of, value_of
from celery_redlock.lock.model.lease import MARGIN, Lease, LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.model.rate import Rate, RateKey, Start
from celery_redlock.lock.model.votes import is_split
from celery_redlock.lock.server.requests import GRANT
from celery_redlock.lock.transport.command import Command

IMPLAUSIBLE_COUNTER = "FENCE is far ahead of the other nodes"
ROUNDS_IN_TTL = 4  # number of rounds that must fit into a ttl
MAX_UNCLEAR_SPLITS = 2  # more tries, if nodes have permits free that no quorum shares
MAX_ROLLBACK_PAUSE = 0.01  # seconds, the longest pause between the two rounds of a try
START_REPETITIONS = 3  # more requests for a start that is too old once its body may begin

Failure = LockTaken | QuorumUnreachable
Ask = Callable[[int | None], tuple[Failure | None, PermitRound]]  # for any permit, or for one


class AlreadyCompletedError(RedlockError):
    """A node reports that the run has ended already, so it must not run again."""


class SupersededError(RedlockError):
    """The same task was sent again meanwhile, and the later send runs instead.

    later: the task id of a later send; "" if it is not known here.
    """

    def __init__(self, resource: str, later: str = "") -> None:
        super().__init__(resource)
        self.later = later


class Acquirer:
    """Runs acquire rounds."""

    def __init__(self, core: Core, releaser: Releaser, renewer: Renewer) -> None:
        self.core = core
        self._clock = core.clock
        self._releaser = releaser
        self._renewer = renewer
        nodes = core.nodes
        options = core.options
        margin = MARGIN + core.clock.resolution
        is_guarded = options.guard.mode != "off"
        self._terms = len(nodes.all), nodes.quorum, options.clock_drift, margin, is_guarded

    def try_acquire(
        self, hold: Hold, options: LockOptions, keys: Sequence[LockKey]
    ) -> Failure | None:
        """Lock every key or none, without waiting for a release. Return None, or the failure.

        A failure is rolled back. If this raises, the caller releases the hold. Raises
        AlreadyCompletedError, SupersededError, and SettingsError if two nodes turn out to be one
        server.
        """
        core = self.core
        clock = self._clock
        acquisition = Acquisition(options, keys, hold.owner)
        started = clock.now()
        hold.add(acquisition)  # before its request leaves, so that an exception releases it
        acquisition.splits = hold.splits
        failure = self._lock_keys(acquisition)
        if failure is None and options.fencing:
            failure = self.confirm_fencing_token([acquisition])
        if failure is None and options.rates:
            failure = self._take_starts(acquisition, options.rates)
        has_several_keys = len(acquisition.leases) > 1
        if failure is None and has_several_keys and not acquisition.held(clock.now()):
            # the first keys expired during the rounds for later keys
            failure = QuorumUnreachable(acquisition.resource, (), core.nodes.quorum)
        if failure is not None:
            return self._undo(hold, acquisition, failure, started)
        acquisition.plan_renewals(started)
        core.watchdog.watch(acquisition)
        replaced_at = core.guard.replaced_at
        if replaced_at:  # between the grant of the first key and now
            for lease in (*acquisition.leases, *acquisition.starts):
                for node in lease.replaced(replaced_at):
                    lease.withdraw(node)
        acquisition.nest()
        core.events.acquired(acquisition)
        if acquisition.starts and not options.body_follows:
            failure = self.begin_body(acquisition)  # last: who hears of the acquire may take long
            if failure is not None:
                core.events.released(acquisition)
                return self._undo(hold, acquisition, failure, started)
        return None

    def _undo(
        self, hold: Hold, acquisition: Acquisition, failure: Failure, started: float
    ) -> Failure:
        """Roll a failed try back; return its failure. started: monotonic seconds."""
        self._releaser.roll_back(acquisition)
        hold.remove(acquisition)
        hold.splits = hold.splits + 1 if acquisition.was_split else 0
        hold.took = self._clock.now() - started
        return failure

    def _lock_keys(self, acquisition: Acquisition) -> Failure | None:
        """Lock each key in order: those with one holder, then one permit of each of the others.

        A run that may be delivered again locks its own name first, if another delivery of it may
        hold other permits of all its keys, or hold them with other limits.
        """
        marker = acquisition.options.marker
        keys = acquisition.keys
        if marker is not None and (keys[0].limit > 1 or marker.is_redelivered):
            prefix = self.core.options.prefix
            ttl = acquisition.options.ttl
            keys = [LockKey(prefix, name_of_run(marker.run), ttl), *keys]
        for key in keys:
            lock = self._lock_key if key.limit == 1 else self._lock_permit
            failure = lock(acquisition, key)
            if failure is not None:
                return failure
        return None

    def _lock_key(self, acquisition: Acquisition, key: LockKey) -> Failure | None:
        """Run one round for one key."""
        core = self.core
        clock = self._clock
        options = acquisition.options
        lease = self.new_lease(options, key)
        acquisition.leases.append(lease)  # before the request leaves, so it gets released
        core.events.claiming(acquisition, lease)
        round_ = AcquireRound(lease, core.nodes.send_to, options.marker)
        lease.sent = clock.now()
        min_token = None
        if lease.fence is not None:
            min_token = lease.fence.proposed = proposal(clock.wall_us())
        request = core.requests.acquire(lease, options, min_token)
        is_suffixed = True
        is_dated = bool(min_token)
        command = Command(request, round_, GRANT, is_suffixed, is_dated)
        failure = self._run(round_, command, lease, acquisition)
        if failure is not None:
            tally = round_.tally
            was_split = is_split(round_.holders, tally.unheard, tally.quorum)
            self._handle_refusals(round_, lease)
            if was_split:
                acquisition.was_split = True  # rivals share the nodes, and none has got the lock
        return failure

    def _run(
        self, round_: AcquireRound, command: Command, lease: Lease, acquisition: Acquisition
    ) -> Failure | None:
        """Send the request of a round to all nodes, and wait until the round is decided."""
        core = self.core
        clock = self._clock
        sent_at = lease.sent
        nodes = core.nodes
        guard = core.guard
        nodes.broadcast(command, sent_at)
        max_wait = acquisition.options.ttl / ROUNDS_IN_TTL
        if round_.is_released:
            core.requests.release(lease)  # encoded now, while the nodes work
        nodes.wait(round_, sent_at + min(nodes.timeout, max_wait))
        if not round_.decided:
            nodes.wait_for_connects(round_, sent_at, max_seconds=max_wait)
        time_is_up = not round_.decided
        round_.decided = True
        if guard.same_server is not None:
            core.check_distinct()
        if round_.completed:
            error = SupersededError if round_.superseded else AlreadyCompletedError
            raise error(lease.key.resource)
        if guard.replaced_at:
            round_.withdraw_replaced(guard.replaced_at)
        # before the token is chosen: it must be as large as the counters of a quorum that counts
        has_counters = lease.fence is None or self._has_counters(lease.fence, round_)
        if round_.tally.reached and has_counters and lease.begin(clock.now()):
            return None
        return self._failed(round_, lease, time_is_up=time_is_up)

    def _handle_refusals(self, round_: AcquireRound, lease: Lease) -> None:
        """Learn the clocks of nodes that refused; release what they granted to us too late."""
        for node, refusal in round_.held_by.items():
            self.core.guard.learn_time(node, refusal.wall, lease.sent)
            self._releaser.release_late_grant(node, refusal.value)

    def _lock_permit(self, acquisition: Acquisition, key: LockKey) -> Failure | None:
        """Try to get one permit of a key, in at most two rounds.

        If rivals share the nodes, the second round is for a permit that a quorum has free; or, if
        there is none, for any, a moment later, because rivals roll back. A redelivery begins with
        the plain lock's key, because a first delivery with a limit of 1 holds that key.
        """
        marker = acquisition.options.marker
        if marker is not None and marker.is_redelivered:
            failure, _ = self._ask_permit(acquisition, key, only_permit=0)
            is_own = isinstance(failure, LockTaken) and is_of_run(failure.holder, marker.run)
            if is_own or not isinstance(failure, LockTaken):
                return failure  # the holder is this same run, in another delivery of its message
            self._releaser.roll_back_last(acquisition)
        ask = functools.partial(self._ask_permit, acquisition, key)
        return self._in_two_rounds(acquisition, ask, self._releaser.roll_back_last)

    def _in_two_rounds(
        self, acquisition: Acquisition, ask: Ask, undo_round: Callable[[Acquisition], object]
    ) -> Failure | None:
        """Ask for any permit; then for a certain one, if rivals share the nodes.

        undo_round: gives back what the first round has got.
        """
        failure, round_ = ask(None)
        if not isinstance(failure, LockTaken) or not round_.is_free_somewhere:
            return failure
        undo_round(acquisition)
        permit = round_.takable()
        if permit is None:
            self._clock.sleep(random.uniform(0, MAX_ROLLBACK_PAUSE))  # noqa: S311 - no secret
        failure, round_ = ask(permit)
        if isinstance(failure, LockTaken):
            # a permit of single nodes may be one that rivals give back now, or a holder's
            is_unclear = round_.is_free_somewhere and acquisition.splits < MAX_UNCLEAR_SPLITS
            acquisition.was_split = is_unclear or round_.takable() is not None
        return failure

    def _ask_permit(
        self, acquisition: Acquisition, key: LockKey, only_permit: int | None = None
    ) -> tuple[Failure | None, PermitRound]:
        """Run one round for a permit of a key. only_permit: its number; None for any."""
        core = self.core
        options = acquisition.options
        limit = key.limit
        key = LockKey(core.options.prefix, key.resource, key.ttl, limit)  # it becomes a permit's
        lease = self.new_lease(options, key)
        acquisition.leases.append(lease)  # as for a plain key
        core.events.claiming(acquisition, lease)
        first_permit = random.randrange(limit)  # noqa: S311 - no secret
        request = functools.partial(core.requests.permit, lease, options.marker, first_permit)
        nodes = core.nodes
        marker = options.marker
        round_ = PermitRound(lease, nodes.send_to, marker, request, only_permit)
        lease.sent = self._clock.now()
        failure = self._run(round_, round_.command(only_permit), lease, acquisition)
        if failure is not None:
            self._handle_refusals(round_, lease)
        return failure, round_

    def _take_starts(self, acquisition: Acquisition, rates: Mapping[str, Rate]) -> Failure | None:
        """Take a start of the rate of each key, in the order of the keys."""
        for resource in (key.resource for key in acquisition.keys if key.resource in rates):
            ask = functools.partial(self._ask_start, acquisition, resource, rates[resource])
            failure = self._in_two_rounds(acquisition, ask, self._releaser.cancel_last)
            if failure is not None:
                return failure
        return None

    def _ask_start(
        self, acquisition: Acquisition, resource: str, rate: Rate, only_permit: int | None = None
    ) -> tuple[Failure | None, StartRound]:
        """Run one round for a permit of a rate. only_permit: its number; None for any."""
        options = self.core.options
        key = RateKey(options.prefix, resource, rate, options.clock_drift)
        start = Start(key, self.core.platform.new_token(), *self._terms)
        acquisition.starts.append(start)  # before the request leaves, so it is given back
        return self._take(acquisition, start, only_permit)

    def _take(
        self,
        acquisition: Acquisition,
        start: Start,
        only_permit: int | None,
        *,
        is_repeated: bool = False,
    ) -> tuple[Failure | None, StartRound]:
        core = self.core
        first_permit = random.randrange(start.key.limit)  # noqa: S311 - no secret

        def request(permit: int | None, is_resent: bool) -> bytes:
            return core.requests.take(start, first_permit, permit, is_repeated=is_resent)

        if is_repeated:  # a node that was away may be asked now
            start.never_asked.clear()
        round_ = StartRound(
            start, core.nodes.send_to, request, only_permit, is_repeated=is_repeated
        )
        start.sent = self._clock.now()
        return self._run(round_, round_.command(only_permit), start, acquisition), round_

    def begin_body(self, acquisition: Acquisition) -> Failure | None:
        """Count the starts of an acquisition, as the last step before its body; None if it may run.

        Each start counts from a moment before the nodes stored it. The body must not begin later
        than the rate's slack after that moment. A start that is older is requested again, up to
        `START_REPETITIONS` times. Returns the failure if the body may not begin.
        """
        quorum = self.core.nodes.quorum
        requested_at = self._clock.now()
        repetitions = 0
        while True:
            now = self._clock.now()
            if not acquisition.held(now):
                return QuorumUnreachable(acquisition.resource, (), quorum)
            late_starts = [start for start in acquisition.starts if not start.held(now)]
            if not late_starts:
                self._count_starts(acquisition.starts, now)
                return None
            if repetitions == START_REPETITIONS:
                break
            repetitions += 1
            for start in late_starts:
                requested_at = self._clock.now()
                failure, _ = self._take(acquisition, start, start.key.permit, is_repeated=True)
                if failure is not None:
                    return failure
        took = self._clock.now() - requested_at
        key = late_starts[0].key
        cause = f"replies took {took:.3f} s, and a rate of {key.rate} needs them in {key.ttl:g} s"
        return QuorumUnreachable(key.resource, [cause], quorum)

    def _count_starts(self, starts: Sequence[Start], now: float) -> None:
        """Record that the body of these starts begins now, on nodes that did not grant them, too.

        now: the monotonic second at which each start was still held.
        """
        for start in starts:
            start.started_at = now
        for start in starts:
            if len(start.granted) < len(start.ends):
                self._releaser.record(start, now)

    def new_lease(self, options: LockOptions, key: LockKey, value: str = "") -> Lease:
        """Return a new lease without a request yet. value: of another process's lease."""
        if not value:
            since_ms = self._clock.wall_us() // 1000
            label = options.label or _process_label(os.getpid())
            token = HOLD_MARK * options.is_hold + self.core.platform.new_token()
            value = value_of(token, since_ms, label, options.ttl, key.limit)
        fence = Fence(self.core.nodes.quorum) if options.fencing else None
        return Lease(key, value, *self._terms, fence)

    def _has_counters(self, fence: Fence, round_: AcquireRound) -> bool:
        """Return whether a quorum's counters count; tell of the nodes whose counters do not."""
        for node in fence.implausible:
            round_.errors[node] = NodeError("", IMPLAUSIBLE_COUNTER)
            self.core.guard.on_error_reply(self.core.nodes.all[node], IMPLAUSIBLE_COUNTER)
        return fence.has_quorum

    def _failed(self, round_: AcquireRound, lease: Lease, *, time_is_up: bool) -> Failure:
        """Return the error for a round that did not get its key."""
        resource = lease.key.resource
        nodes = self.core.nodes
        if not round_.tally.taken(time_is_up=time_is_up):
            causes = round_.causes(nodes.all, time_is_up=time_is_up)
            return QuorumUnreachable(resource, causes, nodes.quorum)
        if isinstance(lease, Start):  # nobody holds a start
            return LockTaken(resource, "", round_.expires_in(), rate=str(lease.key.rate))
        values = round_.holders
        # the one that most of the refusing nodes have is shown
        holder, _, ttl, _ = parts_of(max(values, key=values.count, default=""))
        limit = lease.key.limit
        return LockTaken(resource, holder, round_.expires_in(), ttl=ttl, limit=limit)

    def confirm_fencing_token(self, acquisitions: Sequence[Acquisition]) -> Failure | None:
        """Have the keys' common token confirmed for each: later holders of one get a larger one."""
        core = self.core
        token = max(acquisition.fencing_token for acquisition in acquisitions)
        for lease in chain.from_iterable(acquisition.leases for acquisition in acquisitions):
            until = self._clock.now() + core.nodes.timeout
            causes = self._renewer.confirm_fencing_token(lease, token, until)
            if causes is not None:
                return QuorumUnreachable(lease.key.resource, causes, core.nodes.quorum)
        return None


@functools.lru_cache(maxsize=1)
def _process_label(pid: int) -> str:
    return f"pid {pid} on {socket.gethostname()}"
