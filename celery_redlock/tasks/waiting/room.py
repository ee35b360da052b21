"""Who waits for a resource, and whom its release wakes.

A message that is put back comes to some worker's main process, which keeps it until its countdown
is over. There it stands in a line, in the order in which the messages were put back first: one for
each resource that refused, and each `limit` by which it was asked, for what is taken to one may be
free to another. A release wakes the first of each line. By itself only the first one tries again,
at the end of its countdown, which ends with the lease that refused it; so a dead holder's end, and
a word that was missed, are watched for once a resource and worker. Those behind it cost nothing but
memory until they are first, or until the broker would take them for lost. All of that is a hint:
whoever is woken takes the lock like any other, or goes back. Where more wait than there are seats
for, the last of the longest line goes back to its queue for another message to come in.

Those for whom no quorum voted stand in a line of their own. They try at the end of their
countdowns, and all at once when as many nodes as a quorum are heard again, or an operator trusts
nodes.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Any

from celery import bootsteps

from celery_redlock.errors import RedlockError
from celery_redlock.lock.model.keys import votes_channel, wake_channel
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.platform.threads import Waker, new_mutex
from celery_redlock.lock.transport.subscriber import Subscriber
from celery_redlock.tasks.body.interrupt import Interrupter, current_interrupter
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.delivery.header import CLOCKS_DIFFER, LockHeader
from celery_redlock.tasks.delivery.route import CAME_BACK
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.waiting.capacity import CAPACITY, capacity
from celery_redlock.tasks.waiting.queues import RETRY_NEXT_AFTER, QueueKey, Waiter, WaitQueues

logger = logging.getLogger(__name__)


UNSUBSCRIBE_AFTER = 30.0  # s for which a worker goes on listening where nobody waits any more
MESSAGE_IDS = (
    4096  # that are remembered: every node tells of each release, some hundreds in one read
)
SWEEP_INTERVAL = 1.0  # s: between looks at what has expired or was revoked
IMMINENT = 1.0  # s: who tries by then anyway need not try because a worker begins to listen
EVICTION_INTERVAL = 0.025  # s: between those that leave for the others of a queue to come in
RELEASE_HISTORY = 16  # releases of a resource that are remembered for messages on their way


class WaitingRoom(bootsteps.StartStopStep):
    """Where the messages wait that have come back to a worker's main process.

    Other parts use `admit`, `waiting`, `subscriptions` and, from the threads that listen,
    `on_release_message`. Everything else happens in the process's event loop (or greenlets, or
    Celery's timer thread).
    Source: celery.worker.strategy binds `consumer.apply_eta_task` when the consumer starts, which
    is after its steps are made; the timer calls that at the end of a message's countdown.
    """

    name = "celery_redlock waiting room"

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._consumer, self._clock = parent, SystemClock()
        self._mutex = threading.RLock()
        self._hearing = new_mutex()
        self._apply: Callable[[Any], object] = parent.apply_eta_task
        parent.apply_eta_task = self._due
        self._ears: list[Subscriber] = []
        self._bell = Waker()
        self._place: Interrupter | None = None  # of the greenlets, where there are any
        self._looks: Any = None
        self._leaves: Any = None  # in the timer, where somebody is to make way
        self._seats = CAPACITY
        self._majority = 1
        self._votes = ""  # the channel of those for whom no quorum voted
        self._forget()
        _rooms[parent] = self

    def _forget(self) -> None:
        self._lines = WaitQueues()
        self._standing = 0  # how many wait for whom no further message is taken in
        self._woken: weakref.WeakSet[Any] = weakref.WeakSet()
        # the last releases of a channel: monotonic s, and the limits that somebody was woken by;
        # where nodes vote again that is for all that wait for it, and these are ids of tasks
        self._told: dict[str, deque[tuple[float, set[object]]]] = {}
        self._opened_at = self._clock.now()  # what was said before that may have been missed
        self._words: dict[str, int] = {}  # how many nodes have said it, the latest last
        self._told_at: dict[str, float] = {}  # monotonic s of the last release, by channel
        self._refused: dict[
            QueueKey, float
        ] = {}  # monotonic s of the last refusal that is known of
        self._heard_of: set[str] = set()  # channels of which some node has said that it listens
        self._calls: deque[tuple[str, str, Waiter | None]] = deque()

    def start(self, parent: Any) -> None:
        """Be ready, also after the connection to the broker was lost."""
        self._forget()
        self._seats = capacity(parent.app.conf, parent.initial_prefetch_count)
        if parent.hub is not None:
            parent.hub.add_reader(self._bell.descriptor, self._on_bell)
        elif getattr(parent.pool, "is_green", False):
            self._place = current_interrupter()
        self._looks = parent.timer.call_after(SWEEP_INTERVAL, self._look_again)

    def stop(self, parent: Any) -> None:
        """Forget everybody: the broker delivers again what waits here."""
        looks, self._looks = self._looks, None  # first: it may be looking, and go on meanwhile
        self._cancel(looks)
        self._cancel(self._leaves)
        self._leaves = None
        self._forget()

    def shutdown(self, parent: Any) -> None:
        """Listen no more."""
        for ear in self._ears:
            ear.close()

    def admit(self, request: Any, slip: LockHeader) -> None:
        """Take a message in whose countdown is about to begin."""
        consumer = self._consumer
        if consumer.task_buckets[request.name] is not None and not consumer.disable_rate_limits:
            return  # it goes through a rate limit's own line first
        settings = settings_of(consumer.app)
        channel = wake_channel(settings.prefix, slip.refused_by or slip.waits_for[0])
        if slip.reason:
            channel = self._votes = votes_channel(settings.prefix)
        now = self._clock.now()
        eta = now + max(0.0, (request.eta - utc_now()).total_seconds())
        patient = slip.patient and request.expires is None
        order, line = (str(slip.since), id(request)), (channel, 1 if slip.reason else slip.limit)
        waiting = Waiter(request, order, line, eta, patient=patient)
        # all at once would be a herd
        waiting.until = now + settings.countdown_cap * random.uniform(0.5, 1.0)  # noqa: S311
        refused_at = now - slip.waited_since_refused(utc_now())
        with self._mutex:
            self._refused[line] = max(self._refused.get(line, -math.inf), refused_at)
            displaced = self._lines.add(waiting)
            if displaced is not None:
                self._rearm(displaced, math.inf)
            is_missed = self._has_missed(waiting, refused_at - CLOCKS_DIFFER)
            self._count()
        if is_missed:
            self._call(channel, "", waiting)
        self._listen()

    def _has_missed(self, waiting: Waiter, refused_at: float) -> bool:
        """Tell whether a release came while a message was on its way, and found nobody in its line.

        refused_at: monotonic s. That release is for this one, then, and for nobody after it. Of
        permits several may have been released; of a plain lock the last release alone matters.
        """
        channel, limit = waiting.line
        who = waiting.request.id if channel == self._votes else limit
        for told_at, woken in list(self._told_on(channel))[-limit:]:
            if who not in woken and told_at >= refused_at:
                woken.add(who)
                return True
        return False

    def _told_on(self, channel: str) -> deque[tuple[float, set[object]]]:
        opened: list[tuple[float, set[object]]] = [(self._opened_at, set())]
        if channel == self._votes:
            opened = []  # who comes first hears of it as the subscription begins
        return self._told.setdefault(channel, deque(opened, maxlen=RELEASE_HISTORY))

    def waiting(self) -> list[Waiter]:
        """Return who waits, in the order in which they were put back first; asked by any thread."""
        with self._mutex:
            return sorted(self._lines.all())

    def _count(self) -> None:
        """Have the worker take in one message more for each that waits, up to the seats.

        Celery does that without a bound. Beyond the seats one leaves for another to come in, so
        that what has nothing to do with a crowd gets past it.
        """
        standing, qos = max(0, self._lines.patient - self._seats), self._consumer.qos
        for _ in range(self._standing, standing):
            qos.decrement_eventually()
        for _ in range(standing, self._standing):
            qos.increment_eventually()
        self._standing = standing
        if standing and self._leaves is None:
            self._leaves = self._consumer.timer.call_after(EVICTION_INTERVAL, self._make_way)

    def _make_way(self) -> None:
        """Have the one that is needed last try: if it is refused, it goes to its queue's end."""
        with self._mutex:
            self._leaves = None
            last = self._lines.last_of_longest() if self._standing else None
        if last is not None:  # outside: a solo pool runs its body here
            self._wake(last)

    def _listen(self) -> None:
        if not self._ears:
            session = redlock_of(self._consumer.app).session
            nodes, timeout = session.node_set.nodes, session.options.node_timeout
            self._majority = session.node_set.size
            make = (
                timeout,
                session.platform,
                lambda: self._lines.channels(),
                self.on_release_message,
            )
            self._ears = [Subscriber(node.address, *make) for node in nodes]
        for ear in self._ears:
            ear.resubscribe()

    # by the threads that listen

    def on_release_message(self, channel: str, message_id: str) -> None:
        """Take note of a release, once; message_id: "" if a subscription begins.

        Not before a majority has said it, of the nodes that are heard: whoever came sooner would
        find the others still taken.
        """
        with self._hearing:
            hears = self.subscriptions(channel)
            if not message_id and channel == self._votes:
                is_news = hears >= self._majority  # so many nodes are up, one more than before
            elif not message_id:
                is_news = hears == 1 or channel not in self._heard_of
                self._heard_of.add(channel)
            else:
                said = self._words[message_id] = self._words.pop(message_id, 0) + 1
                # an operator's word is published once all nodes that it is for have heard it
                needed = 1 if channel == self._votes else max(1, min(hears, self._majority))
                is_news = said == needed
                if len(self._words) > MESSAGE_IDS:
                    del self._words[next(iter(self._words))]
        if is_news:
            self._call(channel, message_id)

    def subscriptions(self, channel: str) -> int:
        """Return how many nodes announce the releases on a channel to this worker."""
        return sum(channel in ear.confirmed for ear in self._ears)

    def _call(self, channel: str, word: str, missed: Waiter | None = None) -> None:
        self._calls.append((channel, word, missed))
        consumer = self._consumer
        if consumer.hub is not None:
            self._bell.wake()
        elif self._place is not None:
            self._place.run_beside(self._serve)
        else:
            self._serve()

    # in the event loop

    def _on_bell(self) -> None:
        self._bell.clear()
        self._serve()

    def _serve(self) -> None:
        """Wake those who are first where something may be free."""
        while self._calls:
            channel, word, missed = self._calls.popleft()
            now = self._clock.now()
            if channel == self._votes:
                self._serve_votes(word, missed, now)
                continue
            firsts = self._firsts(channel)
            if word:
                self._told_on(channel).append((now, {first.line[1] for first in firsts}))
            if word and firsts:
                self._expect_another(channel, now)
            for first in firsts:
                if word or first.eta >= now + IMMINENT:
                    self._hand_on(first)

    def _serve_votes(self, word: str, missed: Waiter | None, now: float) -> None:
        """Have all try that wait for a quorum, where there may be one again.

        missed: the one that was on its way when that was said.
        """
        with self._mutex:
            all_ = self._lines.on(self._votes) if missed is None else [missed]
        if missed is None:
            self._told_on(self._votes).append((now, {one.request.id for one in all_}))
        for one in all_:
            if word or one.eta >= now + IMMINENT:
                self._hand_on(one)

    def _firsts(self, channel: str) -> list[Waiter]:
        """Return the first of each line that is to run.

        Those before it that are not to run any more are handed on: they would take no lock, and so
        nobody would wake who stands behind them.
        """
        while True:
            with self._mutex:
                firsts = self._lines.firsts(channel)
            over = [first for first in firsts if self._is_over(first.request)]
            if not over:
                return firsts
            for first in over:
                self._hand_on(first)

    def _is_over(self, request: Any) -> bool:
        """Tell whether a message has expired or is revoked: by its id, or by a stamp.

        Source: celery.worker.request: Request.revoked, which writes REVOKED; of what may run
        elsewhere the gate does, and it says no. Celery asks it when the message is handed on, and
        that again does no harm.
        """
        if request.id in self._consumer.controller.state.revoked:
            return True
        expires = request.expires
        if expires is not None and expires < datetime.now(expires.tzinfo):
            return True
        try:
            is_revoked = bool(request.stamped_headers and request.revoked())
        except Exception:  # it is, and the result backend that is to be told of it is away
            return True
        return is_revoked or getattr(request, "is_revoked", False)

    def _expect_another(self, channel: str, now: float, *, first_time: bool = True) -> None:
        """Have the first ones try once more if no release follows this one soon.

        Those that one release wakes in three workers and more may each get a node, and none all.
        """
        self._told_at[channel] = now
        seconds = RETRY_NEXT_AFTER * random.uniform(1.0, 1.25)  # noqa: S311
        call = self._consumer.timer.call_after
        call(seconds, self._try_again, (channel, now), {"first_time": first_time})

    def _try_again(self, channel: str, told_at: float, *, first_time: bool) -> None:
        """Wake the next ones; and so on, until somebody was refused what may be free.

        Who was woken may have been refused something else, and tells nobody that it did not try.
        When it was refused is told by another worker's calendar.
        """
        if self._told_at.get(channel) != told_at:
            return
        del self._told_at[channel]
        now, goes_on = self._clock.now(), False
        for first in self._firsts(channel):
            refused_at = self._refused.get(first.line, -math.inf)
            if first_time or refused_at < told_at - CLOCKS_DIFFER:
                goes_on = True
                if first.eta > now + IMMINENT:
                    self._hand_on(first)
        if goes_on:
            self._expect_another(channel, now, first_time=False)

    def _due(self, request: Any) -> None:
        """Hand a message on whose countdown is over, unless it is to wait for a word."""
        if request in self._woken:
            return
        with self._mutex:
            waiting = self._lines.of(request)
            if waiting is not None and waiting.patient:
                now = waiting.eta = self._clock.now()  # the calendar may see it a little earlier
                seconds = self._lines.may_try(waiting, now)
                if seconds > 0:
                    self._rearm(waiting, seconds)
                    return
        self._let_go(waiting, request)

    def _overdue(self, request: Any) -> None:
        """Hand a message on that has waited for long enough, or whose turn it is to look."""
        if request not in self._woken:
            self._let_go(self._lines.of(request), request)

    def _wake(self, waiting: Waiter) -> None:
        """Hand a message on before its time."""
        celerys = getattr(waiting.request, "_eta_timer_entry", None)  # before 5.7 it stays
        self._cancel(celerys if waiting.entry is None else waiting.entry)
        self._let_go(waiting, waiting.request)

    def _hand_on(self, waiting: Waiter) -> None:
        """Wake one, and survive what Celery raises there, as with a timer it does itself.

        Source: kombu.asynchronous.hub: what a reader raises ends the loop, and so the worker.
        """
        try:
            self._wake(waiting)
        except Exception:
            told = {"event": "dispatch_failed", "task": waiting.request.name}
            told["task_id"] = waiting.request.id
            text = "cannot hand on %s[%s]"
            logger.exception(text, waiting.request.name, waiting.request.id, extra=told)

    def _let_go(self, waiting: Waiter | None, request: Any) -> None:
        with self._mutex:
            if request in self._woken:
                return
            self._woken.add(request)
            if waiting is not None:
                follower = self._lines.remove(waiting, self._clock.now())
                if follower is not None:
                    self._rearm(follower, RETRY_NEXT_AFTER)
        self._apply(request)  # Celery takes one away here, and never adds one at its limit
        with self._mutex:
            self._count()

    def _rearm(self, waiting: Waiter, seconds: float) -> None:
        """Have one try after so many s where its countdown is over; else that is soon enough.

        seconds: inf where it is not its turn; then it goes back before the broker delivers it anew.
        """
        now = self._clock.now()
        if waiting.eta > now or not waiting.patient:
            return
        seconds = max(0.0, min(seconds, waiting.until - now))
        self._cancel(waiting.entry)
        call = self._consumer.timer.call_after
        waiting.entry = call(seconds, self._overdue, (waiting.request,), priority=6)
        if hasattr(waiting.request, "_eta_timer_entry"):  # so that Celery 5.7 cancels it
            waiting.request._eta_timer_entry = waiting.entry

    def _cancel(self, entry: Any) -> None:
        if entry is not None:
            self._consumer.timer.cancel(entry)

    def _look_again(self) -> None:
        """Look each second.

        Source: celery.concurrency.gevent: what `call_repeatedly` returns there cancels the first
        call alone.
        """
        looks = self._looks
        try:
            self._look()
        finally:
            if self._looks is looks:  # else the room was closed meanwhile
                self._looks = self._consumer.timer.call_after(SWEEP_INTERVAL, self._look_again)

    def _look(self) -> None:
        """Hand on what is not to run, which Celery sees then, and forget what nobody needs."""
        now = self._clock.now()
        with self._mutex:
            self._lines.forget_empty(now - UNSUBSCRIBE_AFTER)
            with self._hearing:
                self._heard_of &= self._lines.channels()
            channels = self._lines.channels()
            self._told = {c: told for c, told in self._told.items() if c in channels}
            self._refused = {line: at for line, at in self._refused.items() if line[0] in channels}
            all_ = self._lines.all()
        for waiting in all_:
            if self._is_over(waiting.request):
                self._hand_on(waiting)


_rooms: weakref.WeakKeyDictionary[Any, WaitingRoom] = weakref.WeakKeyDictionary()


def waiters_of(consumer: Any) -> list[Waiter]:
    """Return who waits in the worker of a consumer, in order."""
    room = _rooms.get(consumer)
    return [] if room is None else room.waiting()


def add_waiting_room(sender: Any = None, **_: Any) -> None:
    """Give the worker's consumer its room."""
    sender.app.steps["consumer"].add(WaitingRoom)


def admit_received(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Let a message wait in the room that was refused a lock; in the worker's main process."""
    room = None if request.eta is None else _rooms.get(sender)
    if room is None:
        return
    slip = LockHeader.of(request._context)
    delivery = request.delivery_info or {}
    if slip.waits_for and delivery.get("exchange") != CAME_BACK:
        try:
            room.admit(request, slip)
        except RedlockError as error:
            told = {"event": "not_woken", "task": request.name, "task_id": request.id}
            text = "%s[%s] is not woken: %s"
            logger.warning(text, request.name, request.id, error, extra=told)
