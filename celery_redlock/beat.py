"""`LockedScheduler`: of several beats, only the holder of one lock sends periodic tasks.

It wraps another scheduler, and makes it anew when the lock is acquired, so that it reads the last
runs then. A lost lock discards it unsaved: the next holder may have saved newer runs. Celery loads
this module by name: `celery beat -S celery_redlock.beat:LockedScheduler`. Not here: what is due
(the other scheduler), and the lock (`lock/lock.py`).
"""

from __future__ import annotations

import logging
import math
import os
import socket
from contextlib import suppress
from functools import cached_property
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from celery.beat import PersistentScheduler, Scheduler, Service
from kombu.exceptions import OperationalError

from celery_redlock import compatibility
from celery_redlock.errors import LockTaken, NotAcquired, describe_taken
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.app import WRAPS_ITSELF, OptionSource
from celery_redlock_entry import without_proxy

logger = logging.getLogger(__name__)
compatibility.check(compatibility.IN_BEAT)

SHORT_NAMES = "celery.beat_schedulers"  # entry points, as "django"
AFTER_FAILURE = 1.0  # seconds until the next try


class _NotHeldError(BaseException):
    """The lock is not held. Celery logs any Exception of a send, and counts the entry as sent."""


class _BrokerAwayError(BaseException):
    """The broker takes nothing from here. As above: the entry is to be sent by another beat."""


class WrappedScheduler(Scheduler):
    """Comes before the class of another scheduler, which so sends and saves under the lock alone.

    beat_lock: of the `LockedScheduler`. is_sending: a send has neither returned nor failed.
    """

    beat_lock: Lock
    is_sending = is_discarded = False
    # redbeat extends a lock of its own in each tick; without a key it has none
    lock_key = property(lambda self: None, lambda self, value: None)

    def check_held(self, *_: Any) -> None:
        if not self.beat_lock.held:
            raise _NotHeldError

    def apply_async(self, entry: Any, *args: Any, **options: Any) -> Any:
        """Send an entry and save its run, so that a crash repeats no other entry."""
        self.check_held()
        self.is_sending = True
        try:
            result = super().apply_async(entry, *args, **options)
        except Exception:  # Celery logs it; the entry waits for its next time
            self._end_send()
            raise
        self._end_send()
        return result

    def _end_send(self) -> None:
        self.is_sending = False
        self.sync()

    def sync(self) -> None:
        """Save the last runs, unless another beat may have saved newer ones.

        A send that a signal interrupts is not saved: it would count, and may not have been sent.
        """
        if self.beat_lock.held and not (self.is_sending or self.is_discarded):
            super().sync()

    @cached_property
    def producer(self) -> Any:
        """The producer of the wrapped scheduler. It publishes nothing after the lock is lost.

        What comes before the publish may take long: a claim, a result store, a user's signal.
        Raises _BrokerAwayError: Celery's own would try a hundred times.
        """
        self._check_broker()
        producer = super().producer
        publish = producer.publish

        def publish_while_held(*args: Any, retry_policy: Any = None, **options: Any) -> Any:
            self.check_held()
            policy = {**(retry_policy or {}), "errback": self.check_held}
            try:
                return publish(*args, retry_policy=policy, **options)
            except (OperationalError, *self.connection.connection_errors):
                self._check_broker()
                raise  # another message may be taken: this one is not, wherever it comes from

        producer.publish = publish_while_held
        return producer

    def _check_broker(self) -> None:
        """Raise _BrokerAwayError if no broker of the app takes a connection."""
        with self.app.connection_for_write() as connection:
            try:
                connection.ensure_connection(
                    max_retries=len(connection.alt or "1"), interval_start=0, interval_step=0
                )
            except OperationalError as error:
                raise _BrokerAwayError(str(error)) from None

    def discard(self) -> None:
        """Save nothing from now on, and close what is open."""
        self.is_discarded = True  # django-celery-beat saves when the process exits, too
        store = getattr(self, "_store", None)
        connection = self.__dict__.pop("connection", None)
        with suppress(Exception):
            if store is not None:
                store.cache.clear()  # a shelf writes it when it is closed or collected
                store.close()
        with suppress(Exception):
            if connection is not None:
                connection.release()


