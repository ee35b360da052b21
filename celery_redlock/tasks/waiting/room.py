"""The waiting room: deferred messages in a worker's main process, dispatched at a release.

A deferred message comes to some worker's main process, which keeps it until its countdown is over.
If its task acknowledges late, it stays in the main process whose pool was refused the lock. It
waits in the queue of the resource that refused it (`queues.py`); a release names the workers that
are next (`successor.py`). Without a release only the head looks again: about every 10 s, and at the
end of its countdown, which ends with the lease that refused it.

Messages for which no quorum voted wait in a queue of their own. Each tries at the end of its
countdown, and all at once as soon as there may be a quorum again.

The way of a release: `Subscriber` thread -> `Inbox.on_message` -> `Successor.on_step` ->
`EventLoop.call_soon` -> `Dispatcher.dispatch` for the head of each queue.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from celery import bootsteps
from celery.worker import state

from celery_redlock.errors import LockTaken, RedlockError
from celery_redlock.label import label_of_run
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.engine.inbox import Inbox
from celery_redlock.lock.model.keys import votes_channel, waiting_for
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.tasks.children.reaper import may_hold
from celery_redlock.tasks.delivery.delivery import header_of, seen_of, utc_now
from celery_redlock.tasks.delivery.header import CLOCK_TOLERANCE, Deferral
from celery_redlock.tasks.delivery.route import DELAYED_EXCHANGE, driver_of
from celery_redlock.tasks.per_app import leave_redlock, redlock_of, settings_of, time_of_nodes
from celery_redlock.tasks.reporting import StoringThread
from celery_redlock.tasks.waiting.buckets import Buckets
from celery_redlock.tasks.waiting.dispatch import Dispatcher
from celery_redlock.tasks.waiting.held import HeldMessages
from celery_redlock.tasks.waiting.loop import EventLoop
from celery_redlock.tasks.waiting.prefetch import Prefetch, capacity
from celery_redlock.tasks.waiting.queues import (
    WITHOUT_QUORUM,
    BehindRun,
    MessageQueues,
    QueueKey,
    QuorumHistory,
    RefusalHistory,
    WaitingMessage,
    WaitingTimes,
    priority_order,
)
from celery_redlock.tasks.waiting.successor import Successor

logger = logging.getLogger(__name__)

TIMES = WaitingTimes()


class WaitingRoom(bootsteps.StartStopStep):
    """The consumer's step that keeps the messages that have come back to this worker.

    It makes the queues and all parts that work on them, and forgets what they know together. All
    but `states`, `take_back`, `waiting` and `note_refusal` runs in the worker's event loop.
    Source: celery.worker.strategy binds `consumer.apply_eta_task` when the consumer starts, which
    is after its steps are made; the timer calls that at the end of a message's countdown.
    """

    name = "celery_redlock waiting room"
    inbox: Inbox | None = None  # from the first message on

    def __init__(
        self,
        parent: Any,
        times: WaitingTimes = TIMES,
        platform: Platform | None = None,
        **options: Any,
    ) -> None:
        super().__init__(parent, **options)
        platform = platform or Platform(SystemClock())
        self._consumer = parent
        self._times = times
        self._clock = platform.clock
        self._loop = EventLoop(parent, platform)
        self._queues = MessageQueues(times, threading.RLock())
        self._buckets = Buckets(parent)
        self._prefetch = Prefetch(parent, self._loop, self._queues, times.eviction_interval)
        self.states = StoringThread(parent.app, self._loop.call_soon)
        self._dispatcher = Dispatcher(
            parent, self._loop, self._clock, self._queues, self._buckets, self._prefetch,
            self.states,
        )  # fmt: skip
        self._successor = Successor(
            self._loop, self._clock, times, self._queues, self._buckets, self._dispatcher
        )
        self._held = HeldMessages(parent, self._loop, self._queues.mutex, self._prefetch, times)
        # each of these calls a part that is made after it
        self._prefetch.on_evict = self._dispatcher.dispatch
        self._dispatcher.on_head = self._successor.on_head
        self._dispatcher.on_due = self._successor.on_due
        parent.apply_eta_task = self._dispatcher.on_eta
        parent._limit_post_eta = self._dispatcher.on_eta
        if hasattr(parent, "_limit_move_to_pool"):
            parent._limit_move_to_pool = self._buckets.on_token
        connect = getattr(parent, "connection_for_read", None)
        if connect is not None:  # else a broker's restart may end the worker, as without a room
            parent.connection_for_read = functools.partial(_closing_twice, connect)
        self._redlock: Redlock | None = None
        self._quorum = 1
        self._votes_channel = ""  # the channel that announces that nodes vote again
        self._trust_message = ""  # the last message on it
        self._trusted_at_by_node: dict[int, float] = {}  # monotonic seconds of a node's message
        self._stop_sweeps: Callable[[], None] | None = None
        self._returning: dict[Any, Deferral] = {}  # by request
        self._forget()
        rooms[parent] = self

    def _forget(self) -> None:
        self._successor.forget()
        self.states.forget()
        with self._queues.mutex:
            self._queues.forget()
            self._held.forget()
            self._prefetch.forget()
        self._buckets.forget()
        self._dispatcher.forget()
        self._quorum_history = QuorumHistory()
        self._refusals = RefusalHistory(self._times)
        self._returning.clear()
        self._loop.clear()

    def start(self, parent: Any) -> None:
        """Open the room; again after the connection to the broker was lost."""
        self._prefetch.capacity = capacity(parent.app.conf, parent.initial_prefetch_count)
        self._forget()
        self._loop.start()
        self._stop_sweeps = self._loop.call_repeatedly(self._times.sweep_interval, self._sweep)

    def stop(self, parent: Any) -> None:
        """Forget all waiters: the broker delivers their messages again.

        If the worker stops, those that were deferred here are published before, with their
        deferrals, until the broker does not take one.
        """
        stop_sweeps = self._stop_sweeps
        self._stop_sweeps = None
        if stop_sweeps is not None:  # first: a sweep may run now, and would go on
            stop_sweeps()
        try:
            if self._is_stopping:
                self.states.forget(keeps_ends=True)
                self.states.flush()  # a DEFERRED that is stored later would stay over a final state
                self.states.call_ended()  # acknowledges the messages whose end is stored
                requests = [*self._returning, *(waiter.request for waiter in self.waiting())]
                requests += self._dispatcher.unaccepted()
                deferred = (
                    request for request in requests if getattr(request, "is_deferred_here", False)
                )
                all(request.publish_again() for request in deferred)
        finally:
            self._forget()

    @property
    def _is_stopping(self) -> bool:
        """Whether the worker ends by a warm shutdown; else its broker is away, or it is killed."""
        blueprint = getattr(self._consumer, "blueprint", None)
        is_ending = blueprint is not None and blueprint.state in (
            bootsteps.CLOSE,
            bootsteps.TERMINATE,
        )
        return is_ending and not state.should_terminate

    def shutdown(self, parent: Any) -> None:
        """Close the subscriptions, and have the last states stored; the worker has ended.

        Source: celery.worker.worker sends no worker_shutdown if the worker ends by WorkerTerminate.
        """
        self.states.flush()
        if self.inbox is not None:
            self.inbox.close()
        self._redlock = None
        rooms.pop(parent, None)  # the room refers to the consumer, which would stay for ever
        if not has_room(parent.app):
            leave_redlock(parent.app)

    def admit(self, request: Any, deferral: Deferral) -> None:
        """Queue a message whose countdown is about to begin."""
        inbox = self._connect()
        now = self._clock.now()
        waiter = self._waiter_of(request, deferral)
        since_refusal = max(0.0, time_of_nodes(self._consumer.app) - deferral.at)
        with self._queues.mutex:
            missed_quorum = not deferral.is_taken and self._quorum_history.claim(
                request.id, now - since_refusal - CLOCK_TOLERANCE
            )
        self._dispatcher.add(waiter)
        if missed_quorum and waiter.eta >= now + self._times.imminent:
            self._loop.call_soon(self._dispatcher.dispatch, waiter)
        inbox.listen()

    def take_back(self, request: Any, deferral: Deferral) -> None:
        """Let a message wait that a run of this worker was refused; in any thread."""
        if request.hostname != self._consumer.hostname:
            return  # of another worker of the app in this process
        if self._stop_sweeps is None:
            if self._is_stopping:
                request.publish_again()
            return
        # else its connection was lost, and the broker delivers it again
        if request.message.channel is self._consumer.task_consumer.channel:
            self._returning[request] = deferral
            self._loop.call_soon(self._take_back, request)

    def _take_back(self, request: Any) -> None:
        deferral = self._returning.pop(request, None)
        if deferral is not None:  # else the room was closed meanwhile
            self._dispatcher.schedule(request, deferral.countdown)
            try:
                self.admit(request, deferral)
            finally:
                self._consumer.qos.increment_eventually()

    def waiting(self) -> list[WaitingMessage]:
        """Return the waiters by priority, then by first deferral; called by any thread."""
        with self._queues.mutex:
            return sorted(self._queues.all())

    def dispatch_soon(self, is_chosen: Callable[[Any], bool]) -> None:
        """Give requests to Celery, which ends those that must not run; in any thread.

        is_chosen: returns whether a request is one of them.
        """
        self._loop.call_soon(self._dispatch, is_chosen)

    def _dispatch(self, is_chosen: Callable[[Any], bool]) -> None:
        for waiter in self.waiting():
            if is_chosen(waiter.request):
                self._dispatcher.dispatch(waiter)

    def note_refusal(self, deferral: Deferral) -> None:
        """Remember for a moment that a run of this worker was refused a lock; in any thread."""
        if deferral.is_taken:
            queue = QueueKey.of(deferral.resource, deferral.limit, deferral.rate)
            self._refusals.record(queue, deferral, self._clock.now())
            if deferral.rate and deferral.expires_in is None:
                self._successor.note_unclear(queue)

    def may_refuse(self, task_name: str) -> bool:
        """Return whether `refusal_of` may know of any refusal, or is to note a message."""
        if not self._refusals.is_empty or self._queues.waiting_for_release > 0:
            return True
        return self._dispatcher.has_slots or self._buckets.bucket_of(task_name) is not None

    def refusal_of(self, request: Any, wanted_keys: Sequence[QueueKey]) -> LockTaken | None:
        """Return the refusal that a new message may take for its own; None: it tries.

        That is if another message waits here for the same lock, runs here, or was refused just now.
        Of a task with a rate limit one message of each lock waits for its rate, and the others for
        that one. wanted_keys: of its locks and rates, in the order in which it
        acquires them.
        """
        queues = [self._queue_of(queue_key, request.task.name) for queue_key in wanted_keys]
        for queue in queues:
            run = self._dispatcher.run_of(queue.name) if queue.limit == 1 else None
            if run is not None and run.id == request.id:
                return None  # this message, delivered once more: DEFERRED would hide its run
            refusal = self._refusal_in(queue) if run is None else self._refusal_by(run, queue)
            if refusal is not None:
                return refusal
        self._dispatcher.note_leaving(request, queues)
        return None

    def _refusal_in(self, queue: QueueKey) -> LockTaken | None:
        with self._queues.mutex:
            has_waiters = self._queues.head(queue) is not None
            is_awaited = has_waiters or self._buckets.awaits_rate(queue)
        return self._refusals.refusal(queue, self._clock.now(), is_awaited=is_awaited)

    def _refusal_by(self, run: Any, queue: QueueKey) -> LockTaken:
        """Return the refusal of a message whose lock a run here has, or is about to take."""
        resource, _ = waiting_for(queue.name)
        label = label_of_run(str(run.delivery.run_id), run.hostname)
        session = redlock_of(self._consumer.app).session
        is_held = may_hold(session, resource, label)
        return (LockTaken if is_held else BehindRun)(resource, label, None)

    def _queue_of(self, queue: QueueKey, task_name: str) -> QueueKey:
        has_rate = self._buckets.bucket_of(task_name) is not None
        return queue._replace(task=task_name) if has_rate else queue

    def _waiter_of(self, request: Any, deferral: Deferral) -> WaitingMessage:
        app = self._consumer.app
        now = self._clock.now()
        properties = request.request_dict["properties"]
        queue = QueueKey(WITHOUT_QUORUM, 1)
        if deferral.is_taken:
            resource = deferral.resource or deferral.resources[0]  # a sender may leave it out
            queue = QueueKey.of(resource, deferral.limit, deferral.rate)
            queue = self._queue_of(queue, request.task.name)
        # a message whose run was refused has been unacknowledged since it came; random, as all at
        # once would be a herd
        received_at = min(now, seen_of(properties).get("received", now))
        patience = settings_of(app).countdown_cap * random.uniform(0.5, 1.0)  # noqa: S311
        return WaitingMessage(
            request,
            since=deferral.since,
            queue=queue,
            eta=now + max(0.0, (request.eta - utc_now()).total_seconds()),
            deadline=received_at + patience,
            waits_for_release=deferral.waits_for_release and request.expires is None,
            came_at=now,
            priority=priority_order(properties.get("priority"), driver_of(app)),
        )

    def _connect(self) -> Inbox:
        if self.inbox is None or self._redlock is None or self._redlock.session.is_closed:
            if self.inbox is not None:  # of one that the user's code has closed
                self.inbox.close()
            self._redlock = redlock_of(self._consumer.app)  # kept: an app may leave its own
            session = self._redlock.session
            self._votes_channel = votes_channel(session.options.prefix)
            self._quorum = session.nodes.quorum
            host = str(getattr(self._consumer, "hostname", ""))
            on_vote = functools.partial(self._loop.call_soon, self._on_vote)
            self.inbox = Inbox(session, self._successor, host, self._channels, on_vote)
            self._successor.inbox = self.inbox
        return self.inbox

    def _channels(self) -> set[str]:
        """Return the channels to hear beside the inbox; called by any thread."""
        return {self._votes_channel} if WITHOUT_QUORUM in self._queues.resources() else set()

    # in the event loop

    def _on_vote(self, channel: str, message: str, node: int) -> None:
        """Dispatch all messages that wait for a quorum, as there may be one again.

        message: of an operator's `trust`, the same from each node. A node counts once in a while,
        as it could send any number. "" as a subscription begins: one more node is up than before.
        """
        now = self._clock.now()
        if message:
            counts_again = (
                now - self._trusted_at_by_node.get(node, -math.inf) > self._times.refresh_after
            )
            if message == self._trust_message or not counts_again:
                return
            self._trust_message = message
            self._trusted_at_by_node[node] = now
        elif self.inbox is None or self.inbox.subscriptions(self._votes_channel) < self._quorum:
            return
        with self._queues.mutex:
            waiters = self._queues.on(WITHOUT_QUORUM)
            self._quorum_history.record(now, {waiter.request.id for waiter in waiters})
        for waiter in waiters:  # if nothing was announced, not those that try soon anyway
            if message or waiter.eta >= now + self._times.imminent:
                self._dispatcher.dispatch(waiter)

    def _sweep(self) -> None:
        """Forget resources without waiters, and dispatch expired and revoked messages."""
        if self.inbox is not None:
            self._connect().listen()  # a subscriber that ended just as its channel was wanted again
        with self._queues.mutex:
            self._queues.forget_empty(self._clock.now() - self._times.unsubscribe_after)
        self._dispatcher.sweep()
        self._refusals.forget_old(self._clock.now(), self._queues)
        self._successor.look_again_if_due()


def _closing_twice(connect: Callable[..., Any], heartbeat: float | None = None) -> Any:
    """Return a connection to the broker whose loss does not end the worker.

    Source: celery.worker.consumer closes a lost connection twice. With Redis, unacknowledged
    messages and an open BRPOP the first close fails, and the second one finds no transport: an
    AttributeError, which Celery does not expect.
    """
    connection = connect(heartbeat)
    close = connection.close

    def try_close() -> None:
        with contextlib.suppress(AttributeError):
            close()

    connection.close = try_close
    return connection


# of this process, by consumer
rooms: weakref.WeakKeyDictionary[Any, WaitingRoom] = weakref.WeakKeyDictionary()


def waiters_of(consumer: Any) -> list[WaitingMessage]:
    """Return the messages that wait in the worker of a consumer, in order."""
    room = rooms.get(consumer)
    return [] if room is None else room.waiting()


def rooms_of(app: Any) -> Iterator[WaitingRoom]:
    """Yield the rooms of an app's workers in this process."""
    for consumer, room in list(rooms.items()):
        if consumer.app is app:
            yield room


