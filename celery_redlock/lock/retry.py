"""Retries an acquire while others hold the lock, and decides when to try again and when to give up.

One generator has the rules. It yields moves: a call, or a pause from which a release may wake the
caller. A thread makes the moves itself; a coroutine makes the calls in threads.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeGuard

from celery_redlock.errors import CLOSED, LockLost, LockTaken, QuorumUnreachable, set_waited
from celery_redlock.lock.engine.acquirer import Failure
from celery_redlock.lock.engine.callers import MAX_SPIN, Caller
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Acquisition, Hold
from celery_redlock.lock.model.handoff import (
    LOOK,
    TURN,
    AskAgain,
    Step,
    WaitFree,
    next_move,
    unclear_pause,
)
from celery_redlock.lock.model.keys import name_of_lock
from celery_redlock.lock.model.lease import LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.model.rate import Rate, awaited
from celery_redlock.lock.platform.coroutines import StepRunner, rest
from celery_redlock.lock.server.error_hints import is_misconfigured, is_of_a_replica
from celery_redlock.lock.server.requests import REGISTRATION_TTL

# all in seconds; acquisition.py has the pauses for rivals that share the nodes
FIRST_SPIN = 0.05  # between tries while the caller waits for the lock; up to MAX_SPIN
START_SPREAD = 0.005  # range over which callers spread their looks for the next start of a rate
# between looks of a caller that releases can name, in case one was missed
MAX_LISTENING_PAUSE = 5.0
MISCONFIGURED_WAIT = 3.0  # how long a caller waits while too many nodes are misconfigured
# locks that callers of a process wait for, or callers for one: more look less often
CROWD_SIZE = 100


class Pause(NamedTuple):
    """A sleep. A caller may be woken from it; without a caller, nothing ends it early."""

    caller: Caller | None
    seconds: float


Move = Callable[[], Failure | None] | Pause
Moves = Generator[Move, Any, Failure | None]  # gets the result of each call, returns the last one


class Wait:
    """One wait of a caller for a lock that was refused. Times are monotonic seconds.

    until: the end of the wait. failure: of the last try; None once the caller has the lock.
    tried_at: the begin of that try. tries: number of tries with a new result. quiet_until: up to
    this moment no wake-up ends the caller's sleep. hopeless_at: if too many nodes are
    misconfigured, a try that began later than this ends the wait.
    """

    __slots__ = (
        "_quiet_pause", "caller", "failure", "hopeless_at", "quiet_until", "tried_at", "tries",
        "until",
    )  # fmt: skip

    def __init__(self, caller: Caller, failure: Failure, now: float, until: float) -> None:
        self.caller = caller
        self.failure: Failure | None = failure
        self.until = until
        self.tries = 0
        self.hopeless_at = now + MISCONFIGURED_WAIT
        self._quiet_pause = 0.0
        self.record_try(failure, now)

    def record_try(self, failure: Failure | None, now: float) -> None:
        """Record the result of a try. now: the monotonic second at which the try began."""
        if failure is not self.failure:  # the same object: it was another waiter's turn, no try
            self.tries += 1
        self.failure = failure
        self.tried_at = now
        is_unclear = isinstance(failure, LockTaken) and failure.is_unclear
        self._quiet_pause = unclear_pause(self._quiet_pause) if is_unclear else 0.0
        self.quiet_until = min(now + self._quiet_pause, self.until)

    def wakes_at(self, next_look: float) -> float:
        """Return when the caller's next pause ends. next_look: of a caller without a step."""
        return max(min(next_look, self.caller.due), self.quiet_until)


