"""What is sent, and what comes back: RESP, commands, their handlers, and rounds.

RESP is the protocol of Redis: commands to bytes, and replies to values. A round is one request to
several nodes. Not here: the sockets (`connection.py`), and who reads from them (`nodes.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import hiredis

from celery_redlock.errors import NodeError


def encoded(text: str) -> bytes:
    """Return the bytes of a text on the nodes. Two different texts never have the same bytes.

    UTF-8, also for lone surrogates: `os.fsdecode` makes them from a file name that is not UTF-8.
    """
    return text.encode("utf-8", "surrogatepass")


def encode_bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def encode_text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")  # as `encoded`, but in one call: made for each try
    return b"$%d\r\n%b\r\n" % (len(data), data)


def encode_words(words: Iterable[str]) -> bytes:
    return b"".join(map(encode_text, words))


def encode_command(*words: str) -> bytes:
    return b"*%d\r\n%b" % (len(words), encode_words(words))


def read_list(reply: Any, length: int | None = None) -> list[Any]:
    """Return a reply that is a list of this length; raises UnexpectedReplyError."""
    if not isinstance(reply, list) or length not in (None, len(reply)):
        raise UnexpectedReplyError(reply)
    return reply


def read_number(reply: Any) -> int:
    if type(reply) is not int:
        raise UnexpectedReplyError(reply)
    return reply


def read_text(reply: Any) -> str:
    if not isinstance(reply, (bytes, str)):
        raise UnexpectedReplyError(reply)
    return text_of(reply)


def text_of(reply: Any) -> str:
    """Return a reply as text, for people. Invalid bytes of another program are replaced."""
    if not isinstance(reply, bytes):
        return str(reply)
    try:
        return reply.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return reply.decode(errors="replace")


MAX_REPLY_ITEMS = 1000  # of a list in a reply; no script or command of ours gets a longer one
MAX_REPLY_BYTES = 1 << 20  # of a text in a reply
INCOMPLETE = object()  # what `ReplyReader.gets` returns if there is no complete reply
_PLAIN_GRANTS = frozenset(b":1\r\n" * count for count in (1, 2))  # most replies: a release, a grant
# in each header that is too large, and perhaps in a text, if kinds and digits are made one each
_LARGE_HEADER = b"*0000"
_HEADER_KINDS = bytes.maketrans(b">~%|$=123456789", b"******000000000")
# any lines that are no header; then the header of a list or of a text, if it is complete
_HEADER = re.compile(
    rb"(?:[^*>~%|$=\r\n][^\r\n]*\r\n)*(?:[*>~%|](-?\d{1,20})\r\n|[$=](-?\d{1,20})\r\n)?"
)


class ReplyReader:
    """Reads replies by hiredis, and checks their headers before.

    For a list, hiredis reserves memory for as many items as the header says, and keeps the GIL
    meanwhile. gets: returns the next reply. It is called until it returns `INCOMPLETE`. items,
    size: most of a list, and bytes of a text.
    """

    __slots__ = ("_is_open", "_items", "_partial_line", "_reader", "_size", "_skip", "_unchecked",
                 "gets")  # fmt: skip

    def __init__(self, items: int = MAX_REPLY_ITEMS, size: int = MAX_REPLY_BYTES) -> None:
        self._items = items
        self._size = size
        self._reader = hiredis.Reader(notEnoughData=INCOMPLETE)
        self.gets: Callable[[], Any] = self._reader.gets
        self._unchecked = b""  # the last bytes, if they begin with a line and are not parsed here
        self._is_open = False  # `_check` ended within a header or a text
        self._partial_line = b""  # an incomplete line
        self._skip = 0  # bytes of a text that are still to come

    def feed(self, data: bytes) -> None:
        """Add the next bytes of a connection; raise OSError for a header that is too large."""
        reader = self._reader
        is_small = data in _PLAIN_GRANTS or (
            data[-1:] == b"\n" and _LARGE_HEADER not in data.translate(_HEADER_KINDS)
        )
        # hiredis does not count the first byte of a header that has come alone: `_is_open` does
        if is_small and not self._is_open and not reader.has_data():
            self._unchecked = data
        else:
            self._check(self._unchecked + data)
            self._unchecked = b""
        reader.feed(data)

    def _check(self, data: bytes) -> None:
        data = self._partial_line + data
        position = self._skip
        while position < len(data):
            match = _HEADER.match(data, position)
            if match is None or match.end() == position:
                break
            position = match.end()
            items, size = match.groups()
            if items is not None and int(items) > self._items:
                raise OSError(f"a reply of {int(items)} items: no Redis server for locks")
            # hiredis refuses a size below -1, by which this would go back, and never end
            if size is not None and int(size) >= 0:
                if int(size) > self._size:
                    raise OSError(f"a reply of {int(size)} bytes: no Redis server for locks")
                position += int(size) + 2  # and the end of its line
        self._partial_line = data[position:]
        self._skip = max(0, position - len(data))
        self._is_open = position != len(data)
        if len(self._partial_line) > MAX_REPLY_BYTES:
            raise OSError("a reply with a line that does not end")


class UnexpectedReplyError(Exception):
    """A reply that the script or command cannot return. reply: as received."""

    def __init__(self, reply: Any) -> None:
        super().__init__(f"not a reply of its script: {outline_of(reply)}")


def outline_of(reply: Any, depth: int = 2) -> str:
    """Return an outline of a reply without long texts, which may be secret lock values."""
    if reply is None:
        return "nil"
    if isinstance(reply, (list, tuple)):
        outlines = [outline_of(item, depth - 1) for item in reply[:5]] if depth else ["..."]
        return f"[{', '.join([*outlines, *(['...'] if len(reply) > 5 else [])])}]"
    if isinstance(reply, (bytes, str)):
        return repr(reply) if len(reply) <= 16 else f"a text of {len(reply)}"
    return repr(reply) if isinstance(reply, (bool, int, float)) else f"a {type(reply).__name__}"


class Script:
    """A Lua script as the bytes of the commands that run it.

    name: for people. digest: that EVALSHA takes.
    """

    def __init__(self, name: str, source: bytes) -> None:
        self.name = name
        self.source = source
        self.digest = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self._by_source = encode_bulk(b"EVAL") + encode_bulk(source)
        self.by_digest = encode_bulk(b"EVALSHA") + encode_bulk(self.digest)
        self.load = b"*3\r\n" + encode_bulk(b"SCRIPT") + encode_bulk(b"LOAD") + encode_bulk(source)

    def call(self, keys: Sequence[str], *args: str) -> bytes:
        """Return the request for these keys and arguments, by the script's digest."""
        words = [str(len(keys)), *keys, *args]
        return b"*%d\r\n%b%b" % (len(words) + 2, self.by_digest, encode_words(words))

    def with_source(self, request: bytes) -> bytes:
        """Return a request of this script with the source instead of the digest."""
        return request.replace(self.by_digest, self._by_source, 1)


