"""DEFERRED, STARTED, SKIPPED: what is stored in the result backend and sent as an event.

Order matters: DEFERRED is stored and sent before the message is published, for another worker may
finish the message at once, and a later write would stay for ever.

Each event that is none of Celery's own says as `result` why it was sent: a monitor shows only those
fields of an event that celery.events.state.Task names.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from celery import states
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError
from celery.signals import task_revoked

from celery_redlock.compatibility import find
from celery_redlock.errors import LockLost
from celery_redlock.lock.platform.clock import SystemClock

logger = logging.getLogger(__name__)

# without it, results are written to a backend that keeps none, which is logged
DisabledBackend: Any = find("celery.backends.base:DisabledBackend", ())
DEFERRED = "DEFERRED"
MAX_PENDING = 1000  # states that wait to be stored; as many messages may wait in a worker
STORE_TIMEOUT = 5.0  # seconds after which a store is given up, so that its message may run
RETRY_TIME = 120.0  # seconds for which a final state is tried again: as long as Celery waits
IDLE_TIME = 30.0  # seconds that the storing thread, and its connection, wait for the next state


class _PendingState(NamedTuple):
    """A state that waits to be stored.

    store: stores it; raises what the result backend raises. on_lost: called with the cause if it is
    not stored. retry_until: monotonic seconds; a final state is tried again until then, any other
    state (-inf) is tried once. on_end: called in the event loop once it is stored or lost.
    """

    store: Callable[[], object]
    on_lost: Callable[[object], object]
    retry_until: float
    on_end: Callable[[], object] | None


_NO_STATE = _PendingState(str, str, -math.inf, None)


class StoringThread:
    """Stores the states that a worker's main process reports, in one thread; one of each message.

    A result backend that hangs blocks this thread, and not the event loop. Some states are lost
    then, but no final ones: those of messages that go on meanwhile, and those above `MAX_PENDING`.
    Under gevent the thread is a greenlet. call_soon: calls a function in the event loop.
    """

    def __init__(self, app: Any, call_soon: Callable[[Callable[[], object]], object]) -> None:
        self._app = app
        self._call_soon = call_soon
        self._clock = SystemClock()
        self._changed = threading.Condition()
        self._pending: dict[str, _PendingState] = {}  # by task id
        self._current_id = ""  # of the message whose state is being stored
        self._current = _NO_STATE  # that state
        self._began_at = 0.0  # monotonic second at which its store began
        self._on_stored: list[Callable[[], object]] = []  # called after that store
        self._end_callbacks = deque[Callable[[], object]]()  # of final states that are stored
        self._is_running = False

    def put(
        self, id_: str, store: Callable[[], object], on_lost: Callable[[object], object],
        on_end: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Have a state stored, in place of a waiting state of the same message.

        A final state has `on_end`. on_lost, on_end: as of `_PendingState`.
        """
        is_final = on_end is not None
        retry_until = self._clock.now() + RETRY_TIME if is_final else -math.inf
        with self._changed:
            replaced = self._pending.pop(id_, None)
            is_full = not is_final and len(self._pending) >= MAX_PENDING
            if not is_full:
                self._pending[id_] = _PendingState(store, on_lost, retry_until, on_end)
                self._changed.notify_all()
                if not self._is_running:
                    threading.Thread(target=self._run, daemon=True).start()
                    self._is_running = True
        if is_full:
            on_lost("the result backend does not keep up")
        if replaced is not None and replaced.on_end is not None:
            self._end_callbacks.append(replaced.on_end)
            self._call_soon(self.call_ended)

    def withdraw(self, id_: str, on_stored: Callable[[], object]) -> bool:
        """Forget the state of a message that is about to run: it could be stored over a later one.

        Return True if no state of the message is being stored. Otherwise `on_stored` is called
        after that store.
        """
        if not self._is_running:
            return True
        with self._changed:
            if id_ in self._pending and self._pending[id_].retry_until == -math.inf:
                del self._pending[id_]
            if self._current_id != id_:
                return True
            self._on_stored.append(on_stored)
            return False

    def forget(self, *, keeps_ends: bool = False) -> None:
        """Forget the states of waiting messages, which are delivered again.

        Final states are still stored, but their `on_end` is forgotten unless `keeps_ends`: the
        messages cannot be acknowledged any more.
        """
        with self._changed:
            finals = {
                id_: state for id_, state in self._pending.items() if state.retry_until > -math.inf
            }
            if not keeps_ends:
                finals = {id_: state._replace(on_end=None) for id_, state in finals.items()}
                self._current = self._current._replace(on_end=None)
                self._end_callbacks.clear()
            self._pending = finals

    def flush(self) -> None:
        """Wait until all states are stored, for `STORE_TIMEOUT` at most."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._pending and not self._current_id, STORE_TIMEOUT
            )

    def call_ended(self) -> None:
        """Call the `on_end` of each final state that is stored by now; in the event loop."""
        while True:
            try:
                on_end = self._end_callbacks.popleft()
            except IndexError:  # also if another thread was first
                return
            on_end()

    def _run(self) -> None:
        """Store states one after the other, until none comes for `IDLE_TIME`."""
        with contextlib.suppress(Exception):  # of a backend that cannot be made: the store says why
            self._limit_waits(self._app.backend)
        while True:
            state = self._take_next()
            if state is None:
                return
            must_retry = False
            try:
                state.store()
            except BaseException as error:  # also a SystemExit: this thread has others to store
                must_retry = self._clock.now() < state.retry_until
                if not must_retry:
                    state.on_lost(error)
            callbacks = self._settle(must_retry=must_retry)
            if self._end_callbacks:
                self._call_soon(self.call_ended)
            for callback in callbacks:
                callback()
            if must_retry:
                self._clock.sleep(1.0)

    def _take_next(self) -> _PendingState | None:
        """Begin with the next state; return None, and end the thread, if there is none in time."""
        with self._changed:
            if not self._pending:
                self._changed.wait_for(lambda: self._pending, IDLE_TIME)
            if not self._pending:
                self._is_running = False
                return None
            self._current_id = next(iter(self._pending))
            self._current = self._pending.pop(self._current_id)
            self._began_at = self._clock.now()
            return self._current

    def _settle(self, *, must_retry: bool) -> list[Callable[[], object]]:
        """End the current store, or queue its state again; return what is to be called now."""
        with self._changed:
            state = self._current  # `forget` may have removed its `on_end`
            self._current = _NO_STATE
            if must_retry:  # last, unless the message has another state by now
                self._pending.setdefault(self._current_id, state)
            elif state.on_end is not None:
                self._end_callbacks.append(state.on_end)
            self._current_id = ""
            callbacks = self._on_stored
            self._on_stored = []
            self._changed.notify_all()
            return callbacks

    def _limit_waits(self, backend: Any) -> None:
        """Limit each wait for a Redis to `STORE_TIMEOUT`; other result backends have their own.

        Source: celery.backends.redis waits for two minutes, and tries twenty times again.
        """
        params = getattr(backend, "connparams", None)
        if params is None or backend.thread_safe:  # the latter: other threads use it, too
            return
        for name in {"socket_timeout", "socket_connect_timeout"} & params.keys():
            params[name] = min(params[name] or STORE_TIMEOUT, STORE_TIMEOUT)
        retry_connection = getattr(backend, "on_connection_error", None)
        if retry_connection is None:  # then only each read is limited
            return

        def on_connection_error(most: Any, error: Exception, *how: Any) -> Any:
            if self._clock.now() - self._began_at >= STORE_TIMEOUT:
                raise error  # the connection is closed, and the message may run
            return retry_connection(most, error, *how)

        backend.on_connection_error = on_connection_error


class StateReporter:
    """Stores the states of one run in its result backend, and sends its events.

    task, request: Celery's. send_event: sends an event of the task; None: the task's own. thread:
    stores the states, in a worker's main process. A result backend or broker that is away is
    logged, and does not keep a message from being republished.
    """

    __slots__ = ("_request", "_send_event", "_task", "_thread")

    def __init__(
        self,
        task: Any,
        request: Any,
        send_event: Callable[..., object] | None = None,
        thread: StoringThread | None = None,
    ) -> None:
        self._task = task
        self._request = request
        self._send_event = send_event or task.send_event
        self._thread = thread

    @property
    def ignores_result(self) -> bool:
        """Whether nobody wants the result: the call's option goes before the task's.

        Source: celery.app.task.Context has a class-level False, which is nobody's option.
        """
        call_option = self._request.__dict__.get("ignore_result")
        return bool(self._task.ignore_result if call_option is None else call_option)

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

    def has_final_state(self, *, if_none_wanted: bool = False) -> bool:
        """Return whether a final state is stored; reads the result backend.

        False if the result backend cannot be read. if_none_wanted: what to return if nobody wants
        a state.
        """
        backend = self._task.backend
        if if_none_wanted and (not self.stores or isinstance(backend, DisabledBackend)):
            return True
        # rpc is not persistent: the result is in the queue of its caller
        if isinstance(backend, DisabledBackend) or not backend.persistent:
            return False
        try:
            meta = backend.get_task_meta(self._request.id, cache=False)
        except Exception as error:
            self._warn("state_not_read", "cannot read the state of %s[%s]: %s", error)
            return False
        return meta["status"] in states.READY_STATES

    def deferred(self, info: Mapping[str, Any], reason: str, *, is_stored: bool = True) -> None:
        """Store and send DEFERRED.

        info, reason: as `info` and `why` of `Deferral`. is_stored: False sends the event alone.
        """
        if is_stored and self.stores:
            self._store(functools.partial(self._store_deferred, info))
        if "rate" not in info:  # the reason of a rate names the resource
            reason = f"{info['resource']}: {reason}"
        text = "{why}; deferrals: {deferrals}; waited: {waited:.1f} s; next try: {next_try}"
        text = text.format(why=reason, **info)
        self._send("task-deferred", result=text, **info)

    def _is_aborted(self) -> bool:
        """Return whether celery.contrib's ABORTED is stored; no state on the way goes over it."""
        is_aborted = getattr(self._task, "is_aborted", None)
        return is_aborted is not None and bool(is_aborted(task_id=self._request.id))

    def _store_deferred(self, info: Mapping[str, Any]) -> None:
        if not self._is_aborted():
            self._store_state(DEFERRED, info)

    def _store_state(self, state: str, meta: Mapping[str, Any]) -> None:
        request = self._request
        self._task.backend.store_result(request.id, meta, state, request=request)

    def revoked_untried(
        self, reason: str, *, store_result: bool, on_end: Callable[[], object]
    ) -> None:
        """Store REVOKED for a message that no run has seen, as Celery does, and call `on_end`.

        Source: celery.worker.request: Request._announce_revoked.
        """
        task = self._task
        request = self._request
        self._store(
            lambda: task.backend.mark_as_revoked(
                request.id, reason, request=request, store_result=store_result
            ),
            on_end,
        )

    def started(self, *, was_deferred: bool) -> None:
        """Store STARTED once the lock is held, and let monitors leave DEFERRED.

        was_deferred: DEFERRED and its reason may be what monitors show until now.
        """
        reraised = (SoftTimeLimitExceeded,)  # the body is about to begin, and must not now
        # not attempted: a body that can be aborted does not begin if nobody can say that it was
        if self.stores and not self._is_aborted():
            meta = {"pid": os.getpid(), "hostname": self._request.hostname}
            self._attempt(functools.partial(self._store_state, states.STARTED, meta), reraised)
        if was_deferred and not self._request.is_eager:
            why = "lock acquired after a deferral"
            self._send_after_deferral("task-started", why, reraised)

    def _send_after_deferral(
        self, event: str, reason: str, reraised: tuple[type[Exception], ...] = (), **fields: Any
    ) -> None:
        """Send an event, and let monitors leave DEFERRED and its reason.

        Source: celery.events.state: an unknown state, as DEFERRED, stays over STARTED and REVOKED.
        A task-retried takes its place, and any event takes the place of that one.
        """
        self._send("task-retried", reraised, exception=reason, traceback="")
        empty_fields = {"result": None, "exception": None, "traceback": None}
        self._send(event, reraised, **empty_fields, **fields)

    def skipped(self, resource: str, reason: str) -> None:
        """Store REVOKED, so that callers, chains and chords end, and send SKIPPED."""
        is_eager = self._request.is_eager
        if not is_eager or self.stores_errors:
            self._store_revoked(reason)
        if not is_eager:
            self._send("task-skipped", resource=resource, reason=reason, result=reason)

    def revoked(self, reason: str, *, was_deferred: bool) -> None:
        """Store REVOKED, and report it as Celery does in the main process.

        reason: "expired" or "revoked". was_deferred: as of `started`.
        """
        self._store_revoked(reason)
        fields = {"terminated": False, "signum": None, "expired": reason == "expired"}
        self.show_revoked(reason, was_deferred=was_deferred, **fields)
        task_revoked.send(self._task, request=self._request, **fields)

    def show_revoked(self, reason: str, *, was_deferred: bool, **fields: Any) -> None:
        """Send task-revoked. reason: "terminated" as well. fields: Celery's of that event."""
        if was_deferred:
            self._send_after_deferral("task-revoked", reason, **fields)
        else:
            self._send("task-revoked", **fields)

    def message_lost(self, error: Exception) -> None:
        self._attempt(functools.partial(self._mark_as_failure, error))

    def _store_revoked(self, reason: str) -> None:
        """Store REVOKED, so that all that wait for the task learn of it.

        Source: celery.backends.base: mark_as_revoked leaves out what is chained after the task, and
        a chord behind it would wait for ever; mark_as_failure reports to all of it.
        """
        error = TaskRevokedError(reason)
        self._mark_as_failure(error, call_errbacks=False, state=states.REVOKED)

    def _mark_as_failure(self, error: Exception, **options: Any) -> None:
        request = self._request
        store_result = self.stores_errors
        mark = self._task.backend.mark_as_failure
        mark(request.id, error, request=request, store_result=store_result, **options)

    def lock_lost(self, error: LockLost) -> None:
        """Send task-lock-lost, in whatever thread or greenlet this is called."""
        task = self._task
        request = self._request
        if request.is_eager:
            return
        task.request_stack.push(request)  # an event is about the task's current request
        try:
            text = f"{error.resource}: lost, {error.reason}"
            self._send("task-lock-lost", result=text, resource=error.resource, reason=error.reason)
        finally:
            task.request_stack.pop()

    def _store(
        self, store: Callable[[], object], on_end: Callable[[], object] | None = None
    ) -> None:
        if self._thread is not None:
            self._thread.put(str(self._request.id), store, self._warn_not_shown, on_end)
            return
        self._attempt(store)
        if on_end is not None:
            on_end()

    def _send(
        self, event: str, reraised: tuple[type[Exception], ...] = (), /, **fields: Any
    ) -> None:
        if self._task.send_events:  # as Celery asks before each event of a task
            self._attempt(functools.partial(self._send_event, event, **fields), reraised)

    def _attempt(
        self, report: Callable[[], object], reraised: tuple[type[Exception], ...] = ()
    ) -> None:
        try:
            report()
        except reraised:
            raise
        except Exception as error:
            self._warn_not_shown(error)

    def _warn_not_shown(self, cause: object) -> None:
        self._warn("state_not_shown", "cannot report the state of %s[%s]: %s", cause)

    def _warn(self, event: str, text: str, cause: object) -> None:
        name = self._task.name
        task_id = self._request.id
        extra = {"event": event, "task": name, "task_id": task_id}
        logger.warning(text, name, task_id, cause, extra=extra)
