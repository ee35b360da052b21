"""The page on the lock: each reference to the code names a file and what is defined in it."""

from __future__ import annotations

import ast
import re

import pytest

from tests.pages import ROOT

LOCK = ROOT / "celery_redlock" / "lock"
_REFERENCE = re.compile(r"`([\w/]+\.py):\s+([\w.]+)`")
PAGE = (ROOT / "docs" / "explanation" / "safety-proof.md").read_text(encoding="utf-8")
REFERENCES = sorted(set(_REFERENCE.findall(PAGE)))


def defined_in(body: list[ast.stmt], before: str = "") -> set[str]:
    """Return the classes, functions and methods of a module, with the names of their classes."""
    names = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            names |= {before + node.name} | defined_in(node.body, f"{before}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(before + node.name)
    return names


def test_the_page_refers_to_the_code() -> None:
    assert len(REFERENCES) >= 15


@pytest.mark.parametrize(("file", "name"), REFERENCES)
def test_a_reference_names_what_is_there(file: str, name: str) -> None:
    path = LOCK / file
    assert path.is_file(), f"the page names {file}, which is not in celery_redlock/lock"
    names = defined_in(ast.parse(path.read_text(encoding="utf-8")).body)
    assert name in names, f"the page names {name}, which {file} does not define"
