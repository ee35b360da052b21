"""The table of mutants fits the source: a rename that it does not follow is an error here."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from lupa.lua51 import LuaRuntime

from tests.mutants.mutant import ROOT, SCRIPT, Mutant, mutated
from tests.mutants.table import MUTANTS
from tests.sources import ONE_PROCESS, text_of, tree_of

pytestmark = ONE_PROCESS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_the_source_and_leaves_it_a_program(mutant: Mutant) -> None:
    source = text_of(ROOT / mutant.path)
    changed = mutated(mutant, source)
    if mutant.path.endswith(SCRIPT):
        LuaRuntime().compile(changed)
        assert changed != source
    else:
        assert ast.dump(ast.parse(changed)) != dumped(ROOT / mutant.path)


@functools.cache
def dumped(path: Path) -> str:
    return ast.dump(tree_of(path))


def test_the_tests_that_catch_a_mutant_are_there() -> None:
    absent = [
        (mutant.name, words)
        for mutant in MUTANTS
        for words in mutant.keyword.split(" or ")
        if not is_there(words.partition(" and ")[0], mutant.files)
    ]
    assert absent == []


def is_there(word: str, files: list[str]) -> bool:
    """Tell whether a test has a word in its name, or in an id that is a key of its table."""
    pattern = rf'(def|class) \w*{word}|"\w*{word}\w*":'
    return any(re.search(pattern, text_of(ROOT / file)) for file in files)


def test_names_of_mutants_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