class LockedScheduler(Scheduler):
    """A scheduler for several beats: the holder of the lock `beat:<name of the app>` ticks.

    The others wait. `redlock_beat_scheduler` names the scheduler that is wrapped. Its errors end
    the process, as without this class; the lock is released then. Raises SettingsError.
    """

    lock_key = None  # a receiver of redbeat's reads it
    max_interval: float

    def __init__(
        self, app: Any, schedule_filename: Any = None, max_interval: Any = None, **options: Any
    ) -> None:
        app = without_proxy(app)
        super().__init__(app, max_interval=max_interval, **options)
        wrapped = _scheduler_class(app)
        self._lock = _lock_of(app)
        self._wrapped = wrapped
        self._redlock = redlock_of(app)
        self._clock = self._redlock.session.clock
        self._failed_at = -math.inf
        self._has_told_of_holder = False
        self._behind_until = -math.inf  # monotonic seconds until which it lets others lead
        self._inner: Any = None  # while this beat has the lock
        held = {"beat_lock": self._lock}
        self._made: Any = type(wrapped.__name__, (WrappedScheduler, wrapped), held)
        self._maker = Service(app, max_interval, schedule_filename, self._made)
        self.max_interval = min(self.max_interval, self._lock.ttl / 3)
        if issubclass(wrapped, PersistentScheduler) and not options.get("lazy"):
            logger.warning(
                "beat saves the last runs in a file of this machine, %s: a beat on another machine "
                "does not know them, and sends entries again; see redlock_beat_scheduler",
                self._maker.schedule_filename, extra={"event": "beat_file_is_local"},
            )  # fmt: skip

    @property
    def info(self) -> str:
        """The lines about the scheduler in the banner of `celery beat`."""
        of = f"{self._wrapped.__module__}.{self._wrapped.__name__}"
        return f"    . lock -> {self._lock.resource}\n    . wrapped -> {of}"

    def setup_schedule(self) -> None:
        """Set up nothing: the wrapped scheduler has the schedule."""

    def tick(self, *_: Any, **__: Any) -> float:
        """Send what is due, or wait for the lock; return the seconds until the next call."""
        if self._inner is None or not self._lock.held:
            return self._stand_by()
        try:
            interval = self._inner.tick()
        except _NotHeldError:
            self._step_down()
            return 0.0
        except _BrokerAwayError as away:
            text = "beat gives the lock %r up: its broker cannot be reached: %s"
            extra = {"event": "beat_broker_away"}
            logger.warning(text, self._lock.resource, away, extra=extra)
            self._step_down()
            self._behind_until = self._clock.now() + self.max_interval
            return self.max_interval
        self._keep()
        return min(interval or 0.0, self.max_interval)

    def sync(self) -> None:
        """Save the last runs if the lock is held."""
        if self._inner is not None:
            self._inner.sync()

    def close(self) -> None:
        """Save the last runs and release the lock. A signal handler and Celery both call it."""
        inner = self._inner
        self._inner = None
        try:
            if inner is not None and self._lock.held and not inner.is_sending:
                inner.close()
        finally:
            if inner is not None:
                inner.discard()
            if self._lock.held:
                self._lock.release()

    def _stand_by(self) -> float:
        """Wait for the lock in this thread, which owns it then; make the wrapped scheduler."""
        self._step_down()
        if (left := self._behind_until - self._clock.now()) > 0:
            return left
        redlock = redlock_of(self.app)
        if redlock is not self._redlock:  # a user's code has closed the one before
            self._redlock = redlock
            self._lock = _lock_of(self.app)
            self._made.beat_lock = self._lock
        try:
            self._lock.acquire(self.max_interval)
        except NotAcquired as failure:
            return self._wait(failure)
        self._keep()
        self._failed_at = -math.inf
        self._has_told_of_holder = False
        text = "beat has the lock %r, and sends the periodic tasks"
        logger.info(text, self._lock.resource, extra={"event": "beat_leads"})
        self._inner = self._maker.get_scheduler()
        return 0.0

    def _wait(self, failure: NotAcquired) -> float:
        """Log once why this beat does not send; return the seconds until the next try."""
        if isinstance(failure, LockTaken):
            if not self._has_told_of_holder:
                text = "beat waits: the lock %r is %s"
                taken = describe_taken(failure)
                logger.info(text, failure.resource, taken, extra={"event": "beat_waits"})
            self._has_told_of_holder = True
            return 0.0
        # one node that still keeps the lock may refuse in between, but for no longer than a ttl
        before = self._failed_at
        self._failed_at = self._clock.now()
        if self._failed_at - before > 2 * self._lock.ttl:
            logger.error(
                "beat sends no periodic tasks until the lock nodes answer: %s",
                failure, extra={"event": "beat_has_no_quorum"},
            )  # fmt: skip
        return AFTER_FAILURE  # the nodes may have failed sooner than a wait takes

    def _step_down(self) -> None:
        """Discard the wrapped scheduler, whose lock is lost."""
        inner = self._inner
        self._inner = None
        if inner is not None:
            inner.discard()
            self._lock.release()

    def _keep(self) -> None:
        """Have the lock renewed until no tick has ended for this long: then this process hangs."""
        self._lock.ownership.renew_for(self.max_interval + 2 * self._lock.ttl)


def _lock_of(app: Any) -> Lock:
    options = LockOptions(
        resources=(f"beat:{app.main}" if app.main else "beat",),
        ttl=settings_of(app).ttl,
        wait=0.0,
        renew=True,
        max_hold=None,
        label=f"beat, pid {os.getpid()} on {socket.gethostname()}",
    )
    return Lock(redlock_of(app), options)


def _scheduler_class(app: Any) -> Any:
    """Return the class of the scheduler to wrap; raises SettingsError."""
    source = OptionSource.at("app", "beat_scheduler")
    name = settings_of(app).beat_scheduler
    is_own = name is None
    if is_own:
        source = OptionSource("app", "beat_scheduler")
        name = app.conf.beat_scheduler
    try:
        short = {one.name: one.value for one in entry_points(group=SHORT_NAMES)}
        found = resolve_name(short.get(name, name)) if isinstance(name, str) else name
    except Exception as error:  # of any module
        raise source.wrong(name, f"cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise source.wrong(name, "must be a subclass of celery.beat.Scheduler")
    if not issubclass(found, (LockedScheduler, WrappedScheduler)):
        return found
    if is_own:
        return PersistentScheduler
    raise source.wrong(name, WRAPS_ITSELF)
