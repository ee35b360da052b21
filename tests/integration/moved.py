"""The app of those who came from other plugins: its tasks are what their guide says."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from celery import current_task, shared_task

from celery_redlock import LockedTask, current_lock
from tests.integration.app import LOG, app, write

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "migrate.md"


def spellings() -> list[str]:
    """Return each spelling of the column "here", once."""
    rows = [line.split(" | ") for line in GUIDE.read_text().splitlines() if line.startswith("| ")]
    found = [match[1] for row in rows if (match := re.fullmatch(r"`(.*)`", row[1]))]
    return sorted(set(found))


def name_of(spelling: str) -> str:
    return f"moved.{spellings().index(spelling)}"


def body(a: Any, b: int = 0, c: int = 0, sku: str = "s") -> str | None:
    """Return the resource that is held."""
    lock = current_lock()
    write("begin", current_task.name)
    end = time.monotonic() + 120
    while a == "stay" and not LOG.with_name(current_task.name).exists() and time.monotonic() < end:
        time.sleep(0.02)
    return lock and lock.resource


def declare(spelling: str) -> None:
    if spelling.startswith("with "):
        return
    whole = re.fullmatch(r"(@app\.task|@shared_task)\((.*)\)", spelling)
    options = eval(f"dict({whole[2] if whole else spelling})", {"LockedTask": LockedTask})
    how = {"name": name_of(spelling), "base": LockedTask, "shared": False, **options}
    if whole and whole[1] == "@shared_task":
        del how["shared"]
        shared_task(**how)(body)
    else:
        app.task(**how)(body)


for one in spellings():
    declare(one)
