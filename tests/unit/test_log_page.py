"""The page of log messages has each event of the package that a log shows by default."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import celery_redlock

PACKAGE = Path(celery_redlock.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reference" / "log-messages.md"
AT_DEBUG = {"copy_astray", "queue_unknown", "run_not_due"}
# the ways in which the package names the event of a line
_EVENT = re.compile(r'(?:"event": |log_extra\(|_warn\(|_log\()\s*"(\w+)"')


def test_every_event_is_on_the_page_of_log_messages_with_its_text() -> None:
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    written = {event for source in sources for event in _EVENT.findall(source)}
    assert {"lock_lost", "run_deferred", "state_not_read", "node_evicts"} <= written
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    rows = r"^\| `([^`]+)` \| `(\w+)` \|"
    told = re.findall(rows, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {event for _, event in told} == written - AT_DEBUG
    assert [text for text, _ in told if text not in texts] == []
