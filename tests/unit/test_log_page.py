"""The page of log messages has each event of the package that a log shows by default."""

from __future__ import annotations

import re
from pathlib import Path

import celery_redlock

PACKAGE = Path(celery_redlock.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reference" / "log-messages.md"
AT_DEBUG = {"copy_astray", "queue_unknown"}
# the ways in which the package names the event of a line
_EVENT = re.compile(r'(?:"event": |log_extra\(|_warn\(|_log\()\s*"(\w+)"')


def test_every_event_is_on_the_page_of_log_messages() -> None:
    written = {
        event for path in PACKAGE.rglob("*.py") for event in _EVENT.findall(path.read_text())
    }
    assert {"lock_lost", "run_deferred", "state_not_read", "node_evicts"} <= written
    rows = r"^\| (?:INFO|WARNING|ERROR) \| `[^`]+` \| `(\w+)` \|"
    told = set(re.findall(rows, PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert told == written - AT_DEBUG
