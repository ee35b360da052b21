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
import math
import random
from collections.abc import Collection
from typing import Any

from celery_redlock.lock.engine.inbox import Inbox
from celery_redlock.lock.model.handoff import (
    FALLBACK,
    LOOK,
    MAX_UNCLEAR_PAUSE,
    TURN,
    AskAgain,
    Place,
    Step,
    WaitFree,
    next_move,
    unclear_pause,
)
from celery_redlock.lock.model.keys import waiting_for
from celery_redlock.lock.model.rate import Rate
from celery_redlock.lock.platform.clock import Clock
from celery_redlock.signals import HANDOFF_STEPS, LockHandedOffEvent, lock_handed_off
from celery_redlock.tasks.delivery.delivery import SEEN, seen_of, utc_now
from celery_redlock.tasks.waiting.buckets import Buckets
from celery_redlock.tasks.waiting.dispatch import Dispatcher
from celery_redlock.tasks.waiting.loop import EventLoop
from celery_redlock.tasks.waiting.queues import (
    WITHOUT_QUORUM,
    MessageQueues,
    QueueKey,
    WaitingMessage,
    WaitingTimes,
)

MAX_NAMED = 3  # workers, by one release: as in lua/announce.lua


class Successor:
    """The heads of one worker's queues, as the `Line` of an inbox: each is dispatched in its turn.

    `on_step` and `on_listening` are called in the subscribers' threads, everything else in the
    worker's event loop.
    """

    inbox: Inbox | None = None  # of the room, which makes it for the first message

    def __init__(
        self,
        loop: EventLoop,
        clock: Clock,
        times: WaitingTimes,
        queues: MessageQueues,
        buckets: Buckets,
        dispatcher: Dispatcher,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._times = times
        self._queues = queues
        self._buckets = buckets
        self._dispatcher = dispatcher
        # by resource: when its turn comes, in monotonic seconds, the step, and the timer's entry
        self._turns: dict[str, tuple[float, Step, Any]] = {}
        self._refreshed_at = self._last_look = self._clock.now()
        # by rate: until when, in monotonic seconds, its heads do not try, and for how long that is
        self._unclear_rates: dict[QueueKey, tuple[float, float]] = {}
        self._opened_at = -math.inf  # when the inbox opened on a node, and all heads asked

    def forget(self) -> None:
        """Forget whose turn it is, and let the nodes forget this worker's waiters."""
        if self.inbox is not None:
            self.inbox.leave()
        for resource in list(self._turns):
            self._cancel_turn(resource)
        self._unclear_rates.clear()

    def note_unclear(self, queue: QueueKey) -> None:
        """Let the heads of a rate wait, as no quorum agrees on a free permit; in any thread."""
        now = self._clock.now()
        until, pause = self._unclear_rates.get(queue, (-math.inf, 0.0))
        if now >= until:
            pause = unclear_pause(pause if now < until + MAX_UNCLEAR_PAUSE else 0.0)
            self._unclear_rates[queue] = now + pause, pause

    # as a `Line`, in any thread

    def since(self, resource: str) -> float | None:
        """Return since when the first waiter of a resource waits; None if none waits."""
        # not since when a head does: an urgent one would put its worker behind all others
        with self._queues.mutex:
            waiters = self._queues.on(resource)
        return min((waiter.since for waiter in waiters), default=None)

    def resources(self) -> Collection[str]:
        """Return the resources that messages wait for."""
        return self._queues.resources() - {WITHOUT_QUORUM}

    def on_step(self, resource: str, step: Step, due: float) -> None:
        """Let the heads of a resource act: a release names this worker."""
        self._loop.call_soon(self._on_step, resource, step, due)

    def on_listening(self) -> None:
        """Ask for all heads; at most once a second, as a node may open again and again."""
        self._loop.call_soon(self._on_listening)

    # in the event loop

    def _on_listening(self) -> None:
        now = self._clock.now()
        self._refreshed_at = -math.inf  # unless it asks now, the next sweep does
        if now - self._opened_at > self._times.sweep_interval:
            self._opened_at = now
            self.look_again()

    def _on_step(self, resource: str, step: Step, due: float) -> None:
        heads = self._dispatcher.heads_to_run(resource)
        if not heads:
            return
        if step.why != FALLBACK:
            for head in heads:
                self._tell(head, HANDOFF_STEPS[0])
        now = self._clock.now()
        if not step.passed and now - due < TURN:
            self._cancel_turn(resource)
            for head in heads:
                self._dispatch(head, step)
            return
        # a loop that was blocked for its turn asks first: another worker may have acted
        self._ask_after(due - now, resource, step)

    def _ask_after(self, seconds: float, resource: str, step: Step) -> None:
        """Ask for the heads of a resource in a while, or before if that is planned already."""
        # no release puts that off: a stopped worker in front would stay there for as long as
        # releases follow each other faster than turns
        seconds = max(0.0, seconds)
        due = self._clock.now() + seconds
        planned = self._turns.get(resource)
        if planned is not None and planned[0] <= due and planned[1].unless in (None, step.unless):
            return
        self._cancel_turn(resource)
        entry = self._loop.call_after(seconds, self._ask_all, resource, step)
        self._turns[resource] = (due, step, entry)

    def _cancel_turn(self, resource: str) -> None:
        *_, entry = self._turns.pop(resource, (None,))
        self._loop.cancel(entry)

    def _ask_all(self, resource: str, step: Step) -> None:
        self._turns.pop(resource, None)
        if self._is_needed(step):
            for head in self._dispatcher.heads_to_run(resource):
                self.ask(head, step)

    def on_due(self, waiter: WaitingMessage) -> None:
        """Ask for a head whose countdown is over; also a dead holder announces nothing."""
        self._dispatcher.postpone(waiter, waiter.pause)  # in case that no reply comes
        self.ask(waiter, Step(FALLBACK))

    def ask(self, head: WaitingMessage, step: Step) -> None:
        """Register a head, and ask the nodes for its place."""
        if self._buckets.awaits_rate(head.queue):
            return
        if self.inbox is None:
            self._dispatch(head, step)
            return
        report = functools.partial(self._loop.call_soon, self._on_place, head, step)
        self.inbox.ask(head.queue.name, head.queue.limit, step.passed, report)

    def _on_place(self, waiter: WaitingMessage, step: Step, place: Place | None) -> None:
        """Dispatch a head if its lock is free and it is its turn, else let it wait on."""
        with self._queues.mutex:  # an earlier message may have come since the question
            is_waiting = self._queues.of(waiter.request) is waiter
            head = self._queues.head(waiter.queue) if is_waiting else None
        if head is None:
            return
        is_due = head.eta <= self._clock.now() or head.is_postponed
        if place is None:
            if is_due:
                self._dispatch(head, step)  # the run finds out that there is no quorum
            return
        move = next_move(place, step)
        if isinstance(move, AskAgain):
            self._ask_after(move.seconds, head.queue.name, move.step)
        elif isinstance(move, WaitFree):
            # a head that is far from its turn needs no look at its ETA, which is soon
            is_far = place.rank >= MAX_NAMED or isinstance(head.queue.limit, Rate)
            if head.waits_for_release and (is_due or is_far):  # else it tries at its ETA
                self._wait_on(head, place)
        elif head.queue.limit == 1 or not self._postpone_for_pool(head, place):
            self._dispatch(head, step, more=place.free - place.rank > 1)

    def _postpone_for_pool(self, head: WaitingMessage, place: Place) -> bool:
        """Postpone a head that would wait in the pool; return whether it is postponed.

        The free permits are for the heads before it, and for messages that the pool has not begun.
        """
        unbegun = self._dispatcher.unbegun(head.queue)
        if not unbegun or unbegun + place.rank < place.free:
            return False
        if head.waits_for_release:  # else it tries at its ETA
            self._dispatcher.postpone(head, self._times.ask_next_after)
        return True

    def _wait_on(self, head: WaitingMessage, place: Place) -> None:
        """Let a head wait until the holder's lease ends, or for its next look."""
        if isinstance(head.queue.limit, Rate):  # a start that is given back is announced
            delay = random.uniform(0.0, self._times.after_start)  # noqa: S311
            self._dispatcher.postpone(head, min(place.free_in + delay, self._times.longest_pause))
            return
        # the more workers are before it, the longer: they look as well
        pause = min(head.pause * (1 + place.rank // MAX_NAMED), self._times.longest_pause)
        pause *= random.uniform(0.5, 1.0)  # noqa: S311
        after_lease = place.free_in + random.uniform(0.0, self._times.after_lease)  # noqa: S311
        head.pause = min(2 * head.pause, self._times.longest_pause)
        self._dispatcher.postpone(head, min(pause, after_lease))

    def _dispatch(self, head: WaitingMessage, step: Step, *, more: bool = False) -> None:
        """Dispatch a head, unless it would be refused now; then plan a look for those behind it.

        more: more permits are free than those before it take, and it.
        """
        pause = self._pause_before(head, step)
        if pause is not None:
            self._dispatcher.postpone(head, pause)
            return
        if step.named_at is not None:
            released_at = utc_now().timestamp() - (self._clock.now() - step.named_at)
            properties = head.request.request_dict["properties"]
            properties[SEEN] = {**seen_of(properties), "named_at": released_at}
        if step.why:
            self._tell(head, step.why)
        had_succeeded = self._dispatcher.has_succeeded(str(head.request.id))
        self._dispatcher.dispatch(head, is_named=step.named_at is not None)
        if head.queue.name != WITHOUT_QUORUM:
            self._ask_next(head, had_succeeded=had_succeeded, more=more)

    def _pause_before(self, head: WaitingMessage, step: Step) -> float | None:
        """Return the seconds for which a head waits, if it would be refused now; None: it tries."""
        if not head.waits_for_release:
            return None
        now = self._clock.now()
        unclear_until, _ = self._unclear_rates.get(head.queue._replace(task=""), (-math.inf, 0.0))
        if unclear_until > now:
            return unclear_until - now
        if head.queue.limit != 1 or step.named_at is not None:
            return None
        run = self._dispatcher.run_of(head.queue.name)
        if run is None:
            return None
        if run.time_start is None:  # it waits in the pool, and asks first
            return head.pause
        # a run that began a while ago has asked since: if the lock is free, it has none any more.
        # Else it is about to ask; or it has ended, and its result is on its way
        has_asked = utc_now().timestamp() - run.time_start >= self._times.asks_within
        return None if has_asked else TURN

    def _ask_next(self, dispatched: WaitingMessage, *, had_succeeded: bool, more: bool) -> None:
        """Ask in a while for the heads that follow a dispatched message.

        It may be refused another lock before, and then no release of this one follows. Its success
        makes that superfluous. had_succeeded: an earlier message with its id has, which says
        nothing. more: as of `_dispatch`.
        """
        name, limit, _ = dispatched.queue
        heads = self._dispatcher.heads_to_run(name)
        if not heads:
            return
        if limit != 1 or any(head.queue.limit != 1 for head in heads):
            # a release hands on one message, but more permits may be free
            self._ask_after(0.0 if more else self._times.ask_next_after, name, Step(FALLBACK))
            return
        step = Step(FALLBACK, unless=None if had_succeeded else str(dispatched.request.id))
        if self._is_needed(step):
            self._ask_after(self._times.retry_next_after, name, step)

    def _is_needed(self, step: Step) -> bool:
        return step.unless is None or not self._dispatcher.has_succeeded(step.unless)

    def _tell(self, head: WaitingMessage, step: str) -> None:
        event = LockHandedOffEvent(waiting_for(head.queue.name)[0], step)
        lock_handed_off.send(getattr(head.request, "task", None), event=event)

    # the registrations

    def on_head(self, resource: str, first: WaitingMessage | None = None) -> None:
        """Register since when the head of a resource waits; ask for the place of the first one."""
        if self.inbox is None or resource == WITHOUT_QUORUM:
            return
        if first is not None and self.inbox.is_listening:  # else `look_again` asks, as it opens
            self.ask(first, Step(LOOK))
        else:
            self.inbox.changed(resource)

    def look_again_if_due(self) -> None:
        """Ask for each head now and then: registrations expire, and a release may be missed."""
        now = self._clock.now()
        # by the loop, or as the process was stopped: others have passed this worker by
        was_blocked = now - self._last_look > 2 * self._times.sweep_interval
        self._last_look = now
        if was_blocked or now - self._refreshed_at > self._times.refresh_after:
            self.look_again(FALLBACK, of_rates=was_blocked)

    def look_again(self, why: str = LOOK, *, of_rates: bool = True) -> None:
        """Register and ask for each head; why: of those that are dispatched then.

        of_rates: also for those that wait for a start past their countdowns: each of them looks
        often enough by itself.
        """
        self._refreshed_at = self._clock.now()
        for name in self.resources():
            for head in self._dispatcher.heads_to_run(name):
                checks_itself = head.waits_for_release and isinstance(head.queue.limit, Rate)
                if of_rates or not checks_itself:
                    self.ask(head, Step(why))
