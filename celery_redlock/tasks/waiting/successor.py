"""Which message of this worker is next on a lock, as the nodes say: named, in turn, or by itself.

The nodes keep which workers wait for a resource, each since its head was first deferred. A release
names the first three of them. The worker that a majority names first dispatches its head at once.
The second and the third ask the nodes after their turns, and act if the lock is still free: a
stopped worker costs a turn, not a lease. A head whose countdown is over asks as well, before it
tries: it waits one turn for each worker before it, or until the holder's lease ends.

All of that is a hint. A wrong or lost name costs time; a dispatched message takes the lock like any
other, or is refused.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from celery_redlock.lock.engine.registrar import Registrar
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.engine.wait_queue import process_name
from celery_redlock.lock.model.handoff import TURN, Named, Namings, Registration, Standing
from celery_redlock.lock.model.keys import inbox_channel
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.tasks.delivery.delivery import NAMED_AT, utc_now
from celery_redlock.tasks.signals import HANDOFF_STEPS, LockHandedOffEvent, lock_handed_off
from celery_redlock.tasks.waiting.dispatch import Dispatcher
from celery_redlock.tasks.waiting.loop import EventLoop
from celery_redlock.tasks.waiting.queues import WITHOUT_QUORUM, Waiter
from celery_redlock.tasks.waiting.times import WaitingTimes

NAMED_AT_MOST = 3  # workers, by one release: as in lua/announce.lua
MOST_TURNS = 10  # that a head waits for workers before it, which may be stopped
NAMED, ACTED, LADDER, FALLBACK = HANDOFF_STEPS


@dataclass(frozen=True)
class Turn:
    """Why a head may act.

    step: of `LockHandedOffEvent`, "" as its worker begins to wait or to listen. passed: how many
    workers before it have had their turn. released_at: monotonic seconds of the release's message,
    None without one. unless: id of a message; if its run succeeds, the turn is not needed.
    """

    step: str
    passed: int = 0
    released_at: float | None = None
    unless: str = ""


class Successor:
    """Registers the heads of one worker's queues, and dispatches each when it is its turn.

    `on_message` is called in the subscribers' threads, everything else in the worker's event loop.
    Nothing is registered before `use`.
    """

    _registrar: Registrar | None = None
    inbox = ""

    def __init__(
        self, consumer: Any, loop: EventLoop, platform: Platform, times: WaitingTimes
    ) -> None:
        self._loop, self._clock, self._times = loop, platform.clock, times
        self._name = process_name(str(getattr(consumer, "hostname", "")))
        self._prefix = ""
        self._counting = platform.new_mutex()  # of the namings; real threads compete for it
        self._namings = Namings(1)
        self._registered: dict[str, float] = {}  # by resource: since when, as the nodes know it
        # by resource: when its turn comes, in monotonic seconds, the turn, and the timer's entry
        self._turns: dict[str, tuple[float, Turn, Any]] = {}
        self._refreshed_at = self._looked_at = self._clock.now()
        self.dispatcher = Dispatcher(consumer, loop, self._clock, times, self.on_head, self.on_due)

    def use(self, session: Session, subscriptions: Callable[[str], int]) -> None:
        """Use the nodes of a session from now on. subscriptions: as of the room."""
        self._registrar, self._prefix = session.registrar, session.options.prefix
        self._subscriptions = subscriptions
        self.inbox = inbox_channel(self._prefix, self._name)
        self._namings = Namings(session.node_set.size)

    def forget(self) -> None:
        """Forget all waiters, and let the nodes forget them."""
        for resource in list(self._registered):
            self._unregister(resource)
        for resource in list(self._turns):
            self._cancel_turn(resource)
        with self._counting:
            self._namings.clear()
        self.dispatcher.forget()

    # in the subscribers' threads

    def on_message(self, message: str, node: int) -> None:
        """Take one node's message to this worker's own channel; "" as it opens."""
        if not message:
            self._loop.call_soon(self.look_again)
            return
        named = Named.parse(message, self._prefix)
        if named is None:
            return
        with self._counting:
            turns = self._namings.turns(named, node)
        if turns is not None:
            self._loop.call_soon(self._on_named, named, turns, self._clock.now())

    # in the event loop

    def _on_named(self, named: Named, turns: int, at: float) -> None:
        """Act on a release that names this worker. at: monotonic seconds, when that came."""
        heads = self.dispatcher.heads_to_run(named.resource)
        if not heads:
            return
        if named.rank == turns:  # else the nodes differ, or the others' messages are on their way
            for head in heads:
                self._tell(head, NAMED)
        late = self._clock.now() - at
        if turns == 0 and late < TURN:
            self._cancel_turn(named.resource)
            for head in heads:
                self._dispatch(head, Turn(ACTED, released_at=at))
            return
        # a loop that was blocked for its turn asks first: another worker may have acted
        self._ask_after(turns * TURN - late, named.resource, Turn(LADDER, turns, at))

    def _ask_after(self, seconds: float, resource: str, turn: Turn) -> None:
        """Ask for the heads of a resource in a while, or before if that is planned already.

        If it were put off by each release, a stopped worker in front would stay there for as long
        as releases follow each other faster than turns.
        """
        seconds = max(0.0, seconds)
        due, planned = self._clock.now() + seconds, self._turns.get(resource)
        if planned is not None and planned[0] <= due and planned[1].unless in ("", turn.unless):
            return
        self._cancel_turn(resource)
        entry = self._loop.call_after(seconds, self._ask_all, resource, turn)
        self._turns[resource] = (due, turn, entry)

    def _cancel_turn(self, resource: str) -> None:
        *_, entry = self._turns.pop(resource, (None,))
        self._loop.cancel(entry)

    def _ask_all(self, resource: str, turn: Turn) -> None:
        self._turns.pop(resource, None)
        if self.dispatcher.has_succeeded(turn.unless):
            return
        for head in self.dispatcher.heads_to_run(resource):
            self.ask(head, turn)

    def on_due(self, waiter: Waiter) -> None:
        """Ask for a head whose countdown is over; also a dead holder announces nothing."""
        self.dispatcher.postpone(waiter, waiter.pause)  # in case that no reply comes
        self.ask(waiter, Turn(FALLBACK))

    def ask(self, head: Waiter, turn: Turn) -> None:
        """Register a head, and ask the nodes how it stands."""
        if self.dispatcher.has_dispatched(head.queue):
            return
        if self._registrar is None:
            self._dispatch(head, turn)
            return
        resource, limit = head.queue.resource, head.queue.limit
        since = self._since(resource)
        if since is None:
            return  # it has gone to Celery meanwhile
        self._registered[resource] = since
        registration = Registration(self._name, resource, since, limit, turn.passed)
        report = functools.partial(self._loop.call_soon, self._on_standing, head, turn)
        self._registrar.ask(registration, report)

    def _on_standing(self, asker: Waiter, turn: Turn, standing: Standing | None) -> None:
        """Dispatch a head if its lock is free and it is its turn, else let it wait on."""
        with self.dispatcher.mutex:  # an earlier message may have come since the question
            head = self.dispatcher.queues.head_of(asker)
        if head is None:
            return
        is_over = head.eta <= self._clock.now() or head.is_postponed
        if standing is None:
            if is_over:
                self._dispatch(head, turn)  # the run finds out that there is no quorum
        elif not standing.is_free:
            # a head that is far from its turn needs no look at its ETA, which is soon
            is_far = standing.rank >= NAMED_AT_MOST
            if head.waits_for_release and (is_over or is_far):  # else it tries at its ETA
                self._wait_on(head, standing)
        elif standing.rank <= turn.passed:
            self._dispatch(head, turn)
        else:
            more = min(standing.rank - turn.passed, MOST_TURNS)
            next_turn = replace(turn, passed=turn.passed + more)
            self._ask_after(more * TURN, head.queue.resource, next_turn)

    def _wait_on(self, head: Waiter, standing: Standing) -> None:
        """Let a head wait until the holder's lease ends, or for its next look.

        The more workers are before it, the longer: they look as well.
        """
        pause = min(head.pause * (1 + standing.rank // NAMED_AT_MOST), self._times.longest_pause)
        pause *= random.uniform(0.5, 1.0)  # noqa: S311
        after_lease = standing.free_in + random.uniform(0.0, self._times.after_lease)  # noqa: S311
        head.pause = min(2 * head.pause, self._times.longest_pause)
        self.dispatcher.postpone(head, min(pause, after_lease))

    def _dispatch(self, head: Waiter, turn: Turn) -> None:
        if turn.released_at is not None:
            released_at = utc_now().timestamp() - (self._clock.now() - turn.released_at)
            head.request.request_dict["properties"][NAMED_AT] = released_at
        if turn.step:
            self._tell(head, turn.step)
        resource, id_ = head.queue.resource, str(head.request.id)
        unless = "" if self.dispatcher.has_succeeded(id_) else id_  # "": that was an earlier one
        self.dispatcher.dispatch(head, is_named=turn.released_at is not None)
        if resource == WITHOUT_QUORUM:
            return
        # it may be refused another lock before, and then no release of this one follows
        heads = self.dispatcher.heads_to_run(resource)
        if any(each.queue.limit > 1 for each in heads):
            unless = ""  # a release hands on one message, but more permits may be free
        if heads and not self.dispatcher.has_succeeded(unless):
            self._ask_after(self._times.retry_next_after, resource, Turn(FALLBACK, unless=unless))

    def _tell(self, head: Waiter, step: str) -> None:
        event = LockHandedOffEvent(head.queue.resource, step)
        lock_handed_off.send(getattr(head.request, "task", None), event=event)

    # the registrations

    def on_head(self, resource: str, first: Waiter | None = None) -> None:
        """Let the nodes know since when the head of a resource waits; ask for the first one.

        While the inbox is closed nothing is asked yet: `look_again` does, as it opens.
        """
        if self._registrar is None or resource == WITHOUT_QUORUM:
            return
        if first is not None:
            if self._subscriptions(self.inbox):
                self.ask(first, Turn(""))
            return
        since, known = self._since(resource), self._registered.get(resource)
        if since is None:
            self._unregister(resource)
        elif known is not None and known != since:
            self._registered[resource] = since
            self._registrar.update(Registration(self._name, resource, since))

    def _since(self, resource: str) -> float | None:
        """Return since when the first waiter of a resource waits; None if none waits."""
        with self.dispatcher.mutex:
            heads = self.dispatcher.queues.heads(resource)
        return min((head.since for head in heads), default=None)

    def _unregister(self, resource: str) -> None:
        if self._registrar is not None and self._registered.pop(resource, None) is not None:
            self._registrar.unregister(self._name, resource)

    def look_again_if_due(self) -> None:
        """Ask for each head from time to time: registrations expire, and a release may be missed.

        Also if this is late: the loop was blocked or the process stopped, and others have passed
        this worker by.
        """
        now = self._clock.now()
        was_blocked = now - self._looked_at > 2 * self._times.sweep_interval
        self._looked_at = now
        if was_blocked or now - self._refreshed_at > self._times.refresh_after:
            self.look_again(FALLBACK)

    def look_again(self, step: str = "") -> None:
        """Register and ask for each head: a node may have forgotten this worker, or passed it by.

        step: of heads that are dispatched then.
        """
        self._refreshed_at = self._clock.now()
        with self.dispatcher.mutex:
            resources = self.dispatcher.queues.resources()
        for resource in resources - {WITHOUT_QUORUM}:
            for head in self.dispatcher.heads_to_run(resource):
                self.ask(head, Turn(step))
