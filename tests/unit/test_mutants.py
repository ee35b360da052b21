"""The table of mutants fits the source: a rename that it does not follow is an error here."""

from __future__ import annotations

import ast
import re

import pytest
from lupa.lua51 import LuaRuntime

from tests.mutants.mutant import ROOT, SCRIPT, Mutant, mutated
from tests.mutants.table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_the_source_and_leaves_it_a_program(mutant: Mutant) -> None:
    source = (ROOT / mutant.path).read_text()
    changed = mutated(mutant, source)
    if mutant.path.endswith(SCRIPT):
        LuaRuntime().compile(changed)
        assert changed != source
    else:
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_catch_a_mutant_are_there(mutant: Mutant) -> None:
    texts = [(ROOT / file).read_text() for file in mutant.files]
    for word in mutant.keyword.split(" or "):
        assert any(re.search(rf"(def|class) \w*{word}", text) for text in texts), word


def test_names_of_mutants_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
