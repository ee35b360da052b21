"""The pages on the lock: each step of the proof has its code and tests, and each name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.pages import ROOT

LOCK, TESTS = ROOT / "celery_redlock" / "lock", ROOT / "tests"
EXPLANATION = ROOT / "docs" / "explanation"
PROOF = "".join(
    (EXPLANATION / f"{name}.md").read_text(encoding="utf-8")
    for name in ("safety-proof", "safety-proof-features")
)
PAGE = (EXPLANATION / "safety-checks.md").read_text(encoding="utf-8")
REFERENCES = sorted(set(re.findall(r"`([\w/]+\.py):\s+([\w.]+)`", PAGE)))
NAMED_TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))
SCRIPTS = sorted(set(re.findall(r"`(\w+\.lua)`", PAGE)))
FUNCTIONS = sorted(set(re.findall(r"`redlock\.(\w+)`", PAGE)))  # of postgres/schema.sql
CAUGHT = re.findall(r"\*Caught:\*(.*?)(?=\n\n|\n- )", PAGE, re.DOTALL)
_STEP = re.compile(r"\*\*([A-Z])(\d)\b")


def defined_in(body: list[ast.stmt], before: str = "") -> set[str]:
    """Return the classes, functions and methods of a module, with the names of their classes."""
    names = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            names |= {before + node.name} | defined_in(node.body, f"{before}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(before + node.name)
    return names


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def mutants() -> set[str]:
    """Return the names of the mutants of the simulation."""
    return {
        node.name
        for node in parsed(TESTS / "simulation" / "mutants.py").body
        if isinstance(node, ast.FunctionDef)
        for by in node.decorator_list
        if isinstance(by, ast.Call) and ast.unparse(by.func) == "mutant"
    }


MUTANTS = mutants()
_LISTED = ast.get_docstring(parsed(TESTS / "simulation" / "invariants.py")) or ""
INVARIANTS = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^- .*?:", _LISTED, re.MULTILINE))))


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_the_page_refers_to_the_code() -> None:
    assert min(map(len, (REFERENCES, NAMED_TESTS, SCRIPTS, FUNCTIONS, CAUGHT))) >= 4


@pytest.mark.parametrize(("file", "name"), REFERENCES)
def test_a_reference_names_what_is_there(file: str, name: str) -> None:
    path = LOCK / file
    assert path.is_file(), f"the page names {file}, which is not in celery_redlock/lock"
    assert name in defined_in(parsed(path).body), f"{file} does not define {name}"


@pytest.mark.parametrize(("file", "name"), NAMED_TESTS)
def test_a_test_that_the_page_names_is_there(file: str, name: str) -> None:
    assert re.search(rf"(def|class) \w*{name}", (TESTS / file).read_text(encoding="utf-8"))


def test_the_scripts_and_functions_of_the_page_are_there() -> None:
    schema = (LOCK / "postgres" / "schema.sql").read_text(encoding="utf-8")
    assert [name for name in SCRIPTS if not (LOCK / "server" / "lua" / name).is_file()] == []
    assert [name for name in FUNCTIONS if f"FUNCTION redlock.{name}(" not in schema] == []


def test_each_shortcut_of_the_simulation_is_on_the_page() -> None:
    assert len(MUTANTS) >= 50
    assert sorted(MUTANTS - names_in(PAGE)) == []


@pytest.mark.parametrize("caught", CAUGHT)
def test_what_catches_a_fault_is_a_shortcut_or_an_invariant(caught: str) -> None:
    assert names_in(caught) <= MUTANTS | INVARIANTS


def test_each_step_of_the_proof_is_on_the_page_of_its_checks() -> None:
    steps = _STEP.findall(PROOF)
    assert len(steps) == len(set(steps)) >= 50
    listed = set(_STEP.findall(PAGE))
    assert listed == set(steps)
