"""Servers: the shared model of one, with a wall clock, and a memory that may be lost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from celery_redlock.lock.model.keys import guard_keys, tenure_key
from celery_redlock.lock.server.requests import PERMIT, TRUST
from celery_redlock.lock.server.tenures import RECORD_TTL_MS
from celery_redlock.lock.transport.command import Script
from celery_redlock.testing import model
from celery_redlock.testing.model import Scripts, Server, engine

if TYPE_CHECKING:
    from tests.simulation.network import Link
    from tests.simulation.world import World

_changed: dict[Script, bytes] = {}


def library() -> Scripts:
    """Return by digest the shipped scripts' names and bodies, or what stands for them just now."""
    return model.library(_changed)


@contextlib.contextmanager
def patched_scripts(texts: dict[Script, bytes]) -> Iterator[None]:
    """Let nodes run other texts for some scripts, under the shipped digests, for a while."""
    _changed.update(texts)
    try:
        yield
    finally:
        _changed.clear()


class Node(Server):
    """One server at one address, over all its lives.

    rate: s of its wall clock in a real s. offset: s that its wall clock is ahead.
    scripts: by digest, what it can be asked to run once it was loaded.
    """

    def __init__(
        self, world: World, index: int, *, rate: float, offset: float, scripts: Scripts
    ) -> None:
        super().__init__(scripts)
        self.world, self.index = world, index
        self.name = f"node{index}"
        self.rate, self.offset = rate, offset
        self.links: dict[Link, None] = {}  # in the order in which they came
        self.stopped_until = 0.0  # real s: frozen, with its connections open
        self.down = False
        self.silent_until = -math.inf  # real s: it lost memory and must not vote before
        self.is_away = False  # another server serves under its address
        self.is_behind = False  # another server granted under its address while it was away
        self.was_free = False  # whether nothing stood under the key of the last command
        self.snapshots: list[Any] = []
        self.freed: set[tuple[str, bytes]] = set()  # run and key: by the release of a body's end
        self._boot()

    def _boot(self) -> None:
        self.world.counts["boots"] += 1
        self.run_id = f"run{self.index}-{self.world.counts['boots']}"
        self._started = self.world.now
        self._loaded.clear()

    @property
    def is_silent(self) -> bool:
        """Whether it lost memory so lately that it must not vote."""
        return self.silent_until > self.world.now

    @property
    def wall_ms(self) -> int:
        """The ms of its own wall clock."""
        return int((self.world.now * self.rate + self.offset) * 1000)

    @property
    def uptime(self) -> float:
        """S since it was started, by its own clock."""
        return (self.world.now - self._started) * self.rate

    def end_of(self, key: bytes, value: bytes) -> float:
        """Return the real s at which a key ends that has this value, -inf where it has another."""
        found, ms = self.look(key)
        return self.world.now + ms / 1000 / self.rate if found == value else -math.inf

    def execute(self, words: list[bytes]) -> tuple[str, bytes]:
        """Run one command, and note what a silent node should have said."""
        if self.is_silent and words[0] == b"EVALSHA":
            self.was_free = self.holder(words[3]) is None
            if words[1] == PERMIT.digest:  # it votes again if it finds its value anywhere
                value, _, limit = words[3 + int(words[2]) :][:3]
                names = [words[3], *(words[3] + b"#%d" % permit for permit in range(1, int(limit)))]
                self.was_free = value not in map(self.holder, names)
        return super().execute(words)

    # its keys

    def holder(self, key: bytes) -> bytes | None:
        return self.look(key)[0]

    def put(self, key: bytes, value: bytes, seconds: float) -> None:
        """Set a key that expires after this many seconds of the node's clock."""
        self._call(b"SET", key, value, b"PX", b"%d" % (seconds * 1000))

    def drop(self, key: bytes) -> None:
        self._call(b"DEL", key)

    def look(self, key: bytes) -> tuple[bytes | None, int]:
        """Return the value of a key and its PTTL: ms, -1 without expiry, -2 without the key."""
        found: tuple[bytes | None, int] = self._lua[b"look"](self.store, self.wall_ms, key)
        return found

    # what befalls it

    def trusted(self, prefix: str) -> None:
        """Know all scripts, and an operator's word: it votes at once."""
        self._loaded.update(self._scripts)
        names = [name.encode() for name in (*guard_keys(prefix), tenure_key(prefix))]
        self._run(self._scripts[TRUST.digest], [b"", b"", b"3", *names, self.run_id.encode()])

    def tenure(self, prefix: str) -> bytes:
        """Return its own tenure as it noted it."""
        return self.holder(tenure_key(prefix).encode()) or b""

    def snapshot(self) -> None:
        """Write its memory to disk."""
        self.snapshots.append(self._lua[b"copy"](self.store))

    def forget_scripts(self) -> None:
        """Take the command SCRIPT FLUSH."""
        self._loaded.clear()

    def freeze(self, until: float) -> None:
        """Do nothing until a real s, with all connections open."""
        self.stopped_until = max(self.stopped_until, until)

    def stop(self, *, keeps: str) -> None:
        """End as `kill -9` does. keeps: "all", "nothing", or "some": what the last snapshot has."""
        self.down = True
        if keeps != "all":
            self.freed.clear()  # the marks went with it, or some of them
        if keeps == "some" and self.snapshots:
            self.store = self._lua[b"copy"](self.snapshots[-1])
        elif keeps != "all":
            self.store = engine().empty()
        links, self.links = list(self.links), {}
        for link in links:
            link.server_ended()
        subscribers, self.subscriptions = list(self.subscriptions), {}
        for subscriber in subscribers:
            subscriber.broken()

    def start(self) -> None:
        """Begin a new life with the memory that `stop` left."""
        self.down = False
        self._boot()

    def give_way(self, *, copied: bool) -> Callable[[], None]:
        """Let another server take its place, while it is frozen; returns what brings it back.

        copied: the other one has been its replica, else it begins empty.
        """
        before = self.store, self.run_id, self._started
        self.store = self._lua[b"copy"](self.store)
        self.stop(keeps="all" if copied else "nothing")
        self.start()

        def come_back() -> None:
            self.stop(keeps="all")
            self.down, self.is_behind = False, True
            self.store, self.run_id, self._started = before

        return come_back


def introduce(nodes: Sequence[Node], prefix: str) -> None:
    """Let each node know the tenure of each other one, as clients tell them when they connect."""
    for node in nodes:
        for other in nodes:
            if other is not node:
                key = tenure_key(prefix, other.name).encode()
                node.put(key, other.tenure(prefix), RECORD_TTL_MS / 1000)


def lost_until(node: Node, silence: float) -> float:
    """Return the real s until which a node that loses its memory now must not vote."""
    return node.world.now + silence / node.rate
