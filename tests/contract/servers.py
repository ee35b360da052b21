"""A real server and a simulated one, as functions that take a command and return its reply."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import hiredis
from redis import Redis, ResponseError

from celery_redlock.lock.transport.command import encode_command
from tests.simulation.nodes import Node

Command = Callable[..., Any]  # the words, as texts; an error is returned, too


def real(client: Redis) -> Command:
    """Return the replies as they come, without what redis-py makes of them."""
    client.response_callbacks.clear()

    def command(*words: str) -> Any:
        try:
            return client.execute_command(*words)
        except ResponseError as error:
            return error

    return command


def simulated(node: Node) -> Command:
    def command(*words: str) -> Any:
        reader = hiredis.Reader(encoding="utf-8")
        reader.feed(node.execute([word.encode() for word in words])[1])
        return reader.gets()

    return command


class RealEar:
    """A subscriber of a real server."""

    def __init__(self, port: int, channels: tuple[str, ...]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._reader = hiredis.Reader(encoding="utf-8")
        self._socket.sendall(encode_command("SUBSCRIBE", *channels))
        self.heard()

    def heard(self) -> list[tuple[str, str]]:
        """Return the channels and messages since the last call."""
        self._socket.sendall(encode_command("PING"))
        heard = []
        while (reply := self._next()) != ["pong", ""]:
            if reply[0] == "message":
                heard.append((reply[1], reply[2]))
        return heard

    def _next(self) -> Any:
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        return reply

    def close(self) -> None:
        self._socket.close()
