"""What a task's functions take, also those that a decorator wraps."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

Body = Callable[..., Any]


def bound_to(task: Any, attribute: Any) -> Any:
    """Return an attribute of a task's class, bound to the task as Python binds it."""
    bind = getattr(type(attribute), "__get__", None)
    return attribute if bind is None else bind(attribute, task, type(task))


def is_wrapper(body: Any) -> bool:
    """Return whether this is a wrapper, and no body that `functools.wraps` made look like one."""
    return getattr(body, "redlock_wrapper", None) is body


def bodies_of(task: Any) -> list[Body]:
    """Return a task's own `run` and `__call__`, as far as it has them, bound.

    They are looked up on the class: the wrapper of autoretry on the instance may hide them.
    """
    found = (inspect.getattr_static(type(task), name) for name in ("run", "__call__"))
    return [bound_to(task, one.redlock_body) for one in found if is_wrapper(one)]


def is_async(function: Any) -> bool:
    """Return whether a function is an `async def`.

    What wraps one is not, though inspect may say so: only what that returns can tell.
    """
    while type(function) in (functools.partial, types.MethodType):
        is_partial = type(function) is functools.partial
        function = function.func if is_partial else function.__func__
    flags = function.__code__.co_flags if type(function) is types.FunctionType else 0
    return bool(flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def signature_of(function: Body) -> inspect.Signature:
    """Return what a function takes; if a decorator wraps it, what the decorator takes.

    A decorator that passes everything on takes what the function takes.
    """
    if type(function) is functools.partial and hasattr(function, "__wrapped__"):
        # as asgiref binds what it wraps: inspect would give the first parameter, too
        function = functools.partial(function.__wrapped__, *function.args, **function.keywords)
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # an object that has a __get__: inspect takes it for a builtin
        return inspect.signature(function)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
        signature = inspect.signature(function)
    return signature


def with_self(body: Any) -> inspect.Signature:
    """Return the signature of a class's function, which loses its first parameter when bound."""
    if not isinstance(body, staticmethod):
        return signature_of(body)
    signature = signature_of(body.__func__)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])
