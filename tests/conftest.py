"""What all tests share: real nodes, and a way to wait for what must come true."""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib.metadata
import logging
import os
import shutil
import signal
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import celery
import hypothesis
import pytest
from celery import _state
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from celery_redlock import Lock, Redlock
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.node_status import ask_nodes
from celery_redlock.lock.server.requests import REGISTER, Requests
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, Script
from celery_redlock.testing import EmbeddedNode, embedded_nodes
from tests.clocks import WallClock
from tests.reruns import mark_flaky
from tests.skips import is_allowed

# s: a busy machine keeps a node or a thread of ours waiting for longer than the defaults allow
PATIENCE = 7.0  # of the default ttl a quarter: no stall of 5 s makes a node miss it
NODE_TIMEOUT = 2.0  # where short ttls are needed
TTL = 4 * NODE_TIMEOUT  # of locks that are renewed: a stall of 5 s, below two thirds, loses none
FREED = 15.0  # below two thirds of the default ttl: what is free by then did not just expire

# redis-py reads its own version from a file for each connection: a tenth of the tests' time
importlib.metadata.version = functools.cache(importlib.metadata.version)

# how long an example takes says more about the machine than about what is tested
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=int(os.environ.get("CELERY_REDLOCK_EXAMPLES", "40")),
)  # fmt: skip
hypothesis.settings.load_profile("any machine")

# of the lane of pages: files, and what they import that the default run does not install
OF_PAGES = {
    "integration/test_django_admin_pages.py": "selenium",
    "integration/test_flower.py": "selenium",
    "integration/test_third_party.py": "gunicorn",
    "test_site.py": "sphinx",
}
collect_ignore = [file for file, module in OF_PAGES.items() if find_spec(module) is None]

