"""The wrappers of a task's `run`, `__call__` and hooks, and the tracebacks of our errors.

The wrapper runs inside Celery's tracer: a signal handler before the run could not stop it, and the
tracer handles what is raised here as any task's exception.
"""

from __future__ import annotations

import functools
import sys
import traceback
import types
from contextvars import ContextVar
from typing import Any

from celery.app import trace
from celery.exceptions import Ignore, Reject

from celery_redlock.compatibility import find
from celery_redlock.errors import RedlockError
from celery_redlock.tasks.arguments import Arrivals
from celery_redlock.tasks.body import MonitoredBody
from celery_redlock.tasks.declaration import Body, bound_to, with_self
from celery_redlock.tasks.delivery.delivery import RUN_STATE, Delivery
from celery_redlock.tasks.execution.run import LockedRun, run_of
from celery_redlock.tasks.settings.app import CELERY_PREFIX

# for the error of a hook that reads `self.lock`
hook_outside_run: ContextVar[bool] = ContextVar("hook outside a run", default=False)
_EINFO = "billiard.einfo:"
ExceptionInfo: Any = find(f"{_EINFO}ExceptionInfo", object)
ExceptionWithTraceback = find(f"{_EINFO}ExceptionWithTraceback", None)
# else Celery describes each deferral itself, which takes twice as long
_can_be_quick = hasattr(trace, "ExceptionInfo") and (
    ExceptionInfo is not object and ExceptionWithTraceback is not None
)

_PACKAGE_PREFIX = "celery_redlock."
_MAP_TASKS = ("celery.map", "celery.starmap", "celery.chunks")
_MAX_CACHED = (
    100  # tracebacks; a tool may put frames of generated code around a run, new ones each time
)


def wrap_run(body: Any) -> Body:
    """Return a class's `run` or `__call__`, to be called under the task's lock.

    body: the attribute as it stands in the class: a function, or any other descriptor. No
    `__wrapped__` is left, for `task_annotations` with "@run" unwraps it, and would drop the lock.
    """
    kind = type(body)

    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        request = request_of_run(self)
        if kind is staticmethod:  # what Celery makes of a function without `bind`
            call = body.__func__
        else:
            is_function = kind is types.FunctionType
            call = types.MethodType(body, self) if is_function else bound_to(self, body)
        if request.called_directly:
            refuse_map(self)
            return call(*args, **kwargs)
        if run_of(request) is not None or self.name.startswith(CELERY_PREFIX):
            return call(*args, **kwargs)
        try:
            return LockedRun(Delivery(self, request), args, kwargs).execute(call)
        except BaseException as error:
            hide_own_frames(error)
            raise

    functools.update_wrapper(run, body)
    run.__dict__.pop("__wrapped__", None)
    if kind in (types.FunctionType, staticmethod):
        run.__signature__ = with_self(body)  # type: ignore[attr-defined]
    run.redlock_wrapper = run  # type: ignore[attr-defined]
    run.redlock_body = body  # type: ignore[attr-defined]
    return run


def request_of_run(task: Any) -> Any:
    """Return the request on top of the stack; it shares its attributes with the tracer's request.

    A tool may call the task, where Celery's tracer calls its `run`: an agent that hands a proxy of
    the task to the tracer, for example. Outside `celery worker` a call pushes a copy of the
    request, and task_postrun would not find there what the run has registered on the copy.
    Source: celery.app.task: `Task.__call__` and `push_request`.
    """
    stack = task.request_stack.stack
    if not stack:
        return task.request
    request = stack[-1]  # `task.request` would look the stack up once more
    if len(stack) > 1:
        state = request.__dict__.get(RUN_STATE)
        traced = next(
            candidate for candidate in stack if candidate.__dict__.get(RUN_STATE) is state
        )
        if state is not None and traced is not request:
            request.__dict__ = traced.__dict__
    return request


