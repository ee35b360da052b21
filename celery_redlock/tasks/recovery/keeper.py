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
from celery_redlock.tasks.recovery.ledger import Beat, Ledger, MoveResult
from celery_redlock.tasks.recovery.notices import Notices
from celery_redlock.tasks.recovery.observer import BEAT_INTERVAL, TRUST, Observer
from celery_redlock.tasks.recovery.tags import new_lease
from celery_redlock.tasks.recovery.tries import Tries

logger = logging.getLogger(__name__)

NEVER = float("-inf")
CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError)
# a reason for a move, as the log shows it: the worker lives, so no death is counted
IS_OWN_LEASE = "was this worker's"
JOIN = "join"  # the name under which `Tries` keeps a refused join, beside those of worker leases


@dataclass(frozen=True)
class _OwnLease:
    """The worker lease of this worker.

    confirmed_at: monotonic second at which its last answered beat had been sent.
    """

    lease: str
    confirmed_at: float


NO_LEASE = _OwnLease("", NEVER)  # before the first join, and while the broker refuses joins


class Keeper:
    """Keeps the worker lease of one worker alive, and moves the messages of dead ones.

    connect: returns a ledger for one thread, on the broker of the consumer's connection. name: of
    the worker. on_moved_away: called with a lease of this worker that others declared dead. sender:
    of the signal.
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
        # for `owns`, in any thread; the thread of the keeper has its own
        self._query_ledger: Ledger | None = None
        # of `_own_lease`, which two threads replace; without I/O
        self._mutex = platform.new_mutex()
        self._own_lease = NO_LEASE
        self._tries = Tries()
        self._delivery_numbers = itertools.count()
        self._observer = Observer()
        self._timer = platform.deadline_timer()
        self._join_count = 0  # of new connections of the consumer
        # worker leases that this worker had before, of which messages may still be there
        self._former_leases: dict[str, None] = {}
        # the lease for which `owns` got no answer: its messages have to be moved
        self._abandoned_lease = ""
        self._is_running = False
        self._has_recalled = False  # `_recall_once` is done
        self._is_ended = False
        self._loss_count = 0  # how often others declared it dead

    @property
    def lease(self) -> str:
        """The name of the worker lease; "" before it has joined, or if it has to join anew."""
        return self._own_lease.lease

    def join(self) -> None:
        """Take a new worker lease, and resign the one before; raises redis-py's errors.

        If the broker refuses it, the worker has no lease until its thread has joined: if the lease
        of the lost connection stayed alive, nobody would move the messages of that connection.
        """
        ledger = self._connect()
        self._tries.clear()  # the broker may be another one
        try:
            own_lease = self._join(ledger)
        except ResponseError as error:
            self._tries.record_refusal(JOIN, self._clock.now())
            self._notices.is_first(error)  # no more: the caller tells
            self._take_over(ledger, NO_LEASE)
            raise
        except BaseException:
            ledger.close()
            raise
        self._take_over(ledger, own_lease)

    def _take_over(self, ledger: Ledger, new_lease: _OwnLease) -> None:
        old_ledger = self._query_ledger
        self._query_ledger = ledger
        with self._mutex:
            old_lease = self._own_lease
            self._own_lease = new_lease
            self._join_count += 1
        if old_ledger is not None:
            old_ledger.close()
        if old_lease.lease:
            self._former_leases[old_lease.lease] = None
        if not self._is_running:
            self._platform.start_thread(self._run)
            self._is_running = True
        self._timer.wake()

    def _join(self, ledger: Ledger) -> _OwnLease:
        own_lease = _OwnLease(new_lease(ledger.lease_start), self._clock.now())
        ledger.beat(own_lease.lease, joins_as=self._name)
        self._tries.record_success(JOIN)
        keepers[own_lease.lease] = self
        extra = {"event": "worker_lease_joined", "lease": own_lease.lease}
        logger.debug("the worker lease of %s is %s", self._name, own_lease.lease, extra=extra)
        return own_lease

    def tag(self, name: str) -> str:
        """Return the delivery tag of the next message; "" without a worker lease.

        name: of the list that it was taken from. The text is that of a `DeliveryTag`, sooner made.
        """
        lease = self._own_lease.lease  # once: another thread may give it up
        return f"{lease}:{next(self._delivery_numbers)}:{name}" if lease else ""

    def owns(self, lease: str) -> bool:
        """Return whether a worker lease is this worker's, and cannot have been declared dead.

        If the last answer is older than `TRUST`, the broker is asked. Without an answer the worker
        abandons the lease, because a message that is not begun here has to be moved.
        """
        own_lease = self._own_lease
        while lease == own_lease.lease and lease != self._abandoned_lease:
            now = self._clock.now()
            if now - own_lease.confirmed_at < TRUST:
                return True
            if not self._is_alive(lease, now):  # else once more: a pause makes an answer too old
                self._abandoned_lease = lease
                self._timer.wake()
            own_lease = self._own_lease
        if lease != own_lease.lease:  # its message may have been noted after the others were moved
            self._former_leases[lease] = None
        return False

    def _is_alive(self, lease: str, now: float) -> bool:
        ledger = self._query_ledger
        try:
            if ledger is not None and ledger.beat(lease).is_alive:
                self._confirm(lease, now)
                return True
        except Exception as error:
            extra = {"event": "worker_lease_unsure", "lease": lease}
            logger.debug("no answer for %s: %r", lease, error, extra=extra)
        return False

    def _confirm(self, lease: str, sent_at: float) -> None:
        with self._mutex:
            own_lease = self._own_lease
            if own_lease.lease == lease and own_lease.confirmed_at < sent_at:
                self._own_lease = _OwnLease(lease, sent_at)

    def end(self) -> None:
        """Resign as the worker ends: others move the messages that it has not given back."""
        with self._mutex:
            self._is_ended = True
            own_lease = self._own_lease
            self._own_lease = NO_LEASE
        self._notices.end()
        self._timer.wake()
        ledger = self._query_ledger
        if ledger is not None:
            self._resign(ledger, own_lease.lease)
            ledger.close()
        for lease, keeper in list(keepers.items()):
            if keeper is self:
                keepers.pop(lease, None)

    def _resign(self, ledger: Ledger, own_lease: str) -> None:
        """Declare this worker's leases dead; move what is left of the former ones."""
        former = list(self._former_leases)
        try:
            for lease in filter(None, (own_lease, *former)):
                ledger.declare_dead(lease, claims=False)
            for lease in former:  # no other worker looks for messages that were noted late
                self._move(ledger, lease, IS_OWN_LEASE)
        except Exception as error:  # other workers prove the death
            extra = {"event": "worker_lease_left", "lease": own_lease}
            logger.debug("cannot resign %s: %r", own_lease, error, extra=extra)

    # in the thread

    def _run(self) -> None:
        ledger: Ledger | None = None
        join_count = self._join_count
        while not self._is_ended:
            began_at = self._clock.now()
            try:
                if (
                    ledger is not None and join_count != self._join_count
                ):  # the broker may be another one
                    ledger.close()
                    ledger = None
                    self._observer.forget()
                join_count = self._join_count
                ledger = ledger or self._connect()
                self._beat_and_move(ledger)
                self._recall_once(ledger)
            except BaseException as error:  # SystemExit of a receiver, too: this thread must go on
                self._notices.log_error(self.lease, error)
            self._timer.begin_pass(self._clock.now())
            if not self._is_ended:
                self._timer.sleep(max(0.05, began_at + BEAT_INTERVAL - self._clock.now()))
        if ledger is not None:
            ledger.close()

    def _beat_and_move(self, ledger: Ledger) -> None:
        """Beat once; then move the messages of dead workers and of this worker's former leases.

        The beat is first, so that this worker stays alive if the broker refuses a move.
        """
        own_lease = self._own_lease
        sent_at = self._clock.now()
        beat = Beat(False)
        if own_lease.lease not in ("", self._abandoned_lease):
            beat = self._beat(ledger, own_lease.lease, claims=True)
        if not beat.is_alive:
            self._rejoin(ledger, own_lease.lease)
            self._move_former_leases(ledger)
            return
        self._confirm(own_lease.lease, sent_at)
        other_beats = {lease: seen for lease, seen in beat.quiet.items() if lease != self.lease}
        dead = self._observer.look(sent_at, self._clock.now(), other_beats)
        self._move_former_leases(ledger)
        for lease, last_beat in dead.items():
            self._move(ledger, lease, "does not beat", last_beat)
        if beat.claimed:
            self._move(ledger, beat.claimed, "is dead")

    def _beat(self, ledger: Ledger, lease: str, *, claims: bool = False) -> Beat:
        try:
            return ledger.beat(lease, claims=claims)
        except BaseException:  # the broker is away, say: all others get the whole time anew
            self._observer.forget()
            raise

    def _recall_once(self, ledger: Ledger) -> None:
        """Recall forgotten worker leases that still have messages; once in each worker.

        A worker that was taken for dead may wake, note a message under a worker lease that has been
        forgotten, and be killed before its next beat. The worker that starts in its place finds it.
        """
        if self._has_recalled or not self.lease:
            return
        self._has_recalled = True
        try:
            if missing := ledger.missing_rights():
                self._notices.log_missing_rights(self.lease, " ".join(missing))
            else:
                ledger.recall(lambda: self._beat_between(ledger))
        except CONNECTION_ERRORS:
            self._has_recalled = False
            raise

    def _rejoin(self, ledger: Ledger, lost_lease: str) -> None:
        """Join anew: others declared this worker's lease dead, or its join was refused before.

        lost_lease: the dead one; "" after a refused join. Its messages that others have not
        moved yet are moved later. While its join is refused the worker has no lease.
        """
        joins = self._join_count
        now = self._clock.now()
        self._observer.forget()
        if (
            self._is_ended
            or self._own_lease.lease != lost_lease
            or not self._tries.may_try(JOIN, now)
        ):
            return
        try:
            new_lease = self._join(ledger)
        except ResponseError as error:
            self._tries.record_refusal(JOIN, now)
            self._notices.log_error(self.lease, error)
            new_lease = NO_LEASE
        with self._mutex:
            is_current = not self._is_ended and (self._join_count, self._own_lease.lease) == (
                joins,
                lost_lease,
            )
            if is_current:
                self._own_lease = new_lease
        if not is_current:  # it has ended, or its consumer has joined meanwhile
            keepers.pop(new_lease.lease, None)
            if new_lease.lease:
                ledger.declare_dead(new_lease.lease, claims=False)
        elif lost_lease:
            self._former_leases[lost_lease] = None
            self._log_loss(lost_lease)

    def _log_loss(self, lost_lease: str) -> None:
        self._loss_count += 1
        extra = {"event": "worker_lease_lost", "lease": lost_lease, "times": self._loss_count}
        logger.warning(
            "%s did not reach the broker for so long that other workers took it for dead (%d times "
            "so far): its messages are moved, and it begins none of them",
            self._name, self._loss_count, extra=extra,
        )  # fmt: skip

    def _move_former_leases(self, ledger: Ledger) -> None:
        """Move the messages of its former worker leases, which this worker does not acknowledge."""
        for lease in list(self._former_leases):
            if not self._tries.may_try(lease, self._clock.now()):
                continue
            del self._former_leases[lease]  # first: a message that is noted meanwhile may be missed
            is_done = False
            try:
                is_done = self._move(ledger, lease, IS_OWN_LEASE, "")
            finally:
                if not is_done:
                    self._former_leases[lease] = None
            self._on_moved_away(lease)

    def _move(self, ledger: Ledger, lease: str, reason: str, beat: str | None = None) -> bool:
        """Move the messages of a dead worker lease; return whether there is none to try again.

        beat: the lease is declared dead first, if its last beat is this one; "": whatever its last
        beat; None: it is dead already. An error of one worker lease does not stop the moves of
        others; a lost connection stops all moves until the next beat.
        """
        if not self._tries.may_try(lease, self._clock.now()):
            return False
        try:
            if beat is not None and not ledger.declare_dead(lease, beat) and reason != IS_OWN_LEASE:
                return True  # it has beaten
            result = self._move_all(ledger, lease, reason)
        except Exception as error:
            self._tries.record_refusal(lease, self._clock.now())
            if isinstance(error, CONNECTION_ERRORS):
                raise
            self._notices.log_error(self.lease, error)
            return False
        if result.refusal:
            self._tries.record_refusal(lease, self._clock.now())
        else:
            self._tries.record_success(lease)
        return not result.refusal

    def _move_all(self, ledger: Ledger, lease: str, reason: str) -> MoveResult:
        name = ledger.name_of(lease) or "a worker"
        between = partial(self._beat_between, ledger)
        result = ledger.move_all(lease, between, is_counted=reason != IS_OWN_LEASE)
        self._notices.report_moves(name, lease, reason, result)
        return result

    def _beat_between(self, ledger: Ledger) -> None:
        own_lease = self._own_lease
        now = self._clock.now()
        if now - own_lease.confirmed_at <= BEAT_INTERVAL or own_lease.lease in (
            "",
            self._abandoned_lease,
        ):
            return
        if self._beat(ledger, own_lease.lease).is_alive:
            self._confirm(own_lease.lease, now)


