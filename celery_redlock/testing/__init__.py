"""Support for tests of locked tasks: fake nodes with a clock, embedded servers, worker processes.

Read `node.py` first: a `FakeNode` is a lock node without a server.

- `node.py`: `FakeNode`, `VirtualClock`, `fake_nodes`: a node that is a thread of this process, with
  a clock that a test moves, also with freezegun or time-machine. `FakeServer` is one life of a
  node.
- `model.py`: `Server`, `Engine`: runs the shipped scripts in a real Lua, over keys in memory
  (`server.lua`).
- `holders.py`: `hold`, `lose`, `assert_released`, `locking_off`: hold a lock as another owner, lose
  a lock, check that it was released, or run without any lock. `use_nodes` gives an app other nodes.
- `servers.py`: `EmbeddedNode`, `WorkerProcess`, `embedded_nodes`: real servers and workers, which a
  test kills and pauses.

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
