"""What a server may promise before hiredis believes it."""

from __future__ import annotations

import itertools
from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.transport.command import (
    INCOMPLETE,
    MAX_REPLY_BYTES,
    MAX_REPLY_ITEMS,
    ReplyReader,
    encode_bulk,
)

TOO_LARGE = [
    *(b"%c1000000000\r\n" % kind for kind in b"*>~%"),
    *(b"%c2000000000\r\n" % kind for kind in b"$="),
]

numbers = st.integers(-9, 10**12).map(lambda number: b":%d\r\n" % number)
texts = st.one_of(st.binary(max_size=60), st.sampled_from([*TOO_LARGE, b"*1000000000"]))
verbatim = texts.map(lambda text: b"=%d\r\ntxt:%b\r\n" % (len(text) + 4, text))
bulks = st.one_of(texts.map(encode_bulk), verbatim, st.just(b"$-1\r\n"))
errors = st.sampled_from([b"-ERR no *1000000000\r\n", b"+OK\r\n"])


def listed(replies: list[bytes]) -> bytes:
    return b"*%d\r\n%b" % (len(replies), b"".join(replies))


replies = st.recursive(
    st.one_of(numbers, bulks, errors), lambda inner: st.lists(inner, max_size=4).map(listed)
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut bytes into the pieces in which a socket may give them."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


def read_all(reader: ReplyReader, data: list[bytes], taken: int = 10**6) -> list[Any]:
    """Return the replies. taken: how many of them are read between two pieces."""
    found: list[Any] = []
    for piece in data:
        reader.feed(piece)
        found += itertools.islice(iter(reader.gets, INCOMPLETE), taken)
    return [*found, *iter(reader.gets, INCOMPLETE)]


@given(
    st.lists(replies, min_size=1, max_size=4),
    st.lists(st.integers(0, 10**6), max_size=5),
    st.integers(0, 2),
)
def test_replies_pass_however_they_are_cut(said: list[bytes], cuts: list[int], taken: int) -> None:
    whole = b"".join(said)
    plain = hiredis.Reader()
    plain.feed(whole)
    known = [repr(plain.gets()) for _ in said]  # errors are equal by their text alone
    for most in (10**6, taken):
        assert [*map(repr, read_all(ReplyReader(), pieces(whole, cuts), most))] == known


@given(
    st.lists(replies, max_size=3),
    st.sampled_from(TOO_LARGE),
    st.lists(st.integers(0, 10**6), max_size=5),
)
def test_a_header_that_is_too_large_is_refused_however_it_is_cut(
    said: list[bytes], header: bytes, cuts: list[int]
) -> None:
    with pytest.raises(OSError, match=r"000 (items|bytes)"):
        read_all(ReplyReader(), pieces(b"".join([*said, b"*2\r\n", header]), cuts))


@pytest.mark.parametrize("reply", [b"$-7\r\n+OK\r\n", b"$-100\r\n:1\r\n", b"=-9\r\n+OK\r\n"])
def test_a_size_below_none_is_refused(reply: bytes) -> None:
    with pytest.raises(hiredis.ProtocolError):
        read_all(ReplyReader(), pieces(reply, [5]))


def test_a_line_that_does_not_end_is_refused() -> None:
    with pytest.raises(OSError, match="does not end"):
        read_all(ReplyReader(), [b"-" + b"x" * (MAX_REPLY_BYTES // 2)] * 3)


def test_what_is_at_the_limit_passes() -> None:
    ReplyReader().feed(b"*%d\r\n$%d\r\n" % (MAX_REPLY_ITEMS, MAX_REPLY_BYTES))
