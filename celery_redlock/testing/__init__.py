"""Support for testing locked tasks: fake nodes with a clock, real ones, and real workers.

Needs the extra `celery_redlock[testing]`. Nothing in the package itself imports it. The pytest
fixtures over it are in `pytest_celery_redlock`, which pytest finds by itself; see docs/testing.md.
"""

from celery_redlock.testing.clock import VirtualClock
from celery_redlock.testing.holders import assert_released, hold, lose, trust_nodes, use_nodes
from celery_redlock.testing.node import FakeNode, fake_nodes
from celery_redlock.testing.servers import EmbeddedNode, WorkerProcess, embedded_nodes
from celery_redlock.testing.unlocked import locking_off

__all__ = [
    "EmbeddedNode",
    "FakeNode",
    "VirtualClock",
    "WorkerProcess",
    "assert_released",
    "embedded_nodes",
    "fake_nodes",
    "hold",
    "locking_off",
    "lose",
    "trust_nodes",
    "use_nodes",
]
