"""`LockedRun`: one execution of a task's body under its lock. Read this first.

`LockedRun.execute` is the way to the body; its end is `release_after_run` in `end.py`. What becomes
of a delivery that does not get its lock: `outcomes.py`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_redlock.errors import (
    MAX_VALUE_LENGTH,
    LockLost,
    LockTaken,
    NotAcquired,
    QuorumUnreachable,
    RedlockError,
    SettingsError,
)
from celery_redlock.label import label_of_run
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError, SupersededError
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.tasks.arguments import Arrivals
from celery_redlock.tasks.body import MonitoredBody
from celery_redlock.tasks.declaration import check_finished, config_of, dumped, refuse_aio_pool
from celery_redlock.tasks.delivery.delivery import RUN_STATE, Delivery, RunState
from celery_redlock.tasks.delivery.republish import NotRepublishedError
from celery_redlock.tasks.delivery.route import queue_of_call
from celery_redlock.tasks.execution import outcomes
from celery_redlock.tasks.execution.completion_markers import (
    check_not_superseded,
    completion_marker,
    is_completed_since,
)
from celery_redlock.tasks.execution.deferral import Refusal
from celery_redlock.tasks.per_app import redlock_as_set, redlock_of, time_of_nodes
from celery_redlock.tasks.recovery.keeper import end_moved, moved_requests
from celery_redlock.tasks.settings.call import CallKeys, TaskCall
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.unique.claim import ClaimToken

logger = logging.getLogger(__name__)

Body = Callable[..., Any]


class LockedRun:
    """One execution of a task's body; registered on the request until its lock is released.

    lock: of the run, unset before its acquire. limits_error: what the limits or rates of a
    redelivery have raised. runs_unlocked: it runs without a lock, as on_unreachable="run" says.
    republish_error: the broker did not take the message back, so that only this process has it.
    body_began: set just before the body. outcome_stored: set before a hook of the user's.
    """

    __slots__ = (
        "args", "arrivals", "body_began", "call", "delivery", "done_ttl", "is_reported", "keys",
        "kwargs", "limits_error", "lock", "options", "outcome_stored", "republish_error",
        "runs_unlocked", "token",
    )  # fmt: skip

    arrivals: Arrivals | None
    call: TaskCall
    done_ttl: float
    keys: CallKeys
    lock: Lock
    limits_error: SettingsError | SoftTimeLimitExceeded | None
    options: TaskLockOptions

    def __init__(self, delivery: Delivery, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.delivery = delivery
        self.args = args
        self.kwargs = kwargs
        unique = delivery.header.unique
        self.token = None if unique is None else ClaimToken.of(unique)
        self.runs_unlocked = False
        self.outcome_stored = False
        self.limits_error = None
        self.republish_error: NotRepublishedError | None = None
        self.body_began = False
        self.is_reported = False  # STARTED is stored and sent, or need not be
        outer_error = sys.exc_info()[1]
        # Celery closes a lost connection in a handler, and its solo pool runs tasks there
        if outer_error is not None:
            delivery.state.outer_error = outer_error

    def execute(self, body: Body) -> Any:
        """Run the body and return its result, or end this delivery.

        Raises Ignore or Requeue if the delivery ends without its body; all else ends as FAILURE.
        """
        delivery = self.delivery
        if moved_requests and delivery.delivery_tag in moved_requests:
            end_moved(delivery)
        if delivery.is_for_another_queue:  # a copy of a deferred message
            delivery.state.continues_elsewhere = True
            extra = delivery.log_extra("copy_astray")
            logger.debug("%s is for another queue", delivery, extra=extra)
            raise Ignore("for another queue")
        may_have_run = delivery.acks_late and delivery.may_have_run_elsewhere
        if not may_have_run:
            outcomes.end_if_cancelled(delivery)
        self._resolve_options()
        if self.keys.resources:
            if self.arrivals is not None:
                body = self.arrivals.around(body, self)
            if "celery_aio_pool.pool" in sys.modules:
                refuse_aio_pool(delivery.task)
            self._acquire_or_end()
        if may_have_run or self.options.wait or self.keys.rates or self.delivery is not delivery:
            # the lock has shown that no other delivery runs
            outcomes.end_if_cancelled(self.delivery)
        return self._run_body(body) if self.keys.resources else body(*self.args, **self.kwargs)

    def _resolve_options(self) -> None:
        delivery = self.delivery
        task = self.delivery.task
        config = config_of(task)
        call_options = delivery.header.options
        self.done_ttl = config.app.done_ttl
        if delivery.request.is_eager:
            queue = queue_of_call(task, self.args, self.kwargs)
        else:
            queue = delivery.queue(config.queues)
        allowed = config.allowed_options(call_options) if call_options else {}
        self.options = config.options_for(queue, allowed)
        self.arrivals = config.arrivals and config.arrivals_for(self.options)
        if call_options:
            changes = config.overridden_options(queue, self.options)
            log_call_options(delivery, allowed, changes)
        self.call = TaskCall(task, *dumped(task, self.args, self.kwargs), queue)
        resources = config.resources(self.options, self.call)
        try:
            self.keys = config.keys(self.options, self.call, resources)
        except (SettingsError, SoftTimeLimitExceeded) as error:
            if not (delivery.is_redelivered and delivery.can_republish):
                raise
            self.limits_error = error  # raised once the locks show that no other delivery runs
            self.keys = CallKeys(in_order(resources), None, None)

    def _acquire_or_end(self) -> None:
        """Acquire the lock, or end this delivery; return without a lock if `runs_unlocked` is set.

        A message that the broker does not take back stays in its slot: it waits for its lock there
        between the tries to republish it. If the worker stops, the message ends as FAILURE, for
        whoever waits for the result.
        """
        if self.token is not None:
            task = self.delivery.task
            session = redlock_of(task.app).session
            self.token.mark_superseded(session, task.name, self.delivery.request.id)
        pause = 0.0
        try:
            self._try_once(0.0)
            while self.republish_error is not None:
                pause = self._try_in_slot(self.republish_error, pause)
        except Exception:  # Celery stores it as the outcome
            raise
        except BaseException as stop:
            # the worker stops, or this greenlet is killed, and nobody else has the message
            if self.republish_error is not None:
                text = f"not republished: {type(stop).__name__}, and {self.republish_error.reason}"
                self.delivery.reporter.message_lost(RedlockError(text))
            raise

    def _try_in_slot(self, error: NotRepublishedError, last_pause: float) -> float:
        """Wait in the slot, and try; return the seconds of the wait.

        A soft time limit is one on the body, which has not begun: it ends this try alone.
        """
        try:
            delivery = self.delivery
            # it goes on in its slot as if the message had come back
            self.delivery = Delivery(delivery.task, delivery.request, error.header)
            pause = outcomes.pause_in_slot(self.delivery, error, last_pause)
            self._try_once(pause)
        except SoftTimeLimitExceeded:
            return last_pause
        return pause

    def _try_once(self, wait_in_slot: float) -> None:
        """Try to acquire; set `republish_error` if the broker does not take the message back."""
        try:
            self._try_to_acquire(wait_in_slot)
            self.republish_error = None
        except NotRepublishedError as error:
            self.republish_error = error

    def _try_to_acquire(self, wait_in_slot: float) -> None:
        """Acquire the lock, or end this delivery.

        wait_in_slot: seconds, of a message that the broker did not take back. Raises
        NotRepublishedError if it does not take it back now.
        """
        delivery = self.delivery
        is_unique = self.token is not None
        marker = completion_marker(delivery, self.done_ttl, is_unique=is_unique)
        label = label_of_run(str(delivery.run_id), delivery.request.hostname)
        self.lock = lock_of(
            delivery.task,
            self.options,
            self.keys,
            label,
            marker=marker,
            body_follows=True,
        )
        state = delivery.state
        state.lock = self.lock
        state.locked_run = self  # before the grant leaves, so that task_postrun finds the lock
        try:
            if delivery.header.deferral.at:
                outcomes.put_back_if_early(delivery, wait_in_slot)
            self._acquire(wait_in_slot)
            if self.token is not None:
                check_not_superseded(delivery)
                self._end_claim_at_start()
            if self.keys.rates and delivery.cancelled is None:
                # what takes its time delays the body: a start that is late then is asked for again
                self._report_started()
                self.lock.ownership.begin_body()
        except NotAcquired as refusal:
            state.locked_run = None
            self.is_reported = False
            # it may have been granted, and a node failed after that
            self.lock.ownership.release_all()
            now = time_of_nodes(delivery.task.app)
            resources = self.keys.resources
            last = delivery.header.deferral
            failure = Refusal(refusal, now, self.options, resources, self.call, last)
            outcomes.end_refused(delivery, failure)
            self.runs_unlocked = True
            state.locked_run = self
            self._start_unlocked()
        except AlreadyCompletedError:
            self.release()
            outcomes.discard_redelivery(delivery)
        except SupersededError as error:
            self.release()
            outcomes.end_superseded(delivery, error)
        except SoftTimeLimitExceeded as error:
            self.release()
            if delivery.is_redelivered and delivery.can_republish:
                # the first delivery may run by now, and FAILURE would be stored over its state
                outcomes.wait_for_first_delivery(delivery, error)
            raise
        except BaseException:
            self.release()
            raise

    def _acquire(self, wait_in_slot: float) -> None:
        """Acquire the lock; do not wait in the slot for another delivery of the same message."""
        delivery = self.delivery
        if self.limits_error is not None:
            self._end_without_limit(self.limits_error, wait_in_slot)
        if wait_in_slot:
            self.lock.acquire(wait=wait_in_slot)
            return
        if self.options.wait > 0 and delivery.acks_late and delivery.can_republish:
            try:
                self.lock.acquire(wait=0)
            except NotAcquired as refusal:
                if outcomes.is_held_by_own_run(delivery, refusal):
                    raise
            else:
                return
        self.lock.acquire()

    def _end_without_limit(self, error: Exception, wait_in_slot: float) -> NoReturn:
        """Raise the error unless the first delivery runs: FAILURE would replace its state."""
        try:
            self.lock.acquire(wait=wait_in_slot)
        except NotAcquired as refusal:
            is_own = outcomes.is_held_by_own_run(self.delivery, refusal)
            if is_own or not isinstance(refusal, LockTaken):
                outcomes.wait_for_first_delivery(self.delivery, refusal)
        raise error

    def _end_claim_at_start(self) -> None:
        """End a claim that lasts until the start; a retry has none, but its place in an order."""
        request = self.delivery.request
        if self.token is None:
            return
        session = redlock_of(self.delivery.task.app).session
        if self.token.number:
            from celery_redlock.tasks.unique.start import start_run

            outcomes.end_if_cancelled(self.delivery)  # else an earlier send would end for it
            start_run(session, self.token, request.id)
        elif not request.retries:
            self.token.release_at_start(session)

    def _start_unlocked(self) -> None:
        """End the claim at the start of a run without a lock; no quorum keeps the order then."""
        try:
            self._end_claim_at_start()
        except QuorumUnreachable:
            return  # as was logged of the lock
        except SupersededError as error:
            self.release()
            outcomes.end_superseded(self.delivery, error)

    def _run_body(self, body: Body) -> Any:
        """Run the body. `release_after_run` releases, so hooks are called under the lock."""
        self._report_started()
        self.body_began = True
        if self.runs_unlocked:
            return body(*self.args, **self.kwargs)
        return self._run_monitored(body)

    def _report_started(self) -> None:
        """Store and send STARTED once, if a state before it is stored or it is asked for."""
        if self.is_reported:
            return
        self.is_reported = True
        delivery = self.delivery
        was_deferred = self.delivery.was_deferred
        # taken over from `track_started` by `LockedTask.on_bound`
        tracks = getattr(delivery.task, "_redlock_track_started", False)
        if tracks or was_deferred:
            delivery.reporter.started(was_deferred=was_deferred)

    def _run_monitored(self, body: Body) -> Any:
        """Run a body that is interrupted if its lock is lost; without its lock it cannot succeed.

        The body's own error is raised as it is. If another delivery of the message has completed
        meanwhile, this one is discarded instead.
        """
        delivery = self.delivery
        aborts = self.options.on_lost == "abort"
        acks_late = delivery.acks_late
        began = redlock_of(delivery.task.app).session.clock.now() if acks_late else 0.0
        monitored = MonitoredBody(
            self.lock, abort=aborts, report=lambda loss: delivery.reporter.lock_lost(loss)
        )
        try:
            result = monitored.run(body, self.args, self.kwargs)
            if result is not None:
                check_finished(delivery.task, result)
            if not self.lock.ownership.held:
                monitored.report_loss()
                if aborts:
                    self._refuse_success()
        except Exception as error:
            monitored.report_loss()
            if acks_late and not isinstance(error, (Ignore, Reject, Retry)):
                self._discard_if_completed_since(began)
            raise
        return result

    def _refuse_success(self) -> None:
        """Raise LockLost if the lock was lost by the end of the body."""
        try:
            self.lock.ensure()
        except LockLost as lost:
            raise LockLost(lost.resource, lost.reason, True) from None

    def _discard_if_completed_since(self, began: float) -> None:
        """Discard a failed run if its lock was lost and another delivery has completed meanwhile.

        began: monotonic seconds.
        """
        delivery = self.delivery
        if self.lock.ownership.loss() is None or not is_completed_since(delivery, began):
            return
        # if none is stored, this body stored a state of its own over it: a final one follows
        if delivery.reporter.has_final_state(if_none_wanted=True):
            outcomes.discard_redelivery(delivery)

    @uninterruptible
    def release(self, *, completed: bool = False) -> None:
        """Release the lock, if this run is registered.

        completed: the run is at its end, and its message does not come back, unless redelivered.
        """
        state = self.delivery.state
        if state.locked_run is not None:
            self.lock.ownership.release_all(ended=completed)
            state.locked_run = None  # last: if this is cut before, task_postrun releases again


def log_call_options(
    delivery: Delivery, allowed: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    """Log what a sender changes of what the task's author has set, and what is not heeded of it."""
    ignored = [name for name in delivery.header.options if name not in allowed]
    if ignored:
        extra = delivery.log_extra("call_options_ignored", options=ignored)
        text = "%s: options of its message that redlock_call_options does not name are ignored: %s"
        logger.warning(text, delivery, ", ".join(ignored), extra=extra)
    if changes:
        changes_text = ", ".join(
            f"{name}={repr(value)[:MAX_VALUE_LENGTH]}" for name, value in changes.items()
        )
        extra = delivery.log_extra("call_options_used", options=list(changes))
        logger.info("%s: its message changes the lock: %s", delivery, changes_text, extra=extra)


