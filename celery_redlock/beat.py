"""`LockedScheduler`: of several beats, only the holder of one lock sends periodic tasks.

It wraps another scheduler. Each time it acquires the lock, it creates that scheduler again, which
then reads the last runs. When the lock is lost, the wrapped scheduler is discarded without saving,
because the next holder may have saved newer runs. Celery loads this module by name: `celery beat -S
celery_redlock.beat:LockedScheduler`. Not here: which entries are due (the wrapped scheduler), and
the lock (`lock/lock.py`).
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

SCHEDULER_ENTRY_POINTS = "celery.beat_schedulers"  # the group of names such as "django"
RETRY_DELAY = 1.0  # seconds until the next try if no quorum answers


class _NotHeldError(BaseException):
    """The lock is not held.

    No Exception, because Celery logs any Exception of a send and counts the entry as sent.
    """


class _BrokerUnreachableError(BaseException):
    """No broker can be reached from this process, so another beat has to send the entry.

    No Exception, for the same reason.
    """


class WrappedScheduler(Scheduler):
    """The first base of the guarded class: lets the wrapped scheduler send only under the lock.

    beat_lock: the lock of the `LockedScheduler`. is_sending: a send has neither returned nor
    failed. is_discarded: the scheduler saves nothing any more.
    """

    beat_lock: Lock
    is_sending = is_discarded = False
    # redbeat extends a lock of its own at each tick; without a key it has none
    lock_key = property(lambda self: None, lambda self, value: None)

    def check_held(self, *_: Any) -> None:
        if not self.beat_lock.held:
            raise _NotHeldError

    def apply_async(self, entry: Any, *args: Any, **options: Any) -> Any:
        """Send an entry and save its run at once, so that a crash repeats at most this entry."""
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

        Saves nothing during a send: if a signal interrupts the send, its run would be saved
        although the message may not have been sent.
        """
        if self.beat_lock.held and not (self.is_sending or self.is_discarded):
            super().sync()

    @cached_property
    def producer(self) -> Any:
        """The producer of the wrapped scheduler. It publishes only while the lock is held.

        The lock is checked just before each publish, because the steps before may take long: a
        claim, a result store, a user's signal receiver. Publishing raises _BrokerUnreachableError
        if the broker cannot be reached; Celery's own policy would retry a hundred times.
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
                raise  # the broker is there and refuses this message, from any beat

        producer.publish = publish_while_held
        return producer

    def _check_broker(self) -> None:
        """Raise _BrokerUnreachableError if no broker of the app takes a connection."""
        with self.app.connection_for_write() as connection:
            try:
                connection.ensure_connection(
                    max_retries=len(connection.alt or "1"), interval_start=0, interval_step=0
                )
            except OperationalError as error:
                raise _BrokerUnreachableError(str(error)) from None

    def discard(self) -> None:
        """Save nothing from now on, and close the store and the connection."""
        self.is_discarded = True  # django-celery-beat saves when the process exits, too
        store = getattr(self, "_store", None)
        connection = self.__dict__.pop("connection", None)
        with suppress(Exception):
            if store is not None:
                store.cache.clear()  # a shelf writes its cache when it is closed or collected
                store.close()
        with suppress(Exception):
            if connection is not None:
                connection.release()


class LockedScheduler(Scheduler):
    """A scheduler for several beats: the holder of the lock `beat:<name of the app>` ticks.

    The other beats wait for the lock. `redlock_beat_scheduler` names the wrapped scheduler. Its
    errors end the process, as without this class, and the lock is released. Raises SettingsError if
    that scheduler cannot be imported or is of a wrong class.
    """

    lock_key = None  # a signal receiver of redbeat reads it
    max_interval: float

    def __init__(
        self, app: Any, schedule_filename: Any = None, max_interval: Any = None, **options: Any
    ) -> None:
        app = without_proxy(app)
        super().__init__(app, max_interval=max_interval, **options)
        wrapped_class = _scheduler_class(app)
        self._lock = _lock_of(app)
        self._wrapped_class = wrapped_class
        self._redlock = redlock_of(app)
        self._clock = self._redlock.session.clock
        self._failed_at = -math.inf
        self._has_logged_holder = False
        self._standby_until = -math.inf  # monotonic seconds: before that it does not try the lock
        self._scheduler: Any = None  # the wrapped scheduler, while this beat has the lock
        attributes = {"beat_lock": self._lock}
        self._guarded_class: Any = type(
            wrapped_class.__name__, (WrappedScheduler, wrapped_class), attributes
        )
        self._service = Service(app, max_interval, schedule_filename, self._guarded_class)
        self.max_interval = min(self.max_interval, self._lock.ttl / 3)
        if issubclass(wrapped_class, PersistentScheduler) and not options.get("lazy"):
            logger.warning(
                "beat saves the last runs in a file of this machine, %s: a beat on another machine "
                "does not know them, and sends entries again; see redlock_beat_scheduler",
                self._service.schedule_filename, extra={"event": "beat_file_is_local"},
            )  # fmt: skip

    @property
    def info(self) -> str:
        """The lines about the scheduler in the banner of `celery beat`."""
        class_path = f"{self._wrapped_class.__module__}.{self._wrapped_class.__name__}"
        return f"    . lock -> {self._lock.resource}\n    . wrapped -> {class_path}"

    def setup_schedule(self) -> None:
        """Set up nothing: the wrapped scheduler has the schedule."""

    def tick(self, *_: Any, **__: Any) -> float:
        """Send the due entries, or wait for the lock; return the seconds until the next call."""
        if self._scheduler is None or not self._lock.held:
            return self._stand_by()
        try:
            interval = self._scheduler.tick()
        except _NotHeldError:
            self._step_down()
            return 0.0
        except _BrokerUnreachableError as error:
            text = "beat gives the lock %r up: its broker cannot be reached: %s"
            extra = {"event": "beat_broker_away"}
            logger.warning(text, self._lock.resource, error, extra=extra)
            self._step_down()
            self._standby_until = self._clock.now() + self.max_interval
            return self.max_interval
        self._extend_renewal()
        return min(interval or 0.0, self.max_interval)

    def sync(self) -> None:
        """Save the last runs if the lock is held."""
        if self._scheduler is not None:
            self._scheduler.sync()

    def close(self) -> None:
        """Save the last runs and release the lock. A signal handler and Celery both call it."""
        scheduler = self._scheduler
        self._scheduler = None
        try:
            if scheduler is not None and self._lock.held and not scheduler.is_sending:
                scheduler.close()
        finally:
            if scheduler is not None:
                scheduler.discard()
            if self._lock.held:
                self._lock.release()

    def _stand_by(self) -> float:
        """Wait for the lock, and create the wrapped scheduler once this thread owns it.

        Return the seconds until the next try; 0 if the lock was acquired.
        """
        self._step_down()
        if (standby_left := self._standby_until - self._clock.now()) > 0:
            return standby_left
        redlock = redlock_of(self.app)
        if redlock is not self._redlock:  # a user's code has closed the earlier one
            self._redlock = redlock
            self._lock = _lock_of(self.app)
            self._guarded_class.beat_lock = self._lock
        try:
            self._lock.acquire(self.max_interval)
        except NotAcquired as failure:
            return self._wait(failure)
        self._extend_renewal()
        self._failed_at = -math.inf
        self._has_logged_holder = False
        text = "beat has the lock %r, and sends the periodic tasks"
        logger.info(text, self._lock.resource, extra={"event": "beat_leads"})
        self._scheduler = self._service.get_scheduler()
        return 0.0

    def _wait(self, failure: NotAcquired) -> float:
        """Log once why this beat does not send; return the seconds until the next try."""
        if isinstance(failure, LockTaken):
            if not self._has_logged_holder:
                text = "beat waits: the lock %r is %s"
                holder = describe_taken(failure)
                logger.info(text, failure.resource, holder, extra={"event": "beat_waits"})
            self._has_logged_holder = True
            return 0.0
        # a node that still has the lock may refuse in between, for at most one ttl
        failed_before = self._failed_at
        self._failed_at = self._clock.now()
        if self._failed_at - failed_before > 2 * self._lock.ttl:
            logger.error(
                "beat sends no periodic tasks until the lock nodes answer: %s",
                failure, extra={"event": "beat_has_no_quorum"},
            )  # fmt: skip
        return RETRY_DELAY  # the acquire may have failed at once

    def _step_down(self) -> None:
        """Discard the wrapped scheduler and release the lock."""
        scheduler = self._scheduler
        self._scheduler = None
        if scheduler is not None:
            scheduler.discard()
            self._lock.release()

    def _extend_renewal(self) -> None:
        """Let the watchdog renew the lock for a limited time; each tick extends it.

        If no tick ends within that time, this process hangs, and the lock expires.
        """
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
    uses_celery_setting = name is None
    if uses_celery_setting:
        source = OptionSource("app", "beat_scheduler")
        name = app.conf.beat_scheduler
    try:
        class_paths = {
            entry_point.name: entry_point.value
            for entry_point in entry_points(group=SCHEDULER_ENTRY_POINTS)
        }
        scheduler_class = (
            resolve_name(class_paths.get(name, name)) if isinstance(name, str) else name
        )
    except Exception as error:  # of any module
        raise source.wrong(name, f"cannot be imported: {error}") from error
    if not (isinstance(scheduler_class, type) and issubclass(scheduler_class, Scheduler)):
        raise source.wrong(name, "must be a subclass of celery.beat.Scheduler")
    if not issubclass(scheduler_class, (LockedScheduler, WrappedScheduler)):
        return scheduler_class
    if uses_celery_setting:
        return PersistentScheduler
    raise source.wrong(name, WRAPS_ITSELF)
