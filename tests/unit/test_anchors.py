"""Each error, and each log line of level ERROR, ends with the passage that explains it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_redlock
from celery_redlock import anchors, errors
from celery_redlock.errors import NEVER_ACQUIRED, LockLost, RedlockError, SettingsError
from celery_redlock.operate.cli.explain import read_passages
from tests.sources import ONE_PROCESS, lines_of, nodes_of, text_of
from tests.unit.test_errors import ERRORS

ROOT = Path(celery_redlock.__file__).parents[1]
MODULES = sorted((ROOT / "celery_redlock").rglob("*.py"))
ANCHORS = {
    name: value for name, value in vars(anchors).items() if name.isupper() and name[0] != "_"
}
AT_ERROR = {"error", "exception", "critical", "log"}  # log: of a level that is found at run time
_HEADING = re.compile(r"anchors\.|passage_of\(")
_LOGS = re.compile(r"logger\.|logging\.ERROR")
# These lines end with the text of a RedlockError, which names its own heading.
END_WITH_AN_ERROR = {
    "%s runs WITHOUT its lock: %s", "no lock can be acquired: %s",
    "beat sends no periodic tasks until the lock nodes answer: %s",
}  # fmt: skip


@pytest.mark.parametrize("name", ANCHORS)
def test_an_anchor_is_the_command_that_prints_its_passage(name: str) -> None:
    celery_, redlock_, explain_, code = ANCHORS[name].strip("`").split()
    assert (celery_, redlock_, explain_) == ("celery", "redlock", "explain")
    assert read_passages()[code].text.count("\n") > 2


def test_no_anchor_is_left_over() -> None:
    sources = "".join(text_of(path) for path in MODULES if path.stem != "anchors")
    assert [name for name in ANCHORS if f"anchors.{name}" not in sources] == []


@pytest.mark.parametrize(
    "error",
    [*ERRORS, LockLost("r", NEVER_ACQUIRED), RedlockError("it is the wrong thread")],
    ids=lambda error: type(error).__name__,
)
def test_the_text_of_an_error_ends_with_a_heading(error: RedlockError) -> None:
    _, _, anchor = str(error).rpartition(" See ")
    assert anchor in ANCHORS.values(), str(error)
    assert str(error).count(" See ") == 1


def test_each_public_error_is_tried_and_makes_its_text_by_the_root() -> None:
    public = {vars(errors)[name] for name in errors.__all__}
    assert public - {type(error) for error in ERRORS} == {RedlockError, errors.NotAcquired}
    for one in public - {LockLost, RedlockError}:
        assert "__str__" not in vars(one), one


@pytest.mark.parametrize("hint", ["must be above 0", "is wrong. It must be above 0."])
def test_a_sentence_before_the_heading_has_one_full_stop(hint: str) -> None:
    assert "above 0. See `celery redlock" in str(SettingsError("app", "redlock_ttl", "0", hint))


def test_a_question_before_the_heading_has_none() -> None:
    error = SettingsError(
        "app", "redlock_tll", "0", "is not a setting; did you mean 'redlock_ttl'?"
    )
    assert "'redlock_ttl'? See `celery redlock" in str(error)


def lines_at_error(function: ast.AST) -> Iterator[ast.Call]:
    """Give each call of a function that writes, or prepares, a log line of level ERROR.

    It calls the logger, makes a `partial` of the logger's method, or passes the level on.
    """
    for call in ast.walk(function):
        if isinstance(call, ast.Call):
            words = {ast.unparse(word) for word in (call.func, *call.args)}
            if words & {"logging.ERROR", *(f"logger.{method}" for method in AT_ERROR)}:
                yield call


def words_with_a_heading(function: ast.FunctionDef) -> set[str]:
    """Return the names of a function that hold a heading: a parameter `see`, or an assignment."""
    found = {one.arg for one in function.args.args if one.arg == "see"}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                found |= {
                    ast.unparse(name) for name, made in pairs if _HEADING.search(ast.unparse(made))
                }
    return found


def unnamed_lines(path: Path) -> tuple[int, list[int]]:
    """Return how many lines of level ERROR a module has, and where one has no heading.

    A line has one if one of its arguments is, or was made with, a constant of `anchors`.
    """
    seen, unnamed = set(), []
    for function in nodes_of(path):
        if isinstance(function, ast.FunctionDef) and _LOGS.search(lines_of(path, function)):
            named = words_with_a_heading(function)
            for call in lines_at_error(function):
                words = [ast.unparse(word) for word in call.args]
                texts = {word.value for word in call.args if isinstance(word, ast.Constant)}
                ends_well = any(word in named or word.startswith("anchors.") for word in words)
                if not ends_well and not texts & END_WITH_AN_ERROR:
                    unnamed.append(call.lineno)
                seen.add(call.lineno)
    return len(seen), unnamed


@ONE_PROCESS
def test_each_line_of_level_error_names_a_heading() -> None:
    found = {path.relative_to(ROOT): unnamed_lines(path) for path in MODULES}
    assert {path: lines for path, (_, lines) in found.items() if lines} == {}
    assert sum(seen for seen, _ in found.values()) >= 12
