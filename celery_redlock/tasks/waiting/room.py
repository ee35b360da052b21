"""The waiting room: deferred messages in a worker's main process, dispatched at a release.

A deferred message comes to some worker's main process, which keeps it until its countdown is over.
Meanwhile it waits in a queue, in order of first deferral, for the resource that refused it. A
release dispatches the head of each queue. Without a release only the head tries again, at the end
of its countdown, which ends with the lease that refused it; so one message of a resource and worker
notices a dead holder and a missed announcement. If more messages wait than the worker has capacity
for, the last of the longest queue is dispatched, and goes back to the broker's queue if refused.

Messages for which no quorum voted wait on a channel of their own. Each tries at the end of its
countdown, and all at once as soon as a quorum of nodes is subscribed to again, or an operator
trusts nodes.

The way of a release: `Subscriber` thread -> `on_release_message` (a majority has announced it) ->
`EventLoop.call_soon` -> `_on_release` -> `_dispatch` for the head of each queue.
"""

from __future__ import annotations

import logging
import random
import weakref
from typing import Any

from celery import bootsteps

from celery_redlock.errors import RedlockError
from celery_redlock.lock.model.keys import votes_channel, wake_channel
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.lock.transport.subscriber import Subscriber
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.delivery.header import LockHeader, Wait
from celery_redlock.tasks.delivery.route import CAME_BACK
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.waiting.capacity import capacity
from celery_redlock.tasks.waiting.dispatch import Dispatcher
from celery_redlock.tasks.waiting.loop import EventLoop, RepeatedCall
from celery_redlock.tasks.waiting.queues import QueueKey, Waiter
from celery_redlock.tasks.waiting.releases import Announcements, FollowUps, Release, ReleaseHistory
from celery_redlock.tasks.waiting.times import WaitingTimes

logger = logging.getLogger(__name__)

TIMES = WaitingTimes()


