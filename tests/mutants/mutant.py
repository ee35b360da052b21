"""What a mutant is, and how it is put into the source."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "celery_redlock"
SCRIPT = ".lua"
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Mutant:
    """A fault, and the tests of which at least one fails with it.

    name: what a user would see. where: module and class, as "tasks.task:LockedTask", or the whole
    module, as "tasks.task:"; of a script its file, as "lock/server/lua/grant.lua:". tests: files
    below tests/, and behind "::" words that narrow them, as of `pytest -k`. old, new: a piece of
    the source, and what stands there instead.
    """

    name: str
    where: str
    tests: str
    old: str
    new: str

    @property
    def files(self) -> list[str]:
        """The files of the tests, relative to the repository."""
        return [f"tests/{name}" for name in self.tests.partition("::")[0].split(" ")]

    @property
    def keyword(self) -> str:
        """The words that narrow them, "" if all tests of the files may catch it."""
        return self.tests.partition("::")[2]

    @property
    def path(self) -> str:
        """The file, relative to the repository."""
        module, _, _ = self.where.partition(":")
        is_script = module.endswith(SCRIPT)
        return f"{PACKAGE}/{module if is_script else module.replace('.', '/') + '.py'}"


def mutated(mutant: Mutant, source: str) -> str:
    """Return a file's source with the mutant in it.

    Raises LookupError if the function is not there, or has the old piece not exactly once.
    """
    start, end = _span(source, mutant.where.partition(":")[2])
    lines = source.splitlines(keepends=True)
    body = "".join(lines[start:end])
    if body.count(mutant.old) != 1:
        raise LookupError(f"{mutant.where} has {mutant.old!r} {body.count(mutant.old)} times")
    return "".join(lines[:start]) + body.replace(mutant.old, mutant.new) + "".join(lines[end:])


@functools.cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _span(source: str, name: str) -> tuple[int, int]:
    """Return the first line of a function or class, with its decorators, and the one behind it."""
    if not name:
        return 0, source.count("\n")
    found: ast.AST = _parsed(source)
    for part in name.split("."):
        found = next(
            (
                node
                for node in ast.iter_child_nodes(found)
                if isinstance(node, NAMED) and node.name == part
            ),
            found,
        )
        if getattr(found, "name", None) != part:
            raise LookupError(f"no {name} in this file")
    assert isinstance(found, NAMED)
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    return first - 1, found.end_lineno or found.lineno
