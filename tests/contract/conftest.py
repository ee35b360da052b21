"""Fixtures of several files here: other clients, threads to wait in, and a network."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from celery_redlock import Redlock
from tests.conftest import NODE_TIMEOUT, Nodes, see_quorum
from tests.contract.proxy import Proxy, proxies

T = TypeVar("T")


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


def in_child(work: Callable[[], object]) -> None:
    """Do a work in a forked child; fails where it raises, or returns False."""
    child = os.fork()
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
