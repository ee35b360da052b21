"""The state of a run, read from outside the workers: the broker's counts and the lock nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

from example_worker import shop

__all__ = ["Traffic", "Watch", "place"]

PULSE = 0.2
# the key that a node has while it abstains, because it may have lost locks
QUIET = "{redlock}:quiet"


class Traffic(NamedTuple):
    """The broker's counts at one moment.

    queued: messages that no worker has taken. taken: messages that a worker has and has not
    acknowledged: running, or waiting there. deferrals: since the phase began.
    """

    queued: int
    taken: int
    deferrals: int


class Watch:
    """Reads the broker and the lock nodes at these URLs; only `clear` changes anything."""

    def __init__(self, broker: str, nodes: Sequence[str]) -> None:
        self._broker = Redis.from_url(broker, decode_responses=True)
        self._nodes = [(place(url), _client(url)) for url in nodes]

    def close(self) -> None:
        """Close the connections."""
        for client in (self._broker, *(client for _, client in self._nodes)):
            client.close()

    def check(self) -> None:
        """Raise RedisError if the broker, RuntimeError if most lock nodes, do not answer."""
        self._broker.ping()
        down = [name for name, state in self.nodes() if state == "DOWN"]
        if len(down) * 2 >= len(self._nodes):
            raise RuntimeError(f"most lock nodes do not answer: {', '.join(down)}")

    def clear(self) -> None:
        """Delete the shop's messages and counter on the broker, also those of an earlier run."""
        shop.app.control.purge()
        self._broker.delete(shop.DEFERRALS)

    def traffic(self) -> Traffic:
        """Return the counts, all of one moment."""
        with self._broker.pipeline() as pipe:
            pipe.llen(f"{shop.PREFIX}{shop.QUEUE}")
            pipe.hlen(f"{shop.PREFIX}unacked")
            pipe.get(shop.DEFERRALS)
            queued, taken, deferrals = pipe.execute()
        return Traffic(queued, taken, int(deferrals or 0))

    def nodes(self) -> Sequence[tuple[str, str]]:
        """Return host and port of each lock node, and its state.

        "up", "abstains" (it answers and does not vote yet), or "DOWN" (no answer within 0.2 s).
        """
        return [(name, _state(client)) for name, client in self._nodes]


def _client(url: str) -> Redis:
    """Return a client without retries, which would delay the screen while a node is down."""
    once = Retry(NoBackoff(), 0)
    return Redis.from_url(url, socket_timeout=PULSE, socket_connect_timeout=PULSE, retry=once)


def _state(client: Redis) -> str:
    try:
        return "abstains" if client.exists(QUIET) else "up"
    except RedisError:
        return "DOWN"


def place(url: str) -> str:
    """Return host, port and database of a URL, without its password."""
    return url.rpartition("@")[2].removeprefix("redis://").removeprefix("rediss://")
