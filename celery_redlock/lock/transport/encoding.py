"""RESP, the protocol of Redis: commands to bytes, and replies to values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def encoded(text: str) -> bytes:
    """Return the bytes of a text on the nodes. Two different texts never have the same bytes.

    UTF-8, also for lone surrogates: `os.fsdecode` makes them from a file name that is not UTF-8.
    """
    return text.encode("utf-8", "surrogatepass")


def decoded(name: bytes) -> str:
    """Return the text of bytes on a node. Invalid bytes of another program are replaced."""
    try:
        return name.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return name.decode(errors="replace")


def encode_bulk(word: bytes) -> bytes:
    """Return a word as a RESP bulk string."""
    return b"$%d\r\n%b\r\n" % (len(word), word)


def encode_text(text: str) -> bytes:
    """Return a text as a RESP bulk string."""
    word = text.encode("utf-8", "surrogatepass")  # as `encoded`, but in one call: made for each try
    return b"$%d\r\n%b\r\n" % (len(word), word)


def encode_words(words: Iterable[str]) -> bytes:
    """Return texts as consecutive RESP bulk strings."""
    return b"".join(map(encode_text, words))


def encode_command(*words: str) -> bytes:
    """Return a command as a request."""
    return b"*%d\r\n%b" % (len(words), encode_words(words))


def read_list(reply: Any, length: int) -> list[Any]:
    """Return a reply that is a list of this length; raises UnexpectedReplyError."""
    if not isinstance(reply, list) or len(reply) != length:
        raise UnexpectedReplyError(reply)
    return reply


def read_number(reply: Any) -> int:
    """Return a reply that is a number; raises UnexpectedReplyError."""
    if type(reply) is not int:
        raise UnexpectedReplyError(reply)
    return reply


def read_text(reply: Any) -> str:
    """Return a reply that is a text; raises UnexpectedReplyError."""
    if not isinstance(reply, (bytes, str)):
        raise UnexpectedReplyError(reply)
    return text_of(reply)


def text_of(reply: Any) -> str:
    """Return a reply as text, for people."""
    return decoded(reply) if isinstance(reply, bytes) else str(reply)


class UnexpectedReplyError(Exception):
    """A reply that the script or command cannot return. reply: as received."""

    def __init__(self, reply: Any) -> None:
        super().__init__(f"not a reply of its script: {outline_of(reply)}")


def outline_of(reply: Any, depth: int = 2) -> str:
    """Return an outline of a reply without long texts, which may be secret lock values."""
    if reply is None:
        return "nil"
    if isinstance(reply, (list, tuple)):
        inside = [outline_of(word, depth - 1) for word in reply[:5]] if depth else ["..."]
        return f"[{', '.join([*inside, *(['...'] if len(reply) > 5 else [])])}]"
    if isinstance(reply, (bytes, str)):
        return repr(reply) if len(reply) <= 16 else f"a text of {len(reply)}"
    return repr(reply) if isinstance(reply, (bool, int, float)) else f"a {type(reply).__name__}"
