"""The pytest fixtures of `celery_redlock.testing`, found by pytest itself: docs/how-to/test.md.

This module is outside the package, because pytest imports it at each start, even if no test uses a
lock. The first fixture that a test uses imports the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from celery_redlock import Redlock
    from celery_redlock.testing import EmbeddedNode, FakeNode


@pytest.fixture(scope="session")
def redlock_node_count() -> int:
    """Give the number of nodes. Override it for another number."""
    return 3


@pytest.fixture(scope="session")
def redlock_prefix() -> str:
    """Give the `redlock_prefix` under which the nodes are trusted. Override it to match yours."""
    return "redlock"


@pytest.fixture(scope="session")
def redlock_node_timeout() -> float:
    """Give `redlock_node_timeout` in seconds: longer than in production, because CI machines stall.

    A ttl must be at least four times as long; override it for shorter ones.
    """
    return 1.0


@pytest.fixture
def redlock_fake_nodes(redlock_node_count: int, redlock_prefix: str) -> Iterator[list[FakeNode]]:
    """Give new fake nodes that share one clock and are trusted already."""
    from celery_redlock.testing import fake_nodes, trust_nodes

    with fake_nodes(redlock_node_count) as nodes:
        trust_nodes(nodes, redlock_prefix)
        yield nodes


@pytest.fixture(scope="session")
def redlock_servers(redlock_node_count: int) -> Iterator[list[EmbeddedNode]]:
    """Give embedded nodes that run for the whole session; tests use `redlock_embedded_nodes`."""
    from celery_redlock.testing import embedded_nodes

    with embedded_nodes(redlock_node_count) as nodes:
        yield nodes


@pytest.fixture
def redlock_embedded_nodes(
    redlock_servers: list[EmbeddedNode], redlock_prefix: str
) -> list[EmbeddedNode]:
    """Give embedded nodes that are up, empty, and trusted already."""
    from celery_redlock.testing import trust_nodes

    for node in redlock_servers:
        if not node.pid:
            node.start()
        node.resume()
        with node.client() as client:
            client.flushall()
    trust_nodes(redlock_servers, redlock_prefix)
    return redlock_servers


@pytest.fixture
def redlock_nodes(redlock_fake_nodes: list[FakeNode]) -> Sequence[Any]:
    """Give the nodes of `redlock` and `redlock_settings`: fake ones.

    Override it to return `redlock_embedded_nodes` if workers in other processes lock, too.
    """
    return redlock_fake_nodes


@pytest.fixture
def _redlock(
    redlock_nodes: Sequence[Any], redlock_prefix: str, redlock_node_timeout: float
) -> Iterator[Redlock]:
    from celery_redlock import Redlock
    from celery_redlock.testing.holders import default_target

    urls = [node.url for node in redlock_nodes]
    redlock = Redlock(urls, prefix=redlock_prefix, node_timeout=redlock_node_timeout)
    with redlock, default_target(redlock):
        yield redlock


@pytest.fixture
def redlock(_redlock: Redlock) -> Redlock:
    """Give a `Redlock` over `redlock_nodes`, the default of `hold`, `lose`, `assert_released`."""
    return _redlock


@pytest.fixture
def redlock_settings(
    _redlock: Redlock,
    redlock_nodes: Sequence[Any],
    redlock_prefix: str,
    redlock_node_timeout: float,
) -> Iterator[dict[str, Any]]:
    """Give the settings with which a Celery app locks on `redlock_nodes`.

    Such apps have closed their connections to the nodes before the nodes end.
    """
    from celery_redlock.testing.holders import close_beside

    yield {
        "redlock_nodes": [node.url for node in redlock_nodes],
        "redlock_prefix": redlock_prefix,
        "redlock_node_timeout": redlock_node_timeout,
    }
    close_beside(_redlock)


@pytest.fixture
def redlock_off() -> Iterator[None]:
    """Switch locking off in this process for one test; see `locking_off`."""
    from celery_redlock.testing import locking_off

    with locking_off():
        yield
