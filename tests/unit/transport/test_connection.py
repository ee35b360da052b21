"""One connection: replies in the order of commands, whatever the socket makes of the bytes."""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from celery_redlock.lock.transport.command import Command, encode_command
from celery_redlock.lock.transport.connection import POISONED, Peer, RedisConnection
from tests.unit.transport.ends import Kept, ServerEnd, echo, ends

MUCH = "x" * 4_000_000  # more than two ends of a socket pair take


class Interrupt(BaseException):
    """What a signal handler raises in the middle of anything."""


@pytest.fixture
def pair() -> Iterator[tuple[RedisConnection, ServerEnd]]:
    dialled, server = ends()
    connection = RedisConnection(dialled, Peer("run", encode_suffix()))
    yield connection, server
    connection.close(reset=True)
    server.socket.close()


def encode_suffix() -> bytes:
    return b"$6\r\nsuffix\r\n"


def write(connection: RedisConnection, *commands: Command, keeps_gil: bool = True) -> None:
    connection.write([(command, 0.0, command.request) for command in commands], keeps_gil=keeps_gil)


def replies(connection: RedisConnection) -> list[Any]:
    return [reply for _, reply in connection.replies]


@pytest.mark.parametrize("keeps_gil", [True, False])
def test_a_reply_that_comes_byte_by_byte_is_one_reply(
    pair: tuple[RedisConnection, ServerEnd], keeps_gil: bool
) -> None:
    connection, server = pair
    write(connection, echo("a", Kept()), echo("b", Kept()), keeps_gil=keeps_gil)
    whole = b"$5\r\nfirst\r\n*2\r\n:1\r\n:2\r\n"
    seen = []
    for byte in whole:
        server.say(bytes([byte]))
        connection.read(keeps_gil=keeps_gil)
        seen.append(len(connection.replies))
    assert replies(connection) == [b"first", [1, 2]]
    assert seen == [0] * 10 + [1] * 12 + [2]
    assert not connection.in_flight


def test_replies_that_come_at_once_go_to_their_commands_in_order(
    pair: tuple[RedisConnection, ServerEnd],
) -> None:
    connection, server = pair
    commands = [echo(str(number), Kept()) for number in range(3)]
    write(connection, *commands)
    server.say(b":0\r\n:1\r\n:2\r\n")
    connection.read()
    assert [(entry[0], reply) for entry, reply in connection.replies] == list(
        zip(commands, range(3), strict=True)
    )


@pytest.mark.parametrize("keeps_gil", [True, False])
def test_what_the_socket_does_not_take_is_written_later_and_first(
    pair: tuple[RedisConnection, ServerEnd], keeps_gil: bool
) -> None:
    connection, server = pair
    write(connection, echo(MUCH, Kept()), keeps_gil=keeps_gil)
    left = len(connection.write_buffer)
    assert 0 < left < len(MUCH)
    write(connection, echo("behind", Kept()), keeps_gil=keeps_gil)  # the socket takes nothing
    assert len(connection.write_buffer) == left + len(encode_command("ECHO", "behind"))
    received, expected = b"", encode_command("ECHO", MUCH) + encode_command("ECHO", "behind")
    while len(received) < len(expected):
        received += server.socket.recv(65536)
        connection.write((), keeps_gil=keeps_gil)
    assert received == expected
    assert connection.write_buffer == b""


def test_only_commands_that_are_flagged_end_with_the_suffix(
    pair: tuple[RedisConnection, ServerEnd],
) -> None:
    connection, server = pair
    head = b"*3\r\n" + encode_command("ECHO", "a").partition(b"\r\n")[2]
    flagged, plain = Command(head, Kept(), suffixed=True), echo("b", Kept())
    write(connection, flagged)
    write(connection, plain)
    write(connection, flagged, plain)
    with_it, without = [b"ECHO", b"a", b"suffix"], [b"ECHO", b"b"]
    assert [server.read_command() for _ in range(4)] == [with_it, without, with_it, without]


class Interrupted(Command):
    """An exception strikes while it is put into bytes."""

    __slots__ = ()

    @property
    def suffixed(self) -> bool:  # type: ignore[override]
        raise Interrupt

    @suffixed.setter
    def suffixed(self, value: bool) -> None:
        pass


def test_an_exception_in_the_middle_of_a_write_poisons_the_connection(
    pair: tuple[RedisConnection, ServerEnd],
) -> None:
    connection, server = pair
    struck = Interrupted(encode_command("ECHO", "a"), Kept())
    with pytest.raises(Interrupt):
        write(connection, struck)
    assert [entry[0] for entry in connection.in_flight] == [struck], "it may have left"
    with pytest.raises(OSError, match=POISONED):
        write(connection, echo("b", Kept()))
    assert len(connection.in_flight) == 2, "who gives the connection up reports both"
    server.say(b":1\r\n")
    with pytest.raises(OSError, match=POISONED):
        connection.read()
    assert not connection.replies


def test_an_exception_in_the_middle_of_a_read_poisons_the_connection(
    pair: tuple[RedisConnection, ServerEnd],
) -> None:
    class Interrupting(deque[Any]):
        def popleft(self) -> Any:
            raise Interrupt

    connection, server = pair
    connection.in_flight = Interrupting()
    write(connection, echo("a", Kept()), echo("b", Kept()))
    server.say(b":1\r\n:2\r\n")
    with pytest.raises(Interrupt):
        connection.read()
    assert replies(connection) == [1]
    assert len(connection.in_flight) == 2, "answered and in flight: told twice, but not lost"
    with pytest.raises(OSError, match=POISONED):
        connection.read()
    assert replies(connection) == [1], "no reply goes to the command before its own"


def test_a_reply_that_nobody_asked_for_ends_the_connection(
    pair: tuple[RedisConnection, ServerEnd],
) -> None:
    connection, server = pair
    write(connection, echo("a", Kept()))
    server.say(b":1\r\n:2\r\n")
    with pytest.raises(OSError, match="an unexpected answer"):
        connection.read()
    assert replies(connection) == [1]


def test_what_is_no_reply_at_all_ends_the_connection(
    pair: tuple[RedisConnection, ServerEnd],
) -> None:
    connection, server = pair
    write(connection, echo("a", Kept()))
    server.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(OSError, match="not a Redis server"):
        connection.read()
    assert not connection.replies


def test_the_end_of_the_stream_is_told_from_nothing_to_read(
    pair: tuple[RedisConnection, ServerEnd],
) -> None:
    connection, server = pair
    connection.read()  # nothing has come
    server.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match="closed by the server"):
        connection.read()


def test_a_read_within_a_read_leaves_its_bytes_alone(
    pair: tuple[RedisConnection, ServerEnd],
) -> None:
    outer, server = pair
    dialled, other_server = ends()
    inner = RedisConnection(dialled, Peer("run"))
    write(outer, echo("a", Kept()))
    write(inner, echo("b", Kept()))
    server.say(b"$5\r\nouter\r\n")
    other_server.say(b"$5\r\ninner\r\n")

    def read_other(frame: FrameType, event: str, arg: object) -> None:
        """Read as a finalizer may: the bytes have come, and are not copied yet."""
        if event == "return" and frame.f_code.co_name == "_checked":
            sys.setprofile(None)
            inner.read()

    sys.setprofile(read_other)
    try:
        outer.read()
    finally:
        sys.setprofile(None)
    assert replies(inner) == [b"inner"]
    assert replies(outer) == [b"outer"]
    inner.close(reset=True)
    other_server.socket.close()
