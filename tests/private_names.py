"""Which private names of the package its tests use: a rename of one breaks a test for no reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.sources import nodes_of

PACKAGE = "celery_redlock"
_BY_NAME = {"setattr", "getattr", "hasattr", "delattr", "attrgetter", "object"}
_WORD = re.compile(r"\b_[a-zA-Z]\w*")
_IN_TEXT = re.compile(r"(?<=\.)_[a-zA-Z]\w*")  # in a script that a test runs, or a dotted path


class PrivateNames:
    """The private names of a package: all of them, and which of them each class has."""

    def __init__(self, package: Path) -> None:
        nodes = [node for path in package.rglob("*.py") for node in nodes_of(path)]
        self.all = set(_given_by(nodes))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self.of_class = {node.name: set(_given_in(node)) for node in classes}
        known, before = sum(map(len, self.of_class.values())), 0
        while known > before:  # a class inherits what its bases inherit
            for node in classes:
                for base in node.bases:
                    self.of_class[node.name] |= self.of_class.get(_last(base), set())
            known, before = sum(map(len, self.of_class.values())), known


def uses_in(source: str, private: PrivateNames) -> list[tuple[int, str]]:
    """Return line and name of each use of a private name of the package.

    A name that a test gives to its own class is none, though the package gives it to another one.
    """
    if private.all.isdisjoint(_WORD.findall(source)):
        return []
    return sorted(_uses(ast.parse(source), private.all, private, dict(private.of_class)))


def _uses(
    node: ast.AST, on_self: set[str], private: PrivateNames, of_class: dict[str, set[str]]
) -> Iterator[tuple[int, str]]:
    """Give the uses in a node; on_self: the names that `self` has from a class of the package."""
    line: int = getattr(node, "lineno", 0)
    if isinstance(node, ast.ClassDef):
        on_self = of_class[node.name] = _inherited(node, of_class)
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        yield from ((each.lineno, each.name) for each in methods if each.name in on_self)
    if isinstance(node, ast.Attribute) and _is_self(node.value):
        names = {node.attr} & on_self
    else:
        names = set(_used_by(node)) & private.all
    yield from ((line, name) for name in names)
    for child in ast.iter_child_nodes(node):
        yield from _uses(child, on_self, private, of_class)


def _used_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call):
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        names = [text for text in texts if isinstance(text, str) and _last(node.func) in _BY_NAME]
        return names + [key.arg for key in node.keywords if key.arg]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _IN_TEXT.findall(node.value)
    return []


def _given_in(tree: ast.AST) -> Iterator[str]:
    """Give each private name that a module or class gives to a part of it."""
    return _given_by(ast.walk(tree))


def _given_by(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        name = getattr(node, "name", "")
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            name = _last(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value  # in __slots__, or for setattr
        if isinstance(name, str) and re.fullmatch(r"_[a-zA-Z]\w*", name):
            yield name


def _inherited(node: ast.ClassDef, of_class: Mapping[str, set[str]]) -> set[str]:
    return {name for base in node.bases for name in of_class.get(_last(base), ())}


def _is_self(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def _last(node: ast.AST) -> str:
    """Return the last name of a dotted one."""
    return getattr(node, "attr", getattr(node, "id", ""))
