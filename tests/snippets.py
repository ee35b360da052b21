"""A block of code on a page, as a reader copies it: alone."""

from __future__ import annotations

import ast
import builtins


def missing_names(code: str) -> set[str]:
    """Return the names that a block uses, and neither imports nor makes."""
    used: set[str] = set()
    made = set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(name) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                made.add(name)
            case ast.AsyncFunctionDef(name) | ast.ExceptHandler(name=str(name)):
                made.add(name)
            case ast.alias(name, asname):
                made.add((asname or name).partition(".")[0])
    return used - made
