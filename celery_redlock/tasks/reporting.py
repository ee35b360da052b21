"""DEFERRED, STARTED, SKIPPED: what is stored in the result backend and sent as an event.

Order matters: DEFERRED is stored and sent before the message is out, for whoever takes the
message may finish it at once, and a later write would stay for ever.

Each event that is none of Celery's own says as `result` why it was sent: of all the fields of an
event a monitor shows those alone that celery.events.state.Task names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from celery import states
from celery.backends.base import DisabledBackend
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError
from celery.signals import task_revoked

from celery_redlock.errors import LockLost

logger = logging.getLogger(__name__)


DEFERRED = "DEFERRED"


def fields(event: str, task: Any, request: Any, **more: Any) -> dict[str, Any]:
    """Return what a log line of a run says as fields, for handlers that write them."""
    return {"event": event, "task": task.name, "task_id": request.id, **more}


def ignores_result(task: Any, request: Any) -> bool:
    """Tell whether a run's result is not wanted: the call's word goes before the task's.

    Source: celery.app.task.Context has a class-level False, which is nobody's word.
    """
    of_call = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if of_call is None else of_call)


def stores(task: Any, request: Any) -> bool:
    """Tell whether a run's state goes into the result backend, unless it is an error."""
    return not request.is_eager and not ignores_result(task, request)


def stores_errors(task: Any, request: Any) -> bool:
    """Tell whether a run's end goes into the result backend where it is an error, REVOKED too.

    Source: celery.app.trace: TraceInfo.handle_error_state; celery.worker.request: store_errors.
    """
    if ignores_result(task, request):
        return bool(task.store_errors_even_if_ignored)
    return not request.is_eager or bool(task.store_eager_result)


def may_show(task: Any, request: Any) -> bool:
    """Tell whether a state of a run on its way may be stored; not over celery.contrib's ABORTED."""
    asks = getattr(task, "is_aborted", None)
    return stores(task, request) and not (asks is not None and asks(task_id=request.id))


def is_over(task: Any, request: Any) -> bool:
    """Tell whether a final state is stored for a task, so that who comes late need store none.

    True where none is wanted. False where the result backend cannot say.
    """
    if not stores(task, request) or isinstance(task.backend, DisabledBackend):
        return True
    return has_end(task, request)


def has_end(task: Any, request: Any) -> bool:
    """Tell whether a final state is stored for a task; reads the result backend.

    False where that cannot say.
    """
    backend = task.backend
    if isinstance(backend, DisabledBackend):
        return False
    if not backend.persistent:  # rpc: what is stored is in its caller's queue
        return False
    try:
        meta = backend.get_task_meta(request.id, cache=False)
    except Exception as error:
        text = "cannot read the state of %s[%s]: %s"
        told = fields("state_not_read", task, request)
        logger.warning(text, task.name, request.id, error, extra=told)
        return False
    return meta["status"] in states.READY_STATES


def in_iso(now: datetime, seconds: float) -> str:
    """Return the moment so many s after `now`, ISO 8601 with its zone."""
    return (now + timedelta(seconds=seconds)).isoformat()


def in_words(info: dict[str, Any], why: str) -> str:
    """Return what is known of a deferral as one line. why: held by whom, or what no node said."""
    counts = f"deferrals: {info['deferrals']}; waited: {info['waited']:.1f} s"
    return f"{info['resource']}: {why}; {counts}; next try: {info['next_try']}"


def show_deferred(task: Any, request: Any, info: dict[str, Any], why: str) -> None:
    """Store and send DEFERRED.

    info: resource, holder, deferrals, waited, next_try. why: as of `in_words`.
    """
    if may_show(task, request):
        _show(task, lambda: task.backend.store_result(request.id, info, DEFERRED, request=request))
    _send(task, "task-deferred", result=in_words(info, why), **info)


def show_started(task: Any, request: Any, *, tracked: bool, deferred: bool) -> None:
    """Store STARTED once the lock is held, and let monitors leave DEFERRED.

    tracked: the task has `track_started`, which the gate took over, or a state may stand there that
    an earlier delivery of the message has left. deferred: this message was put back before, so
    DEFERRED and its reason are what a person sees until now.
    Source: celery.events.state: a task-started after a custom event does not change the state,
    a task-retried does.
    """
    if not (tracked or deferred):
        return
    if may_show(task, request):
        meta = {"pid": os.getpid(), "hostname": request.hostname}
        store = task.backend.store_result
        _show(
            task,
            lambda: store(request.id, meta, states.STARTED, request=request),
            let_through=(SoftTimeLimitExceeded,),  # the body is about to begin, and must not now
        )
    if deferred and not request.is_eager:
        _send(task, "task-retried", exception="lock acquired after a deferral", traceback="")
        # the reason of DEFERRED is over, and a run that got its lock has no exception
        _send(task, "task-started", result=None, exception=None, traceback=None)


def show_skipped(task: Any, request: Any, resource: str, reason: str) -> None:
    """Store REVOKED, so that callers, chains and chords end, and send SKIPPED."""
    if request.is_eager:
        if stores_errors(task, request):
            _store_revoked(task, request, reason)
        return
    _store_revoked(task, request, reason)
    _send(task, "task-skipped", resource=resource, reason=reason, result=reason)


def show_revoked(task: Any, request: Any, reason: str) -> None:
    """Store REVOKED, and tell of it as Celery does in the main process.

    reason: "expired" or "revoked".
    """
    _store_revoked(task, request, reason)
    told = {"terminated": False, "signum": None, "expired": reason == "expired"}
    _send(task, "task-revoked", **told)
    task_revoked.send(task, request=request, **told)


def _store_revoked(task: Any, request: Any, reason: str) -> None:
    """Store REVOKED, so that all who wait hear of it.

    Source: celery.backends.base: mark_as_revoked leaves out what is chained after the task, and a
    chord that stands behind it would wait for ever; mark_as_failure tells all of it.
    """
    task.backend.mark_as_failure(
        request.id,
        TaskRevokedError(reason),
        request=request,
        store_result=stores_errors(task, request),
        call_errbacks=False,
        state=states.REVOKED,
    )


def show_lost(task: Any, request: Any, error: Exception) -> None:
    """Store FAILURE for a message that nobody has any more."""
    store = stores_errors(task, request)
    mark = task.backend.mark_as_failure
    _show(task, lambda: mark(request.id, error, request=request, store_result=store))


def show_lock_lost(task: Any, request: Any, lost: LockLost) -> None:
    """Send task-lock-lost, in whatever thread or greenlet this is called."""
    if request.is_eager:
        return
    task.request_stack.push(request)  # what is sent is about the task's current request
    try:
        told = {"resource": lost.resource, "reason": lost.reason}
        _send(task, "task-lock-lost", result=f"{lost.resource}: lost, {lost.reason}", **told)
    finally:
        task.request_stack.pop()


def _send(task: Any, event: str, **fields: Any) -> None:
    _show(task, lambda: task.send_event(event, **fields))


def _show(
    task: Any, show: Callable[[], object], let_through: tuple[type[Exception], ...] = ()
) -> None:
    """Show a state; a backend or broker that is away keeps nobody from putting a message back."""
    try:
        show()
    except let_through:
        raise
    except Exception as error:
        text = "cannot show the state of %s[%s]: %s"
        told = fields("state_not_shown", task, task.request)
        logger.warning(text, task.name, task.request.id, error, extra=told)
