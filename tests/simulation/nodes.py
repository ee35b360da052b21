"""Servers: the shipped scripts in a real Lua, a wall clock, and a memory that may be lost."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lupa.lua51 import LuaRuntime

from celery_redlock.lock.keys import guard_keys
from celery_redlock.lock.nodes import GRANT, GUARD, RELEASE, RENEW, TRUST, Script

if TYPE_CHECKING:
    from tests.simulation.network import Link
    from tests.simulation.world import World

NAMES = {GRANT: "grant", RENEW: "renew", RELEASE: "release", GUARD: "guard", TRUST: "trust"}
NOSCRIPT = b"-NOSCRIPT No matching script. Please use EVAL.\r\n"


class Engine:
    """One Lua for all nodes of an operating system process: making it costs more than a schedule.

    publish: called with a channel; returns how many hear of it.
    """

    def __init__(self) -> None:
        lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self.publish: Callable[[bytes], int] = lambda channel: 0
        names = lua.globals()
        names[b"publish"] = lambda channel: self.publish(channel)
        lua.execute((Path(__file__).parent / "server.lua").read_bytes())
        self.run: Callable[..., bytes] = names[b"run"]
        self.peek: Callable[[Any, int, bytes], bytes | None] = names[b"peek"]
        self.look: Callable[[Any, int, bytes], tuple[bytes | None, int]] = names[b"look"]
        self.put: Callable[[Any, int, bytes, bytes, int], None] = names[b"put"]
        self.drop: Callable[[Any, int, bytes], None] = names[b"drop"]
        self.copy: Callable[[Any], Any] = names[b"copy"]
        self.names: Callable[[Any, int], bytes] = names[b"names"]
        self.empty: Callable[[], Any] = lua.table
        self._compile = lua.eval(b"function(text) return assert(loadstring(text)) end")

    def body(self, source: bytes) -> Any:
        """Return a script as a Lua function."""
        return self._compile(source)


@functools.lru_cache(maxsize=1)
def engine() -> Engine:
    """Return the one Lua of this process."""
    return Engine()


@functools.lru_cache(maxsize=64)
def body_of(source: bytes) -> Any:
    """Return a script as a Lua function, compiled once."""
    return engine().body(source)


_changed: dict[Script, bytes] = {}


def library() -> dict[bytes, tuple[str, Any]]:
    """Return by digest the shipped scripts' names and bodies."""
    return {
        digest_of(script): (name, body_of(_changed.get(script, script.source)))
        for script, name in NAMES.items()
    }


@contextlib.contextmanager
def patched_scripts(texts: dict[Script, bytes]) -> Iterator[None]:
    """Let nodes run other texts for some scripts, under the shipped digests, for a while."""
    _changed.update(texts)
    try:
        yield
    finally:
        _changed.clear()


@functools.lru_cache(maxsize=8)
def digest_of(script: Script) -> bytes:
    """Return the digest by which a script is called."""
    return script.by_digest.split(b"\r\n")[3]