def run_of(request: Any) -> LockedRun | None:
    """Return the run that is registered on a request, None outside one."""
    state = request.__dict__.get(RUN_STATE)
    run: LockedRun | None = state.locked_run if isinstance(state, RunState) else None
    return run


def lock_of_run(request: Any) -> Lock | None:
    """Return the lock that the run of a request has asked for, even after its release, or None."""
    state = request.__dict__.get(RUN_STATE)
    return state.lock if isinstance(state, RunState) else None


def lock_of(
    task: Any,
    options: TaskLockOptions,
    keys: CallKeys,
    label: str,
    *,
    wait: float | None = None,
    marker: CompletionMarker | None = None,
    body_follows: bool = False,
) -> Lock:
    """Return the lock that a run with these options takes.

    label: what the nodes show of its holder. wait: seconds, instead of the options'. marker,
    body_follows: as of `LockOptions`.
    """
    lock_options = LockOptions(
        resources=keys.resources,
        ttl=options.ttl,
        wait=options.wait if wait is None else wait,
        renew=options.renew,
        max_hold=options.max_hold,
        label=label,
        sender=task,
        limits=keys.limits,
        rates=keys.rates,
        body_follows=body_follows,
        fencing=options.fencing,
        marker=marker,
    )
    return Lock(redlock_as_set(task.app), lock_options)
