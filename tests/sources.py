"""The source files that tests look at, each read and parsed once in a process.

Tests that look at the whole package are in one group, `ONE_PROCESS`, which one process runs.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ONE_PROCESS = pytest.mark.xdist_group("sources")


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def lines_of(path: Path, node: ast.FunctionDef) -> str:
    """Return a function as its file has it: to see cheaply what it cannot have."""
    return "\n".join(_lines(path)[node.lineno - 1 : node.end_lineno])


@functools.cache
def _lines(path: Path) -> list[str]:
    return text_of(path).splitlines()


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return every node of a file's program."""
    return [*ast.walk(tree_of(path))]
