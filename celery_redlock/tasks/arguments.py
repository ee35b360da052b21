"""What a task's function takes of a call, and whether the arguments arrive where a key took them.

A decorator that passes everything on (`*args, **kwargs`) says by `__wrapped__` whose parameters are
meant. It may still add an argument, take one out or move one: then a key would be made of another
argument than the one that the caller means. So the first runs are compared at the entry of the
wrapped function, by the identity of the objects, for each form of call. If that entry is not seen,
a warning says so. Not here: how a key is made (`settings/task_config.py`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any, Protocol

from celery_redlock.errors import ArgumentsError

Body = Callable[..., Any]
Arguments = tuple[Sequence[Any], Mapping[str, Any]]  # by position, and by name


class Call(Protocol):
    """The arguments of a call."""

    @property
    def args(self) -> Sequence[Any]: ...

    @property
    def kwargs(self) -> Mapping[str, Any]: ...


_EMPTY = inspect.Parameter.empty
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
WAYS_OUT = (
    "give the decorator a __signature__, use a callable lock_key, or take the argument inside the "
    "body"
)
BEHIND_A_DECORATOR = (
    "the key is made of what the wrapped function takes. If a decorator or `__call__` adds, takes "
    f"out or moves an argument, the runs fail: {WAYS_OUT}. One that passes all on needs nothing"
)

UNSEEN_RUNS = 3  # before the warning: a decorator may return without a call of the function
_ANOTHER_PROFILER = "another profiler is at work"
_NO_PYTHON = "it has no Python code"
_ELSEWHERE = "it was called in another thread, or not at all"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConsumedArguments:
    """The arguments of a call that one decorator takes for itself: by position, and by name."""

    positions: Collection[int]
    names: Collection[str]

    def remove_from(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a call without these."""
        remaining = [value for position, value in enumerate(args) if position not in self.positions]
        return remaining, {name: value for name, value in kwargs.items() if name not in self.names}


@dataclass(frozen=True)
class Parameters:
    """What a function takes of a call.

    signature: without `self`. consumed: the arguments that decorators take for themselves, the
    outermost decorator first. code: of the function that has the signature; None if it is not
    written in Python. wrappers: the decorators and `__call__` around it, as texts for people.
    """

    signature: inspect.Signature
    consumed: tuple[ConsumedArguments, ...] = ()
    code: CodeType | None = None
    wrappers: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults by name, without the parameters that have none."""
        parameters = self.signature.parameters.values()
        return {param.name: param.default for param in parameters if param.default is not _EMPTY}

    @functools.cached_property
    def binder(self) -> Callable[..., dict[str, Any]]:
        """A function with these parameters that returns its arguments by name, with defaults."""
        parameters = self.signature.parameters.values()
        bare = [param.replace(annotation=_EMPTY, default=_EMPTY) for param in parameters]
        items = ", ".join(f"{param.name!r}: {param.name}" for param in parameters)
        # as `namedtuple` does: Python binds. `Signature.bind` takes 0.5 percent of a locked task's
        # instructions for one parameter and 1.4 percent for a rich signature. Python 3.11's refuses
        # a positional-only name that `**options` takes
        source = f"lambda {str(inspect.Signature(bare))[1:-1]}: {{{items}}}"
        binder: Any = eval(source, {})  # noqa: S307 - a signature has names and nothing else
        keyword_only = {param.name for param in parameters if param.kind is param.KEYWORD_ONLY}
        defaults = self.defaults.items()
        binder.__kwdefaults__ = {name: value for name, value in defaults if name in keyword_only}
        binder.__defaults__ = tuple(value for name, value in defaults if name not in keyword_only)
        return binder  # type: ignore[no-any-return]

    def without_consumed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a call without those that decorators take for themselves."""
        for consumed in self.consumed:
            args, kwargs = consumed.remove_from(args, kwargs)
        return args, kwargs


