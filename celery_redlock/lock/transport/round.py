"""One request to several nodes that a caller waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.transport.command import Command


class Round:
    """One request to all nodes that somebody waits for. A subclass decides it.

    wake: set by whoever waits; called once the round is decided, in any thread.
    """

    __slots__ = ("decided", "wake")

    wake: Callable[[], None] | None

    def __init__(self) -> None:
        self.decided = False
        self.wake = None

    def decide(self) -> None:
        """Mark the round as over and wake the one that waits for it."""
        self.decided = True
        wake = self.wake
        if wake is not None:
            wake()


class Question(Round):
    """Asks some nodes, by index; decided when each has spoken.

    An error is a reply as well: it comes from a server that is there. read: returns what any other
    reply means; raises UnexpectedReplyError.
    """

    wanted = True

    def __init__(self, nodes: Iterable[int], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self._read = read
        self._replies: dict[int, Any] = {}
        self._due = set(nodes)

    @property
    def replies(self) -> dict[int, Any]:
        """What the nodes said, by index, as of now: any thread may bring in a late one."""
        return self._replies.copy()

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Keep what it says."""
        is_error = type(reply) is hiredis.ReplyError
        self._replies[node] = reply if is_error else self._read(reply)
        self._heard(node)

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Take note that it does not answer."""
        self._heard(node)

    def _heard(self, node: int) -> None:
        self._due.discard(node)
        if not self._due:
            self.decide()