class MovedAwayError(Ignore):
    """Ends a run that has not begun: its message was moved to another worker.

    It reaches the request: see `tasks/worker_request.py`.
    """


# of this process, by worker lease; also by former leases, whose messages are not begun
keepers: dict[str, Keeper] = {}
reset_in_children(keepers.clear)  # a child has no beat and no connection of its own
# requests whose message was moved while they waited for a thread or greenlet, by delivery tag
moved_requests: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def still_owned(delivery_tag: object) -> bool:
    """Return whether a message is still its worker's; True for one without a worker lease."""
    lease = str(delivery_tag).partition(":")[0]  # asked three times a message: nothing more is read
    keeper = keepers.get(lease)
    return keeper is None or keeper.owns(lease)


def end_if_moved(delivery: Delivery) -> None:
    """End a refused run whose message another worker has: to republish it would make a second copy.

    A message that was acknowledged early is this worker's alone. A child of a pool has no keeper,
    so it cannot know.
    """
    if delivery.acks_late and not still_owned(delivery.delivery_tag):
        end_moved(delivery)


def end_moved(delivery: Delivery) -> NoReturn:
    """End a run whose message another worker has; no state is stored and no event is sent."""
    delivery.state.continues_elsewhere = True
    raise MovedAwayError("is with another worker")