def parameters_of(function: Body) -> Parameters:
    """Return the parameters of a function; of a decorated one, those of the function inside."""
    if isinstance(function, types.MethodType):
        parameters = _read(function.__func__, bound=1)
        return replace(parameters, signature=_without_first(parameters.signature))
    return _read(function, bound=0)


def _read(function: Any, bound: int) -> Parameters:
    """Return the parameters of a function; bound: how many of them a call does not give."""
    if type(function) is functools.partial and hasattr(function, "__wrapped__"):
        # as asgiref binds what it wraps: inspect would give the first parameter, too
        function = functools.partial(function.__wrapped__, *function.args, **function.keywords)
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # an object that has a __get__: inspect takes it for a builtin
        return Parameters(inspect.signature(function))
    wrapped = getattr(function, "__wrapped__", None)
    passes_on = any(param.kind in _ANY for param in signature.parameters.values())
    if wrapped is None or not passes_on or _declares(function, wrapped):
        return Parameters(signature, code=_code_of(function))
    inner = _read(wrapped, bound)
    if _is_of_celery(function):  # it converts values, and moves none
        return inner
    consumed = _consumed_by(signature, bound, inner.signature)
    return Parameters(
        inner.signature,
        (*([consumed] if consumed.names else []), *inner.consumed),
        inner.code,
        (_described(function), *inner.wrappers),
    )


def _consumed_by(
    wrapper: inspect.Signature, bound: int, inner: inspect.Signature
) -> ConsumedArguments:
    """Return the arguments that a wrapper names and the function inside does not have."""
    named = [param for param in wrapper.parameters.values() if param.kind not in _ANY]
    names = [param.name for param in named[bound:] if param.name not in inner.parameters]
    places = [param.name for param in named if param.kind is not param.KEYWORD_ONLY]
    positions = frozenset(places.index(name) - bound for name in names if name in places)
    return ConsumedArguments(positions, frozenset(names))


def _declares(function: Any, wrapped: Any) -> bool:
    """Return whether a decorator has a signature of its own; `functools.wraps` copies that."""
    declared = getattr(function, "__signature__", None)
    return declared is not None and declared is not getattr(wrapped, "__signature__", None)


def _is_of_celery(function: Any) -> bool:
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return str(module).startswith("celery.")


def _code_of(function: Any) -> CodeType | None:
    while type(function) in (functools.partial, types.MethodType):
        is_partial = type(function) is functools.partial
        function = function.func if is_partial else function.__func__
    # functions of Cython have a `__code__`, which nobody enters
    return function.__code__ if isinstance(function, types.FunctionType) else None


