"""The page of log messages has each line of the package that a log shows by default, as it is."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import celery_redlock
from celery_redlock import Redlock
from celery_redlock.lock.node_status import shared_settings_of
from celery_redlock.lock.reports import NodeList, NodeStatus
from celery_redlock.operate.lints import lint
from celery_redlock.operate.start_report import open_decisions
from celery_redlock.tasks.startup import _log_report
from tests import fork_server
from tests.sources import ONE_PROCESS, lines_of, nodes_of, text_of, tree_of
from tests.unit.test_lints import shop_of

PACKAGE = Path(celery_redlock.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "reference" / "log-messages.md").read_text(encoding="utf-8")
AT_DEBUG = {
    "copy_astray", "queue_unknown", "run_not_due",
    "worker_lease_joined", "worker_lease_left", "worker_lease_unsure", "messages_untold",
}  # fmt: skip
BY_FUNCTION = {"lint", "left_open", "nodes_answer"}  # their whole line is "%s"
# words of redis-py, the system and RabbitMQ, and how each SettingsError and each deferral begins
OF_OTHERS = (
    r"Error 111 connecting to \S+ Connection refused", r"\[Errno \d+\] [A-Z][a-z ]+",
    r"[\w ':]+: \w+=\S+: \.\.\.", r"[\w.]+\[\S+\] on \S+",
    r"(?:lock '[\w:-]+' (?:is|has)|waits) (.+)", r"b:6379, c:6379: Connection refused",
)  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))
pytestmark = ONE_PROCESS
# the ways in which the package names the event of a line
_EVENT = re.compile(r"(?:'event': |log_extra\(|_warn\(|_log\()\s*'(\w+)'")
_LEVEL = re.compile(r"logger\.(\w+)\(")
_LOGS = re.compile(r"logger\.|_warn\(")
_ROW = re.compile(r"^\| (?P<lines>`.+?`) \| `(?P<event>\w+)` \|", re.MULTILINE)
_HOLE = re.compile(r"(%(?:\.\d)?[srdf])")
_FILLS = {"s": "(.+?)", "r": r"(['\"].+['\"]|\w+\(.+\))", "d": r"(\d+)", "f": r"(\d+\.\d+)"}
_WORD = re.compile(r"[A-Za-z]{2,}")


def rows() -> list[tuple[str, str]]:
    """Return each line of the page, and its event."""
    found = [(row["event"], row["lines"]) for row in _ROW.finditer(PAGE)]
    return [(event, line) for event, lines in found for line in re.findall("`([^`]+)`", lines)]


@functools.cache
def formats() -> list[tuple[str, set[str]]]:
    """Return each format of a line in the code, with the events that its function names."""
    return [found for path in MODULES for found in formats_in(path)]


def formats_in(path: Path) -> Iterator[tuple[str, set[str]]]:
    if not _LOGS.search(text_of(path)):
        return
    shared = {
        one.targets[0].id: one.value
        for one in tree_of(path).body
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    }
    functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
    for node in functions:
        source = ast.unparse(node) if _LOGS.search(lines_of(path, node)) else ""
        events = set(_EVENT.findall(source))
        if _LOGS.search(source) and not events & AT_DEBUG:
            named = [shared.get(one.id) for one in ast.walk(node) if isinstance(one, ast.Name)]
            for text in [*texts_of(node), *(text for one in named for text in texts_of(one))]:
                if len(text.split()) > 2 and (_HOLE.search(text) or len(text.split()) > 8):
                    yield text, events


def events_in(path: Path) -> set[str]:
    """Return the events that a file names."""
    names_any = re.search(r"\"event\"|log_extra\(|_warn\(|_log\(", text_of(path))
    return set(_EVENT.findall(ast.unparse(tree_of(path)))) if names_any else set()


def texts_of(node: ast.AST | None) -> Iterator[str]:
    """Yield the texts in a node, without f-strings and docstrings."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif node is not None and not isinstance(node, ast.JoinedStr | ast.Expr):
        for one in ast.iter_child_nodes(node):
            yield from texts_of(one)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from texts_of(node.value)


def template_of(node: ast.AST) -> re.Pattern[str] | None:
    """Return what a text with two words or more may be once it is filled in; None: no such text."""
    if isinstance(node, ast.JoinedStr):
        parts = [str(one.value) if isinstance(one, ast.Constant) else "" for one in node.values]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = [node.value]
    else:
        return None
    has_words = len(_WORD.findall(" ".join(parts))) > 1
    return re.compile("".join(re.escape(one) or "(.*)" for one in parts)) if has_words else None


def templates() -> Iterator[re.Pattern[str]]:
    """Yield what each text of the package with two words or more may be once it is filled in."""
    yield from filter(None, (template_of(node) for path in MODULES for node in nodes_of(path)))


