"""A command, its handler, and a round: one request to several nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.transport.encoding import encode_bulk, encode_command, encode_words


class Script:
    """A Lua script as the bytes of the commands that run it. name: for people."""

    def __init__(self, name: str, source: bytes) -> None:
        digest = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self.name, self.source = name, source
        self._by_source = encode_bulk(b"EVAL") + encode_bulk(source)
        self.by_digest = encode_bulk(b"EVALSHA") + encode_bulk(digest)
        self.load = b"*3\r\n" + encode_bulk(b"SCRIPT") + encode_bulk(b"LOAD") + encode_bulk(source)

    def call(self, keys: Sequence[str], *args: str) -> bytes:
        """Return the request for these keys and arguments, by the script's digest."""
        words = [str(len(keys)), *keys, *args]
        return b"*%d\r\n%b%b" % (len(words) + 2, self.by_digest, encode_words(words))

    def with_source(self, request: bytes) -> bytes:
        """Return a request of this script with the source instead of the digest."""
        return request.replace(self.by_digest, self._by_source, 1)


PING = encode_command("PING")


class Handler(Protocol):
    """Receives the end of a command for each node, from one thread at a time."""

    @property
    def wanted(self) -> bool:
        """Whether the command may still be written; False is final. Read in the turn of the node.

        So an unwanted command is never written after a command that was sent once this was False.
        """

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Handle a reply. sent: monotonic seconds before the write. run_id: of the server."""

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Handle an error: no reply will come. The command may have run, or may still run later."""


class Command:
    """One request, the same for every node.

    script: sent again if a node has forgotten it. suffixed: the connection appends its suffix
    (`Peer.suffix`) as it writes the request. dated: the request contains a time, so a repetition
    keeps the time of the first write.
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
    """The handler of a command whose reply is not needed."""

    wanted = True

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Do nothing."""

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Do nothing."""


IGNORE_REPLY = IgnoreReply()
Entry = tuple[Command, float, bytes]  # command, monotonic seconds of the write, request


def still_wanted(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the commands that may still be written."""
    for command, _, _ in entries:
        if not command.handler.wanted:
            return [entry for entry in entries if entry[0].handler.wanted]
    return entries


class Round:
    """One request that a caller waits for. A subclass calls `decide`.

    wake: set by the waiter; called when the round is decided, in any thread.
    """

    __slots__ = ("decided", "wake")

    wake: Callable[[], None] | None

    def __init__(self) -> None:
        self.decided = False
        self.wake = None

    @property
    def voted(self) -> int:
        """How many nodes gave a reply that counts; 0 if the round does not count them."""
        return 0

    def decide(self) -> None:
        """Mark the round as decided, and wake its waiter."""
        self.decided = True
        wake = self.wake
        if wake is not None:
            wake()


class Question(Round):
    """A question to some nodes, by index. Decided when each of them has replied or failed.

    An error reply is a reply, too: the server is up. read: returns the value of any other reply;
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
        """A copy of the replies so far, by node, because another thread may add a late reply."""
        return self._replies.copy()

    @property
    def voted(self) -> int:
        """How many nodes have replied."""
        return len(self._replies)

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Store the reply."""
        is_error = type(reply) is hiredis.ReplyError
        self._replies[node] = reply if is_error else self._read(reply)
        self._heard(node)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Count the node as done, because it will not reply."""
        self._heard(node)

    def _heard(self, node: int) -> None:
        self._due.discard(node)
        if not self._due:
            self.decide()


class RoundGroup(Round):
    """Several rounds that one caller waits for together. Decided when all of them are decided."""

    def __init__(self) -> None:
        super().__init__()
        self._open = 1  # the group itself, until `close`

    def add(self, round_: Round) -> None:
        """Add a round. Called before the round is sent."""
        self._open += 1
        round_.wake = self._one_less

    def close(self) -> None:
        """Mark the group as complete: no round is added any more."""
        self._one_less()

    def _one_less(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.decide()