def wrap_hook(hook: Any) -> Body:
    """Return a user's hook with a wrapper that sets `outcome_stored` of the run.

    Source: celery.app.trace calls hooks when the outcome is stored and links and retry are
    published. Their errors pass through the tracer, which does not say where they come from.
    celery.worker.request calls them in the main process for a run whose child it has killed.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = run_of(self.request)
        if run is not None:
            run.outcome_stored = True
            return bound_to(self, hook)(*args, **kwargs)
        context_token = hook_outside_run.set(True)
        try:
            return bound_to(self, hook)(*args, **kwargs)
        finally:
            hook_outside_run.reset(context_token)

    functools.update_wrapper(call, hook)
    call.redlock_wrapper = call  # type: ignore[attr-defined]
    return call


def refuse_map(task: Any) -> None:
    """Raise RedlockError if chunks, map or starmap calls this body: it would take no lock."""
    caller = task.app.current_worker_task
    if caller is not None and caller.name in _MAP_TASKS:
        raise RedlockError(
            f"{task.name} is called by {caller.name}, directly and so without its lock: use a "
            "group of its signatures instead of chunks, map or starmap"
        )


_HIDDEN_CODE = frozenset(
    function.__code__
    for function in (
        LockedRun.execute, LockedRun._run_body, LockedRun._run_monitored, MonitoredBody.run,
        Arrivals.run_compared,
    )
)  # fmt: skip


def hide_own_frames(error: BaseException) -> None:
    """Remove this package's frames from a traceback, but for the wrapper's, which calls this.

    The error of a body keeps the body's frames and its chain. An error that ends a run without its
    body keeps the wrapper's frame alone, so its traceback is always the same. An unexpected error
    of this package stays whole.
    """
    wrapper_entry = error.__traceback__
    entry = None if wrapper_entry is None else wrapper_entry.tb_next
    while entry is not None and entry.tb_frame.f_code in _HIDDEN_CODE:
        entry = entry.tb_next
    module = "" if entry is None else entry.tb_frame.f_globals.get("__name__") or "unnamed"
    is_of_body = bool(module) and not module.startswith(_PACKAGE_PREFIX)
    is_expected = is_of_body or isinstance(error, (Ignore, Reject, RedlockError))
    if wrapper_entry is None or not is_expected:
        return
    wrapper_entry.tb_next = entry if is_of_body else None
    if not is_of_body:
        error.__context__ = None
        if isinstance(error, (Ignore, Reject)):
            error.__cause__ = None  # the cause of any other error is the user's own


def keep_tracebacks(**_: Any) -> None:
    """Have Celery's tracer describe errors by `QuickExceptionInfo` in this process, a worker's.

    Source: celery.app.trace calls `ExceptionInfo` twice for each Ignore and Reject, and no argument
    or setting names another class.
    """
    if _can_be_quick:
        trace.ExceptionInfo = QuickExceptionInfo


class _BilliardInstances(type):
    """Counts billiard's instances and subclasses: other code may look for them by this name."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return (ExceptionInfo if cls is QuickExceptionInfo else cls) in subclass.__mro__


class QuickExceptionInfo(ExceptionInfo, metaclass=_BilliardInstances):
    """billiard's ExceptionInfo, made at little cost for an error that ends a run without a body.

    It took half of the time of a deferral: billiard copies the position of each instruction of
    Celery's tracer, and prefork pickles them. Here the same text is made once for each way to raise
    such an error. `tb`, which Celery does not read, leaves out the tracer's frame.
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return an ExceptionInfo of billiard's own class. args, options: as it takes them."""
        if cls is not QuickExceptionInfo:
            return super().__new__(cls)
        error = None if args or options.get("exc_info") else sys.exc_info()[1]
        path = None if error is None else _frame_path_of(error)
        if error is None or path is None:
            return ExceptionInfo(*args, **options)
        last_line = "".join(traceback.format_exception_only(type(error), error))
        if path not in _traceback_cache:
            full_info = ExceptionInfo(**options)
            full_info.tb = full_info.tb.tb_next
            if full_info.traceback.endswith(last_line) and len(_traceback_cache) < _MAX_CACHED:
                _traceback_cache[path] = full_info.tb, full_info.traceback.removesuffix(last_line)
            return full_info
        info = ExceptionInfo.__new__(ExceptionInfo)
        info.type = type(error)
        info.internal = options.get("internal", False)
        info.tb, text_before = _traceback_cache[path]
        info.traceback = text_before + last_line
        info.exception = ExceptionWithTraceback(error, info.traceback)
        return info


FramePath = tuple[tuple[types.CodeType, int], ...]  # the code of each frame, and the place in it
# billiard's traceback, and its text before the last line
_traceback_cache: dict[FramePath, tuple[Any, str]] = {}


def _frame_path_of(error: BaseException) -> FramePath | None:
    """Return the frames that an error has passed if it ends a run without a body, else None."""
    is_alone = error.__cause__ is None and error.__context__ is None
    if not (isinstance(error, Ignore) and is_alone):
        return None
    path = []
    frame = None
    entry = error.__traceback__
    while entry is not None:
        frame = entry.tb_frame
        path.append((frame.f_code, entry.tb_lasti))
        entry = entry.tb_next
    return tuple(path) if frame is not None and frame.f_globals is globals() else None