class Attempts:
    """The tries of one acquire. They leave out resources that the owner holds already."""

    __slots__ = ("_clock", "_hold", "_keys", "_options", "_outer_acquisitions", "_session",
                 "_started")  # fmt: skip

    def __init__(
        self, session: Session, options: LockOptions, keys: Sequence[LockKey], hold: Hold
    ) -> None:
        self._session = session
        self._options = options
        self._hold = hold
        self._clock = session.clock
        self._started = session.clock.now()
        self._keys = keys
        self._outer_acquisitions: Mapping[str, Acquisition] = {}
        _, flow, _ = hold.owner
        if flow.held and options.reentrant:
            for expired in hold.expired_outer(options, self._started):
                self._release_expired(expired)
            self._outer_acquisitions = hold.add_outer(options, self._started)
            self._keys = [key for key in keys if key.resource not in self._outer_acquisitions]

    def _try(self) -> Failure | None:
        return self._session.acquirer.try_acquire(self._hold, self._options, self._keys)

    def _release_expired(self, acquisition: Acquisition) -> None:
        """Release an acquisition of the owner, of which a node may keep a key for a moment more."""
        reason = acquisition.expire(self._started)
        if reason is not None:
            self._session.events.lost_soon(acquisition, reason)
        self._session.releaser.release(acquisition)

    def run(self, timeout: float) -> None:
        """Acquire, and try again for up to `timeout` seconds.

        If this raises, the caller releases the hold. Raises LockTaken, QuorumUnreachable, LockLost,
        SettingsError.
        """
        if not self._keys:
            return
        # outside of the generator: most acquires need no more
        failure = self._session.acquirer.try_acquire(self._hold, self._options, self._keys)
        if failure is not None or self._outer_acquisitions:
            with closing(self._go_on(failure, timeout)) as moves:
                self._check_acquired(self._do(moves))

    def _do(self, moves: Moves) -> Failure | None:
        """Make the moves of the generator in this thread or greenlet; return the last failure."""
        result = None
        sleeper = self._session.platform.new_sleeper()
        try:
            while True:
                move = moves.send(result)
                result = None
                if callable(move):
                    result = move()
                elif move.caller is None:
                    self._clock.sleep(move.seconds)
                else:
                    move.caller.wake = sleeper.wake
                    if not move.caller.decided:  # read after `wake` is set, so no wake-up is lost
                        sleeper.sleep(move.seconds)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def run_async(self, timeout: float, runner: StepRunner) -> None:
        """Acquire as `run` does, with tries in threads, and pauses in the event loop."""
        if not self._keys:
            return
        failure = await runner.do(self._try)
        result = None
        with closing(self._go_on(failure, timeout)) as moves:
            try:
                while True:
                    move = moves.send(result)
                    result = None
                    if callable(move):
                        result = await runner.do(move)
                    elif move.caller is None:
                        await asyncio.sleep(move.seconds)
                    else:
                        await rest(move.caller, move.seconds)
            except StopIteration as end:
                self._check_acquired(end.value)

    def _check_acquired(self, failure: Failure | None) -> None:
        """Raise the failure, or LockLost if an outer lock expired during the tries."""
        now = self._clock.now()
        session = self._session
        if failure is not None and session.is_closed:  # which ended the wait, or failed the try
            failure = QuorumUnreachable(failure.resource, [CLOSED], session.nodes.quorum)
        if failure is not None:
            set_waited(failure, now - self._started)
            raise failure
        for acquisition in self._outer_acquisitions.values():
            if not acquisition.held(now):
                raise LockLost(acquisition.resource, acquisition.reason)

    # the rules

    def _go_on(self, failure: Failure | None, timeout: float) -> Moves:
        """Yield the moves after the first try, which had this failure; return the last failure."""
        if failure is not None and timeout > 0 and not self._session.is_closed:
            failure = yield from self._wait(failure, self._started + timeout)
        while failure is not None and timeout <= 0:
            # rivals that kept each other from the lock publish no release; after random pauses,
            # one of them gets it
            pause = self._hold.pause_of_split()
            if pause is None:
                break
            yield Pause(None, pause)
            failure = yield self._try
        if failure is None and self._outer_acquisitions and self._options.fencing:
            confirm = self._session.acquirer.confirm_fencing_token
            failure = yield functools.partial(confirm, self._hold.acquisitions)
        return failure

    def _wait(self, first_failure: Failure, until: float) -> Moves:
        """Yield the moves of a wait: a try whenever the lock may be free, up to `until`.

        until: monotonic seconds. If too many nodes are misconfigured, the wait ends earlier, but
        not at once: their errors may be older than their last reconnect.
        """
        session = self._session
        clock = self._clock
        caller = self._join(first_failure)
        wait = Wait(caller, first_failure, clock.now(), until)
        while wait.failure is not None and (now := clock.now()) < until:
            caller.decided = False  # before it looks at its plan: a wake-up may come from now on
            if not self._is_hopeless(wait.failure):
                wait.hopeless_at = now + MISCONFIGURED_WAIT
            # not `now`: a pause of the process must not count
            if session.is_closed or wait.tried_at > wait.hopeless_at:
                break
            next_look = min(now + self._pause(wait), until)
            yield Pause(caller, wait.wakes_at(next_look) - now)
            now = clock.now()
            step = self._due_step(wait, next_look, now)
            if step is not None:
                failure = yield functools.partial(self._act, wait, step)
                wait.record_try(failure, now)
        session.callers.leave(caller, acquired=wait.failure is None)
        self._hold.end_wait = None
        return wait.failure

    def _join(self, failure: Failure) -> Caller:
        """Return a new caller that waits for the lock, or for the start, that was refused."""
        session = self._session
        key = self._keys[0]
        since = 0.0 if self._options.is_hold else session.guard.wall()
        caller = Caller(name_of_lock(key.resource), key.limit, since)
        if self._is_of_another(failure, caller):
            caller.name, caller.limit = _awaited_of(failure)
        # before it joins, so that an exception ends its wait; a forked child has its own callers
        self._hold.end_wait = lambda: session.callers.leave(caller)
        session.callers.join(caller)
        if isinstance(caller.limit, int) and caller.limit > 1:
            # rivals that kept each other from a permit announce no roll-back
            caller.plan(Step(LOOK), self._clock.now() + random.uniform(TURN, 2 * TURN))  # noqa: S311
        return caller

    def _due_step(self, wait: Wait, next_look: float, now: float) -> Step | None:
        """Return the step of a caller whose pause has ended; None if it pauses again.

        next_look, now: monotonic seconds: when it looks without a step, and the present time.
        """
        caller = wait.caller
        if now < wait.quiet_until:  # the release of its own try has named it
            return None
        step = caller.take_step(now)
        if step is not None:
            return step
        if now < next_look or self._is_seen(caller, now, wait.until):
            return None  # it was woken for a step that is due later; or it need not look
        return Step(LOOK)

    def _is_of_another(self, failure: Failure, caller: Caller) -> TypeGuard[LockTaken]:
        """Return whether the failure is the refusal of another key than the caller waits for."""
        is_other = isinstance(failure, LockTaken) and _awaited_of(failure)[0] != caller.name
        return is_other and any(failure.resource == key.resource for key in self._keys)

    def _is_seen(self, caller: Caller, now: float, until: float) -> bool:
        """Return whether a caller need not look, because the first one for this lock has lately."""
        callers = self._session.callers
        first_caller = callers.first_of(caller) or caller
        # in a crowd not even first ones look at the end of their waits, as all may end at once
        if first_caller is caller and not (now >= until and callers.count > CROWD_SIZE):
            return False
        if first_caller.due < now - TURN:  # it had a step to do, and did not act
            callers.pass_over(first_caller)
            return False
        is_rate = isinstance(caller.limit, Rate)
        max_age = REGISTRATION_TTL / 2 if is_rate else 2 * self._longest_look()
        is_recent = now - first_caller.looked_at < max_age
        return is_recent and callers.inbox.is_listening and not self._hold.splits

    def _longest_look(self) -> float:
        """Return the most seconds between two looks of a first caller that releases can name."""
        crowd = max(1.0, self._session.callers.count / CROWD_SIZE)
        # each look registers it again
        return min(MAX_LISTENING_PAUSE * crowd, REGISTRATION_TTL / 2)

    def _act(self, wait: Wait, step: Step) -> Failure | None:
        """Try, unless the nodes report that the lock is taken, or that others are to try first."""
        callers = self._session.callers
        caller = wait.caller
        failure = wait.failure
        caller.looked_at = now = self._clock.now()
        if step.named_at is not None:
            self._hold.splits = 0
        is_named = step.named_at is not None and not step.passed
        # the question takes as long as a node timeout, and so does the try
        is_last = now + self._session.nodes.timeout >= wait.until
        if not (is_named or is_last or self._hold.splits) and isinstance(failure, LockTaken):
            place = callers.inbox.place(caller.name, caller.limit, step.passed)
            move = None if place is None else next_move(place, step)
            if isinstance(move, AskAgain):
                caller.plan(move.step, self._clock.now() + move.seconds)
                return failure
            if isinstance(move, WaitFree):
                ends = move.seconds if math.isfinite(move.seconds) else None
                terms: Any = {name: getattr(failure, name) for name in ("ttl", "limit", "rate")}
                return LockTaken(failure.resource, failure.holder, ends, **terms)
        refusal = self._try()
        if refusal is not None and self._is_of_another(refusal, caller):
            # the try has released the other keys, which wakes their waiters
            callers.move(caller, *_awaited_of(refusal))
        elif refusal is not None:
            callers.inbox.changed(caller.name, reregister=True)
        return refusal

    def _pause(self, wait: Wait) -> float:
        """Return the seconds until the caller's next look: random, so that callers spread out."""
        split = self._hold.pause_of_split()
        if split is not None:
            return split
        uniform = random.uniform
        callers = self._session.callers
        caller = wait.caller
        failure = wait.failure
        if callers.first_of(caller) is not caller:
            return uniform(1.0, 2.0) * max(1.0, len(callers.line(caller.name)) / CROWD_SIZE)
        is_rate = isinstance(caller.limit, Rate)
        if is_rate and callers.inbox.is_listening:  # a start that is given back is announced
            spin = uniform(0.5, 1.0) * REGISTRATION_TTL / 2
        elif callers.inbox.is_listening and isinstance(failure, LockTaken):
            spin = uniform(0.2, 1.0) * self._longest_look()
        else:
            spin = uniform(0.001, min(MAX_SPIN, FIRST_SPIN * 2 ** min(wait.tries, 16)))
        ends = failure.expires_in if isinstance(failure, LockTaken) else None
        spread = START_SPREAD if is_rate else FIRST_SPIN
        return spin if ends is None else min(spin, ends + uniform(0, spread))

    def _is_hopeless(self, failure: Failure) -> bool:
        """Return whether no quorum is possible before an operator changes a setting."""
        if isinstance(failure, LockTaken):
            return False
        nodes = self._session.nodes
        misconfigured = [cause for cause in failure.causes if is_misconfigured(cause)]
        # a failover may make a primary of a replica
        permanent = [cause for cause in misconfigured if not is_of_a_replica(cause)]
        return len(permanent) > len(nodes.all) - nodes.quorum


def _awaited_of(refusal: LockTaken) -> tuple[str, int | Rate]:
    return awaited(refusal.resource, refusal.limit, refusal.rate)