def has_room(app: Any) -> bool:
    """Return whether a worker of an app has a room in this process."""
    for reference in rooms.keyrefs():  # at each message: `items` costs ten calls more
        consumer = reference()
        if consumer is not None and consumer.app is app:
            return True
    return False


def admit_received(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Let a message that was refused a lock wait in the room; in the worker's main process."""
    room = None if request.eta is None else rooms.get(sender)
    if room is None:
        return
    deferral = header_of(request._context).deferral
    if not deferral.at:
        return
    was_delayed_by_broker = (request.delivery_info or {}).get("exchange") == DELAYED_EXCHANGE
    try:
        countdown = 0.0
        if not was_delayed_by_broker:
            remaining = deferral.remaining(time_of_nodes(sender.app))
            # if its queue takes longer than the countdown, it would be refused again and again
            restarts = remaining <= 0 and deferral.waits_for_release
            countdown = deferral.countdown if restarts else remaining
        # whatever the clock of its sender says. celery.worker.strategy reads this after the signal
        countdown = min(max(0.0, countdown), settings_of(sender.app).countdown_cap)
        request._eta = utc_now() + timedelta(seconds=countdown)
        # Celery runs a message that is due by itself; from the room it would run once more
        if deferral.resources and not was_delayed_by_broker and request.eta > utc_now():
            room.admit(request, deferral)
            # 1.5 KB for as long as it waits; Celery makes it anew if it is asked for
            request.__dict__.pop("_context", None)
    except RedlockError as error:
        extra = {"event": "not_woken", "task": request.name, "task_id": request.id}
        text = "%s[%s] is not woken: %s"
        logger.warning(text, request.name, request.id, error, extra=extra)
