"""Workers and callers of two builds of the package: an earlier one, and this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import celery_redlock
from celery_redlock.testing import WorkerProcess
from tests.conftest import eventually
from tests.integration.conftest import ROOT, Stage

ARCHIVE = Path(__file__).parent / "earlier" / "celery_redlock.tar.xz"


@dataclass(frozen=True)
class Build:
    """One build. path: the folder of its package. hands_off: whether its releases name waiters."""

    name: str
    path: Path
    hands_off: bool

    @property
    def env(self) -> dict[str, str]:
        """The environment in which a program imports it; the program's folder must be another."""
        return {"PYTHONPATH": os.pathsep.join([str(self.path), str(ROOT)])}

    def check(self, told: dict[str, object]) -> None:
        """Fail if a program has imported another build. told: `either_build.BUILD`."""
        file = self.path / "celery_redlock" / "__init__.py"
        assert told == {"file": str(file), "hands_off": self.hands_off}


THIS = Build("this", Path(celery_redlock.__file__).parents[1], hands_off=True)


def start_worker(stage: Stage, build: Build, name: str, queue: str = "celery") -> WorkerProcess:
    """Start a worker of a build, as `Stage.worker` starts one."""
    made = WorkerProcess(
        "tests.integration.either_build",
        name=name,
        queues=[queue],
        env={**stage.env, **build.env},
        cwd=stage.log.parent,
    )
    stage.stack.push(made)
    stage.stack.callback(made.kill)
    made.start()
    (line,) = [line for line in stage.lines("build") if line.key == name]
    build.check(line.more)
    return made


class Caller:
    """A process that takes the lock of a key by itself. urls: of the nodes."""

    def __init__(self, stage: Stage, build: Build, key: str, urls: Sequence[str] = ()) -> None:
        words = [key, *(urls or [node.url for node in stage.nodes])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.either_caller", *words],
            env={**os.environ, **stage.env, **build.env},
            cwd=stage.log.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._pool = stage.stack.enter_context(ThreadPoolExecutor(1))  # waits for one reply a time
        stage.stack.callback(self._end)
        build.check(json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def do(self, word: str) -> Future[float]:
        """Let it do what a word says; return when that is done: a monotonic second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._pool.submit(lambda: float(self._read()))

    def _end(self) -> None:
        self._process.kill()
        with self._process:  # closes its pipes
            pass


def see_subscribed(stage: Stage, key: str, count: int = 1) -> None:
    """Return when so many clients hear of the releases of a key, by every node."""
    channel = f"{{redlock}}:wake:k:{key}"
    for node in stage.nodes:
        client = node.client()
        eventually(lambda client=client: client.pubsub_numsub(channel)[0][1] >= count)
