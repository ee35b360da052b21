"""The end of a run: its lock is released, its claim ended, and its completion recorded.

`release_after_run` receives Celery's task_postrun, after the outcome is stored.
"""

from __future__ import annotations

import sys
from typing import Any

from celery import states as celery_states
from celery.exceptions import Reject, Retry

from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.tasks.children.reaper import is_end_announced, this_process
from celery_redlock.tasks.delivery.delivery import Delivery
from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.execution.run import run_of
from celery_redlock.tasks.unique.claim import end_claim


def is_completed(state: str | None, outcome: object) -> bool:
    """Return whether a run that ended like this is completed: its message does not come back.

    state: the tracer's word, None if an exception passed it.
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
    is_gone = not delivery.acks_late  # its message
    goes_on = state == celery_states.RETRY or delivery.state.goes_on
    if error is None or error is delivery.state.outer_error:
        completed = is_completed(state, retval)
    else:
        # Source: celery.worker.request: Request.on_failure handles the message of a child as if the
        # run had ended with that. In other pools task_failure ends the claim, if it is handled.
        kind = celery_states.REJECTED if isinstance(error, Reject) else celery_states.FAILURE
        is_final = isinstance(error, Exception) and is_completed(kind, error)
        is_gone = is_gone or (is_final and this_process.slot is not None)
        is_of_hook = run is not None and run.outcome_stored
        completed = (is_final and is_of_hook) or is_end_announced(str(delivery.run_id))
        if not isinstance(error, Exception) and getattr(task, "retry_on_worker_lost", False):
            goes_on = True  # the main process publishes a retry
        while not goes_on and error is not None:  # a retry is published before its state is stored
            goes_on = isinstance(error, Retry)
            error = error.__context__
    if (completed or is_gone) and not goes_on and delivery.header.unique is not None:
        end_claim(task.app, delivery.header)
    if run is not None:
        if run.body_began and not delivery.acks_late:
            completed = delivery.may_have_run_elsewhere  # no other publication of it is to run
        run.release(completed=completed)
