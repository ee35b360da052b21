"""What a node needs of the set that it is of."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from celery_redlock.errors import NodeError
from celery_redlock.lock.transport.command import Entry
from celery_redlock.lock.transport.connection import Wire


@dataclass(frozen=True)
class TransportOptions:
    """Times in seconds.

    timeout: for a connect and for a reply. longest_idle: after that long without a write, a
    connection is made anew before it is used.
    """

    timeout: float
    longest_idle: float = math.inf


class NodeOwner(Protocol):
    """The set of nodes that a node is of. Every method is called from any thread."""

    def report(self, node: int, entries: deque[Entry], error: NodeError, wire: Wire | None) -> None:
        """Take word of a connection that broke or could not be made.

        entries: the commands that get no reply. wire: to be closed, where nobody reads from it.
        """

    def rearm(self) -> None:
        """Hear that there is something new to poll for."""

    def handshake(self, connection: Any, node: int) -> Any:
        """Greet the server of a new connection; returns its `Peer`. Raises what refuses it."""

    def admit(self, node: int, info: Any, use: Callable[[], None]) -> None:
        """Call `use` to let a connection be used, or raise NodeError to refuse it.

        info: what `handshake` returned.
        """
