"""A broker, lock nodes and workers for the stories that are told here."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery, _state, chain, chord, states
from celery.exceptions import ChordError
from kombu import Connection

from celery_redlock import SettingsError
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import (
    NODE_TIMEOUT,
    PATIENCE,
    Nodes,
    eventually,
    is_free,
    see_freed,
    see_listening,
    trust_nodes,
)

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "s3cret-word"  # of guarded nodes
MakeStage = Callable[..., "Stage"]


def slow_but(fast: Sequence[Any], every: Sequence[Any]) -> list[Any]:
    """Return the parameters of a test, those slow that are not to run each time."""
    values = [each if isinstance(each, tuple) else (each,) for each in every]
    marks = [() if each in fast else pytest.mark.slow for each in every]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


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
    """What a story has: `app` sends, `worker(...)` starts one, `lines()` says what ran.

    before: bytes of the log that were written before this story began.
    """

    tasks: Any
    broker: EmbeddedNode
    nodes: Nodes
    log: Path
    env: dict[str, str]
    stack: ExitStack
    before: int = 0

    @property
    def app(self) -> Any:
        return self.tasks.app

    def worker(
        self, name: str = "w1", module: str = "tests.integration.app", **options: Any
    ) -> WorkerProcess:
        """Start a worker; it is killed with its children when the story ends.

        A warm end takes seconds, in a pool of greenlets most: a test of that end calls `stop`.
        """
        made = WorkerProcess(module, name=name, env=self.env, cwd=ROOT, **options)
        self.stack.push(made)  # removes its log
        self.stack.callback(made.kill)
        return made.start()

    def see_listening(self, name: str = "w1") -> list[str]:
        return see_listening(self.app, name)

    def lines(self, *what: str) -> list[Line]:
        """Return what bodies wrote, in order; of these kinds, or all."""
        text = self.log.read_bytes()[self.before :].decode()
        whole = text.split("\n")[:-1]  # the last is empty, or being written
        raw = [json.loads(line) for line in whole]
        lines = [Line(r.pop("what"), r.pop("key"), r.pop("at"), r.pop("pid"), r) for r in raw]
        return [line for line in lines if not what or line.what in what]

    def wait_for(self, what: str, count: int = 1, within: float = 120) -> list[Line]:
        """Return the lines of a kind once there are so many."""
        eventually(lambda: len(self.lines(what)) >= count, within)
        return self.lines(what)

    def runs_of(self, key: str) -> int:
        return sum(line.key == key for line in self.lines("begin"))

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
        """Return how often a message was put back, by its state's word.

        0 before the first time. Fails if another state stands there by now, as after its end.
        """
        meta = self.info(result)
        if meta["status"] == "DEFERRED":
            return int(meta["result"]["deferrals"])
        said = f"{result.id} is not deferred but {meta['status']}: {meta['result']!r}"
        assert meta["status"] not in states.READY_STATES, said
        return 0

    def see_deferred(self, result: Any, times: int = 1) -> None:
        eventually(lambda: self.deferrals(result) >= times)

    def see_all_end(self, error: type[Exception], *calls: Any) -> None:
        """Return when a call, a chain and a chord have ended with this error.

        calls: one for all three, or one for each.
        """
        call, of_chain, of_chord = calls if len(calls) > 1 else calls * 3
        single, chained = call.apply_async(), chain(of_chain, self.tasks.join.s())()
        gathered = chord([self.tasks.note.si("beside"), of_chord])(self.tasks.join.s())
        for result in (single, chained):
            with pytest.raises(error):
                result.get(timeout=120)
        with pytest.raises(ChordError):
            gathered.get(timeout=120, follow_parents=False)

    def is_free(self, resource: str) -> bool:
        return is_free(self.nodes, resource)

    def see_freed(self, *resources: str) -> None:
        """Return when locks of the default ttl have been released on every node."""
        for resource in resources:
            see_freed(self.nodes, resource)


def overlaps(spans: list[tuple[float, float]]) -> list[tuple[Any, Any]]:
    """Return neighbours of a sorted list of which the second began before the first ended."""
    return [(a, b) for a, b in itertools.pairwise(spans) if b[0] < a[1]]


_numbers = itertools.count()


@pytest.fixture
def key() -> str:
    """Give a key that no other test of this process has."""
    return f"key{next(_numbers)}"


@pytest.fixture(scope="session")
def standing_broker() -> Iterator[EmbeddedNode]:
    with EmbeddedNode() as server:
        yield server
        gc.collect()  # a result unsubscribes when it is forgotten, and its server must be there


@pytest.fixture(scope="session")
def lasting_broker() -> Iterator[EmbeddedNode]:
    """Give a broker for workers that stay: `make_stage` empties the other one."""
    with EmbeddedNode() as server:
        yield server
        gc.collect()  # as above


@pytest.fixture(scope="module")
def set_standing_stage(
    request: pytest.FixtureRequest,
    lasting_broker: EmbeddedNode,
    standing_nodes: Nodes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[MakeStage]:
    """Give what sets a stage for all tests of a module, over emptied servers; takes settings."""
    for node in (*standing_nodes, lasting_broker):
        node.client().flushall()
    trust_nodes(standing_nodes)
    with ExitStack() as stack:

        def make(**conf: Any) -> Stage:
            folder = tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])
            return set_stage(stack, folder, standing_nodes, lasting_broker, **conf)

        yield make


@pytest.fixture(scope="module")
def standing_stage(
    request: pytest.FixtureRequest, set_standing_stage: MakeStage
) -> tuple[Stage, WorkerProcess]:
    """Give a stage and its one worker, which stay for all tests of a module.

    The module names settings in CONF, and options of the worker in WORKER.
    """
    made = set_standing_stage(**getattr(request.module, "CONF", {}))
    return made, made.worker(**request.module.WORKER)


@pytest.fixture
def shared_stage(standing_stage: tuple[Stage, WorkerProcess]) -> Iterator[Stage]:
    """Give the module's stage, on which each test has keys of its own and sees its own lines."""
    stage, _ = standing_stage
    with ExitStack() as stack:
        yield replace(stage, stack=stack, before=stage.log.stat().st_size)


