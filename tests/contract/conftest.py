"""Fixtures of several files here: other clients, threads to wait in, and a network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_redlock import Redlock
from tests.conftest import NODE_TIMEOUT, Nodes, see_quorum
from tests.contract.proxy import Proxy, proxies


@contextlib.contextmanager
def over(nodes: Nodes) -> Iterator[Redlock]:
    """Give a client, connected to a quorum, as of another process."""
    with Redlock([node.url for node in nodes], node_timeout=NODE_TIMEOUT) as made:
        see_quorum(made)
        yield made


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
