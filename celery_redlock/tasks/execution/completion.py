"""The end of a run: its claim ends, its completion is marked, and its lock is released."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

from celery import states as celery_states
from celery.app.task import Context
from celery.exceptions import Reject

from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.tasks.children.forks import is_end_announced
from celery_redlock.tasks.delivery.delivery import RunId
from celery_redlock.tasks.delivery.header import HEADER, LockHeader
from celery_redlock.tasks.execution.outcomes import CONTINUES
from celery_redlock.tasks.execution.run import OUTER_ERROR, run_of
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.unique.claim import ClaimToken


def is_completed(state: str | None, outcome: object) -> bool:
    """Return whether a run that ended like this is completed: its message does not come back.

    state: the tracer's word, None if an exception passed it. outcome: the result or the error.
    Source: celery.worker.request: Request.on_success, on_failure and on_retry acknowledge, or
    reject without requeue. A MemoryError ends the worker with the message unacknowledged.
    """
    if state == celery_states.REJECTED:
        return isinstance(outcome, Reject) and not outcome.requeue
    if state == celery_states.FAILURE:
        return not isinstance(outcome, MemoryError)
    return state in (celery_states.SUCCESS, celery_states.RETRY, celery_states.IGNORED)


def is_completed_before_hook(request: Any, error: BaseException) -> bool:
    """Return whether a run was completed before its hook raised an error, past Celery's tracer.

    Source: celery.worker.request: Request.on_failure acknowledges or rejects the message whatever
    comes out of the tracer, but for Reject with requeue, MemoryError, and what ends a process.
    """
    run = run_of(request)
    if run is None or not run.outcome_stored:
        return False
    if isinstance(error, Reject):
        return not error.requeue
    return isinstance(error, Exception) and not isinstance(error, MemoryError)


@uninterruptible
def release_after_run(sender: Any = None, retval: Any = None, state: Any = None, **_: Any) -> None:
    """Release after the result, links and retry are stored or published: late acknowledgement.

    Source: celery.app.trace sends task_postrun in a finally, with the request still in place, on
    every way out of a run that the child itself can see. An exception that passes there meanwhile
    is one of the result backend or of a link that could not be sent, and no end; or of a hook of
    the user's, which comes after the end.
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
    header = LockHeader.of(request) if run is None else run.delivery.header
    if error is None or error is request.__dict__.get(OUTER_ERROR):
        completed = is_completed(state, retval)
    else:
        run_id = str(RunId.of(task.name, request, header.life))
        completed = is_completed_before_hook(request, error) or is_end_announced(run_id)
    goes_on = state == celery_states.RETRY or CONTINUES in request.__dict__
    if completed and not goes_on and header.unique is not None:
        end_claim(task.app, header)
    if run is not None:
        run.release(completed=completed)


@uninterruptible
def end_claim(app: Any, header: LockHeader) -> None:
    """End the claim that a message's send has made; nothing happens if there is none."""
    token = ClaimToken.of(header.unique)
    if token is not None:
        token.release_at_end(redlock_of(app).session)


def end_claim_of_revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    """End the claim of a revoked or expired message, in the worker's main process."""
    if HEADER in request.__dict__:
        end_claim(sender.app, LockHeader.of(request))


def end_claim_of_unread(sender: Any = None, message: Any = None, **_: Any) -> None:
    """End the claim of a message that starts no run: its task is unknown, or its body is wrong.

    Source: celery.worker.consumer: Consumer.on_unknown_task, on_invalid_task, on_unknown_message
    have rejected it by then, each without requeue. sender: the consumer.
    """
    headers = message.headers
    if isinstance(headers, Mapping) and HEADER in headers:
        end_claim(sender.app, LockHeader.of(Context(headers)))


_received: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def note_claim(request: Any = None, **_: Any) -> None:
    """Keep the request of a message that has a claim, for as long as Celery itself keeps it."""
    if HEADER in request.request_dict and LockHeader.of(request._context).unique is not None:
        _received[request.id] = request


def end_claim_of_killed(sender: Any = None, task_id: Any = None, **_: Any) -> None:
    """End the claim of a run whose process is gone; its message does not come back.

    Source: celery.worker.request: Request.on_failure sends this in the worker's main process if the
    child could not, and does not send it if it hands the message back.
    """
    request = _received.get(task_id)
    if request is not None:
        end_claim(sender.app, LockHeader.of(request._context))