class Node:
    """One server at one address, over all its lives.

    rate: s of its wall clock in a real s. offset: s that its wall clock is ahead.
    scripts: by digest, what it can be asked to run once it was loaded.
    """

    def __init__(
        self,
        world: World,
        index: int,
        *,
        rate: float,
        offset: float,
        scripts: dict[bytes, tuple[str, Any]],
        uptime: float = 0.0,
    ) -> None:
        self.world, self.index = world, index
        self.name = f"node{index}"
        self.rate, self.offset = rate, offset
        self.store: Any = engine().empty()
        self.links: dict[Link, None] = {}  # in the order in which they came
        self.ears: dict[Any, set[bytes]] = {}  # subscribers: the channels of each
        self.stopped_until = 0.0  # real s: frozen, with its connections open
        self.down = False
        self.silent_until = -math.inf  # real s: it lost memory and must not vote before
        self.was_free = False  # whether nothing stood under the key of the last command
        self.snapshots: list[Any] = []
        self.freed: set[tuple[str, bytes]] = set()  # run and key: by the release of a body's end
        self._scripts = scripts
        self._loaded: dict[bytes, tuple[str, Any]] = {}
        self._uptime = uptime
        self._engine = engine()
        self._boot()

    def _boot(self) -> None:
        self.world.counts["boots"] += 1
        self.run_id = f"run{self.index}-{self.world.counts['boots']}"
        self._started = self.world.now - self._uptime
        self._uptime = 0.0
        self._loaded.clear()

    @property
    def is_silent(self) -> bool:
        """Whether it lost memory so lately that it must not vote."""
        return self.silent_until > self.world.now

    @property
    def wall_ms(self) -> int:
        """The ms of its own wall clock."""
        return int((self.world.now * self.rate + self.offset) * 1000)

    def holder(self, key: bytes) -> bytes | None:
        """Return the value that stands under a key."""
        return self._engine.peek(self.store, self.wall_ms, key) or None

    def put(self, key: bytes, value: bytes, seconds: float) -> None:
        """Set a key for so many s of its clock."""
        self._engine.put(self.store, self.wall_ms, key, value, int(seconds * 1000))

    def drop(self, key: bytes) -> None:
        """Delete a key."""
        self._engine.drop(self.store, self.wall_ms, key)

    def look(self, key: bytes) -> tuple[bytes | None, int]:
        """Return what stands under a key, and the ms that are left: -1 for ever, -2 nothing."""
        value, ms = self._engine.look(self.store, self.wall_ms, key)
        return value or None, ms

    def end_of(self, key: bytes, value: bytes) -> float:
        """Return the real s at which a key ends that has this value, -inf where it has another."""
        found, ms = self._engine.look(self.store, self.wall_ms, key)
        return self.world.now + ms / 1000 / self.rate if found == value else -math.inf

    def keys(self) -> list[bytes]:
        """Return the names that stand there."""
        return self._engine.names(self.store, self.wall_ms).split(b"\n")

    def execute(self, words: list[bytes]) -> tuple[str, bytes]:
        """Run one command; returns the name of the script, "" for others, and the reply."""
        verb = words[0]
        if verb == b"EVALSHA":
            script = self._loaded.get(words[1])
            if script is None:
                return "", NOSCRIPT
            if self.is_silent:
                self.was_free = self.holder(words[3]) is None
            return script[0], self._run(script[1], words)
        if verb == b"EVAL":
            name, body = self._by_source(words[1])
            return name, self._run(body, words)
        return "", self._answer(verb, words)

    def _by_source(self, source: bytes) -> tuple[str, Any]:
        digest = next(digest_of(script) for script in NAMES if script.source == source)
        self._loaded[digest] = self._scripts[digest]
        return self._loaded[digest]

    def _run(self, body: Any, words: list[bytes]) -> bytes:
        engine = self._engine
        engine.publish = self._publish
        return engine.run(body, self.store, self.wall_ms, *words[2:])

    def _answer(self, verb: bytes, words: list[bytes]) -> bytes:
        if verb == b"SCRIPT":
            self._by_source(words[2])
            return b"$2\r\nok\r\n"
        if verb == b"INFO":
            uptime = int((self.world.now - self._started) * self.rate)
            text = f"run_id:{self.run_id}\r\nuptime_in_seconds:{uptime}\r\n".encode()
            return b"$%d\r\n%b\r\n" % (len(text), text)
        if verb == b"SCAN":
            return b"*2\r\n$1\r\n0\r\n*0\r\n"
        return b"+PONG\r\n"

    def _publish(self, channel: bytes) -> int:
        heard = [ear for ear, channels in self.ears.items() if channel in channels]
        for ear in heard:
            ear.published(channel)
        return len(heard)

    # what befalls it

    def trusted(self, prefix: str) -> None:
        """Know all scripts, and an operator's word: it votes at once."""
        self._loaded.update(self._scripts)
        names = [name.encode() for name in guard_keys(prefix)]
        self._run(
            self._scripts[digest_of(TRUST)][1], [b"", b"", b"2", *names, self.run_id.encode()]
        )

    def snapshot(self) -> None:
        """Write its memory to disk."""
        self.snapshots.append(self._engine.copy(self.store))

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
            self.store = self._engine.copy(self.snapshots[-1])
        elif keeps != "all":
            self.store = self._engine.empty()
        links, self.links = list(self.links), {}
        for link in links:
            link.server_ended()
        ears, self.ears = list(self.ears), {}
        for ear in ears:
            ear.broken()

    def start(self) -> None:
        """Begin a new life with the memory that `stop` left."""
        self.down = False
        self._boot()


def lost_until(node: Node, silence: float) -> float:
    """Return the real s until which a node that loses its memory now must not vote."""
    return node.world.now + silence / node.rate
