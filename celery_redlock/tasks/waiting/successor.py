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
from dataclasses import replace
from typing import Any

from celery_redlock.lock.engine.registrar import Registrar
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.engine.wait_queue import process_name
from celery_redlock.lock.model.handoff import TURN, Named, Namings, Registration, Standing
from celery_redlock.lock.model.keys import (
    inbox_channel,
    resource_of_channel,
    votes_channel,
    waiting_channel,
)
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.tasks.delivery.delivery import NAMED_AT, utc_now
from celery_redlock.tasks.signals import LockHandedOffEvent, lock_handed_off
from celery_redlock.tasks.waiting.dispatch import Dispatcher
from celery_redlock.tasks.waiting.loop import EventLoop
from celery_redlock.tasks.waiting.queues import Waiter
from celery_redlock.tasks.waiting.releases import Release
from celery_redlock.tasks.waiting.times import WaitingTimes
from celery_redlock.tasks.waiting.turns import (
    ACTED,
    ANNOUNCED,
    FALLBACK,
    LADDER,
    MOST_TURNS,
    NAMED,
    NAMED_AT_MOST,
    Turn,
)


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
        self._prefix = self._quorum_channel = ""
        self._counting = platform.new_mutex()  # of the namings; real threads compete for it
        self._namings = Namings(1)
        self._registered: dict[str, float] = {}  # by channel: since when, as the nodes know it
        # by channel: when its turn comes, in monotonic seconds, the turn, and the timer's entry
        self._turns: dict[str, tuple[float, Turn, Any]] = {}
        self._refreshed_at = self._looked_at = self._clock.now()
        self.dispatcher = Dispatcher(consumer, loop, self._clock, times, self)

    def use(self, session: Session, subscriptions: Callable[[str], int]) -> None:
        """Use the nodes of a session from now on. subscriptions: as of the room."""
        self._registrar, self._prefix = session.registrar, session.options.prefix
        self._subscriptions = subscriptions
        self._quorum_channel = votes_channel(self._prefix)
        self.inbox = inbox_channel(self._prefix, self._name)
        self._namings = Namings(session.node_set.size)

    def forget(self) -> None:
        """Forget all waiters, and let the nodes forget them."""
        for channel in list(self._registered):
            self._unregister(channel)
        for channel in list(self._turns):
            self._cancel_turn(channel)
        with self._counting:
            self._namings.clear()
        self.dispatcher.forget()

    def channels(self, common: set[str]) -> set[str]:
        """Return the channels by which releases name this worker; common: of its waiters."""
        if not common or not self.inbox:
            return set()
        return {waiting_channel(self._prefix, channel) for channel in common} | {self.inbox}

    # in the subscribers' threads

    def on_message(self, message: str, node: int) -> None:
        """Take one node's message to this worker's own channel; "" as a subscription begins."""
        if not message:
            self._loop.call_soon(self.refresh)  # the node may have lost its memory
            return
        named = Named.parse(message)
        if named is None:
            return
        with self._counting:
            turns = self._namings.turns(named, node)
        if turns is not None:
            self._loop.call_soon(self._on_named, named, turns, self._clock.now())

    # in the event loop

    def _on_named(self, named: Named, turns: int, at: float) -> None:
        """Act on a release that names this worker. at: monotonic seconds, when that came."""
        heads = self.dispatcher.heads_to_run(named.channel)
        if not heads:
            return
        if named.rank == turns:  # else the nodes differ, or the others' messages are on their way
            for head in heads:
                self._tell(head, NAMED)
        late = self._clock.now() - at
        if turns == 0 and late < TURN:
            self._cancel_turn(named.channel)
            for head in heads:
                self._dispatch(head, Turn(ACTED, released_at=at))
            return
        # a loop that was blocked for its turn asks first: another worker may have acted
        self._ask_after(turns * TURN - late, named.channel, Turn(LADDER, turns, at))

    def _ask_after(self, seconds: float, channel: str, turn: Turn) -> None:
        """Ask for the heads of a channel in a while, or before if that is planned already.

        If it were put off by each release, a stopped worker in front would stay there for as long
        as releases follow each other faster than turns.
        """
        seconds = max(0.0, seconds)
        due, planned = self._clock.now() + seconds, self._turns.get(channel)
        if planned is not None and planned[0] <= due and planned[1].unless in ("", turn.unless):
            return
        self._cancel_turn(channel)
        entry = self._loop.call_after(seconds, self._ask_all, channel, turn)
        self._turns[channel] = (due, turn, entry)

    def _cancel_turn(self, channel: str) -> None:
        *_, entry = self._turns.pop(channel, (None,))
        self._loop.cancel(entry)

    def _ask_all(self, channel: str, turn: Turn) -> None:
        self._turns.pop(channel, None)
        if self.dispatcher.has_succeeded(turn.unless):
            return
        for head in self.dispatcher.heads_to_run(channel):
            self.ask(head, turn)

    def on_release(self, release: Release) -> None:
        """Act on a message to all waiters of a channel, or on one that may have been missed."""
        turn = Turn("")
        if release.is_announced:
            turn = Turn(ANNOUNCED, released_at=self._clock.now())
        for head in self.dispatcher.heads_to_run(release.channel):
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
        channel, limit = head.queue.channel, head.queue.limit
        since = self._since(channel)
        if since is None:
            return  # it has gone to Celery meanwhile
        self._registered[channel] = since
        registration = self._registration(channel, since, limit, turn.passed)
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
            if is_over or turn.step == ANNOUNCED:
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
            self._ask_after(more * TURN, head.queue.channel, next_turn)

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
        channel, id_ = head.queue.channel, str(head.request.id)
        unless = "" if self.dispatcher.has_succeeded(id_) else id_  # "": that was an earlier one
        self.dispatcher.dispatch(head, is_named=turn.released_at is not None)
        if channel == self._quorum_channel:
            return
        # it may be refused another lock before, and then no release of this one follows
        heads = self.dispatcher.heads_to_run(channel)
        if any(each.queue.limit > 1 for each in heads):
            unless = ""  # a release hands on one message, but more permits may be free
        if heads and not self.dispatcher.has_succeeded(unless):
            self._ask_after(self._times.retry_next_after, channel, Turn(FALLBACK, unless=unless))

    def _tell(self, head: Waiter, step: str) -> None:
        resource = resource_of_channel(self._prefix, head.queue.channel)
        event = LockHandedOffEvent(resource, step)
        lock_handed_off.send(getattr(head.request, "task", None), event=event)

    # the registrations

    def on_head(self, channel: str, first: Waiter | None = None) -> None:
        """Let the nodes know since when the head of a channel waits; ask for the first one.

        Without a subscription nothing is asked yet: `on_release` does, as the subscription begins.
        """
        if self._registrar is None or channel == self._quorum_channel:
            return
        if first is not None:
            if self._subscriptions(channel):
                self.ask(first, Turn(""))
            return
        since, known = self._since(channel), self._registered.get(channel)
        if since is None:
            self._unregister(channel)
        elif known is not None and known != since:
            self._registered[channel] = since
            self._registrar.update(self._registration(channel, since))

    def _since(self, channel: str) -> float | None:
        """Return since when the first waiter of a channel waits; None if none waits."""
        with self.dispatcher.mutex:
            heads = self.dispatcher.queues.heads(channel)
        return min((head.since for head in heads), default=None)

    def _unregister(self, channel: str) -> None:
        if self._registrar is not None and self._registered.pop(channel, None) is not None:
            self._registrar.unregister(self._name, resource_of_channel(self._prefix, channel))

    def _registration(
        self, channel: str, since: float, limit: int = 1, passed: int = 0
    ) -> Registration:
        resource = resource_of_channel(self._prefix, channel)
        return Registration(self._name, resource, since, limit, passed)

    def refresh_if_due(self) -> None:
        """Register all heads anew from time to time, as their registrations expire.

        Also if this is late: the loop was blocked or the process stopped, and others have passed
        this worker by.
        """
        now = self._clock.now()
        was_blocked = now - self._looked_at > 2 * self._times.sweep_interval
        self._looked_at = now
        if was_blocked or now - self._refreshed_at > self._times.refresh_after:
            self.refresh()

    def refresh(self) -> None:
        """Register all heads anew: a node may have forgotten them, or have passed them by."""
        self._refreshed_at = self._clock.now()
        if self._registrar is None:
            return
        for channel in list(self._registered):
            since = self._since(channel)
            if since is not None:
                self._registered[channel] = since
                self._registrar.register(self._registration(channel, since))
