"""Support for tests of locked tasks: fake nodes with a clock, embedded servers, worker processes.

Read `node.py` first: a `FakeNode` is a lock node without a server. It answers by the shipped
scripts (`model.py`, `server.lua`), and by its `VirtualClock`, which a test moves, also with
freezegun or time-machine. `holders.py`: hold a lock, lose a lock, check that it was released, or
run without any lock. `servers.py`: real servers and workers, which `reaper.py` kills if the test
run dies.
Not here: the fixtures; pytest finds them in `pytest_celery_redlock`, beside the package. Needs the
extra `celery_redlock[testing]`; no other folder imports this one. Examples: docs/how-to/test.md.
"""

from celery_redlock.testing.holders import (
    assert_released,
    hold,
    locking_off,
    lose,
    trust_nodes,
    use_nodes,
)
from celery_redlock.testing.node import FakeNode, VirtualClock, fake_nodes
from celery_redlock.testing.servers import EmbeddedNode, WorkerProcess, embedded_nodes

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
