"""A broker, lock nodes and workers for the stories that are told here."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery, _state, chain, chord, states
from celery.exceptions import ChordError
from kombu import Connection
from redis.exceptions import ConnectionError as RedisConnectionError

from celery_redlock import SettingsError
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.testing import EmbeddedNode
from tests.conftest import (
    NODE_TIMEOUT,
    PATIENCE,
    Nodes,
    eventually,
    is_free,
    see_freed,
    see_listening,
    three_nodes,
    trust_nodes,
)
from tests.workers import ForkedWorker

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "s3cret-word"  # of guarded nodes
MakeStage = Callable[..., "Stage"]
APP = "tests.integration.app"
POOLS = ("prefork", "threads", "solo", "gevent")
RULES = {
    "other": {"on_conflict": "fail"},
    "he*": {"key": "{queue}:{key}", "on_conflict": "skip"},
    "wait*": {"max_wait": 0.2},
    "two-at-once*": {"key": "{queue}", "limit": 2},
    "old*": {"ttl": PATIENCE * 4},
    "new*": {"ttl": PATIENCE * 8, "limit": 3},
}
# What a module names as its WORKER if any worker is right for it: all of them share one. A stall of
# the machine costs it no node's answer, and leases outlive any test: what runs was woken.
STANDING: dict[str, Any] = {
    "conf": {
        "redlock_node_timeout": PATIENCE, "redlock_max_ttl": 200, "redlock_queues": RULES,
        "result_extended": True, "task_store_errors_even_if_ignored": True,
        "accept_content": ["json", "pickle"],
    },
    "concurrency": 6, "options": ["-E"],
}  # fmt: skip
REST = 60.0  # s: what a test leaves behind ends sooner, or never
FAILED = pytest.StashKey[bool]()


def slow_but(fast: Sequence[Any], every: Sequence[Any]) -> list[Any]:
    """Return the parameters of a test, those slow that are not to run each time."""
    values = [each if isinstance(each, tuple) else (each,) for each in every]
    marks = [() if each in fast else pytest.mark.slow for each in every]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


def pools(*fast: str, every: Sequence[str] = POOLS) -> list[Any]:
    """Return the pools of a test as parameters; but for prefork, one process runs all of a pool."""
    marks = {pool: [] if pool in fast else [pytest.mark.slow] for pool in every}
    for pool in {*every} - {"prefork"}:
        marks[pool].append(pytest.mark.xdist_group(pool))
    return [pytest.param(pool, marks=marks[pool]) for pool in every]


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

    def worker(self, name: str = "w1", module: str = APP, **options: Any) -> ForkedWorker:
        """Start a worker; it is killed with its children when the story ends.

        A warm end takes seconds, in a pool of greenlets most: a test of that end calls `stop`.
        """
        made = ForkedWorker(module, name=name, env=self.env, cwd=ROOT, **options)
        self.stack.push(made)  # removes its log
        self.stack.callback(made.kill)
        made.start()
        return made

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let this process, and what it starts, have this stage's settings and tasks meanwhile."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.env.items():
                patch.setenv(name, value)
            patch.setitem(sys.modules, APP, self.tasks)
            package, _, name = APP.rpartition(".")
            patch.setattr(sys.modules[package], name, self.tasks)  # Celery's `-A` looks there
            self.app.set_current()
            yield

    def see_listening(self, name: str = "w1") -> list[str]:
        return see_listening(self.app, name)

    @contextmanager
    def consumed(self, queue: str, name: str = "w1") -> Iterator[str]:
        """Let a worker take from one more queue meanwhile."""
        control, to = self.app.control, {"destination": self.see_listening(name), "reply": True}
        control.add_consumer(queue, **to, timeout=60)
        try:
            yield queue
        finally:
            control.cancel_consumer(queue, **to, timeout=60)

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


def forget_results() -> None:
    """Let results unsubscribe that nothing refers to any more, while their server is there."""
    gc.collect()
    gc.freeze()  # what is left is not looked at again: late in a run that takes a second each time


@pytest.fixture(scope="session")
def standing_broker() -> Iterator[EmbeddedNode]:
    with EmbeddedNode() as server:
        yield server
        forget_results()


@pytest.fixture(scope="session")
def lasting_broker() -> Iterator[EmbeddedNode]:
    """Give a broker for workers that stay: `make_stage` empties the other one."""
    with EmbeddedNode() as server:
        yield server
        forget_results()


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


@dataclass
class Standing:
    """A stage with workers that stay for all tests of this process."""

    stage: Stage
    workers: list[ForkedWorker]

    def why_unfit(self) -> str:
        """Return why no other test can have it; "" once nothing runs."""
        if not all(worker.runs for worker in self.workers):
            return "a worker has ended"
        try:
            eventually(lambda: not self.doing(), within=REST)
        except AssertionError:
            return f"something runs in it: {self.doing()}"
        for file in self.stage.log.parent.iterdir():
            if file != self.stage.log:  # by such a file a test tells a body what to do
                file.unlink()
        return ""

    def doing(self) -> list[Any]:
        """Return what bodies run, or that a worker did not say so."""
        names = [f"{worker.name}@{socket.gethostname()}" for worker in self.workers]
        control = self.stage.app.control
        try:
            said = control.broadcast("active", destination=names, reply=True, timeout=REST)
        except RedisConnectionError:  # a pooled connection was closed: redis-py opens another one
            said = []
        if len(said) < len(names):
            return ["unknown"]
        return [body for reply in said for bodies in reply.values() for body in bodies]


class StandingStages:
    """Stages of this process, each made when a test first asks for it."""

    def __init__(self, nodes: Nodes, new_folder: Callable[[], Path]) -> None:
        self._nodes, self._new_folder = nodes, new_folder
        self._made: dict[str, tuple[Standing, ExitStack]] = {}

    @contextmanager
    def lend(
        self, test: pytest.Item, names: Sequence[str] = ("w1",), **how: Any
    ) -> Iterator[Standing]:
        """Give one to a test, which sees its own lines; if it is unfit then, the next has another.

        names: of its workers. how: its settings as `conf`, and options of the workers.
        """
        wanted = json.dumps([names, how], sort_keys=True)
        if wanted not in self._made:
            self._made[wanted] = self._make(names, **how)
        made, of_all = self._made[wanted]
        for worker in made.workers:
            worker.begin_anew()
        with ExitStack() as stack:
            stack.enter_context(made.stage.here())
            before = made.stage.log.stat().st_size
            yield Standing(replace(made.stage, stack=stack, before=before), made.workers)
        why = "its test failed" if FAILED in test.stash else made.why_unfit()
        if why:
            print(f"the next test has other standing workers, because {why}")
            del self._made[wanted]
            of_all.close()

    def _make(
        self, names: Sequence[str], conf: dict[str, Any], **options: Any
    ) -> tuple[Standing, ExitStack]:
        with ExitStack() as stack:
            broker = stack.enter_context(EmbeddedNode())
            stack.callback(forget_results)
            stage = new_stage(stack, self._new_folder(), self._nodes, broker, **conf)
            _state._apps.discard(stage.app)  # else it would have each shared task of other tests
            workers = [stage.worker(name, **options) for name in names]
            for name in names:
                stage.see_listening(name)
            return Standing(stage, workers), stack.pop_all()

    def close(self) -> None:
        for _, stack in self._made.values():
            stack.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    """Note that a test has failed: what it had is for no other one."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(scope="session")
