"""The locks of other packages, each over as many nodes as it can use, if it is installed.

They do not renew by themselves, and query one node after another, or in a thread for each node.
They give weaker guarantees, so their figures are a reference and no competition.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from redis import Redis

TTL = 30.0  # s
KEY = "x"

Pair = tuple[Callable[[], object], Callable[[], object]]  # acquire, release


def redis_py(clients: Sequence[Redis]) -> Pair:
    """Return redis-py's own Lock, on the one node that it can use."""
    lock = clients[0].lock("redis-py", timeout=TTL)
    return lock.acquire, lock.release


def redlock_py(clients: Sequence[Redis]) -> Pair:
    """Return redlock-py's lock: SET NX to one node after another."""
    manager = importlib.import_module("redlock").Redlock(clients)
    held: list[object] = []

    def acquire() -> None:
        held.append(manager.lock("redlock-py", int(TTL * 1000)))

    def release() -> None:
        manager.unlock(held.pop())

    return acquire, release


def pottery(clients: Sequence[Redis]) -> Pair:
    """Return pottery's Redlock: a thread a node, for each step anew."""
    make = importlib.import_module("pottery").Redlock
    lock = make(key="pottery", masters=set(clients), auto_release_time=TTL)
    return lock.acquire, lock.release


@dataclass(frozen=True)
class Other:
    """A package with a lock. sizes: the numbers of nodes that it is compared on."""

    package: str
    make: Callable[[Sequence[Redis]], Pair]
    sizes: Sequence[int]

    @property
    def installed(self) -> str:
        """Its version, "" where it is not installed."""
        with contextlib.suppress(PackageNotFoundError):
            return version(self.package)
        return ""

    def pair(self, stack: contextlib.ExitStack, urls: Sequence[str]) -> Pair:
        """Return its acquire and release over these nodes; the stack closes its connections."""
        return self.make([stack.enter_context(Redis.from_url(url)) for url in urls])


OTHERS = (
    Other("redis", redis_py, (1,)),
    Other("redlock-py", redlock_py, (1, 3)),
    Other("pottery", pottery, (1, 3)),
)
