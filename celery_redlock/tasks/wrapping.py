"""What stands around a task's `run`, `__call__` and hooks.

The wrapper runs inside Celery's tracer: a signal handler before the run could not stop it, and the
tracer handles what is raised here as any task's exception.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from celery._state import get_current_worker_task
from celery.exceptions import Ignore, Reject

from celery_redlock.errors import RedlockError
from celery_redlock.tasks.body.monitored import MonitoredBody
from celery_redlock.tasks.execution.run import RUN, _run_body, _run_held, run_locked, run_of
from celery_redlock.tasks.settings.app import CELERY_PREFIX
from celery_redlock.tasks.signatures import Body, _with_self, bound_to

_OURS = "celery_redlock."
_CALLS_BODIES = ("celery.map", "celery.starmap", "celery.chunks")


def wrap_run(body: Any) -> Body:
    """Return a class's `run` or `__call__` with the gate around it.

    body: the attribute as it stands in the class: a function, or any other descriptor. No
    `__wrapped__` is left, for `task_annotations` with "@run" unwraps it and would throw the gate
    away.
    """

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        call = bound_to(self, body)
        if (
            request.called_directly
            or RUN in request.__dict__
            or self.name.startswith(CELERY_PREFIX)
        ):
            refuse_map(self, request)
            return call(*args, **kwargs)
        try:
            return run_locked(self, request, call, args, kwargs)
        except BaseException as error:
            cut_our_frames(error)
            raise

    functools.update_wrapper(run, body)
    run.__dict__.pop("__wrapped__", None)
    if type(body) in (types.FunctionType, staticmethod):
        run.__signature__ = _with_self(body)  # type: ignore[attr-defined]
    run.redlock_gate, run.redlock_body = run, body  # type: ignore[attr-defined]
    return run


def wrap_hook(hook: Any) -> Body:
    """Return a hook of the user's, as it stands in the class, that notes that it was called.

    Source: celery.app.trace calls `on_success`, `on_failure`, `on_retry` and `after_return` when
    the outcome is stored and the links and the retry are published. What such a hook raises goes
    on through the tracer, which says nothing of that.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        passage = run_of(self.request)
        if passage is not None:
            passage.stored = True
        return bound_to(self, hook)(*args, **kwargs)

    functools.update_wrapper(call, hook)
    call.redlock_gate = call  # type: ignore[attr-defined]
    return call


def refuse_map(task: Any, request: Any) -> None:
    """Raise RedlockError where chunks, map or starmap calls this body: it would take no lock."""
    if not request.called_directly:
        return
    caller = get_current_worker_task()
    if caller is not None and caller.name in _CALLS_BODIES:
        raise RedlockError(
            f"{task.name} is called by {caller.name}, directly and so without its lock: use a "
            "group of its signatures instead of chunks, map or starmap"
        )


_TO_A_BODY = frozenset(f.__code__ for f in (run_locked, _run_body, _run_held, MonitoredBody.run))


def cut_our_frames(error: BaseException) -> None:
    """Leave of our frames the gate's alone; called there, with what comes out of it.

    A body's own error shows its own frames then, and its chain. What ends a run without its body
    shows nothing but that: Celery formats it twice for each deferral, which took half of its time.
    What nobody has foreseen stays whole.
    """
    first = error.__traceback__
    inner = None if first is None else first.tb_next
    while inner is not None and inner.tb_frame.f_code in _TO_A_BODY:
        inner = inner.tb_next
    where = "" if inner is None else inner.tb_frame.f_globals.get("__name__") or "unnamed"
    is_bodys = bool(where) and not where.startswith(_OURS)
    if first is None or not (is_bodys or isinstance(error, (Ignore, Reject, RedlockError))):
        return
    first.tb_next = inner if is_bodys else None
    if not is_bodys:
        error.__context__ = None
        if isinstance(error, (Ignore, Reject)):
            error.__cause__ = None  # of an error, it is the user's own
