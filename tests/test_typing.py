"""mypy and pyright pass `typing/api.py`, and refuse each marked line of `typing/refused.py`."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import json
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from celery_redlock import CallOptions, LockedTask, SettingsError, TaskOptions
from celery_redlock.tasks.settings.options import OPTION, TaskLockOptions
from tests.pages import ROOT

FOLDER = Path(__file__).with_name("typing")
Findings = dict[int, str]  # by line


@functools.cache
def printed_by_mypy() -> str:
    """Return what it says of all files: one run reads the package once."""
    files = [str(path) for path in sorted(FOLDER.glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--no-pretty", *files]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    assert f"(checked {len(files)} source files)" in printed, printed
    return printed


def of_mypy(path: Path) -> Findings:
    lines = re.findall(rf"^.*{path.name}:(\d+): error: (.*)$", printed_by_mypy(), re.MULTILINE)
    return {int(number): text for number, text in lines}


def of_pyright(path: Path) -> Findings:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ended = subprocess.run([*command, str(path)], capture_output=True, text=True, cwd=ROOT)
    found = json.loads(ended.stdout)["generalDiagnostics"]
    return {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in found
        if one["severity"] == "error"
    }


WITH_PYRIGHT = pytest.mark.skipif(find_spec("pyright") is None, reason="needs pyright")
CHECKERS = pytest.mark.parametrize(
    "checker", [of_mypy, pytest.param(of_pyright, marks=[WITH_PYRIGHT, pytest.mark.slow])]
)
pytestmark = pytest.mark.xdist_group("typing")  # mypy runs once


@CHECKERS
def test_what_the_pages_allow_passes(checker: Callable[[Path], Findings]) -> None:
    assert checker(FOLDER / "api.py") == {}


@CHECKERS
def test_a_wrong_name_and_a_wrong_value_are_refused(checker: Callable[[Path], Findings]) -> None:
    path = FOLDER / "refused.py"
    lines = path.read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    found = checker(path)
    assert marked - found.keys() == set(), "they pass"
    assert {number: found[number] for number in found.keys() - marked} == {}


def members(kind: Any) -> set[Any]:
    """Return the members of a union and of its literals, of any other type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType, typing.Literal):
        return {one for inner in typing.get_args(kind) for one in members(inner)}
    return {kind}


def callable_of(kind: Any) -> bool:
    return typing.get_origin(kind) is collections.abc.Callable


@pytest.mark.parametrize(
    ("kind", "prefix"), [(TaskOptions, "lock_"), (LockedTask, "lock_"), (CallOptions, "")]
)
def test_what_type_checkers_read_has_each_option_of_the_table(kind: type, prefix: str) -> None:
    of_table = {f"{prefix}{one.name}": one.type for one in dataclasses.fields(TaskLockOptions)}
    declared = [name for name in typing.get_type_hints(kind) if name.startswith(prefix)]
    lines = [f"    {name}: {of}" for name, of in of_table.items() if name not in declared]
    assert not lines, "\n".join([f"add to {kind.__name__}, with the type of the check:", *lines])
    assert declared == list(of_table)


def test_an_option_has_one_type_wherever_it_is_set() -> None:
    declared = typing.get_type_hints(LockedTask)
    of_task, of_call = typing.get_type_hints(TaskOptions), typing.get_type_hints(CallOptions)
    assert {name: kind for name, kind in declared.items() if name.startswith("lock_")} == of_task
    for name, kind in of_call.items():  # those of the task that travel in a message
        of_both = {one for one in members(of_task[f"lock_{name}"]) if not callable_of(one)}
        assert members(kind) == of_both, name


OF_CALL = {name: members(kind) for name, kind in typing.get_type_hints(CallOptions).items()}
WORDS = {name: {one for one in OF_CALL[name] if isinstance(one, str)} for name in OF_CALL}


@pytest.mark.parametrize("name", [name for name in OPTION if WORDS[name]])
def test_the_words_of_a_type_are_those_of_its_check(name: str) -> None:
    with pytest.raises(SettingsError) as refused:
        OPTION[name].check("task", name, "no such word")
    assert set(re.findall(r"'(\w+)'", refused.value.hint)) == WORDS[name]


def test_a_declared_type_is_no_value() -> None:
    assert not [name for name in OPTION if hasattr(LockedTask, f"lock_{name}")]