PING = encode_command("PING")
TIME = encode_command("TIME")


class Handler(Protocol):
    """Receives the end of a command for each node, from one thread at a time."""

    @property
    def wanted(self) -> bool:
        """Whether the command may still be written; False is final. Read in the turn of the node.

        So an unwanted command is never written after a command that was sent once this was False.
        """

    def on_reply(self, node: int, sent_at: float, reply: Any, run_id: str) -> None:
        """Handle a reply. sent_at: monotonic seconds before the write. run_id: of the server."""

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Handle an error: no reply will come. The command may have run, or may still run later."""


@dataclass(eq=False, slots=True)
class Command:
    """One request, the same for every node.

    script: sent again if a node has forgotten it. suffixed: the connection appends its suffix
    (`Peer.suffix`) as it writes the request. dated: the request contains a time, so a repetition
    keeps the time of the first write.
    """

    request: bytes
    handler: Handler
    script: Script | None = None
    suffixed: bool = False
    dated: bool = False


class IgnoreReply:
    """The handler of a command whose reply is not needed: an error costs no vote.

    hear: called with the node, the monotonic seconds of the write and the reply, if it is no error.
    """

    wanted = True

    def __init__(self, hear: Callable[[int, float, Any], object] | None = None) -> None:
        self._hear = hear

    def on_reply(self, node: int, sent_at: float, reply: Any, run_id: str) -> None:
        if self._hear is not None and type(reply) is not hiredis.ReplyError:
            self._hear(node, sent_at, reply)

    def on_error(self, *_: Any) -> None: ...


IGNORE_REPLY = IgnoreReply()
Entry = tuple[Command, float, bytes]  # command, monotonic seconds of the write, request


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
        self.decided = True
        wake = self.wake
        if wake is not None:
            wake()


class Question(Round):
    """A question to some nodes, by index. Decided when each of them has replied or failed.

    An error reply is a reply, too: the server is up. read: returns the value of any other reply, or
    raises UnexpectedReplyError.
    """

    wanted = True

    def __init__(self, nodes: Iterable[int], read_value: Callable[[Any], Any]) -> None:
        super().__init__()
        self._read = read_value
        self._replies: dict[int, Any] = {}
        self._due = set(nodes)

    @property
    def replies(self) -> dict[int, Any]:
        """A copy of the replies so far, by node, because another thread may add a late reply."""
        return self._replies.copy()

    @property
    def voted(self) -> int:
        return len(self._replies)

    def on_reply(self, node: int, sent_at: float, reply: Any, run_id: str) -> None:
        is_error = type(reply) is hiredis.ReplyError
        self._replies[node] = reply if is_error else self._read(reply)
        self._note_reply(node)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        self._note_reply(node)

    def _note_reply(self, node: int) -> None:
        self._due.discard(node)
        if not self._due:
            self.decide()


class RoundGroup(Round):
    """Several rounds that one caller waits for together. Decided when all of them are decided."""

    def __init__(self) -> None:
        super().__init__()
        self._open = 1  # the group itself, until `close`

    def add(self, round_: Round) -> None:
        """Add a round that is not sent yet."""
        self._open += 1
        round_.wake = self._one_less

    def close(self) -> None:
        self._one_less()

    def _one_less(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.decide()