class WaitingRoom(bootsteps.StartStopStep):
    """The consumer's step that keeps the messages that have come back to this worker.

    Other parts use `admit`, `waiting`, `subscriptions` and, in the subscribers' threads,
    `on_release_message`. Everything else runs in the worker's event loop.
    Source: celery.worker.strategy binds `consumer.apply_eta_task` when the consumer starts, which
    is after its steps are made; the timer calls that at the end of a message's countdown.
    """

    name = "celery_redlock waiting room"

    def __init__(
        self,
        parent: Any,
        times: WaitingTimes = TIMES,
        platform: Platform | None = None,
        **options: Any,
    ) -> None:
        super().__init__(parent, **options)
        platform = platform or Platform(SystemClock())
        self._consumer, self._times, self._clock = parent, times, platform.clock
        self._loop = EventLoop(parent, platform)
        self._dispatcher = Dispatcher(parent, self._loop, self._clock, times)
        parent.apply_eta_task = self._dispatcher.on_eta
        self._counting = platform.new_mutex()  # of the announcements; real threads compete for it
        self._subscribers: list[Subscriber] = []
        self._quorum_channel = ""  # of the waiters for which no quorum voted
        self._announcements = Announcements(1, self._quorum_channel)
        self._sweeps: RepeatedCall | None = None
        self._forget()
        _rooms[parent] = self

    def _forget(self) -> None:
        now = self._clock.now()
        self._dispatcher.forget()
        self._history, self._quorum_history = ReleaseHistory(now), ReleaseHistory(None)
        self._follow_ups = FollowUps(self._times.clocks_differ)
        with self._counting:
            self._announcements.clear()
        self._loop.clear()

    def start(self, parent: Any) -> None:
        """Open the room; again after the connection to the broker was lost."""
        self._dispatcher.capacity = capacity(parent.app.conf, parent.initial_prefetch_count)
        self._forget()
        self._loop.start()
        self._sweeps = self._loop.call_repeatedly(self._times.sweep_interval, self._sweep)

    def stop(self, parent: Any) -> None:
        """Forget all waiters: the broker delivers their messages again."""
        sweeps, self._sweeps = self._sweeps, None
        if sweeps is not None:  # first: a sweep may run now, and would go on
            sweeps.cancel()
        self._forget()

    def shutdown(self, parent: Any) -> None:
        """Close the subscriptions."""
        for subscriber in self._subscribers:
            subscriber.close()

    def waiting(self) -> list[Waiter]:
        """Return the waiters in order of first deferral; called by any thread."""
        return self._dispatcher.waiting()

    def admit(self, request: Any, wait: Wait, since: str) -> None:
        """Queue a message whose countdown is about to begin."""
        consumer = self._consumer
        if consumer.task_buckets[request.name] is not None and not consumer.disable_rate_limits:
            return  # it goes through a queue of Celery's first
        waiter = self._waiter_of(request, wait, since)
        refused_at = self._clock.now() - wait.seconds_since_refusal(utc_now())
        with self._dispatcher.mutex:
            self._dispatcher.add(waiter, refused_at)
            has_missed = self._claim_missed(waiter, wait, refused_at - self._times.clocks_differ)
        release = Release(waiter.queue.channel)
        if has_missed and wait.reason:
            self._loop.call_soon(self._dispatch, release, waiter)
        elif has_missed:
            self._loop.call_soon(self._on_release, release)
        self._subscribe()

    def _waiter_of(self, request: Any, wait: Wait, since: str) -> Waiter:
        settings, now = settings_of(self._consumer.app), self._clock.now()
        resource = wait.refused_by or wait.resources[0]
        queue = QueueKey(wake_channel(settings.prefix, resource), wait.limit)
        if wait.reason:
            queue = QueueKey(votes_channel(settings.prefix), 1)
        return Waiter(
            request,
            order=(since, id(request)),
            queue=queue,
            eta=now + max(0.0, (request.eta - utc_now()).total_seconds()),
            # random, as all at once would be a herd
            deadline=now + settings.countdown_cap * random.uniform(0.5, 1.0),  # noqa: S311
            waits_for_release=wait.waits_for_release and request.expires is None,
        )

    def _claim_missed(self, waiter: Waiter, wait: Wait, refused_at: float) -> bool:
        """Return whether a release was announced while a message was on its way, and take it."""
        channel, limit = waiter.queue
        if wait.reason:
            return self._quorum_history.claim(channel, waiter.request.id, refused_at, 1)
        return self._history.claim(channel, limit, refused_at, limit)

    def _subscribe(self) -> None:
        if not self._subscribers:
            session = redlock_of(self._consumer.app).session
            self._quorum_channel = votes_channel(session.options.prefix)
            self._announcements = Announcements(session.node_set.size, self._quorum_channel)
            how = (
                session.options.node_timeout,
                session.platform,
                lambda: self._dispatcher.queues.channels(),
                self.on_release_message,
            )
            self._subscribers = [Subscriber(node.address, *how) for node in session.node_set.nodes]
        for subscriber in self._subscribers:
            subscriber.resubscribe()

    # in the subscribers' threads

    def on_release_message(self, channel: str, message_id: str) -> None:
        """Count one node's message, and act on its release once a majority has announced it.

        message_id: "" as a subscription begins. Whoever came before the majority would find the
        lock's keys on the other nodes still there.
        """
        release = Release(channel, message_id)
        with self._counting:
            is_decided = self._announcements.is_decided(release, self.subscriptions(channel))
        if is_decided:
            is_quorum = channel == self._quorum_channel
            self._loop.call_soon(self._on_quorum if is_quorum else self._on_release, release)

    def subscriptions(self, channel: str) -> int:
        """Return how many nodes announce the releases on a channel to this worker."""
        return sum(channel in subscriber.confirmed for subscriber in self._subscribers)

    # in the event loop

    def _on_release(self, release: Release) -> None:
        """Dispatch the head of each queue of a channel."""
        now, heads = self._clock.now(), self._dispatcher.heads_to_run(release.channel)
        if release.is_announced:
            with self._dispatcher.mutex:
                self._history.record(release.channel, now, {head.queue.limit for head in heads})
            if heads:
                self._expect_another(release.channel, now, is_first=True)
        for head in heads:
            self._dispatch(release, head)

    def _on_quorum(self, release: Release) -> None:
        """Dispatch all messages that wait for a quorum, as there may be one again."""
        now = self._clock.now()
        with self._dispatcher.mutex:
            waiters = self._dispatcher.queues.on(release.channel)
            self._quorum_history.record(release.channel, now, {w.request.id for w in waiters})
        for waiter in waiters:
            self._dispatch(release, waiter)

    def _dispatch(self, release: Release, waiter: Waiter) -> None:
        """Dispatch a message; if nothing was announced, only if it does not try soon anyway."""
        if release.is_announced or waiter.eta >= self._clock.now() + self._times.imminent:
            self._dispatcher.dispatch(waiter)

    def _expect_another(self, channel: str, released_at: float, *, is_first: bool) -> None:
        """Have the heads try once more if no other release follows soon."""
        with self._dispatcher.mutex:
            self._follow_ups.expect(channel, released_at)
        seconds = self._times.retry_next_after * random.uniform(1.0, 1.25)  # noqa: S311
        self._loop.call_after(seconds, self._follow_up, channel, released_at, is_first)

    def _follow_up(self, channel: str, released_at: float, is_first: bool) -> None:
        """Dispatch the next heads; again and again, until one is refused what may be free."""
        with self._dispatcher.mutex:
            if not self._follow_ups.take(channel, released_at):
                return
        now, heads = self._clock.now(), self._dispatcher.heads_to_run(channel)
        if not is_first:
            with self._dispatcher.mutex:
                refusals = [(head, self._dispatcher.queues.refused_at(head)) for head in heads]
            may_be_free = self._follow_ups.may_still_be_free
            heads = [head for head, at in refusals if may_be_free(at, released_at)]
        for head in heads:
            self._dispatch(Release(channel), head)
        if heads:
            self._expect_another(channel, now, is_first=False)

    def _sweep(self) -> None:
        """Forget what nobody waits for any more, and dispatch expired and revoked messages."""
        with self._dispatcher.mutex:
            queues = self._dispatcher.queues
            queues.forget_empty(self._clock.now() - self._times.unsubscribe_after)
            channels = queues.channels()
            self._history.keep(channels)
            self._quorum_history.keep(channels)
            with self._counting:
                self._announcements.keep(channels)
        self._dispatcher.dispatch_cancelled()


_rooms: weakref.WeakKeyDictionary[Any, WaitingRoom] = weakref.WeakKeyDictionary()


def waiters_of(consumer: Any) -> list[Waiter]:
    """Return who waits in the worker of a consumer, in order."""
    room = _rooms.get(consumer)
    return [] if room is None else room.waiting()


def admit_received(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Let a message that was refused a lock wait in the room; in the worker's main process."""
    room = None if request.eta is None else _rooms.get(sender)
    if room is None:
        return
    header = LockHeader.of(request._context)
    delivery = request.delivery_info or {}
    wait = header.wait
    if wait is not None and wait.resources and delivery.get("exchange") != CAME_BACK:
        try:
            room.admit(request, wait, str(header.deferral.since))
        except RedlockError as error:
            extra = {"event": "not_woken", "task": request.name, "task_id": request.id}
            text = "%s[%s] is not woken: %s"
            logger.warning(text, request.name, request.id, error, extra=extra)
