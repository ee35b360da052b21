"""The end of a run: its lock is released, its claim ended, and its completion recorded.

`release_after_run` receives Celery's task_postrun, after the outcome is stored.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from celery import states as celery_states
from celery.exceptions import Reject, Retry

from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.tasks.children.reaper import is_end_announced, this_process
from celery_redlock.tasks.delivery.delivery import Delivery
from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.execution.run import run_of
from celery_redlock.tasks.unique.claim import end_claim


def is_completed(state: str | None, outcome: object) -> bool:
    """Return whether a run is completed, so that its message does not come back.

    state: as Celery's tracer names the end, None if an exception passed the tracer. outcome: the
    result or error.
    Source: celery.worker.request: Request.on_success, on_failure and on_retry. A MemoryError ends
    the worker with the message unacknowledged.
    """
    if state == celery_states.REJECTED:
        return isinstance(outcome, Reject) and not outcome.requeue
    if state == celery_states.FAILURE:
        return not isinstance(outcome, MemoryError)
    return state in (celery_states.SUCCESS, celery_states.RETRY, celery_states.IGNORED)


@uninterruptible
def release_after_run(sender: Any = None, retval: Any = None, state: Any = None, **_: Any) -> None:
    """Release after the result, links and retry are stored or published, and hooks are called.

    Source: celery.app.trace sends task_postrun in a finally, on every way out of a run that the
    child itself can see. An exception that passes there is one of the result backend or of a link,
    and no end of the run; or of a hook of the user's, which comes after the end.
    """
    error = sys.exc_info()[1]  # nothing else before the `try`: an exception would leak the lock
    try:
        end_run(sender, retval, state, error)
    except BaseException:  # cut, as by a soft time limit: nothing else releases the lock after this
        end_run(sender, retval, state, error)
        raise


@uninterruptible
def end_run(task: Any, retval: Any, state: str | None, error: BaseException | None) -> None:
    """End a send's claim, mark the run as completed, and release its lock; twice does no harm.

    error: the exception that passes Celery's tracer, or one that was handled around the run.
    """
    request = task.request
    run = run_of(request)
    if run is None and HEADER not in request.__dict__:
        return  # released already, and no claim to end
    delivery = Delivery(task, request) if run is None else run.delivery
    if error is None or error is delivery.state.outer_error:
        completed = is_completed(state, retval)
        is_acknowledged = not delivery.acks_late
        continues = state == celery_states.RETRY or delivery.state.continues_elsewhere
    else:
        has_outcome = run is not None and run.outcome_stored
        run_end = _end_by_exception(delivery, state, error, has_outcome=has_outcome)
        completed, is_acknowledged, continues = run_end
    if (completed or is_acknowledged) and not continues and delivery.header.unique is not None:
        end_claim(task.app, delivery.header)
    if run is None:
        return
    if run.body_began and not delivery.acks_late:
        # another publication of the message must not run the body again
        run.release(completed=delivery.may_have_run_elsewhere)
    else:
        run.release(completed=completed)


class _RunEnd(NamedTuple):
    """How a run ended.

    completed: as of `is_completed`. is_acknowledged: the broker has the message no more.
    continues: a retry or another delivery follows, and the claim of the send stays for it.
    """

    completed: bool
    is_acknowledged: bool
    continues: bool


def _end_by_exception(
    delivery: Delivery, state: str | None, error: BaseException, *, has_outcome: bool
) -> _RunEnd:
    """Return how a run ended whose exception passes Celery's tracer.

    has_outcome: the outcome was stored before, so a hook of the user's raised it.
    Source: celery.worker.request: Request.on_failure handles the message of a child as if the run
    had ended with that. In other pools task_failure ends the claim, if it is handled.
    """
    kind = celery_states.REJECTED if isinstance(error, Reject) else celery_states.FAILURE
    is_final = isinstance(error, Exception) and is_completed(kind, error)
    # the main process publishes a retry
    is_retried = not isinstance(error, Exception) and getattr(
        delivery.task, "retry_on_worker_lost", False
    )
    return _RunEnd(
        completed=(is_final and has_outcome) or is_end_announced(str(delivery.run_id)),
        is_acknowledged=not delivery.acks_late or (is_final and this_process.slot is not None),
        continues=(
            state == celery_states.RETRY
            or delivery.state.continues_elsewhere
            or is_retried
            or _has_published_retry(error)
        ),
    )


def _has_published_retry(error: BaseException) -> bool:
    """Return whether a Retry led to an error: a retry is published before its state is stored."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Retry):
            return True
        cause = cause.__context__
    return False
