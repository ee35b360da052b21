"""The last commit before formats were kept, beside this one: forward and back, under load.

Its wheel has workers, senders and commands on the same nodes and the same broker.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes
from tests.conftest import eventually, made_once, trust_nodes
from tests.postgres import PostgresNode

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "9d40d29d"  # the commit; its headers and nodes have no number, and its schema is version 3
OLD, NEW = "old", "new"
# beside busy builds on one machine
PATIENCE = 300.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("rolling")]


@pytest.fixture(scope="session")
def old_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder that a wheel of the commit was unpacked to."""
    has_it = ["git", "-C", str(ROOT), "cat-file", "-e", f"{BEFORE}^{{commit}}"]
    if (
        not shutil.which("git")
        or subprocess.run(has_it, capture_output=True, check=False).returncode
    ):
        pytest.skip(f"the history of this copy does not have the commit {BEFORE}")

    def build(where: Path) -> None:
        sources, wheels = where / "sources", where / "wheels"
        sources.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", BEFORE], check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(sources)], input=archive.stdout, check=True)
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(wheels), str(sources)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            say = pytest.fail if os.environ.get("CI") else pytest.skip
            say(f"the wheel cannot be built: {(done.stdout + done.stderr)[-500:]}")
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(where / OLD)

    return made_once(tmp_path_factory, "rolling-wheel", build) / OLD


