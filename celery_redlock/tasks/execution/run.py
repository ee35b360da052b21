"""`LockedRun`: one execution of a task's body under its lock. Read this first."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_redlock.errors import LONGEST_VALUE, LockLost, NotAcquired, SettingsError
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError, SupersededError
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.lock.release import loss_of, release_all
from celery_redlock.tasks.body import MonitoredBody
from celery_redlock.tasks.declaration import check_finished, config_of
from celery_redlock.tasks.delivery.delivery import Delivery
from celery_redlock.tasks.delivery.republish import NotRepublishedError
from celery_redlock.tasks.delivery.route import queue_of_send
from celery_redlock.tasks.execution import outcomes
from celery_redlock.tasks.execution.deferral import Refusal
from celery_redlock.tasks.execution.redelivery import (
    check_not_superseded,
    completion_marker,
    is_completed_elsewhere,
    is_held_by_own_run,
)
from celery_redlock.tasks.per_app import redlock_of, time_of_nodes
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.settings.task_config import TaskCall
from celery_redlock.tasks.unique.claim import ClaimToken

logger = logging.getLogger(__name__)

RUN = "_redlock_run"  # the name on the request under which its run is registered
OUTER_ERROR = "_redlock_outer_error"  # that of an error that was handled when the run began

Body = Callable[..., Any]


class LockedRun:
    """One execution of a task's body; registered on the request until its lock is released.

    lock: what it holds, None before it asks for it. unlocked: it runs without a lock, as
    on_unreachable="run" says. outcome_stored: set once a hook of the user's is called, and so after
    Celery has stored the outcome.
    """

    __slots__ = (
        "args", "cancelled", "delivery", "kwargs", "lock", "options", "outcome_stored", "resources",
        "token", "unlocked",
    )  # fmt: skip

    lock: Lock
    options: TaskLockOptions
    resources: tuple[str, ...]
    cancelled: str | None

    def __init__(self, delivery: Delivery, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.delivery, self.args, self.kwargs = delivery, args, kwargs
        unique = delivery.header.unique
        self.token = None if unique is None else ClaimToken.of(unique)
        self.unlocked = self.outcome_stored = False
        outer = sys.exc_info()[1]
        if outer is not None:  # Celery closes a lost connection, and its solo pool runs this there
            delivery.request.__dict__[OUTER_ERROR] = outer

    def execute(self, body: Body) -> Any:
        """Run the body and return its result, or end this delivery.

        Raises Ignore or Requeue if the delivery ends without its body; SettingsError, NotAcquired
        or what the body raises end the run as FAILURE.
        """
        delivery = self.delivery
        if delivery.is_for_another_queue:
            outcomes.discard_copy(delivery)
        self._resolve_options()
        self.cancelled = delivery.cancelled
        if self.resources:
            self._acquire_or_end()
        if self.cancelled is not None:  # no other delivery ran it, as the lock has shown
            outcomes.end_cancelled(delivery, self.cancelled)
        return self._run_body(body) if self.resources else body(*self.args, **self.kwargs)

    def _resolve_options(self) -> None:
        """Look up the options in force and the resources. Raises SettingsError."""
        delivery, args, kwargs = self.delivery, self.args, self.kwargs
        task = delivery.task
        config = config_of(task)
        if delivery.request.is_eager:
            queue = queue_of_send(task, args, kwargs)
        else:
            queue = delivery.queue(config.queues)
        carried = config.heeded(delivery.header.options)
        self.options = config.options_for(queue, carried)
        if delivery.header.options:
            changed = config.overridden(queue, self.options)
            log_call_options(delivery, carried, changed)
        call = TaskCall(task, args, kwargs, queue)
        self.resources = in_order(config.resources(self.options, call))

    def _acquire_or_end(self) -> None:
        """Acquire the lock, or end this delivery; return without a lock if `unlocked` is set.

        A message that this process alone has, as the broker does not take it back, stays in its
        slot: it waits for its lock there between the tries to republish it. A soft time limit is
        one on the body, which has not begun. If the worker stops, the message ends as FAILURE, so
        that whoever waits for the result learns of it.
        """
        if "celery_aio_pool.pool" in sys.modules:
            refuse_aio_pool(self.delivery.task)
        if self.token is not None:
            task = self.delivery.task
            self.token.mark_superseded(redlock_of(task.app).session, task.name)
        slot: outcomes.WaitInSlot | None = None
        try:
            is_over = False
            while not is_over:
                try:
                    self._try_to_acquire(0.0 if slot is None else slot.begin(self.delivery))
                    is_over = True
                except NotRepublishedError as error:
                    slot = outcomes.WaitInSlot(error, slot)
                    self.delivery = self.delivery.going_on(error.header)
                except SoftTimeLimitExceeded:
                    if slot is None:
                        raise
        except Exception:
            raise
        except BaseException as end:  # the worker stops, or this greenlet is killed
            if slot is not None:
                slot.report_lost(self.delivery, end)
            raise

    def _try_to_acquire(self, wait_in_slot: float) -> None:
        """Do what `_acquire_or_end` says, once. Raises NotRepublishedError.

        wait_in_slot: seconds, of a message that the broker did not take back.
        """
        delivery = self.delivery
        marker = completion_marker(delivery, is_unique=self.token is not None)
        label = delivery.run_id.label(delivery.request.hostname)
        self.lock = lock_of(delivery.task, self.options, self.resources, label, marker=marker)
        self.register()  # before the grant leaves, so that task_postrun finds the lock
        try:
            self._acquire(wait_in_slot)
            if self.token is not None:
                self._begin()
        except NotAcquired as refusal:
            self.unregister()
            release_all(self.lock)  # it may have been granted, and `_begin` failed
            task, call = delivery.task, (tuple(self.args), dict(self.kwargs))
            at = time_of_nodes(task.app)
            found = Refusal(refusal, at, self.options, self.resources, task, *call)
            outcomes.end_refused(delivery, found, self.cancelled)
            self.unlocked = True
            self.register()
            self._end_claim_at_start()
        except AlreadyCompletedError:
            self.release()
            outcomes.discard_redelivery(delivery)
        except SupersededError as newer:
            self.release()
            outcomes.end_superseded(delivery, str(newer))
        except BaseException as error:
            self.release()
            outcomes.end_interrupted(delivery, error)
            raise

    def _acquire(self, wait_in_slot: float) -> None:
        """Acquire the lock; do not wait in the slot for another delivery of the same message."""
        delivery = self.delivery
        if wait_in_slot:
            self.lock.acquire(wait=wait_in_slot)
            return
        if self.options.wait > 0 and delivery.acks_late and delivery.can_republish:
            try:
                self.lock.acquire(wait=0)
            except NotAcquired as refusal:
                if is_held_by_own_run(delivery, refusal):
                    raise
            else:
                return
        self.lock.acquire()

    def _begin(self) -> None:
        """Do what a deduplicated send asks for between the grant and the body."""
        check_not_superseded(self.delivery)
        self._end_claim_at_start()

    def _end_claim_at_start(self) -> None:
        """End the claim of a send that lasts until the body starts, before the body reads anything.

        A retry has no claim any more: the task has started.
        """
        if self.token is not None and not self.delivery.request.retries:
            self.token.release_at_start(redlock_of(self.delivery.task.app).session)

    def _run_body(self, body: Body) -> Any:
        """Run the body, and release the lock if the message is acknowledged before the run."""
        delivery, completed = self.delivery, False
        try:
            self._report_started()
            # no further publication of the message is to run
            completed = delivery.may_have_run_elsewhere
            if self.unlocked:
                return body(*self.args, **self.kwargs)
            return self._run_monitored(body)
        finally:
            if not delivery.acks_late:
                self.release(completed=completed)

    def _report_started(self) -> None:
        """Store STARTED if the task tracks it, or if a state of an earlier delivery is stored."""
        delivery = self.delivery
        was_deferred = delivery.header.deferral.count > 0
        # taken over from `track_started` by `LockedTask.on_bound`
        tracks = getattr(delivery.task, "_redlock_track_started", False)
        if tracks or was_deferred or delivery.is_redelivered:
            delivery.reporter.started(was_deferred=was_deferred)

    def _run_monitored(self, body: Body) -> Any:
        """Run a body that learns of its lock's loss, and does not succeed without its lock.

        What the body raises stands: its own error says more, a retry takes the lock anew, and after
        Ignore or Reject no SUCCESS is stored. But if the message was delivered again meanwhile, and
        that delivery has ended, then its outcome stands and this one is discarded.
        """
        aborts, acks_late = self.options.on_lost == "abort", self.delivery.acks_late
        began = redlock_of(self.delivery.task.app).session.clock.now() if acks_late else 0.0
        monitored = MonitoredBody(self.lock, abort=aborts, report=self._report_lock_lost)
        try:
            try:
                result = monitored.run(body, self.args, self.kwargs)
                if result is not None:
                    check_finished(self.delivery.task, result)
            except Exception:
                monitored.report_loss()
                raise
            if not self.lock.held:
                monitored.report_loss()
                if aborts:
                    self._ensure_held_to_the_end()
        except (Ignore, Reject, Retry):
            raise
        except Exception:
            is_lost = acks_late and loss_of(self.lock) is not None
            if is_lost and is_completed_elsewhere(self.delivery, began):
                outcomes.discard_redelivery(self.delivery)
            raise
        return result

    def _report_lock_lost(self, lost: LockLost) -> None:
        self.delivery.reporter.lock_lost(lost)

    def _ensure_held_to_the_end(self) -> None:
        """Raise LockLost, which says that the body had ended, if the lock is not held any more."""
        try:
            self.lock.ensure()
        except LockLost as lost:
            raise LockLost(lost.resource, lost.reason, True) from None

    def register(self) -> None:
        """Let task_postrun, hooks and `task.lock` find this run."""
        self.delivery.request.__dict__[RUN] = self

    def unregister(self) -> None:
        """Let nobody find this run any more."""
        self.delivery.request.__dict__.pop(RUN, None)

    @uninterruptible
    def release(self, *, completed: bool = False) -> None:
        """Release the lock, if this run is registered.

        completed: the run is at its end, and its message does not come back, unless redelivered.
        """
        if RUN in self.delivery.request.__dict__:
            release_all(self.lock, ended=completed)
            self.unregister()  # last: if this is cut before, task_postrun releases again


def log_call_options(
    delivery: Delivery, heeded: Mapping[str, Any], changed: Mapping[str, Any]
) -> None:
    """Log what a sender changes of what the task's author has set.

    heeded: the options of the message without those that no message may carry. changed: what they
    change of what is excluded.
    """
    ignored = [name for name in delivery.header.options if name not in heeded]
    if ignored:
        extra = delivery.log_extra("call_options_ignored", options=ignored)
        text = "%s: options of its message that redlock_call_options does not name are ignored: %s"
        logger.warning(text, delivery, ", ".join(ignored), extra=extra)
    if changed:
        shown = ", ".join(
            f"{name}={repr(value)[:LONGEST_VALUE]}" for name, value in changed.items()
        )
        extra = delivery.log_extra("call_options_used", options=list(changed))
        logger.info("%s: its message changes the lock: %s", delivery, shown, extra=extra)


def run_of(request: Any) -> LockedRun | None:
    """Return the run that is registered on a request, None outside one."""
    run: LockedRun | None = request.__dict__.get(RUN)
    return run


def lock_of(
    task: Any,
    options: TaskLockOptions,
    resources: tuple[str, ...],
    label: str,
    *,
    wait: float | None = None,
    marker: CompletionMarker | None = None,
) -> Lock:
    """Return the lock that a run with these options takes.

    resources: as of `in_order`. label: what the nodes show of its holder. wait: seconds, instead of
    the options'. marker: of a run that may be delivered again.
    """
    lock_options = LockOptions(
        resources=resources,
        ttl=options.ttl,
        wait=options.wait if wait is None else wait,
        renew=options.renew,
        max_hold=options.max_hold,
        label=label,
        sender=task,
        limit=options.limit,
        fencing=options.fencing,
        marker=marker,
    )
    return Lock(redlock_of(task.app), lock_options)


def refuse_aio_pool(task: Any) -> None:
    """Raise SettingsError in a worker of celery-aio-pool.

    That pool calls bodies in another thread, and keeps there what it knows of a run for the next
    run as well: after a late run its lock would stay, and the next run would take none.
    """
    if sys.modules["celery_aio_pool.pool"].AsyncIOPool.singleton is None:
        return
    hint = (
        f"calls bodies apart from their runs, so that {task.name} cannot be locked: use prefork, "
        "threads, gevent or solo, or lock_key=False"
    )
    raise SettingsError("worker", "pool", "celery_aio_pool", hint)
