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
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol

from celery_redlock.errors import ArgumentsError

Body = Callable[..., Any]


class Call(Protocol):
    """The arguments of a call."""

    @property
    def args(self) -> Sequence[Any]: ...

    @property
    def kwargs(self) -> Mapping[str, Any]: ...


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
WAYS_OUT = (
    "give the decorator a __signature__, use a callable lock_key, or take the argument inside the "
    "body"
)
BEHIND_A_DECORATOR = (
    "the key is made of what the wrapped function takes. If a decorator or `__call__` adds, takes "
    f"out or moves an argument, the runs fail: {WAYS_OUT}"
)


UNSEEN_RUNS = 3  # before the warning: a decorator may return without a call of the function
_ANOTHER_PROFILER = "another profiler is at work"
_NO_PYTHON = "it has no Python code"
_ELSEWHERE = "it was called in another thread, or not at all"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Taken:
    """What one decorator takes out of a call: arguments by position, and by name."""

    positions: Collection[int]
    names: Collection[str]

    def rest(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return what it passes on."""
        left = [value for place, value in enumerate(args) if place not in self.positions]
        return left, {name: value for name, value in kwargs.items() if name not in self.names}


@dataclass(frozen=True)
class Parameters:
    """What a function takes of a call.

    signature: without `self`. taken: by decorators, the outermost first. inner: the code of the
    function that the signature is of, None if that is not Python's. through: what stands before it.
    """

    signature: inspect.Signature
    taken: tuple[Taken, ...] = ()
    inner: CodeType | None = None
    through: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """What stands before the function, as a text."""
        return "; ".join(self.through)

    @functools.cached_property
    def binder(self) -> Callable[..., dict[str, Any]]:
        """A function with these parameters that returns its arguments by name, with defaults."""
        parameters = self.signature.parameters.values()
        bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
        shown = ", ".join(f"{p.name!r}: {p.name}" for p in parameters)
        # as `namedtuple` does: Python binds. `Signature.bind` takes 0.5 percent of a locked task's
        # instructions for one parameter and 1.4 percent for a rich signature. Python 3.11's refuses
        # a positional-only name that `**options` takes
        source = f"lambda {str(inspect.Signature(bare))[1:-1]}: {{{shown}}}"
        binder: Any = eval(source, {})  # noqa: S307 - a signature has names and nothing else
        given = [p for p in parameters if p.default is not p.empty]
        binder.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
        binder.__defaults__ = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY)
        return binder  # type: ignore[no-any-return]

    def passed_on(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of a call without those that decorators take out."""
        for one in self.taken:
            args, kwargs = one.rest(args, kwargs)
        return args, kwargs


def parameters_of(function: Body) -> Parameters:
    """Return what a function takes, or what its decorators pass on to the one that they wrap."""
    if isinstance(function, types.MethodType):
        found = _read(function.__func__, bound=1)
        return Parameters(_without_first(found.signature), found.taken, found.inner, found.through)
    return _read(function, bound=0)


def _read(function: Any, bound: int) -> Parameters:
    """Read it from the outside. bound: number of parameters that a call does not give."""
    if type(function) is functools.partial and hasattr(function, "__wrapped__"):
        # as asgiref binds what it wraps: inspect would give the first parameter, too
        function = functools.partial(function.__wrapped__, *function.args, **function.keywords)
    try:
        own = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # an object that has a __get__: inspect takes it for a builtin
        return Parameters(inspect.signature(function))
    wrapped = getattr(function, "__wrapped__", None)
    passes_on = any(one.kind in _ANY for one in own.parameters.values())
    if wrapped is None or not passes_on or _declares(function, wrapped):
        return Parameters(own, inner=_code_of(function))
    inside = _read(wrapped, bound)
    if _is_of_celery(function):  # it converts values, and moves none
        return inside
    named = [one for one in own.parameters.values() if one.kind not in _ANY]
    ours = [one for one in named[bound:] if one.name not in inside.signature.parameters]
    places = [one.name for one in named if one.kind is not one.KEYWORD_ONLY]
    positions = frozenset(places.index(one.name) - bound for one in ours if one.name in places)
    taken = Taken(positions, frozenset(one.name for one in ours))
    return Parameters(
        inside.signature,
        (*([taken] if ours else []), *inside.taken),
        inside.inner,
        (_named(function), *inside.through),
    )


def _declares(function: Any, wrapped: Any) -> bool:
    """Return whether a decorator has a signature of its own; `functools.wraps` copies that."""
    own = getattr(function, "__signature__", None)
    return own is not None and own is not getattr(wrapped, "__signature__", None)


def _is_of_celery(function: Any) -> bool:
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return str(module).startswith("celery.")


def _code_of(function: Any) -> CodeType | None:
    while type(function) in (functools.partial, types.MethodType):
        is_partial = type(function) is functools.partial
        function = function.func if is_partial else function.__func__
    # functions of Cython have a `__code__`, which nobody enters
    return function.__code__ if isinstance(function, types.FunctionType) else None


def _named(function: Any) -> str:
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

    through: names what stands before the function. In a process each form of call (number of
    positional arguments, names of the others) is compared until a run has proved it right.
    """

    def __init__(self, task_name: str, parameters: Parameters) -> None:
        self._task_name = task_name
        self._parameters = parameters
        self._proved: set[object] = set()
        self._misfits: dict[object, str] = {}
        self._was_seen = False
        self._unseen = itertools.count(1)

    @classmethod
    def of(cls, task_name: str, parameters: Parameters) -> Arrivals | None:
        """Return what compares the calls of a task; None if nothing stands before its function."""
        return cls(task_name, parameters) if parameters.through else None

    def around(self, body: Body, call: Call) -> Body:
        """Return the body, or one that is compared as it runs.

        Raises ArgumentsError for a form of call that did not fit before.
        """
        form = len(call.args), frozenset(call.kwargs)
        if form in self._proved:
            return body
        if form in self._misfits:
            raise self._error(call, self._misfits[form])
        args, kwargs = self._parameters.passed_on(call.args, call.kwargs)
        refuse = functools.partial(self._error, call)
        bound = self._parameters.signature.bind(*args, **kwargs)
        comparison = _Comparison(self._parameters.inner, bound, refuse)
        return functools.partial(self.run_compared, body, form, comparison)

    def run_compared(
        self, body: Body, form: object, comparison: _Comparison, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a body, and keep what its comparison has shown of this form of call."""
        try:
            with _at_entry(comparison):
                result = body(*args, **kwargs)
        finally:
            if comparison.misfit:
                self._misfits[form] = comparison.misfit
            elif comparison.is_proof:
                self._proved.add(form)
        comparison.check()  # a decorator may have caught the error
        if comparison.is_over:
            self._was_seen = True
        elif not self._was_seen:
            unseen = next(self._unseen)
            if unseen == UNSEEN_RUNS:
                self._log_unseen(comparison.obstacle, WAYS_OUT)
        return result

    def _log_unseen(self, why: str, ways_out: str) -> None:
        logger.warning(
            "%s: in %d runs its wrapped function was not seen (%s), so its arguments are not "
            "compared with those of the key: %s",
            self._task_name, UNSEEN_RUNS, why, ways_out,
            extra={"event": "arguments_not_seen", "task": self._task_name, "reason": why},
        )  # fmt: skip

    def _error(self, call: Call, why: str) -> ArgumentsError:
        hint = (
            f"{why}: a decorator or `__call__` adds, takes out or moves an argument, so that the "
            f"lock would be of another one. It is one of these: {self._parameters.shown}. "
            f"{WAYS_OUT}"
        )
        return _refused(self._task_name, call, hint)


def misfit(task_name: str, parameters: Parameters, why: str, call: Call) -> ArgumentsError:
    """Return the error for arguments that do not fit a task's function; it shows none of them."""
    way_out = (
        "If the message was sent for another version of the task, let a worker of that version run "
        "it, or give a new argument a default, and keep an old one while messages have it"
    )
    if parameters.through:
        way_out = f"A decorator or `__call__` may add arguments ({parameters.shown}): {WAYS_OUT}"
    elif next(iter(parameters.signature.parameters), None) == "self":
        way_out = "Celery gives a task as `self` with bind=True alone"
    bare = [p.replace(annotation=p.empty) for p in parameters.signature.parameters.values()]
    hint = (
        f"do not fit {task_name}{inspect.Signature(bare)}: {why}. {way_out}. A send with "
        "lock_unique_for, and lock_for, need all arguments of a run"
    )
    return _refused(task_name, call, hint)


def _refused(task_name: str, call: Call, hint: str) -> ArgumentsError:
    named = f", {', '.join(sorted(map(str, call.kwargs)))} by name" if call.kwargs else ""
    given = f"({len(call.args)} by position{named})"
    return ArgumentsError(f"task {task_name!r}", "arguments", given, hint)


class _Comparison:
    """One run's. misfit: what is wrong, once it is known. is_proof: it has shown that all is right.

    bound: the arguments of the call as the key takes them. refuse: returns the error for a misfit.
    is_over: the function was entered. obstacle: why it is not seen, if it is not.
    """

    def __init__(
        self,
        inner: CodeType | None,
        bound: inspect.BoundArguments,
        refuse: Callable[[str], Exception],
    ) -> None:
        self.inner = inner
        self._bound = bound
        self._refuse = refuse
        self.misfit = ""
        self.is_proof = False
        self.is_over = False
        self.obstacle = _NO_PYTHON if inner is None else _ELSEWHERE

    def compare(self, frame: FrameType) -> None:
        """Compare at the entry of the function; raises what `refuse` returns of a misfit."""
        if self.is_over:
            return
        self.is_over = True
        arrived = dict(frame.f_locals)
        names = self._bound.signature.parameters
        values = _each(self._bound.arguments, names)
        places = _each({one: arrived[one] for one in names if one in arrived}, names)
        twins = [a for a, x in values.items() for b, y in values.items() if a != b and _same(x, y)]
        for place, value in values.items():
            if place in twins or places.get(place, _NOWHERE) is value:
                continue
            elsewhere = [other for other, one in places.items() if one is value]
            default = getattr(names.get(place[0]), "default", _NOWHERE)
            if elsewhere:
                self.misfit = f"{_shown(place)!r} of the call arrives as {_shown(elsewhere[0])!r}"
            elif places.get(place, _NOWHERE) in (_NOWHERE, default):
                self.misfit = f"{_shown(place)!r} of the call does not arrive"
            self.check()
        self.is_proof = not twins

    def check(self) -> None:
        """Raise what `refuse` returns if there is a misfit."""
        if self.misfit:
            raise self._refuse(self.misfit)


_NOWHERE = object()
Place = tuple[str, object]  # a parameter, and the item of one that takes several


def _each(
    arguments: Mapping[str, Any], names: Mapping[str, inspect.Parameter]
) -> dict[Place, object]:
    """Return each argument by its place."""
    found: dict[Place, object] = {}
    for name, value in arguments.items():
        if names[name].kind is inspect.Parameter.VAR_POSITIONAL:
            found.update(((name, number), one) for number, one in enumerate(value))
        elif names[name].kind is inspect.Parameter.VAR_KEYWORD:
            found.update(((name, key), one) for key, one in value.items())
        else:
            found[name, None] = value
    return found


def _shown(place: Place) -> str:
    name, item = place
    return name if item is None else f"{name}[{item!r}]"


def _same(one: object, other: object) -> bool:
    """Return whether two values cannot be told apart; what cannot be compared, can be."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:
        return False


_current: ContextVar[_Comparison | None] = ContextVar("comparison", default=None)


@contextlib.contextmanager
def _at_entry(comparison: _Comparison) -> Iterator[None]:
    """Have a comparison look at the next entry of its function in this thread or greenlet."""
    before = _current.set(comparison)
    try:
        with _monitored(comparison):
            yield
    finally:
        _current.reset(before)


def _look(frame: FrameType | None) -> bool:
    """Compare at the entry of the function that is compared; return whether this is it."""
    comparison = _current.get()
    if comparison is None or frame is None or frame.f_code is not comparison.inner:
        return False
    comparison.compare(frame)
    return True


def _profile(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and _look(frame):
        sys.setprofile(None)  # else the body would run several times as long


@contextlib.contextmanager
def _profiled(comparison: _Comparison) -> Iterator[None]:
    """Call `_look` at each call of this thread; nothing while another profiler is at work."""
    if sys.getprofile() in (None, _profile):
        sys.setprofile(_profile)
    try:
        yield
    finally:
        if sys.getprofile() is _profile:
            sys.setprofile(None)
        elif not comparison.is_over:  # also if a decorator's profiler has begun and ended meanwhile
            comparison.obstacle = _ANOTHER_PROFILER


if sys.version_info >= (3, 12):
    _TOOL = 4  # of six; 0 to 2 and 5 are for debuggers, coverage, profilers and optimizers

    def _on_start(code: CodeType, _: int) -> None:
        _look(sys._getframe(1))

    @contextlib.contextmanager
    def _monitored(comparison: _Comparison) -> Iterator[None]:
        """Call `_look` at each entry of a function, in any thread; elsewhere it costs nothing."""
        monitoring = sys.monitoring
        code = comparison.inner
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
        return contextlib.nullcontext() if comparison.inner is None else _profiled(comparison)