@pytest.fixture
def worker(standing_stage: tuple[Stage, WorkerProcess]) -> WorkerProcess:
    return standing_stage[1]


@contextmanager
def no_shared_task_left(*apps: Celery) -> Iterator[None]:
    """Give shared tasks to these apps and to those made meanwhile, and to no other one.

    Every app of the process would have them, also one that a module of tests keeps for ever; the
    same module, set up once more, would then declare each name for a second time there.
    """
    finalizers, others = set(_state._on_app_finalizers), set(_state._apps) - set(apps)
    for app in others:
        _state._apps.discard(app)
    try:
        yield
    finally:
        _state._on_app_finalizers &= finalizers
        for app in others:
            _state._apps.add(app)


def set_stage(
    stack: ExitStack,
    folder: Path,
    nodes: Nodes,
    broker: EmbeddedNode,
    amqp: str | None = None,
    queues: str = "celery",
    **conf: Any,
) -> Stage:
    """Set a stage until the stack is left. amqp: a RabbitMQ's URL; the broker keeps results then.

    queues: those of `tests.integration.app.QUEUES`. conf: settings of the workers' app.
    """
    log = folder / "lines"
    log.touch()
    env = {
        "TEST_BROKER": amqp or broker.url, "TEST_BACKEND": broker.url, "TEST_QUEUES": queues,
        "TEST_NODES": ",".join(node.url for node in nodes), "TEST_LOG": str(log),
        "TEST_CONF": json.dumps({"redlock_node_timeout": NODE_TIMEOUT, **conf}),
    }  # fmt: skip
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for name, value in env.items():
        patch.setenv(name, value)
    sys.modules.pop("tests.integration.app", None)  # another stage may stay with its own
    tasks = importlib.import_module("tests.integration.app")
    stack.callback(tasks.app.close)
    stack.callback(close_connections, tasks.app)
    return Stage(tasks, broker, nodes, log, env, stack)


def close_connections(app: Any) -> None:
    """Close an app's connections to its nodes, which may end before this process does."""
    with suppress(SettingsError):  # where a test has set it up wrongly
        redlock_of(app).close()


@pytest.fixture
def make_stage(standing_broker: EmbeddedNode, tmp_path: Path) -> Iterator[MakeStage]:
    """Give a function that sets a stage over given nodes, with settings for the workers' app."""
    standing_broker.client().flushall()
    with ExitStack() as stack:

        def make(nodes: Nodes, broker: EmbeddedNode | None = None, **conf: Any) -> Stage:
            return set_stage(stack, tmp_path, nodes, broker or standing_broker, **conf)

        yield make


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Stage:
    """Give a stage over the three standing nodes; of a module with a WORKER the shared one."""
    shared = hasattr(request.module, "WORKER")
    made: Stage = request.getfixturevalue("shared_stage" if shared else "own_stage")
    return made


@pytest.fixture
def own_stage(make_stage: MakeStage, nodes: Nodes) -> Stage:
    """Give a stage over the three standing nodes, for one test."""
    return make_stage(nodes)


@pytest.fixture
def app(nodes: Nodes) -> Iterator[Celery]:
    """Give an app of this process, whose sends are eager runs."""
    made = Celery("eager", broker="memory://", backend="cache+memory://", set_as_default=False)
    made.conf.update(redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE)
    made.conf.task_always_eager = True
    yield made
    made.close()


class GuardedNode(EmbeddedNode):
    """One whose URL has a password."""

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"


@pytest.fixture
def guarded_stage(make_stage: MakeStage) -> Iterator[Stage]:
    """Give a stage over three nodes whose URLs have a password; the last one has another."""
    with (
        GuardedNode(requirepass=PASSWORD) as first,
        GuardedNode(requirepass=PASSWORD) as second,
        GuardedNode(requirepass="another") as refusing,
    ):
        nodes: Nodes = [first, second, refusing]
        trust_nodes(nodes)
        yield make_stage(nodes)


@contextmanager
def virtual_host() -> Iterator[str]:
    """Give the URL of a virtual host of RabbitMQ, which goes with all that is in it.

    Where no RabbitMQ answers its test is skipped, and fails where CI is set.
    """
    server = os.environ.get("CELERY_REDLOCK_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672")
    control = shutil.which("rabbitmqctl")
    try:
        with Connection(f"{server}//", connect_timeout=5) as connection:
            connection.connect()
        missing = "" if control else "rabbitmqctl, which makes virtual hosts"
    except OSError as error:
        missing = f"RabbitMQ: {error}"
    if control is None or missing:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say(f"not there: {missing}")
    name = f"celery_redlock_{uuid.uuid4().hex[:12]}"
    user = urlsplit(server).username or "guest"
    try:
        subprocess.run([control, "-q", "add_vhost", name], check=True)
        permit = [control, "-q", "set_permissions", "-p", name, user, ".*", ".*", ".*"]
        subprocess.run(permit, check=True)
        yield f"{server}/{name}"
    finally:
        subprocess.run([control, "-q", "delete_vhost", name], check=False)


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[str]:
    with virtual_host() as url:
        yield url