def lasting_nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Give three nodes that nobody empties, for workers that stay."""
    with three_nodes(request) as servers:
        trust_nodes(servers)
        yield servers


@pytest.fixture(scope="session")
def standing_stages(
    lasting_nodes: Nodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StandingStages]:
    made = StandingStages(lasting_nodes, lambda: tmp_path_factory.mktemp("standing"))
    yield made
    made.close()


@pytest.fixture
def standing(request: pytest.FixtureRequest, standing_stages: StandingStages) -> Iterator[Standing]:
    """Give the stage and the worker of this module, which other modules may share.

    The module names options of the worker in WORKER, and settings there as "conf", or in CONF.
    """
    named = getattr(request.module, "WORKER", STANDING)
    how = {"conf": getattr(request.module, "CONF", {}), **named}
    with standing_stages.lend(request.node, **how) as lent:
        yield lent


@pytest.fixture
def shared_stage(standing: Standing) -> Stage:
    """Give the module's stage, on which each test has keys of its own and sees its own lines."""
    return standing.stage


@pytest.fixture
def worker(standing: Standing) -> ForkedWorker:
    return standing.workers[0]


@pytest.fixture
def of_pool(
    request: pytest.FixtureRequest, standing_stages: StandingStages, pool: str
) -> Iterator[Standing]:
    """Give a standing stage with a worker of the pool that a test has as its parameter."""
    how = {**STANDING, "pool": pool, "concurrency": 1 if pool == "solo" else 6}
    with standing_stages.lend(request.node, **(STANDING if pool == "prefork" else how)) as lent:
        yield lent


@pytest.fixture
def of_two(request: pytest.FixtureRequest, standing_stages: StandingStages) -> Iterator[Standing]:
    """Give a standing stage with two workers; mark the test as of the group "two"."""
    with standing_stages.lend(request.node, ("w1", "w2"), **STANDING) as lent:
        yield lent


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


def set_stage(stack: ExitStack, *place: Any, **how: Any) -> Stage:
    """Set a stage until the stack is left, and have it here. place, how: as of `new_stage`."""
    stage = new_stage(stack, *place, **how)
    stack.enter_context(stage.here())
    return stage


def new_stage(
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
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        patch.delitem(sys.modules, APP, raising=False)  # another stage may stay with its own
        tasks = importlib.import_module(APP)
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
def small_heap() -> None:
    """Let the garbage collector look only at what is made in the test: a look at all costs."""
    gc.collect()
    gc.freeze()


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
