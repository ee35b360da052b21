"""Every point of some code at which CPython runs signal handlers, and so may raise or re-enter."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import celery_redlock

PACKAGE = Path(celery_redlock.__file__).parent
LOCK = PACKAGE / "lock"
# after these instructions, and at a function's begin; CPython 3.11: _Py_HandlePending in ceval.c
CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
TOOL = 4  # of `sys.monitoring`, and of no other tool here


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


class Points:
    """Counts the points that this thread passes, and does a thing at one of them.

    at: which point, from 1 on. files: in which to look for points. begin: the function that is to
    be entered before the first one counts.
    """

    def __init__(
        self, at: int, do: Callable[[], object], files: tuple[str, ...], begin: str
    ) -> None:
        self._at, self._do, self._files, self._begin = at, do, files, begin
        self._passed, self._begun, self._thread = 0, False, threading.get_ident()

    @property
    def was_reached(self) -> bool:
        return self._passed >= self._at

    def counts_in(self, code: CodeType) -> bool:
        """Return whether this thread's points in a function count, which it enters or is in."""
        if self.was_reached or threading.get_ident() != self._thread:
            return False
        self._begun = self._begun or code.co_name == self._begin
        return self._begun and self.has(code)

    def has(self, code: CodeType) -> bool:
        """Return whether points count there. What `__del__` raises reaches nobody."""
        return code.co_name != "__del__" and name_of_file(code.co_filename) in self._files

    def passes(self) -> None:
        """Count a point of this thread."""
        self._passed += 1
        if self.was_reached:
            self._do()


def interrupt(
    run: Callable[[], object], at: int, do: Callable[[], object], files: tuple[str, ...], begin: str
) -> bool:
    """Run something, and do another thing at one of the points where a signal may; False: none."""
    points = Points(at, do, files, begin)
    with watching(points):
        run()
    return points.was_reached


@functools.cache
def name_of_file(path: str) -> str:
    """Return a file's name if it is one of the package; redis-py has a `connection.py`, too."""
    file = Path(path)
    return file.name if PACKAGE in file.parents else ""


@functools.cache
def names_of(code: CodeType) -> dict[int, str]:
    """Return the instructions of a function by their offset."""
    return {one.offset: one.opname for one in dis.get_instructions(code)}


@contextlib.contextmanager
def traced(points: Points) -> Iterator[None]:
    """Pass a point at the instruction after each one that checks; on Python 3.11."""

    def watch(names: dict[int, str]) -> Callable[[FrameType, str, Any], Any]:
        """Return what is told of each instruction of a frame."""
        last = "RESUME"

        def look(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                before, last = last, names[frame.f_lasti]
                if before.startswith(CHECKS) and not points.was_reached:
                    points.passes()
            return None if points.was_reached else look

        return look

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        if not points.counts_in(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return watch(names_of(frame.f_code))

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def monitored(points: Points) -> Iterator[None]:
    """Pass a point in each instruction that checks; from Python 3.12 on.

    There a trace function gives no points: of instructions it is told only from the next
    `settrace` on (3.12), or until another thread, which is not traced, runs the same code (3.13).
    And in the instruction itself is where a signal's handler raises: on 3.14 `with mutex:` is a
    call, whose exception comes after the mutex is taken, and before the block that gives it back.
    """
    monitoring = sys.monitoring
    events = monitoring.events
    inside = events.PY_RESUME | events.CALL | events.JUMP  # C_RETURN comes with CALL
    watched: set[CodeType] = set()

    def enter(code: CodeType, offset: int) -> object:
        if points.counts_in(code) and code not in watched:
            watched.add(code)
            monitoring.set_local_events(TOOL, code, inside)
        return check(code)

    def check(code: CodeType, *_: object) -> object:
        if points.counts_in(code):
            points.passes()
        return None

    def jump(code: CodeType, offset: int, destination: int) -> object:
        return check(code) if destination < offset else None

    callbacks = {
        events.PY_START: enter, events.PY_RESUME: check, events.C_RETURN: check, events.JUMP: jump,
    }  # fmt: skip
    monitoring.use_tool_id(TOOL, "points")
    for event, callback in callbacks.items():
        monitoring.register_callback(TOOL, event, callback)
    monitoring.set_events(TOOL, events.PY_START)
    try:
        yield
    finally:
        monitoring.set_events(TOOL, 0)
        for code in watched:
            monitoring.set_local_events(TOOL, code, 0)
        for event in callbacks:
            monitoring.register_callback(TOOL, event, None)
        monitoring.free_tool_id(TOOL)


watching = monitored if sys.version_info >= (3, 12) else traced