T = TypeVar("T")
Nodes = list[EmbeddedNode]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that says on which stores the contract tests run."""
    parser.addoption(
        "--store", choices=["valkey", "postgresql", "all"], default="valkey",
        help="what the lock nodes of contract tests are",
    )  # fmt: skip


def pytest_collection_finish() -> None:
    """Leave what was collected out of each search for garbage, which would walk through all."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the few tests that may run again."""
    mark_flaky(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail in CI if a test was skipped for a reason that is not on the list."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI"):
        return
    reasons = {str(report.longrepr[2]) for report in reporter.getreports("skipped")}
    reporter.ensure_newline()
    for reason in sorted(reason for reason in reasons if not is_allowed(reason)):
        reporter.write_line(f"CI must not skip this (tests/skips.py): {reason}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive of our own; Debian's Python 3.11.2 knows no filters yet."""
    safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    archive.extractall(folder, **safe)


def eventually(condition: Callable[[], T], within: float = 90.0) -> T:
    """Return what a condition gives once it is true; fails where it is not within so many s."""
    end = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < end, f"not true within {within} s: {condition}"
        time.sleep(0.02)
    return value


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that one process of this run makes for all."""
    base = factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    where, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(where)
            done.touch()
    return where


def see_listening(app: celery.Celery, name: str, within: float = 60.0) -> list[str]:
    """Return where a worker of this host hears commands, once it does; as of `eventually`.

    That is a little after it is ready, and what a Redis says to nobody is gone. One of greenlets
    begins to listen in a greenlet of its own (celery.worker.pidbox.gPidbox).
    """
    where = [f"{name}@{socket.gethostname()}"]

    def answers() -> object:
        try:
            return app.control.ping(where, timeout=1.0)
        except RedisConnectionError:  # a pooled connection was closed: redis-py opens another one
            return None

    eventually(answers, within)
    return where


@pytest.fixture
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a worker changes in the process that it runs in: its app, and all logging.

    And that it reads the settings of nodes once, and that no task waits for another one.
    """
    monkeypatch.setattr(_state, "_task_join_will_block", False)
    monkeypatch.setattr("celery_redlock.tasks.per_app._is_worker", False)
    root, apps = logging.getLogger(), (_state.default_app, _state._tls.current_app)
    level, handlers = root.level, [*root.handlers]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    _state.default_app, _state._tls.current_app = apps


@pytest.fixture(scope="session", autouse=True)
def _signals_reach_processes() -> None:
    """Ignore in this process alone what nohup or a job in the background has it ignore.

    A process that a test starts inherits that a signal is ignored, but no handler.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True)
def _shared_tasks_stay() -> Iterator[None]:
    """Let the tasks that a test declares be shared with no app of a later test.

    `app.task` shares a task with every app that finalizes later, unless it is told not to.
    """
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers &= before


@pytest.fixture(scope="session")
def standing_nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Give three nodes that no test ends; use `nodes`, which empties them first."""
    with three_nodes(request) as servers:
        yield servers


@contextmanager
def three_nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Start three nodes; of the store "postgresql", one PostgreSQL.

    A parameter of the fixture names the store, or CELERY_REDLOCK_STORE.
    """
    store = getattr(request, "param", os.environ.get("CELERY_REDLOCK_STORE"))
    if store != "postgresql":
        with embedded_nodes(3) as servers:
            yield servers
        return
    from tests.postgres import PostgresNode

    made = PostgresNode(
        request.getfixturevalue("postgres_template"), max_connections=200, fsync=False
    )
    with made as server:
        server.setup()
        yield [cast("EmbeddedNode", server)]


@pytest.fixture
def nodes(standing_nodes: Nodes, trusting: Callable[[], None]) -> Nodes:
    """Give three empty nodes that a test does not end."""
    trusting()
    return standing_nodes


@pytest.fixture(scope="session")
def trusting(standing_nodes: Nodes) -> Callable[[], None]:
    """Give what empties the standing nodes, and leaves what a node needs to vote.

    A client that trusts them takes ten times as long as to write what it had written.
    """
    trust_nodes(standing_nodes)
    if not isinstance(standing_nodes[0], EmbeddedNode):

        def empty() -> None:
            for node in standing_nodes:
                node.client().flushall()
            trust_nodes(standing_nodes)

        return empty
    again: dict[str, Any] = {"retry": Retry(NoBackoff(), 3)}  # a test may have cut its connection
    clients = [
        Redis(port=node.port, retry_on_error=[RedisConnectionError], **again)
        for node in standing_nodes
    ]
    # without the settings of a worker that stands already
    kept = [
        {
            name: value
            for name in client.scan_iter(_type="string")
            if not name.endswith(b":terms") and (value := client.get(name)) is not None
        }
        for client in clients
    ]

    def restore() -> None:
        for client, values in zip(clients, kept, strict=True):
            with client.pipeline(transaction=True) as asked:
                asked.flushall()
                asked.mset(values)
                asked.execute()

    return restore


@pytest.fixture
def mortal_nodes() -> Iterator[Nodes]:
    """Give three nodes of the test's own, to be killed and frozen."""
    with embedded_nodes(3) as servers:
        trust_nodes(servers)
        yield servers


@contextmanager
def paused(*nodes: EmbeddedNode) -> Iterator[None]:
    """Let nodes stand still meanwhile."""
    for node in nodes:
        node.pause()
    try:
        yield
    finally:
        for node in nodes:
            node.resume()


@pytest.fixture(scope="session")
def postgres_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give what `tests.postgres.PostgresNode` starts with."""
    from tests.postgres import template  # imported late: psycopg and psutil are for its tests alone

    return template(tmp_path_factory)


@pytest.fixture
def wall_clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    """Give a clock for a node or a worker."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("setting a process's clock needs gcc")
    return WallClock(tmp_path_factory.mktemp("clock"), compiler)


def serve_all_slots(member: EmbeddedNode) -> None:
    """Make a server that is a cluster's member its only one."""
    client = member.client()
    client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
    eventually(lambda: client.cluster("INFO")["cluster_state"] == "ok")


def trust_nodes(nodes: Nodes, prefix: str = "redlock") -> None:
    """Let nodes vote that are new, or that a test has emptied."""
    urls = [node.url for node in nodes]
    with Redlock(urls, prefix=prefix, node_timeout=PATIENCE) as made:
        made.trust()


@contextmanager
def settled(nodes: Nodes, node_timeout: float = PATIENCE) -> Iterator[Redlock]:
    """Give a client, connected to each node."""
    with Redlock([node.url for node in nodes], node_timeout=node_timeout) as made:
        settle(made)
        yield made


@pytest.fixture
def redlock(nodes: Nodes) -> Iterator[Redlock]:
    """Give a Redlock over `nodes`, connected to each of them."""
    with settled(nodes) as made:
        yield made


@pytest.fixture
def brisk_redlock(nodes: Nodes) -> Iterator[Redlock]:
    """Give a Redlock over `nodes` whose locks may have `TTL`, to see renewals and ends of it."""
    with settled(nodes, NODE_TIMEOUT) as made:
        yield made


class Journal:
    """Hears of each key that a `Redlock` claims, as a forked child's journal does."""

    def claiming(self, session: bytes, at: float, holding: Acquisition, claim: Lease) -> None:
        """Hear that a request is about to leave."""

    def held(self, holding: Acquisition) -> None:
        """Hear that a lock is held."""

    def released(self, holding: Acquisition) -> None:
        """Hear that it is released."""

    def settled(self, claim: Lease) -> None:
        """Hear that no node keeps a key."""


@contextmanager
def receiving(signal: Any, receiver: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call this with the sender and the record of each signal that is sent meanwhile."""

    def receive(sender: Any, event: Any, **_: Any) -> None:
        receiver(sender, event)

    signal.connect(receive)
    try:
        yield
    finally:
        signal.disconnect(receive)


def settle(redlock: Redlock) -> None:
    """Return when every node has executed all that was written to it so far.

    A grant or a release is over for its caller before the last node has seen it. A ping goes the
    same way behind it.
    """
    eventually(lambda: not ask_nodes(redlock.session).failing)


def write(redlock: Redlock, request: bytes, script: Script | None = None) -> None:
    """Write a request to every node; no reply is read."""
    session = redlock.session
    session.nodes.broadcast(Command(request, IGNORE_REPLY, script), session.clock.now())


def register(redlock: Redlock, waiter: str, resource: str, since: float) -> None:
    """Register a process as a waiter on every node."""
    request = Requests(redlock.session.options.prefix, 0.0).register(waiter, resource, since)
    write(redlock, request, REGISTER)


def hearing(redlock: Redlock) -> int:
    """Return how many nodes can name the process as a waiter."""
    inbox = redlock.session.callers.inbox
    return inbox.subscriptions(inbox.channel)


def see_quorum(redlock: Redlock) -> None:
    """Return when a quorum has executed all that was written to it so far.

    A first lock begins with connects, and what a process is stopped in it does not get back.
    """

    def answers() -> bool:
        report = ask_nodes(redlock.session)
        return len(report.nodes) - len(report.failing) >= report.needed

    eventually(answers)


def end_of(lock: Lock) -> float:
    """Return the monotonic s at which a lock ends unless it is renewed; a stall makes it less."""
    return time.monotonic() + lock.remaining


def see_renewal(lock: Lock) -> None:
    """Return when a held lock has been renewed once more."""
    end = end_of(lock)
    eventually(lambda: lock.held and end_of(lock) > end + lock.ttl / 10)


def keys_on(nodes: Nodes) -> list[list[str]]:
    """Return the names of the locks that stand on each node."""
    return [sorted(map(str, node.client().keys("*:lock:*"))) for node in nodes]


def is_free(nodes: Nodes, resource: str, prefix: str = "redlock") -> bool:
    """Tell whether no node holds the lock of a resource."""
    name = f"{{{prefix}}}:lock:{resource}"
    return not any(node.client().exists(name) for node in nodes)


def see_freed(nodes: Nodes, resource: str, prefix: str = "redlock") -> None:
    """Return when a lock of the default ttl has been released on every node."""
    eventually(lambda: is_free(nodes, resource, prefix), within=FREED)
