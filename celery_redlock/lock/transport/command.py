"""A command, its handler, and a round: one request to several nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.transport.encoding import encode_command
from celery_redlock.lock.transport.script import Script

PING = encode_command("PING")


class Handler(Protocol):
    """Receives the end of a command for each node, from one thread at a time."""

    @property
    def wanted(self) -> bool:
        """Whether the command may still be written. Read in the turn of the node.

        So a command never follows one that was sent after the flag went down.
        """

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Take a reply. sent: monotonic seconds before the write; run_id: of the server."""

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """No reply will come. The command may have run, or may still run later."""


class Command:
    """One request, the same for every node. script: sent again if a node has forgotten it.

    suffixed: it ends with the suffix of its connection (`Peer.suffix`), added as it is written.
    dated: the request contains a time, so a repetition keeps the time of the first write.
    """

    __slots__ = ("dated", "handler", "request", "script", "suffixed")

    def __init__(
        self,
        request: bytes,
        handler: Handler,
        script: Script | None = None,
        suffixed: bool = False,
        dated: bool = False,
    ) -> None:
        self.request, self.handler, self.script = request, handler, script
        self.suffixed, self.dated = suffixed, dated


class IgnoreReply:
    """The handler of a command whose reply nobody needs."""

    wanted = True

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Do nothing."""

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Do nothing."""


IGNORE_REPLY = IgnoreReply()
Entry = tuple[Command, float, bytes]  # command, monotonic seconds of the write, request


def still_wanted(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the commands whose handlers still want them written."""
    for command, _, _ in entries:
        if not command.handler.wanted:
            return [entry for entry in entries if entry[0].handler.wanted]
    return entries


class Round:
    """One request that a caller waits for. A subclass decides it.

    wake: set by the waiter; called when the round is decided, from any thread.
    """

    __slots__ = ("decided", "wake")

    wake: Callable[[], None] | None

    def __init__(self) -> None:
        self.decided = False
        self.wake = None

    def decide(self) -> None:
        """Mark the round as decided, and wake its waiter."""
        self.decided = True
        wake = self.wake
        if wake is not None:
            wake()


class Question(Round):
    """A question to some nodes, by index; decided when each has answered or failed.

    An error reply is an answer: the server is there. read: returns the value of any other reply;
    raises UnexpectedReplyError.
    """

    wanted = True

    def __init__(self, nodes: Iterable[int], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self._read = read
        self._replies: dict[int, Any] = {}
        self._due = set(nodes)

    @property
    def replies(self) -> dict[int, Any]:
        """A copy of the replies so far, by node: another thread may add a late one."""
        return self._replies.copy()

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Keep the reply."""
        is_error = type(reply) is hiredis.ReplyError
        self._replies[node] = reply if is_error else self._read(reply)
        self._heard(node)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Count the node as heard: it will not answer."""
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
