"""Every point of some code at which CPython runs signal handlers, and so may raise or re-enter."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import celery_redlock

LOCK = Path(celery_redlock.__file__).parent / "lock"
# after these instructions, and at a function's begin; CPython: _Py_HandlePending in ceval.c
CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


def files_below_the_engine() -> tuple[str, ...]:
    """Return the names of the files with which a thread reads, writes and polls."""
    folders = [LOCK / name for name in ("platform", "transport", "server")]
    found = {path.name for folder in folders for path in folder.glob("*.py")}
    assert len(found) > 10
    return tuple(sorted(found - {"__init__.py", "subscriber.py"}))  # that one has its own thread


def files_of_the_engine() -> tuple[str, ...]:
    """Return the names of the files with which a thread acquires and releases."""
    folders = [LOCK, LOCK / "model", LOCK / "engine"]
    found = {path.name for folder in folders for path in folder.glob("*.py")}
    assert {
        "lock.py",
        "releaser.py",
        "acquisition.py",
        "callers.py",
        "inbox.py",
        "retry.py",
    } <= found
    return tuple(sorted(found - {"__init__.py"}))


@functools.cache
def names_of(code: CodeType) -> dict[int, str]:
    """Return the instructions of a function by their offset."""
    return {one.offset: one.opname for one in dis.get_instructions(code)}


def interrupt(
    run: Callable[[], object], at: int, do: Callable[[], object], files: tuple[str, ...], begin: str
) -> bool:
    """Run something, and do another thing at one of the points where a signal may; False: none.

    at: which point, from 1 on. files: in which to look for points. begin: the function that is to
    be entered before the first one counts.
    """
    passed, begun = 0, False
    last: dict[FrameType, str] = {}

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal passed
        if event == "opcode":
            before = last.get(frame, "RESUME")
            last[frame] = names_of(frame.f_code)[frame.f_lasti]
            passed += before.startswith(CHECKS)
            if passed == at:
                sys.settrace(None)
                passed += 1
                do()
        elif event == "return":
            last.pop(frame, None)
        return look if passed < at else None

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal begun
        begun = begun or frame.f_code.co_name == begin
        if not begun or Path(frame.f_code.co_filename).name not in files or passed >= at:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return look

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return passed >= at
