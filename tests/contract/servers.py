"""A real server and a simulated one, as functions that take a command and return its reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hiredis
from redis import Redis, ResponseError

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