def words_of(module: str, function: str) -> list[re.Pattern[str]]:
    """Return what each text with two words or more in a function may be once it is filled in."""
    (tree,) = (
        node
        for node in nodes_of(PACKAGE / module)
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    body = [node for part in tree.body if not isinstance(part, ast.Expr) for node in ast.walk(part)]
    parts = {id(one) for node in body if isinstance(node, ast.JoinedStr) for one in node.values}
    return [*filter(None, (template_of(node) for node in body if id(node) not in parts))]


def are_known(parts: Sequence[str], known: list[re.Pattern[str]]) -> bool:
    """Return whether the package has the words of each part that has more than three."""
    return all(
        any((found := one.fullmatch(part)) and are_known(found.groups(), known) for one in known)
        for part in parts
        if len(_WORD.findall(part)) > 3
    )


def pattern_of(text: str) -> re.Pattern[str]:
    """Return what a line of this format looks like; the page says once how lines at ERROR end."""
    text = text.replace("%s%s", "%s")
    *parts, last = _HOLE.split(re.sub(r"\. See %s$", "", text))
    filled = [_FILLS[one[-1]] if place % 2 else re.escape(one) for place, one in enumerate(parts)]
    return re.compile("".join([*filled, re.escape(last)]))


def test_the_page_has_each_event_and_each_line_of_the_code() -> None:
    written = set().union(*map(events_in, MODULES))
    assert {"lock_lost", "run_deferred", "state_not_read", "node_evicts"} <= written
    assert {event for event, _ in rows()} == written - AT_DEBUG
    found = formats()
    assert len(found) > 45
    missing = [
        text
        for text, events in found
        if not any(
            pattern_of(text).fullmatch(line) and (event in events or not events)
            for event, line in rows()
        )
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("errors.py", "describe_taken"),
        ("tasks/execution/deferral.py", "decide"),
        ("tasks/execution/deferral.py", "describe_refusal"),
        ("tasks/execution/outcomes.py", "_describe_wait"),
    ],
)
def test_the_page_has_each_way_in_which_a_refusal_is_told(module: str, function: str) -> None:
    """The lines of a deferral and a skip have one format each, and say different things."""
    told = [
        text
        for row in _ROW.finditer(PAGE)
        if row["event"] in {"run_deferred", "run_skipped"}
        for text in re.findall("`([^`]+)`", PAGE[row.start() : PAGE.index("\n", row.start())])
    ]
    wanted = words_of(module, function)
    assert wanted
    missing = [one.pattern for one in wanted if not any(map(one.search, told))]
    # no error is neither taken nor without a quorum
    assert [one for one in missing if one != re.escape("not acquired")] == []


def test_what_the_page_leaves_out_is_logged_at_debug() -> None:
    found = {
        event: _LEVEL.findall(source)
        for path in MODULES
        if _LOGS.search(text_of(path))
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef)
        for source in [ast.unparse(node)]
        for event in AT_DEBUG & set(_EVENT.findall(source))
    }
    assert found == {event: ["debug"] for event in AT_DEBUG}


def test_the_settings_of_a_line_are_those_of_a_client_of_as_many_nodes() -> None:
    (line,) = (line for event, line in rows() if event == "settings_differ")
    samples = re.findall(r"max_ttl=\S+ restart_guard=\S+ nodes=(\d)", line)
    assert len(samples) == 2
    for nodes in samples:
        with Redlock([f"redis://node-{number}" for number in range(int(nodes))]) as redlock:
            assert shared_settings_of(redlock.session) in line


def test_each_line_of_the_page_has_the_words_of_the_code() -> None:
    patterns = [pattern_of(text) for text, _ in formats()]
    known = [*templates(), *map(re.compile, OF_OTHERS)]
    for event, line in rows():
        if event not in BY_FUNCTION:
            fitting = [found for one in patterns if (found := one.fullmatch(line))]
            assert fitting, f"the code writes no such line: {line}"
            # of several formats, that with the most words of its own
            filled = min((one.groups() for one in fitting), key=lambda parts: len("".join(parts)))
            assert are_known(filled, known), line


@pytest.mark.parametrize(
    "nodes",
    [
        [NodeStatus("a", votes=True), *(NodeStatus(f"{one}:6379", "refused") for one in "bc")],
        [NodeStatus(one, silent_for=61.0) for one in "abc"],
        [NodeStatus(one, votes=True) for one in "abc"],
    ],
)
def test_the_lines_about_the_nodes_at_a_start_are_on_the_page(
    nodes: list[NodeStatus], caplog: pytest.LogCaptureFixture
) -> None:
    voting = sum(node.votes for node in nodes)
    with caplog.at_level("INFO"):
        _log_report(NodeList("strict", 2, voting, tuple(nodes), 61.0))
    (record,) = caplog.records
    line = record.getMessage().replace("refused", "...")
    line, _, _ = line.partition(" See `")
    told = [one for event, one in rows() if event == "nodes_answer"]
    assert line.rstrip(".") in [one.rstrip(".") for one in told]


def test_the_lines_about_settings_are_those_of_an_app() -> None:
    app = shop_of({"redlock_nodes": ["redis://a"]}, {"shop.take": {"lock_limit": 2}})
    found = [*lint(app), *open_decisions(app)]
    for event, line in rows():
        if event in {"lint", "left_open"}:
            assert [one for one in found if str(one).startswith(line.removesuffix("..."))], line


CONFIGURED = """
import logging
from celery_redlock.operate.control import is_logged

another = logging.getLogger("another")
assert not another.hasHandlers()
exec(PAGE)
assert not another.disabled
for name in ("celery.app.trace", "celery_redlock.lock.lock", "shop.tasks", "another"):
    logging.getLogger(name).info("a line")
assert is_logged()
"""


def test_what_the_page_gives_an_application_that_sets_up_logging_writes_our_lines() -> None:
    (code,) = [
        code for code in re.findall("```python\n(.+?)```", PAGE, re.DOTALL) if "LOGGING" in code
    ]
    command = [sys.executable, "-c", CONFIGURED.replace("PAGE", repr(code))]
    done = fork_server.run(command, check=True)
    lines = [line.split(" ", 2)[2] for line in done.stderr.splitlines()]
    names = ("celery.app.trace", "celery_redlock.lock.lock", "shop.tasks")
    assert lines == [f"INFO {name} a line" for name in names]
