"""The end of a run: its claim ends, its completion is marked, and its lock is released."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

from celery import states as celery_states
from celery.app.task import Context
from celery.exceptions import Reject

from celery_redlock.lock.platform.interrupts import uninterruptible
from celery_redlock.tasks.children.forks import is_end_announced
from celery_redlock.tasks.delivery.header import HEADER, LockHeader
from celery_redlock.tasks.delivery.run_id import name_of_run
from celery_redlock.tasks.execution.redelivery import CONTINUES
from celery_redlock.tasks.execution.run import let_go, run_of
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.unique.token import UniqueToken


def is_done(state: str | None, outcome: object) -> bool:
    """Tell whether a run that ended like this is done: its message does not come back by itself.

    state: the tracer's word, None where an exception passed it. outcome: the result or the error.
    Source: celery.worker.request: Request.on_success, on_failure and on_retry acknowledge, or
    reject without requeue. A MemoryError ends the worker with the message in its hands.
    """
    if state == celery_states.REJECTED:
        return isinstance(outcome, Reject) and not outcome.requeue
    if state == celery_states.FAILURE:
        return not isinstance(outcome, MemoryError)
    return state in (celery_states.SUCCESS, celery_states.RETRY, celery_states.IGNORED)


def is_stored(request: Any, passing: BaseException) -> bool:
    """Tell whether a run is done although an exception passes Celery's tracer: its hook's.

    Source: celery.worker.request: Request.on_failure lets go of the message whatever comes out of
    the tracer, but for Reject with requeue, MemoryError, and what ends a process.
    """
    passage = run_of(request)
    if passage is None or not getattr(passage, "stored", False):
        return False
    if isinstance(passing, Reject):
        return not passing.requeue
    return isinstance(passing, Exception) and not isinstance(passing, MemoryError)


@uninterruptible
def release_after_run(sender: Any = None, retval: Any = None, state: Any = None, **_: Any) -> None:
    """Release after the result, links and retry are stored or published: late acknowledgement.

    Source: celery.app.trace sends task_postrun in a finally, with the request still in place, on
    every way out of a run that the child itself can see. What is on its way out there meanwhile is
    an exception of the result backend or of a link that could not be sent: not an end; or of a hook
    of the user's, which comes after the end.
    """
    passing = sys.exc_info()[1]
    try:
        end_run(sender, retval, state, passing)
    except BaseException:  # cut, as by a soft time limit: nobody comes after this
        end_run(sender, retval, state, passing)
        raise


@uninterruptible
def end_run(task: Any, retval: Any, state: str | None, passing: BaseException | None) -> None:
    """End a send's window, mark the run as done, and release; twice does no harm.

    passing: the exception on its way out of the tracer.
    """
    request = task.request
    if passing is None:
        done = is_done(state, retval)
    else:
        done = is_stored(request, passing) or is_end_announced(name_of_run(task, request))
    if done and HEADER in request.__dict__:
        _end_window(task.app, request, state)
    let_go(request, done=done)


def _end_window(app: Any, request: Any, state: str | None) -> None:
    """End the window of a send whose run is at its end, and neither put back nor to be retried."""
    if state != celery_states.RETRY and CONTINUES not in request.__dict__:
        end_window(app, request)


@uninterruptible
def end_window(app: Any, request: Any) -> None:
    """End the window that a message's send has opened; nothing happens where there is none."""
    ticket = UniqueToken.of(LockHeader.of(request).unique)
    if ticket is not None:
        ticket.release_at_end(redlock_of(app))


def end_claim_of_revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    """End the window of what is revoked or expired, in the worker's main process."""
    if HEADER in request.__dict__:
        end_window(sender.app, request)


def end_claim_of_unread(sender: Any = None, message: Any = None, **_: Any) -> None:
    """End the window of a message that no run comes of: its task is unknown, or its text wrong.

    Source: celery.worker.consumer: Consumer.on_unknown_task, on_invalid_task, on_unknown_message
    have rejected it by then, each without requeue. sender: the consumer.
    """
    headers = message.headers
    if isinstance(headers, Mapping) and HEADER in headers:
        end_window(sender.app, Context(headers))


_received: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def note_claim(request: Any = None, **_: Any) -> None:
    """Keep what has a window at hand for its end, as long as Celery itself keeps it."""
    if HEADER in request.request_dict and LockHeader.of(request._context).unique is not None:
        _received[request.id] = request


def end_claim_of_killed(sender: Any = None, task_id: Any = None, **_: Any) -> None:
    """End the window of a run whose process is gone; its message does not come back.

    Source: celery.worker.request: Request.on_failure sends this in the worker's main process where
    the child could not, and not where it hands the message back.
    """
    request = _received.get(task_id)
    if request is not None:
        end_window(sender.app, request._context)
