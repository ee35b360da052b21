"""The page of the lock names the file and the function of each step; both are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import celery_redlock

LOCK = Path(celery_redlock.__file__).parent / "lock"
PAGE = (LOCK.parents[1] / "docs" / "the-lock.md").read_text()
STEPS = sorted(set(re.findall(r"`([a-z_/]+\.py): ([\w.]+)`", PAGE)))
FILES = sorted(
    set(re.findall(r"`((?:[a-z_]+/)?[a-z_]+\.py)`", PAGE.partition("Where each step lives")[2]))
)


def names_in(path: Path) -> set[str]:
    """Return the functions and classes of a file, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
            found |= {f"{node.name}.{one.name}" for one in inner}
    return found


def test_the_page_names_many_steps() -> None:
    assert len(STEPS) > 40
    assert len({file for file, _ in STEPS}) > 25


@pytest.mark.parametrize(("file", "name"), STEPS)
def test_a_step_is_where_the_page_says(file: str, name: str) -> None:
    assert name in names_in(LOCK / file)


def test_the_files_that_a_parameter_passes_are_there() -> None:
    assert len(FILES) > 15
    assert [file for file in FILES if not (LOCK / file).exists()] == []
