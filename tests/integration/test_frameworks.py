"""The apps below `examples/`, started as a user starts them, on real servers and real workers."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import NODE_TIMEOUT, eventually
from tests.integration.conftest import ROOT, overlaps
from tests.pages import on_servers

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
CELERY = (sys.executable, "-m", "celery")
WORKER = ("worker", "--concurrency", "4", "--loglevel", "INFO")
PATIENT = f"\napp.conf.redlock_node_timeout = {NODE_TIMEOUT}\n"  # as the machine needs it

# Takes the place of what stands for the reader's own slow code. A body waits for the test's word.
OWN_CODE = """
import json, pathlib, time

FOLDER = pathlib.Path(__file__).resolve().parent

def write(what, key):
    line = json.dumps([what, key, time.monotonic()])
    with (FOLDER / "lines").open("a") as file:
        file.write(line + "\\n")

def work(key):
    write("begin", key)
    while not (FOLDER / f"go-{key}").exists():
        time.sleep(0.02)
    time.sleep(0.02)
    write("end", key)
"""


@dataclass
class Example:
    """A copy of one example, with servers that are there. folder: where it is."""

    folder: Path
    broker: EmbeddedNode
    nodes: list[EmbeddedNode]
    stack: ExitStack
    env: dict[str, str] = field(default_factory=dict)

    def append(self, file: str, text: str) -> None:
        """Add lines to a file of the copy."""
        path = self.folder / file
        path.write_text((path.read_text() if path.exists() else "") + text)

    def start(self, *command: str, name: str) -> WorkerProcess:
        """Start a command of the reader; it is killed with its children when the test ends."""
        made = WorkerProcess(name, name=name, command=command, cwd=self.folder, env=self.env)
        self.stack.push(made)  # removes its log
        self.stack.callback(made.kill)
        made.launch()
        return made

    def worker(self, app: str, *options: str) -> WorkerProcess:
        """Start a worker; return it when it is ready."""
        return self.start(*CELERY, "-A", app, *WORKER, *options, name="worker").wait_ready()

    def lines(self, what: str, key: str) -> list[float]:
        """Return when bodies of a key began, or ended."""
        file = self.folder / "lines"
        text = file.read_text() if file.exists() else ""
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        return [at for said, of, at in lines if (said, of) == (what, key)]

    def see_begin(self, key: str, count: int = 1) -> None:
        """Return when so many bodies of a key have begun."""
        eventually(lambda: len(self.lines("begin", key)) >= count)

    def let_go(self, key: str) -> None:
        """Let the bodies of a key end."""
        (self.folder / f"go-{key}").touch()

    def see_no_overlap(self, key: str, count: int) -> None:
        """Fail if two bodies of a key ran at once; so many must have ended."""
        eventually(lambda: len(self.lines("end", key)) >= count)
        begun, ended = self.lines("begin", key), self.lines("end", key)
        assert not overlaps(list(zip(begun, ended, strict=False)))

    def states(self) -> list[str]:
        """Return the states in a result backend that is the broker's Redis."""
        client = self.broker.client()
        kept = [client.get(name) for name in client.keys("celery-task-meta-*")]
        return [json.loads(str(meta))["status"] for meta in kept if meta]


@pytest.fixture
def example(
    standing_broker: EmbeddedNode, nodes: list[EmbeddedNode], tmp_path: Path
) -> Iterator[Callable[..., Example]]:
    """Give a function that copies an example by name."""
    standing_broker.client().flushall()
    urls = [node.url for node in nodes]
    with ExitStack() as stack:

        def copy(name: str) -> Example:
            folder = tmp_path / name
            shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
            for file in folder.rglob("*.py"):
                file.write_text(on_servers(file.read_text(), standing_broker.url, urls))
            path = os.pathsep.join([str(folder), str(ROOT)])
            return Example(folder, standing_broker, nodes, stack, {"PYTHONPATH": path})

        yield copy


@pytest.mark.parametrize("scheduler", [(), ("--scheduler", "redbeat.RedBeatScheduler")])
def test_a_periodic_run_is_skipped_while_the_last_one_is_at_work(
    example: Callable[..., Example], scheduler: tuple[str, ...]
) -> None:
    shop = example("beat")
    (shop.folder / "reports.py").write_text(OWN_CODE + "\ndef make_report():\n    work('report')\n")
    shop.append("shop.py", PATIENT + 'app.conf.beat_schedule["report"]["schedule"] = 0.5\n')
    shop.worker("shop")
    shop.start(*CELERY, "-A", "shop", "beat", *scheduler, name="beat")
    shop.see_begin("report")
    eventually(lambda: shop.states().count("REVOKED") >= 3)
    assert len(shop.lines("begin", "report")) == 1
    shop.let_go("report")
    shop.see_no_overlap("report", 3)
    assert "SUCCESS" in shop.states()
    assert bool(shop.broker.client().keys("redbeat:*")) == bool(scheduler)
