"""A worker's own lease, the thread that beats for it, and what it observes of the others.

The thread is a real one, also under gevent: a body that does not yield, or one of a solo pool,
stops the event loop, and the worker is to be alive all the same.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from celery.exceptions import Ignore
from redis import ConnectionError as RedisConnectionError
from redis import ResponseError
from redis import TimeoutError as RedisTimeoutError

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.forks import reset_in_children
from celery_redlock.tasks.delivery.delivery import Delivery
from celery_redlock.tasks.recovery.ledger import Beat, Ledger, Moved
from celery_redlock.tasks.recovery.notices import Notices
from celery_redlock.tasks.recovery.observer import BEAT_INTERVAL, TRUST, Observer
from celery_redlock.tasks.recovery.tags import new_lease
from celery_redlock.tasks.recovery.tries import Tries

logger = logging.getLogger(__name__)

NEVER = float("-inf")
AWAY = (RedisConnectionError, RedisTimeoutError)
OWN = "was this worker's"  # why its messages are moved: no death, so it is not counted
JOIN = "join"  # what is tried again, beside the moves of worker leases


@dataclass(frozen=True)
class _Own:
    """The worker lease of a worker. answered: when the last beat that was answered was sent."""

    lease: str
    answered: float


NONE = _Own("", NEVER)  # before it has joined, and while the broker refuses that


class Keeper:
    """Keeps the worker lease of one worker alive, and moves the messages of dead ones.

    connect: returns the broker's ledger, for one thread, over the connection that its consumer has.
    name: of the worker. on_moved_away: called with a worker lease of this worker that others took
    for dead. sender: of the signal.
    """

    def __init__(
        self,
        platform: Platform,
        connect: Callable[[], Ledger],
        name: str,
        sender: Any,
        on_moved_away: Callable[[str], object],
    ) -> None:
        self._clock = platform.clock
        self._platform = platform
        self._connect = connect
        self._name = name
        self._notices = Notices(platform, sender)
        self._on_moved_away = on_moved_away
        self._asked: Ledger | None = None  # of who asks whether the lease lives
        self._mutex = platform.new_mutex()  # of `_own`, which two threads replace; without I/O
        self._own = NONE
        self._tries = Tries()
        self._numbers = itertools.count()
        self._observer = Observer()
        self._timer = platform.deadline_timer()
        self._joins = 0  # how often the consumer has had a new connection
        # worker leases that it had, and of which there may be messages left
        self._left: dict[str, None] = {}
        self._given_up = ""  # of which a message was dropped although it may not be moved yet
        self._is_running = False
        self._has_begun = False  # it has done what each worker does once
        self._is_ended = False
        self._was_dead = 0  # how often it was

    @property
    def lease(self) -> str:
        """The name of the worker lease; "" before it has joined, or if it has to join anew."""
        return self._own.lease

    def join(self) -> None:
        """Take a new worker lease, and resign the one before; raises redis-py's errors.

        If it is refused the worker has none until its thread has joined: nothing would move what
        the connection before has brought, if that lease went on.
        """
        ledger = self._connect()
        self._tries.clear()  # the broker may be another one
        try:
            own = self._join(ledger)
        except ResponseError as error:
            self._tries.refused(JOIN, self._clock.now())
            self._notices.is_news(error)  # no more: the caller tells
            self._take_over(ledger, NONE)
            raise
        except BaseException:
            ledger.close()
            raise
        self._take_over(ledger, own)

    def _take_over(self, asked: Ledger, own: _Own) -> None:
        before = self._asked
        self._asked = asked
        with self._mutex:
            resigned = self._own
            self._own = own
            self._joins += 1
        if before is not None:
            before.close()
        if resigned.lease:
            self._left[resigned.lease] = None
        if not self._is_running:
            self._platform.start_thread(self._run)
            self._is_running = True
        self._timer.wake()

    def _join(self, ledger: Ledger) -> _Own:
        own = _Own(new_lease(), self._clock.now())
        ledger.beat(own.lease, joins_as=self._name)
        self._tries.done(JOIN)
        keepers[own.lease] = self
        extra = {"event": "worker_lease_joined", "lease": own.lease}
        logger.debug("the worker lease of %s is %s", self._name, own.lease, extra=extra)
        return own

    def tag(self, name: str) -> str:
        """Return the delivery tag of the next message; "" without a worker lease.

        name: of the list that it was taken from. The text is that of a `DeliveryTag`, sooner made.
        """
        lease = self._own.lease  # once: another thread may give it up
        return f"{lease}:{next(self._numbers)}:{name}" if lease else ""

    def owns(self, lease: str) -> bool:
        """Return whether a worker lease is this worker's, and cannot have been declared dead.

        If the last answer is too old, the broker is asked. Without an answer the worker gives the
        lease up: the message that was asked for is not begun here, so that it has to be moved.
        """
        own = self._own
        while lease == own.lease and lease != self._given_up:
            now = self._clock.now()
            if now - own.answered < TRUST:
                return True
            if not self._is_alive(lease, now):  # else once more: a pause makes an answer too old
                self._given_up = lease
                self._timer.wake()
            own = self._own
        if lease != own.lease:  # it may have been noted after the others were moved
            self._left[lease] = None
        return False

    def _is_alive(self, lease: str, now: float) -> bool:
        asked = self._asked
        try:
            if asked is not None and asked.beat(lease).is_alive:
                self._confirm(lease, now)
                return True
        except Exception as error:
            extra = {"event": "worker_lease_unsure", "lease": lease}
            logger.debug("no answer for %s: %r", lease, error, extra=extra)
        return False

    def _confirm(self, lease: str, sent: float) -> None:
        with self._mutex:
            own = self._own
            if own.lease == lease and own.answered < sent:
                self._own = _Own(lease, sent)

    def end(self) -> None:
        """Resign, as the worker has ended: what it has not given back is moved by another one."""
        with self._mutex:
            self._is_ended = True
            own = self._own
            self._own = NONE
        self._notices.end()
        self._timer.wake()
        asked = self._asked
        if asked is not None:
            try:
                left = list(self._left)
                for lease in filter(None, (own.lease, *left)):
                    asked.declare_dead(lease, claims=False)
                for lease in left:  # nobody looks for what was noted after the others were moved
                    self._move(asked, lease, OWN)
            except Exception as error:  # others will prove it
                extra = {"event": "worker_lease_left", "lease": own.lease}
                logger.debug("cannot resign %s: %r", own.lease, error, extra=extra)
            asked.close()
        for lease in [lease for lease, keeper in list(keepers.items()) if keeper is self]:
            keepers.pop(lease, None)

    # in the thread

    def _run(self) -> None:
        ledger: Ledger | None = None
        joins = self._joins
        while not self._is_ended:
            begun = self._clock.now()
            try:
                if ledger is not None and joins != self._joins:  # the broker may be another one
                    ledger.close()
                    ledger = None
                    self._observer.forget()
                joins = self._joins
                ledger = ledger or self._connect()
                self._look(ledger)
                self._begin(ledger)
            except BaseException as error:  # SystemExit of a receiver, too: this thread must go on
                self._notices.tell_of_error(self.lease, error)
            self._timer.begin_pass(self._clock.now())
            if not self._is_ended:
                self._timer.sleep(max(0.05, begun + BEAT_INTERVAL - self._clock.now()))
        if ledger is not None:
            ledger.close()

    def _look(self, ledger: Ledger) -> None:
        """Beat once; move what is to be moved of others, and of worker leases that it had.

        The beat is first: if the broker refuses a move, this worker is alive all the same.
        """
        own = self._own
        sent = self._clock.now()
        beat = Beat(False)
        if own.lease not in ("", self._given_up):
            beat = self._beat(ledger, own.lease, claims=True)
        if not beat.is_alive:
            self._begin_anew(ledger, own.lease)
            self._move_what_is_left(ledger)
            return
        self._confirm(own.lease, sent)
        others = {lease: seen for lease, seen in beat.quiet.items() if lease != self.lease}
        dead = self._observer.look(sent, self._clock.now(), others)
        self._move_what_is_left(ledger)
        for lease, score in dead.items():
            self._move(ledger, lease, "does not beat", score)
        if beat.claimed:
            self._move(ledger, beat.claimed, "is dead")

    def _beat(self, ledger: Ledger, lease: str, *, claims: bool = False) -> Beat:
        try:
            return ledger.beat(lease, claims=claims)
        except BaseException:  # the broker is away, say: all others get the whole time anew
            self._observer.forget()
            raise

    def _begin(self, ledger: Ledger) -> None:
        """Do once what each worker does after its start: it may mend what earlier ones have left.

        A worker that was taken for dead may wake, note a message under a worker lease that has been
        forgotten, and be killed before its next beat. The worker that starts in its place finds it.
        """
        if self._has_begun or not self.lease:
            return
        self._has_begun = True
        try:
            if missing := ledger.missing_rights():
                self._notices.tell_of_rights(self.lease, " ".join(missing))
            else:
                ledger.recall(lambda: self._beat_between(ledger))
        except AWAY:
            self._has_begun = False
            raise

    def _begin_anew(self, ledger: Ledger, lost: str) -> None:
        """Join anew: others took this worker for dead, or, if lost is "", its join was refused.

        What others have not moved yet is moved then. A worker whose join is refused has no lease.
        """
        joins = self._joins
        now = self._clock.now()
        self._observer.forget()
        if self._is_ended or self._own.lease != lost or not self._tries.may_try(JOIN, now):
            return
        try:
            own = self._join(ledger)
        except ResponseError as error:
            self._tries.refused(JOIN, now)
            self._notices.tell_of_error(self.lease, error)
            own = NONE
        with self._mutex:
            is_wanted = not self._is_ended and (self._joins, self._own.lease) == (joins, lost)
            if is_wanted:
                self._own = own
        if not is_wanted:  # it has ended, or its consumer has joined: of this one there is nothing
            keepers.pop(own.lease, None)
            if own.lease:
                ledger.declare_dead(own.lease, claims=False)
        elif lost:
            self._left[lost] = None
            self._tell_of_loss(lost)

    def _tell_of_loss(self, lost: str) -> None:
        self._was_dead += 1
        extra = {"event": "worker_lease_lost", "lease": lost, "times": self._was_dead}
        logger.warning(
            "%s did not reach the broker for so long that other workers took it for dead (%d times "
            "so far): its messages are moved, and it begins none of them",
            self._name, self._was_dead, extra=extra,
        )  # fmt: skip

    def _move_what_is_left(self, ledger: Ledger) -> None:
        """Move the messages of the worker leases that it had: nobody here acknowledges them."""
        for lease in list(self._left):
            if not self._tries.may_try(lease, self._clock.now()):
                continue
            del self._left[lease]  # first: of what is noted from here on nothing may be found
            is_moved = False
            try:
                is_moved = self._move(ledger, lease, OWN, "")
            finally:
                if not is_moved:
                    self._left[lease] = None
            self._on_moved_away(lease)

    def _move(self, ledger: Ledger, lease: str, why: str, beat: str | None = None) -> bool:
        """Move the messages of a dead worker lease; return whether there is none to try again.

        beat: it is declared dead first, if that is what it wrote last; "": whatever it wrote. What
        is wrong with one worker lease stops the moves of no other one; a lost connection stops all
        until the next beat.
        """
        if not self._tries.may_try(lease, self._clock.now()):
            return False
        try:
            if beat is not None and not ledger.declare_dead(lease, beat) and why != OWN:
                return True  # it has beaten
            done = self._move_all(ledger, lease, why)
        except Exception as error:
            self._tries.refused(lease, self._clock.now())
            if isinstance(error, AWAY):
                raise
            self._notices.tell_of_error(self.lease, error)
            return False
        if done.refused:
            self._tries.refused(lease, self._clock.now())
        else:
            self._tries.done(lease)
        return not done.refused

    def _move_all(self, ledger: Ledger, lease: str, why: str) -> Moved:
        name = ledger.name_of(lease) or "a worker"
        between = partial(self._beat_between, ledger)
        done = ledger.move_all(lease, between, is_counted=why != OWN)
        self._notices.tell_of_moves(name, lease, why, done)
        return done

    def _beat_between(self, ledger: Ledger) -> None:
        own = self._own
        now = self._clock.now()
        if now - own.answered <= BEAT_INTERVAL or own.lease in ("", self._given_up):
            return
        if self._beat(ledger, own.lease).is_alive:
            self._confirm(own.lease, now)


class MovedAwayError(Ignore):
    """Ends a run that has not begun: its message was moved to another worker.

    It reaches the request: see `tasks/worker_request.py`.
    """


# of this process, by worker lease: also by those that it had before, of which nothing is begun
keepers: dict[str, Keeper] = {}
reset_in_children(keepers.clear)  # a child has no beat and no connection of its own
# requests of a pool in this process that came too late to their thread or greenlet, by delivery tag
refused: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def still_owned(delivery_tag: object) -> bool:
    """Return whether a message is still its worker's; True for one without a worker lease."""
    lease = str(delivery_tag).partition(":")[0]  # asked three times a message: nothing more is read
    keeper = keepers.get(lease)
    return keeper is None or keeper.owns(lease)


def leave_if_moved(delivery: Delivery) -> None:
    """End a run without its lock that another worker has: a second copy would be one too many.

    With early acknowledgement it is this worker's alone by now. A child of a pool has no worker
    lease to ask for, so it does not know.
    """
    if delivery.acks_late and not still_owned(delivery.delivery_tag):
        leave(delivery)


def leave(delivery: Delivery) -> NoReturn:
    """End a run whose message is with another worker, and tell nobody of it."""
    delivery.state.goes_on = True
    raise MovedAwayError("is with another worker")
