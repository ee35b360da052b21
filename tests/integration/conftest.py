"""A broker, lock nodes and workers for the stories that are told here."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import NODE_TIMEOUT, eventually, is_free, see_freed

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Line:
    """One line that a body wrote."""

    what: str
    key: str
    at: float
    pid: int
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Stage:
    """What a story has: `app` sends, `worker(...)` starts one, `lines()` says what ran."""

    tasks: Any
    broker: EmbeddedNode
    nodes: list[EmbeddedNode]
    log: Path
    env: dict[str, str]
    stack: ExitStack

    @property
    def app(self) -> Any:
        return self.tasks.app

    def worker(self, name: str = "w1", **options: Any) -> WorkerProcess:
        """Start a worker; it ends with the story."""
        made = WorkerProcess("tests.integration.app", name=name, env=self.env, cwd=ROOT, **options)
        return self.stack.enter_context(made)

    def lines(self, *what: str) -> list[Line]:
        """Return what bodies wrote, in order; of these kinds, or all."""
        raw = [json.loads(line) for line in self.log.read_text().splitlines()]
        lines = [Line(r.pop("what"), r.pop("key"), r.pop("at"), r.pop("pid"), r) for r in raw]
        return [line for line in lines if not what or line.what in what]

    def wait_for(self, what: str, count: int = 1, within: float = 120) -> list[Line]:
        """Return the lines of a kind once there are so many."""
        eventually(lambda: len(self.lines(what)) >= count, within)
        return self.lines(what)

    def intervals(self) -> dict[str, list[tuple[float, float]]]:
        """Return when the bodies of each key ran, by their own record."""
        found: dict[str, list[tuple[float, float]]] = {}
        begun: dict[tuple[str, int], float] = {}
        for line in self.lines("begin", "end"):
            if line.what == "begin":
                begun[line.key, line.pid] = line.at
            else:
                interval = (begun.pop((line.key, line.pid)), line.at)
                found.setdefault(line.key, []).append(interval)
        return {key: sorted(spans) for key, spans in found.items()}

    def info(self, result: Any) -> Any:
        """Return a result's state and info, past any cache."""
        return result.backend.get_task_meta(result.id, cache=False)

    def deferrals(self, result: Any) -> int:
        """Return how often a message was put back, by its state's word."""
        return int((self.info(result)["result"] or {}).get("deferrals", 0))

    def is_free(self, resource: str) -> bool:
        return is_free(self.nodes, resource)

    def see_freed(self, *resources: str) -> None:
        """Return when locks of the default ttl have been released on every node."""
        for resource in resources:
            see_freed(self.nodes, resource)


def overlaps(spans: list[tuple[float, float]]) -> list[tuple[Any, Any]]:
    """Return neighbours of a sorted list of which the second began before the first ended."""
    return [(a, b) for a, b in itertools.pairwise(spans) if b[0] < a[1]]


@pytest.fixture(scope="session")
def standing_broker() -> Iterator[EmbeddedNode]:
    with EmbeddedNode() as server:
        yield server
        gc.collect()  # a result unsubscribes when it is forgotten, and its server must be there


@pytest.fixture
def make_stage(
    standing_broker: EmbeddedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Stage]]:
    """Give a function that sets a stage over given nodes, with settings for the workers' app."""
    standing_broker.client().flushall()
    with ExitStack() as stack:

        def make(
            nodes: list[EmbeddedNode], broker: EmbeddedNode | None = None, **conf: Any
        ) -> Stage:
            broker = broker or standing_broker
            log = tmp_path / "lines"
            log.touch()
            env = {
                "TEST_BROKER": broker.url,
                "TEST_NODES": ",".join(node.url for node in nodes),
                "TEST_LOG": str(log),
                "TEST_CONF": json.dumps({"redlock_node_timeout": NODE_TIMEOUT, **conf}),
            }
            for name, value in env.items():
                monkeypatch.setenv(name, value)
            import tests.integration.app as tasks

            tasks = importlib.reload(tasks)
            stack.callback(tasks.app.close)
            return Stage(tasks, broker, nodes, log, env, stack)

        yield make


@pytest.fixture
def stage(make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]) -> Stage:
    """Give a stage over the three standing nodes."""
    return make_stage(nodes)