def _described(function: Any) -> str:
    code = _code_of(function)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _without_first(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature as that of a bound method."""
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind not in _ANY:
        del parameters[0]
    return signature.replace(parameters=parameters)


class Arrivals:
    """Compares where the arguments of a task's calls arrive with where its key takes them from.

    A form of call is the number of positional arguments and the names of the others. In a process
    each form is compared until a run has proved it right.
    """

    def __init__(self, task_name: str, parameters: Parameters) -> None:
        self._task_name = task_name
        self._parameters = parameters
        self._proven_forms: set[object] = set()
        self._misfits_by_form: dict[object, str] = {}
        self._was_seen = False
        self._unseen_runs = itertools.count(1)

    @classmethod
    def of(cls, task_name: str, parameters: Parameters) -> Arrivals | None:
        """Return the comparison of a task's calls; None if its function has no wrapper."""
        return cls(task_name, parameters) if parameters.wrappers else None

    def around(self, body: Body, call: Call) -> Body:
        """Return the body, or a function that compares the arguments as it runs the body.

        Raises ArgumentsError for a form of call that did not fit in an earlier run.
        """
        form = len(call.args), frozenset(call.kwargs)
        if form in self._proven_forms:
            return body
        if form in self._misfits_by_form:
            raise self._error(call, self._misfits_by_form[form])
        args, kwargs = self._parameters.without_consumed(call.args, call.kwargs)
        new_error = functools.partial(self._error, call)
        arguments = self._parameters.signature.bind(*args, **kwargs)
        comparison = _Comparison(self._parameters.code, arguments, new_error)
        return functools.partial(self.run_compared, body, form, comparison)

    def run_compared(
        self, body: Body, form: object, comparison: _Comparison, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a body, and remember whether its form of call is proven or misfits."""
        try:
            with _at_entry(comparison):
                result = body(*args, **kwargs)
        finally:
            if comparison.misfit:
                self._misfits_by_form[form] = comparison.misfit
            elif comparison.is_proof:
                self._proven_forms.add(form)
        comparison.check()  # a decorator may have caught the error
        if comparison.was_entered:
            self._was_seen = True
        elif not self._was_seen:
            unseen_runs = next(self._unseen_runs)
            if unseen_runs == UNSEEN_RUNS:
                self._log_unseen(comparison.obstacle, WAYS_OUT)
        return result

    def _log_unseen(self, reason: str, hint: str) -> None:
        logger.warning(
            "%s: in %d runs its wrapped function was not seen (%s), so its arguments are not "
            "compared with those of the key: %s",
            self._task_name, UNSEEN_RUNS, reason, hint,
            extra={"event": "arguments_not_seen", "task": self._task_name, "reason": reason},
        )  # fmt: skip

    def _error(self, call: Call, reason: str) -> ArgumentsError:
        wrappers = "; ".join(self._parameters.wrappers)
        hint = (
            f"{reason}: a decorator or `__call__` adds, takes out or moves an argument, so that "
            f"the lock would be of another one. It is one of these: {wrappers}. {WAYS_OUT}"
        )
        return _refused(self._task_name, call, hint)


def misfit(task_name: str, parameters: Parameters, reason: str, call: Call) -> ArgumentsError:
    """Return the error for arguments that do not fit a task's function; it shows none of them."""
    way_out = (
        "If the message was sent for another version of the task, let a worker of that version run "
        "it, or give a new argument a default, and keep an old one while messages have it"
    )
    if parameters.wrappers:
        wrappers = "; ".join(parameters.wrappers)
        way_out = f"A decorator or `__call__` may add arguments ({wrappers}): {WAYS_OUT}"
    elif next(iter(parameters.signature.parameters), None) == "self":
        way_out = "Celery gives a task as `self` with bind=True alone"
    params = parameters.signature.parameters.values()
    bare = [param.replace(annotation=_EMPTY) for param in params]
    hint = (
        f"do not fit {task_name}{inspect.Signature(bare)}: {reason}. {way_out}. A send with "
        "lock_unique_for, and lock_for, need all arguments of a run"
    )
    return _refused(task_name, call, hint)


def _refused(task_name: str, call: Call, hint: str) -> ArgumentsError:
    by_name = f", {', '.join(sorted(map(str, call.kwargs)))} by name" if call.kwargs else ""
    given = f"({len(call.args)} by position{by_name})"
    return ArgumentsError(f"task {task_name!r}", "arguments", given, hint)


class _Comparison:
    """The comparison of one run.

    code: of the function whose entry is compared. arguments: of the call, as the key takes them.
    new_error: returns the error for a misfit. misfit: which argument did not arrive, "" if there is
    none so far. is_proof: later runs need no comparison. obstacle: why its entry cannot be seen.
    """

    def __init__(
        self,
        code: CodeType | None,
        arguments: inspect.BoundArguments,
        new_error: Callable[[str], Exception],
    ) -> None:
        self.code = code
        self._arguments = arguments
        self._new_error = new_error
        self.misfit = ""
        self.is_proof = False
        self.was_entered = False
        self.obstacle = _NO_PYTHON if code is None else _ELSEWHERE

    def compare(self, frame: FrameType) -> None:
        """Compare at the entry of the function; raises what `new_error` returns for a misfit."""
        if self.was_entered:
            return
        self.was_entered = True
        received = dict(frame.f_locals)
        parameters = self._arguments.signature.parameters
        sent = _by_place(self._arguments.arguments, parameters)
        local = {name: received[name] for name in parameters if name in received}
        arrived = _by_place(local, parameters)
        pairs = itertools.permutations(sent.items(), 2)
        # a swap of two equal arguments cannot be seen
        ambiguous = [place for (place, value), (_, other) in pairs if _same(value, other)]
        for place, value in sent.items():
            if place in ambiguous or arrived.get(place, _NOWHERE) is value:
                continue
            elsewhere = [other for other, item in arrived.items() if item is value]
            default = getattr(parameters.get(place[0]), "default", _NOWHERE)
            if elsewhere:
                self.misfit = f"{_shown(place)!r} of the call arrives as {_shown(elsewhere[0])!r}"
            elif arrived.get(place, _NOWHERE) in (_NOWHERE, default):
                self.misfit = f"{_shown(place)!r} of the call does not arrive"
            self.check()
        self.is_proof = not ambiguous

    def check(self) -> None:
        """Raise what `new_error` returns, if there is a misfit."""
        if self.misfit:
            raise self._new_error(self.misfit)


_NOWHERE = object()
Place = tuple[str, object]  # a parameter, and the item of one that takes several


def _by_place(
    arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> dict[Place, object]:
    """Return each argument by its place."""
    places: dict[Place, object] = {}
    for name, value in arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            places.update(((name, index), item) for index, item in enumerate(value))
        elif parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            places.update(((name, key), item) for key, item in value.items())
        else:
            places[name, None] = value
    return places


def _shown(place: Place) -> str:
    name, item = place
    return name if item is None else f"{name}[{item!r}]"


def _same(left: object, right: object) -> bool:
    """Return whether two values are the same or equal; False if they cannot be compared."""
    if left is right:
        return True
    try:
        return bool(left == right)
    except Exception:
        return False


_current: ContextVar[_Comparison | None] = ContextVar("comparison", default=None)


@contextlib.contextmanager
def _at_entry(comparison: _Comparison) -> Iterator[None]:
    """Compare at the next entry of the function in this thread or greenlet."""
    context_token = _current.set(comparison)
    try:
        with _monitored(comparison):
            yield
    finally:
        _current.reset(context_token)


def _compare_at(frame: FrameType | None) -> bool:
    """Compare if a frame is of the compared function; return whether it is."""
    comparison = _current.get()
    if comparison is None or frame is None or frame.f_code is not comparison.code:
        return False
    comparison.compare(frame)
    return True


def _profile(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and _compare_at(frame):
        sys.setprofile(None)  # else the body would run several times as long


@contextlib.contextmanager
def _profiled(comparison: _Comparison) -> Iterator[None]:
    """Call `_compare_at` at each call of this thread; nothing while another profiler is at work."""
    if sys.getprofile() in (None, _profile):
        sys.setprofile(_profile)
    try:
        yield
    finally:
        if sys.getprofile() is _profile:
            sys.setprofile(None)
        elif not comparison.was_entered:  # or a decorator's own has ended
            comparison.obstacle = _ANOTHER_PROFILER


if sys.version_info >= (3, 12):
    _TOOL = 4  # of six; 0 to 2 and 5 are for debuggers, coverage, profilers and optimizers

    def _on_start(code: CodeType, _: int) -> None:
        _compare_at(sys._getframe(1))

    @contextlib.contextmanager
    def _monitored(comparison: _Comparison) -> Iterator[None]:
        """Call `_compare_at` at each entry of the function, in any thread; no other call slows."""
        monitoring = sys.monitoring
        code = comparison.code
        if code is None:
            yield
            return
        if monitoring.get_tool(_TOOL) is None:
            monitoring.use_tool_id(_TOOL, "celery_redlock")
            monitoring.register_callback(_TOOL, monitoring.events.PY_START, _on_start)
        if monitoring.get_tool(_TOOL) != "celery_redlock":
            with _profiled(comparison):
                yield
            return
        # never switched off again: threads that compare at the same time would have to be counted
        monitoring.set_local_events(_TOOL, code, monitoring.events.PY_START)
        yield
else:

    def _monitored(comparison: _Comparison) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if comparison.code is None else _profiled(comparison)
