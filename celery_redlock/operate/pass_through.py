"""Whether the `__call__` of a task's class gives its arguments to the body as they came.

The documentation of Flask gives each app such a class. Then the key and the body see the same
arguments, and nothing is left to decide. Not here: the comparison of each run
(`tasks/arguments.py`), which is made whatever this says.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from celery import Task


def changing_call(task_class: type) -> str:
    """Return the name of a `__call__` that may change its arguments; "" if there is none."""
    owners = {}  # the last class that has a function: those that lock a task only wrap it
    for cls in task_class.__mro__[: task_class.__mro__.index(Task)]:
        if "__call__" in vars(cls):
            attribute = vars(cls)["__call__"]
            owners[getattr(attribute, "redlock_body", attribute)] = cls
    for function, owner in owners.items():
        if not _passes_all_on(function):
            return f"{owner.__qualname__}.__call__"
    return ""


def _passes_all_on(function: Any) -> bool:
    """Return whether a function uses its arguments only to call the task's body with all of them.

    False also if its source cannot be read, or a decorator is around it.
    """
    if type(function) is not types.FunctionType or hasattr(function, "__wrapped__"):
        return False
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, ValueError):
        return False
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return False
    parameters = definition.args
    positional = parameters.vararg
    by_name = parameters.kwarg
    own = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
    if positional is None or by_name is None or len(own) != 1:
        return False
    task = own[0].arg
    given = f"(*{positional.arg}, **{by_name.arg})"
    calls = {f"{task}.run{given}", f"super().__call__{given}"}
    nodes = [*_nodes_of_body(definition)]
    passed = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node) in calls]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    uses = [node for node in names if node.id in (positional.arg, by_name.arg)]
    is_same_task = all(isinstance(node.ctx, ast.Load) for node in names if node.id == task)
    return bool(passed) and len(uses) == 2 * len(passed) and is_same_task


def _nodes_of_body(definition: ast.FunctionDef) -> Iterator[ast.AST]:
    for statement in definition.body:
        yield from ast.walk(statement)