@dataclass
class Fleet:
    """Programs of two builds over the same servers. paths: of each build."""

    folder: Path
    paths: dict[str, Path]
    env: dict[str, str]
    notes: Redis
    stack: ExitStack
    workers: dict[str, WorkerProcess] = field(default_factory=dict)

    def env_of(self, build: str) -> dict[str, str]:
        return {**self.env, "ROLLING_BUILD": build, "PYTHONPATH": str(self.paths[build])}

    def begin(self, build: str, name: str, *command: str) -> WorkerProcess:
        """Launch a worker, or another command, which is killed in the end."""
        made = WorkerProcess(
            "rolling", name=name, env=self.env_of(build), cwd=self.folder,
            command=command or None, options=["--prefetch-multiplier", "4"],
        )  # fmt: skip
        self.stack.callback(made.kill)
        made.launch()
        return made

    def start(self, build: str, *names: str) -> None:
        """Return when these workers have run bodies beside all others."""
        before = self.ended(build)
        for name in names:
            self.workers[f"{build} {name}"] = self.begin(build, f"{build}-{name}")
        for name in names:
            self.workers[f"{build} {name}"].wait_ready(PATIENCE)
        eventually(lambda: self.ended(build) >= before + 20, PATIENCE)

    def end(self, build: str, *names: str) -> None:
        """End workers by a warm shutdown, which finishes what they have begun."""
        for name in names:
            worker = self.workers[f"{build} {name}"]
            worker.signal(15)
            assert worker.wait(PATIENCE) == 0, worker.output()

    def command(self, build: str, *words: str) -> str:
        """Return what a command of a build prints."""
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "rolling", "redlock", *words], cwd=self.folder,
            env={**os.environ, **self.env_of(build)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def see_commands(self) -> None:
        for build in (OLD, NEW):
            assert "gives no vote" not in self.command(build, "status")
            self.command(build, "locks")
            self.command(build, "waiters")

    def listed(self, name: str) -> list[list[str]]:
        lines: Any = self.notes.lrange(name, 0, -1)
        return [line.split() for line in lines]

    def ended(self, build: str) -> int:
        return sum(words[-1] == build for words in self.listed("ended"))


@contextmanager
def servers_of(kind: str, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Give the URLs of the lock nodes."""
    if kind == "redis":
        with embedded_nodes(3) as nodes:
            trust_nodes(nodes)
            yield [node.url for node in nodes]
    else:
        with PostgresNode(request.getfixturevalue("postgres_template"), fsync=False) as node:
            yield [node.url]


@pytest.fixture(params=["redis", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def fleet(request: pytest.FixtureRequest, old_build: Path, tmp_path: Path) -> Iterator[Fleet]:
    shutil.copy(Path(__file__).with_name("rolling.py"), tmp_path)
    with ExitStack() as stack:
        broker, notes = (stack.enter_context(EmbeddedNode()) for _ in range(2))
        nodes = stack.enter_context(servers_of(request.param, request))
        env = {
            "ROLLING_BROKER": broker.url, "ROLLING_NOTES": notes.url,
            "ROLLING_NODES": ",".join(nodes), "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        yield Fleet(tmp_path, {OLD: old_build, NEW: ROOT}, env, notes.client(), stack)


def see_builds(fleet: Fleet) -> None:
    """Return if each build runs its own files."""
    look = [sys.executable, "-c", "import celery_redlock; print(celery_redlock.__file__)"]
    for build, path in fleet.paths.items():
        env = {**os.environ, **fleet.env_of(build)}
        shown = subprocess.run(look, env=env, cwd=fleet.folder, check=True, capture_output=True)
        assert shown.stdout.decode().startswith(f"{path}/")


def test_both_builds_lock_side_by_side_forward_and_back(
    fleet: Fleet, request: pytest.FixtureRequest
) -> None:
    is_postgres = request.node.callspec.params["fleet"] == "postgresql"
    see_builds(fleet)
    if is_postgres:
        fleet.command(OLD, "setup")
    senders = [fleet.begin(build, f"{build}-sender", sys.executable, "rolling.py")
               for build in (OLD, NEW)]  # fmt: skip
    fleet.start(OLD, "a", "b")
    fleet.start(NEW, "a")
    fleet.see_commands()
    fleet.end(OLD, "a")
    fleet.start(NEW, "b")
    if is_postgres:  # the clients of the older version stay connected
        assert "moved" in fleet.command(NEW, "setup")
        fleet.see_commands()
    fleet.end(OLD, "b")
    fleet.start(OLD, "c")  # and a new one is served, too
    fleet.end(NEW, "a")
    fleet.start(OLD, "d")
    fleet.see_commands()
    fleet.end(NEW, "b")
    fleet.start(OLD, "e")
    fleet.notes.set("stop", "1")
    for sender in senders:
        assert sender.wait(PATIENCE) == 0, sender.output()
    see_all_ran_once(fleet)
    fleet.end(OLD, "c", "d", "e")


def see_all_ran_once(fleet: Fleet) -> None:
    """Return when all that was sent has run; fails for an overlap, and for a second run."""
    sent = {(kind, number) for kind, number in fleet.listed("sent")}
    last = {number.partition("-")[0]: number for (number,) in fleet.listed("last")}

    def runs(name: str) -> list[tuple[str, str]]:
        return [(words[0], words[2]) for words in fleet.listed(name)]

    def is_done() -> bool:
        ended = {*runs("ended")}
        return sent <= ended and all(("newest", number) in ended for number in last.values())

    eventually(is_done, PATIENCE)
    eventually(lambda: len(runs("ended")) == len(runs("begun")), PATIENCE)
    begun = Counter(runs("begun"))
    assert fleet.listed("overlaps") == []
    # a warm shutdown of Celery 5.7 may give back a message that is acknowledged early, as it begins
    twice = [run for run, times in begun.items() if times > 1]
    assert [run for run in twice if run[0] != "early"] == []
    assert len(twice) <= 10, twice
    assert {run for run in begun if run[0] != "newest"} == sent
    for build in (OLD, NEW):  # of each sender's last calls, in their order
        numbers = [int(number.partition("-")[2]) for kind, number in runs("begun")
                   if kind == "newest" and number.startswith(build)]  # fmt: skip
        assert numbers == sorted(numbers)
    print(len(begun), "runs,", dict(Counter(words[-1] for words in fleet.listed("begun"))))
