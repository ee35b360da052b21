"""A command, and its handler: who is told each node's reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.transport.encoding import encode_command
from celery_redlock.lock.transport.script import Script

PING = encode_command("PING")


class Handler(Protocol):
    """Whoever sent a command, and is told the end of it for each node, by one thread at a time."""

    @property
    def wanted(self) -> bool:
        """Whether the command may still be written; asked in the turn of the node.

        So nothing that could set a key follows the release of its token: what ends the want comes
        before the release.
        """

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Take a node's reply; sent: monotonic s before the command left; run_id: whose it is."""

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Learn that no reply will come: the command may have run, or may run later."""


class Command:
    """One request, the same for every node. script: what it calls, where a node may forget it.

    suffixed: it ends with the suffix of its connection (`Peer.suffix`), added as it is written.
    dated: it says what time it is, so that it counts as sent when it was first, however often.
    """

    __slots__ = ("dated", "handler", "request", "script", "suffixed")

    def __init__(
        self,
        request: bytes,
        handler: Handler,
        script: Script | None = None,
        *,
        suffixed: bool = False,
        dated: bool = False,
    ) -> None:
        self.request, self.handler, self.script = request, handler, script
        self.suffixed, self.dated = suffixed, dated


class IgnoreReply:
    """The handler of a command whose answer nobody needs."""

    wanted = True

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Leave it at that."""

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Leave it at that."""


IGNORE_REPLY = IgnoreReply()
Entry = tuple[Command, float, bytes]  # a command, when it was sent, and as what


def still_wanted(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the commands whose handlers still want them written."""
    for command, _, _ in entries:
        if not command.handler.wanted:
            return [entry for entry in entries if entry[0].handler.wanted]
    return entries


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


class RoundGroup(Round):
    """Several rounds that one caller waits for together; decided when all of them are."""

    def __init__(self) -> None:
        super().__init__()
        self._open = 1  # itself, until it is closed

    def add(self, round_: Round) -> None:
        """Wait for a round, too; before it is sent."""
        self._open += 1
        round_.wake = self._one_less

    def close(self) -> None:
        """Say that all rounds are in it."""
        self._one_less()

    def _one_less(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.decide()
