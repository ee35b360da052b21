"""Stories that a process of its own tells, with or without gevent: each a fork of one of a few.

A story is the text of a program, which leaves a value as `told`. gevent must patch a process before
anything else is imported. So one process for each way to patch does that once, imports the package,
and forks for each story: `storyteller.py`. One without gevent is a fork of `tests.fork_server`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from tests import fork_server

ROOT = Path(__file__).resolve().parents[2]
TELLER = "tests.contract.storyteller"
PLAIN = "without gevent"
UNPATCHED, GEVENT = "", "patch_all()"
ENDS_BY = 200.0  # s: for a story that hangs
TOGETHER = pytest.mark.xdist_group("stories")  # in one process of the test run
IMPORTS = """
import json, os, random, time
from celery_redlock import Redlock, LockTaken
from celery_redlock.lock.node_status import ask_nodes
"""
FLOWS = """
import gevent
spawn, kill, sleep, join = gevent.spawn, gevent.kill, gevent.sleep, gevent.joinall
Exit = gevent.GreenletExit
"""
# CPython 3.11 can crash in _PyIO_Fini at its end if daemon threads are left: one run in 40
END = "\nprint(json.dumps(told), flush=True)\nos._exit(0)\n"


class Story:
    """A story that is being told."""

    def __init__(
        self, folder: Path, patch: str, story: str, environment: Mapping[str, str]
    ) -> None:
        self._said, self._errors = folder / "said", folder / "errors"
        self._said.touch()
        self._is_over = False
        self._teller = _teller(patch, os.getpid())
        request = {"story": IMPORTS + FLOWS + story + END, "environment": dict(environment)}
        self._teller.ask({**request, "said": str(self._said), "errors": str(self._errors)})

    def said(self) -> str:
        """Return what it has printed so far."""
        return self._said.read_text()

    def told(self) -> Any:
        """Return the value of what it leaves as `told`, once it is over."""
        status, self._is_over = self._teller.answer(), True
        assert status == 0, self._errors.read_text()
        return json.loads(self.said().splitlines()[-1])

    def end(self) -> None:
        """End it, and its teller, unless it is over."""
        if not self._is_over:
            self._teller.stop()
            _teller.cache_clear()


@contextlib.contextmanager
def begun(patch: str, story: str, environment: Mapping[str, str] | None = None) -> Iterator[Story]:
    """Give a story that has begun. patch: of `gevent.monkey`. environment: more variables of it."""
    with tempfile.TemporaryDirectory(prefix="story-") as folder:
        running = Story(Path(folder), patch, story, environment or {})
        try:
            yield running
        finally:
            running.end()


def tell(patch: str, story: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run a story; return the value of what it leaves as `told`."""
    if patch == PLAIN:
        command = [sys.executable, "-c", IMPORTS + story + END]
        done = fork_server.run(command, timeout=ENDS_BY, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
    with begun(patch, story, environment) as running:
        return running.told()


class _Teller:
    """A process that tells one story after the other, each in a fork."""

    def __init__(self, patch: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", TELLER, patch], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self._output: IO[bytes] = self._process.stdout

    def ask(self, request: Mapping[str, object]) -> None:
        self._input.write(json.dumps(request).encode() + b"\n")
        self._input.flush()

    def answer(self) -> int:
        """Return the exit code of the story."""
        if not select.select([self._output], [], [], ENDS_BY)[0]:
            raise TimeoutError("a story does not end")
        return int(self._output.readline())

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()


@functools.cache
def _teller(patch: str, pid: int) -> _Teller:
    """Return the process of this one that patches so. pid: of this process."""
    made = _Teller(patch)
    atexit.register(lambda: os.getpid() == pid and made.stop())
    return made
