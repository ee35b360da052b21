"""Fixtures of several files here: other clients, threads to wait in, a network, and a broker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from celery import Celery
from redis import Redis
from sqlalchemy import make_url

from celery_redlock import Redlock
from celery_redlock.lock.postgres.address import address_of
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.recovery.keeper import Keeper
from celery_redlock.tasks.recovery.ledger import Ledger
from celery_redlock.testing import EmbeddedNode
from tests.conftest import NODE_TIMEOUT, PATIENCE, Nodes, see_quorum
from tests.contract.postgres_calls import Session, postgres, sessions_on
from tests.contract.proxy import Proxy, proxies
from tests.contract.servers import Command
from tests.contract.worker_leases import keeper_of, open_ledger
from tests.mariadb import MariaDB
from tests.postgres import PostgresNode

T = TypeVar("T")
STORES = {"valkey": ["redis"], "postgresql": ["postgresql"], "all": ["redis", "postgresql"]}
MAJORITY = pytest.mark.redis_only("a majority of several nodes")
REDIS_SERVER = pytest.mark.redis_only("what only a Redis server does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect on PostgreSQL what is marked as `redis_only`."""
    elsewhere = {item for item in items if _is_on_postgres(item) and _is_redis_only(item)}
    items[:] = [item for item in items if item not in elsewhere]
    config.hook.pytest_deselected(items=list(elsewhere))


def _is_on_postgres(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    return call is not None and call.params.get("standing_nodes") == "postgresql"


def _is_redis_only(item: pytest.Item) -> bool:
    return item.get_closest_marker("redis_only") is not None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of standing nodes on three Valkey nodes, on one PostgreSQL, or on both."""
    if "standing_nodes" in metafunc.fixturenames:
        stores = STORES[metafunc.config.getoption("store")]
        metafunc.parametrize("standing_nodes", stores, indirect=True, scope="session")


def names(nodes: Nodes) -> list[str]:
    """Return the names of nodes, as a `Redlock` over them shows them."""
    return [parse_address(node.url, "test", "nodes").name for node in nodes]


def quorum_of(nodes: list[T]) -> list[T]:
    """Return as many nodes as a lock needs."""
    return nodes[: len(nodes) // 2 + 1]


@contextlib.contextmanager
def over(nodes: Nodes) -> Iterator[Redlock]:
    """Give a client, connected to a quorum, as of another process."""
    with Redlock([node.url for node in nodes], node_timeout=NODE_TIMEOUT) as made:
        see_quorum(made)
        yield made


def at_once(*works: Callable[[], T]) -> list[T]:
    """Do each work in a thread of its own; return what they return, or raise the first error."""
    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(lambda work: work(), works))


def in_child(work: Callable[[], object], fork: Callable[[], int] = os.fork) -> None:
    """Do a work in a forked child; fails where it raises, or returns False."""
    child = fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = 2 if work() is False else 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def rival(nodes: Nodes) -> Iterator[Redlock]:
    """Give a client beside `redlock`."""
    with over(nodes) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Give threads to wait in."""
    with ThreadPoolExecutor() as made:
        yield made


@pytest.fixture
def network(nodes: Nodes) -> Iterator[list[Proxy]]:
    """Give a proxy for each of three nodes, in fair weather."""
    with proxies(nodes) as made:
        yield made


@pytest.fixture(scope="module")
def postgres_node(postgres_template: Path) -> Iterator[PostgresNode]:
    """Give a PostgreSQL node with the schema. It keeps what the test before has left."""
    with PostgresNode(postgres_template, fsync=False) as made:
        made.setup()
        yield made


@pytest.fixture
def node(postgres_node: PostgresNode) -> PostgresNode:
    """Give the PostgreSQL node of a test file; a file may have another one."""
    return postgres_node


@pytest.fixture
def sessions(node: PostgresNode) -> Iterator[list[Session]]:
    """Give connections to `node` whose calls are one transaction each, until they commit."""
    with sessions_on(node) as made:
        yield made


@pytest.fixture
def command(node: PostgresNode) -> Command:
    """Give a function that asks `node`, as a client does."""
    return postgres(address_of(node.url))


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedNode]:
    """Give a broker. It keeps what the test before has left."""
    with EmbeddedNode() as server:
        yield server


@pytest.fixture
def client(broker: EmbeddedNode) -> Redis:
    """Give a client of `broker`, which is empty; a file may have another one."""
    client = broker.client()
    client.flushall()
    return client


@pytest.fixture
def ledger(broker: EmbeddedNode, client: Redis) -> Iterator[Ledger]:
    """Give the worker leases of `broker`, which is empty; a file may have another one."""
    made = open_ledger(broker.url)
    yield made
    made.close()


@pytest.fixture
def keeper(broker: EmbeddedNode, ledger: Ledger) -> Iterator[Keeper]:
    """Give the keeper of a worker; that of no other worker is there to prove anything."""
    made = keeper_of("w1@host", broker)
    yield made
    made.end()


@pytest.fixture
def sending_app(nodes: Nodes) -> Iterator[Celery]:
    """Give an app that sends to a broker in this process; its locks are on real nodes."""
    app = Celery("told", broker="memory://", backend="cache+memory://", set_as_default=False)
    app.conf.update(redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE)
    yield app
    redlock_of(app).close()
    app.close()


@pytest.fixture(scope="session")
def database_url(
    postgres_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """Give a function from "sqlite", "postgresql" or "mariadb" to the URL of an own database.

    Each server starts when it is asked for, and ends with the tests.
    """
    urls = {"sqlite": f"sqlite:///{tmp_path_factory.mktemp('database')}/shop.db"}
    with contextlib.ExitStack() as stack:

        def url_of(name: str) -> str:
            if name == "mariadb" and name not in urls:
                urls[name] = stack.enter_context(MariaDB()).url
            if name == "postgresql" and name not in urls:
                node = stack.enter_context(PostgresNode(postgres_template, fsync=False))
                urls[name] = node.url.replace("postgresql:", "postgresql+psycopg:")
            return urls[name]

        yield url_of


def for_django(url: str) -> dict[str, str]:
    """Return the entry of Django's DATABASES for a URL of SQLAlchemy's."""
    place = make_url(url)
    known = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite3"}
    given = {
        "ENGINE": f"django.db.backends.{known[place.get_backend_name()]}",
        "NAME": place.database, "USER": place.username, "HOST": place.host, "PORT": place.port,
    }  # fmt: skip
    return {name: str(value) for name, value in given.items() if value is not None}
