"""Lock nodes without a server: threads of this process, with a clock that a test moves.

Every lock on them in this process uses their clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from redis import Redis

from celery_redlock.lock.platform.clock import Platform, install_platform, uninstall_platform
from celery_redlock.testing.clock import VirtualClock
from celery_redlock.testing.node_thread import NodeThread
from celery_redlock.testing.servers import claim_port


class FakeNode:
    """A lock node that is a thread of this process, with a clock that a test moves.

    It answers this package's requests, by the package's own scripts, and no others: it cannot be a
    broker. `start`, `kill`, `pause`, `resume` and `with` work as for an `EmbeddedNode`; `kill`
    loses the keys. clock: several nodes may share one; None makes a new one.
    Other processes may connect, but their leases use the machine's clock.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        self._claim = claim_port()
        self.port = int(self._claim.getsockname()[1])
        self._thread: NodeThread | None = None
        self._server = f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The URL that `redlock_nodes` takes."""
        return f"redis://{self._server}/0"

    def start(self) -> FakeNode:
        """Start the node, empty; do nothing if it is up."""
        if self._thread is None:
            install_platform(self._server, Platform(self.clock))
            self._thread = NodeThread(self.port, self.clock)
        return self

    def kill(self) -> None:
        """End the node with its keys and connections; do nothing if it is down."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def pause(self) -> None:
        """Freeze the node: connections stay open, and no request is answered."""
        if self._thread is not None:
            self._thread.set_paused(True)

    def resume(self) -> None:
        """Let a paused node answer again."""
        if self._thread is not None:
            self._thread.set_paused(False)

    def advance(self, seconds: float) -> None:
        """Let the node's clock jump ahead, also for its lock holders and nodes that share it."""
        self.clock.advance(seconds)

    def client(self) -> Redis:
        """Return a redis-py client of this node, answering in str."""
        return Redis(port=self.port, decode_responses=True, protocol=2)

    def __enter__(self) -> FakeNode:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        uninstall_platform(self._server)
        self._claim.close()


@contextlib.contextmanager
def fake_nodes(count: int = 3) -> Iterator[list[FakeNode]]:
    """Start fake nodes that share one clock, and end all of them at exit."""
    clock = VirtualClock()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeNode(clock)) for _ in range(count)]
