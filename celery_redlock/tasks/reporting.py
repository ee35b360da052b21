"""DEFERRED, STARTED, SKIPPED: what is stored in the result backend and sent as an event.

Order matters: DEFERRED is stored and sent before the message is published, for another worker may
finish the message at once, and a later write would stay for ever.

Each event that is none of Celery's own says as `result` why it was sent: a monitor shows only those
fields of an event that celery.events.state.Task names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from celery import states
from celery.backends.base import DisabledBackend
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError
from celery.signals import task_revoked

from celery_redlock.errors import LockLost

logger = logging.getLogger(__name__)

DEFERRED = "DEFERRED"


@dataclass(frozen=True)
class DeferredInfo:
    """What is stored and sent with DEFERRED.

    holder: its label, "" if none is known. waited: seconds since the first try. next_try: ISO 8601.
    """

    resource: str
    holder: str
    deferrals: int
    waited: float
    next_try: str

    def describe(self, why: str) -> str:
        """Return the same as one line. why: who holds the lock, or why no quorum voted."""
        counts = f"deferrals: {self.deferrals}; waited: {self.waited:.1f} s"
        return f"{self.resource}: {why}; {counts}; next try: {self.next_try}"


def in_iso(now: datetime, seconds: float) -> str:
    """Return the time that many seconds after `now`, ISO 8601 with its zone."""
    return (now + timedelta(seconds=seconds)).isoformat()


class StateReporter:
    """Stores the states of one run in its result backend, and sends its events.

    task, request: Celery's. send_event: sends an event of the task; None: the task's own. A result
    backend or broker that is away is logged, and does not keep a message from being republished.
    """

    __slots__ = ("_request", "_send_event", "_task")

    def __init__(
        self, task: Any, request: Any, send_event: Callable[..., object] | None = None
    ) -> None:
        self._task, self._request = task, request
        self._send_event = send_event or task.send_event

    @property
    def ignores_result(self) -> bool:
        """Whether nobody wants the result: the call's option goes before the task's.

        Source: celery.app.task.Context has a class-level False, which is nobody's option.
        """
        of_call = self._request.__dict__.get("ignore_result")
        return bool(self._task.ignore_result if of_call is None else of_call)

    @property
    def stores(self) -> bool:
        """Whether the run's state goes into the result backend, unless it is an error."""
        return not self._request.is_eager and not self.ignores_result

    @property
    def stores_errors(self) -> bool:
        """Whether the run's end goes into the result backend if it is an error; REVOKED is one.

        Source: celery.app.trace: TraceInfo.handle_error_state; celery.worker.request: store_errors.
        """
        if self.ignores_result:
            return bool(self._task.store_errors_even_if_ignored)
        return not self._request.is_eager or bool(self._task.store_eager_result)

    def _may_store(self) -> bool:
        """Return whether a state on the way may be stored; not over celery.contrib's ABORTED."""
        is_aborted = getattr(self._task, "is_aborted", None)
        return self.stores and not (is_aborted and is_aborted(task_id=self._request.id))

    def has_final_state_if_wanted(self) -> bool:
        """Return whether a final state is stored, or none is wanted; reads the result backend.

        False if the result backend cannot be read.
        """
        if not self.stores or isinstance(self._task.backend, DisabledBackend):
            return True
        return self.has_final_state()

    def has_final_state(self) -> bool:
        """Return whether a final state is stored; reads the result backend.

        False if the result backend cannot be read.
        """
        backend = self._task.backend
        if isinstance(backend, DisabledBackend):
            return False
        if not backend.persistent:  # rpc: the result is in the queue of its caller
            return False
        try:
            meta = backend.get_task_meta(self._request.id, cache=False)
        except Exception as error:
            self._warn("state_not_read", "cannot read the state of %s[%s]: %s", error)
            return False
        return meta["status"] in states.READY_STATES

    def deferred(self, info: DeferredInfo, why: str) -> None:
        """Store and send DEFERRED. why: as of `DeferredInfo.describe`."""
        task, request, fields = self._task, self._request, asdict(info)
        if self._may_store():
            store = task.backend.store_result
            self._attempt(lambda: store(request.id, fields, DEFERRED, request=request))
        self._send("task-deferred", result=info.describe(why), **fields)

    def started(self, *, was_deferred: bool) -> None:
        """Store STARTED once the lock is held, and let monitors leave DEFERRED.

        was_deferred: DEFERRED and its reason are what monitors show until now.
        Source: celery.events.state: a task-started after a custom event does not change the state,
        a task-retried does.
        """
        task, request = self._task, self._request
        if self._may_store():
            meta = {"pid": os.getpid(), "hostname": request.hostname}
            store = task.backend.store_result
            self._attempt(
                lambda: store(request.id, meta, states.STARTED, request=request),
                # the body is about to begin, and must not now
                let_through=(SoftTimeLimitExceeded,),
            )
        if was_deferred and not request.is_eager:
            reason = "lock acquired after a deferral"
            self._send("task-retried", exception=reason, traceback="")
            # clear the reason of DEFERRED: a run that got its lock has no exception
            self._send("task-started", result=None, exception=None, traceback=None)

    def skipped(self, resource: str, reason: str) -> None:
        """Store REVOKED, so that callers, chains and chords end, and send SKIPPED."""
        if self._request.is_eager:
            if self.stores_errors:
                self._store_revoked(reason)
            return
        self._store_revoked(reason)
        self._send("task-skipped", resource=resource, reason=reason, result=reason)

    def revoked(self, reason: str) -> None:
        """Store REVOKED, and report it as Celery does in the main process.

        reason: "expired" or "revoked".
        """
        self._store_revoked(reason)
        fields = {"terminated": False, "signum": None, "expired": reason == "expired"}
        self._send("task-revoked", **fields)
        task_revoked.send(self._task, request=self._request, **fields)

    def _store_revoked(self, reason: str) -> None:
        """Store REVOKED, so that all that wait for the task learn of it.

        Source: celery.backends.base: mark_as_revoked leaves out what is chained after the task, and
        a chord behind it would wait for ever; mark_as_failure reports to all of it.
        """
        self._task.backend.mark_as_failure(
            self._request.id,
            TaskRevokedError(reason),
            request=self._request,
            store_result=self.stores_errors,
            call_errbacks=False,
            state=states.REVOKED,
        )

    def message_lost(self, error: Exception) -> None:
        """Store FAILURE for a message that no process has any more."""
        request, store = self._request, self.stores_errors
        mark = self._task.backend.mark_as_failure
        self._attempt(lambda: mark(request.id, error, request=request, store_result=store))

    def lock_lost(self, lost: LockLost) -> None:
        """Send task-lock-lost, in whatever thread or greenlet this is called."""
        task, request = self._task, self._request
        if request.is_eager:
            return
        task.request_stack.push(request)  # an event is about the task's current request
        try:
            text = f"{lost.resource}: lost, {lost.reason}"
            self._send("task-lock-lost", result=text, resource=lost.resource, reason=lost.reason)
        finally:
            task.request_stack.pop()

    def _send(self, event: str, **fields: Any) -> None:
        self._attempt(lambda: self._send_event(event, **fields))

    def _attempt(
        self, report: Callable[[], object], let_through: tuple[type[Exception], ...] = ()
    ) -> None:
        """Store or send; an error of the backend or the broker is logged."""
        try:
            report()
        except let_through:
            raise
        except Exception as error:
            self._warn("state_not_shown", "cannot report the state of %s[%s]: %s", error)

    def _warn(self, event: str, text: str, error: Exception) -> None:
        name, task_id = self._task.name, self._request.id
        extra: Mapping[str, Any] = {"event": event, "task": name, "task_id": task_id}
        logger.warning(text, name, task_id, error, extra=extra)
