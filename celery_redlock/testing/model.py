"""A model of one server: it runs the shipped scripts in a real Lua, over keys in memory.

The simulator's nodes and `FakeNode` use it; contract tests compare it with a real server.
Needs lupa, which is in the extra `celery_redlock[testing]`.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery_redlock.lock.server.requests import (
    BREAK,
    GRANT,
    GUARD,
    MARKER,
    REGISTER,
    RELEASE,
    RENEW,
    TRUST,
)
from celery_redlock.lock.transport.command import Script
from celery_redlock.lock.transport.encoding import encode_bulk
from celery_redlock.tasks.unique.rounds import UNIQUE

SCRIPTS = (GRANT, RENEW, RELEASE, REGISTER, GUARD, TRUST, BREAK, UNIQUE, MARKER)
NOSCRIPT = b"-NOSCRIPT No matching script. Please use EVAL.\r\n"
FOREIGN_SCRIPT = b"-ERR this node is a fake: it runs the scripts of celery_redlock alone\r\n"

Scripts = Mapping[bytes, tuple[str, Any]]  # by digest: the name and the Lua function


class Engine:
    """The Lua that all servers of one process share, because making one is slow.

    publish: called with a channel and a message; returns the number of subscribers. subscribers:
    called with a channel; returns their number.
    """

    def __init__(self) -> None:
        try:
            from lupa.lua51 import LuaRuntime  # late: a test with real nodes needs no lupa
        except ImportError:
            raise RuntimeError(
                "a fake node runs the lock's scripts in lupa's Lua, which is not installed: "
                'pip install "celery_redlock[testing]", or use embedded nodes'
            ) from None
        lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self.publish: Callable[[bytes, bytes], int] = lambda channel, message: 0
        self.subscribers: Callable[[bytes], int] = lambda channel: 0
        functions = lua.globals()
        functions[b"publish"] = lambda channel, message: self.publish(channel, message)
        functions[b"subscribers"] = lambda channel: self.subscribers(channel)
        lua.execute((Path(__file__).parent / "server.lua").read_bytes())
        self.run: Callable[..., bytes] = functions[b"run"]
        self.call: Callable[..., bytes | None] = functions[b"call"]
        self.peek: Callable[[Any, int, bytes], bytes | None] = functions[b"peek"]
        self.look: Callable[[Any, int, bytes], tuple[bytes | None, int]] = functions[b"look"]
        self.put: Callable[[Any, int, bytes, bytes, int], None] = functions[b"put"]
        self.drop: Callable[[Any, int, bytes], None] = functions[b"drop"]
        self.copy: Callable[[Any], Any] = functions[b"copy"]
        self.names: Callable[[Any, int], bytes] = functions[b"names"]
        self.empty: Callable[[], Any] = lua.table
        self._compile = lua.eval(b"function(text) return assert(loadstring(text)) end")

    def compile(self, source: bytes) -> Any:
        """Return a script as a Lua function."""
        return self._compile(source)


@functools.lru_cache(maxsize=1)
def engine() -> Engine:
    """Return the Lua of this process."""
    return Engine()


@functools.lru_cache(maxsize=64)
def compiled(source: bytes) -> Any:
    """Return a script as a Lua function; each script is compiled once."""
    return engine().compile(source)


@functools.lru_cache(maxsize=16)
def digest_of(script: Script) -> bytes:
    """Return the digest that EVALSHA takes for a script."""
    return script.by_digest.split(b"\r\n")[3]


def library(texts: Mapping[Script, bytes] | None = None) -> dict[bytes, tuple[str, Any]]:
    """Return the names and the Lua functions of the shipped scripts, by digest.

    texts: replacements for some scripts, which run under the shipped digests.
    """
    changed = texts or {}
    return {
        digest_of(script): (script.name, compiled(changed.get(script, script.source)))
        for script in SCRIPTS
    }


class Server:
    """One server: its keys and its replies. A subclass gives the time.

    scripts: by digest, what a client can load. run_id: as in INFO, new at each start.
    """

    run_id = ""

    def __init__(self, scripts: Scripts) -> None:
        self.store: Any = engine().empty()
        self._scripts = scripts
        self._loaded: dict[bytes, tuple[str, Any]] = {}
        self._engine = engine()

    @property
    def wall_ms(self) -> int:
        """Milliseconds since 1970, by the server's own clock."""
        raise NotImplementedError

    @property
    def uptime(self) -> float:
        """Seconds since the start, by the server's own clock."""
        raise NotImplementedError

    def published(self, channel: bytes, message: bytes) -> int:
        """Send a message to the subscribers of a channel; return how many there are."""
        return 0

    def subscribers(self, channel: bytes) -> int:
        """Return how many subscribers a channel has."""
        return 0

    # the keys

    def holder(self, key: bytes) -> bytes | None:
        """Return the value of a key, None if there is no such key."""
        return self._engine.peek(self.store, self.wall_ms, key) or None

    def put(self, key: bytes, value: bytes, seconds: float) -> None:
        """Set a key that expires after this many seconds of the server's clock."""
        self._engine.put(self.store, self.wall_ms, key, value, int(seconds * 1000))

    def drop(self, key: bytes) -> None:
        """Delete a key."""
        self._engine.drop(self.store, self.wall_ms, key)

    def look(self, key: bytes) -> tuple[bytes | None, int]:
        """Return the value of a key and its PTTL: ms, -1 without expiry, -2 without the key."""
        value, ms = self._engine.look(self.store, self.wall_ms, key)
        return value or None, ms

    def keys(self) -> list[bytes]:
        """Return the names of all keys."""
        return self._engine.names(self.store, self.wall_ms).split(b"\n")

    # the commands

    def execute(self, words: list[bytes]) -> tuple[str, bytes]:
        """Run one command; return the name of its script, "" if it has none, and the reply."""
        verb = words[0]
        if verb == b"EVALSHA":
            script = self._loaded.get(words[1])
            if script is None:
                return "", NOSCRIPT
            return script[0], self._run(script[1], words)
        if verb == b"EVAL":
            known = self._by_source(words[1])
            return ("", FOREIGN_SCRIPT) if known is None else (known[0], self._run(known[1], words))
        return "", self._answer(verb.upper(), words)

    def _by_source(self, source: bytes) -> tuple[str, Any] | None:
        for script in SCRIPTS:
            if script.source == source:
                digest = digest_of(script)
                self._loaded[digest] = self._scripts[digest]
                return self._loaded[digest]
        return None

    def _run(self, body: Any, words: list[bytes]) -> bytes:
        engine = self._engine
        engine.publish, engine.subscribers = self.published, self.subscribers
        return engine.run(body, self.store, self.wall_ms, *words[2:])

    def _answer(self, verb: bytes, words: list[bytes]) -> bytes:
        if verb == b"PING":
            return b"+PONG\r\n"
        if verb == b"SCRIPT":
            return FOREIGN_SCRIPT if self._by_source(words[-1]) is None else b"$2\r\nok\r\n"
        if verb == b"INFO":
            return encode_bulk(self._info())
        if verb in (b"SCAN", b"KEYS"):
            return self._names(verb, words)
        engine = self._engine
        engine.publish, engine.subscribers = self.published, self.subscribers
        reply = engine.call(self.store, self.wall_ms, verb, *words[1:])
        return unknown_command(verb) if reply is None else reply

    def _info(self) -> bytes:
        facts = {
            "server_name": "valkey",
            "redis_version": "7.2.4",
            "run_id": self.run_id,
            "uptime_in_seconds": int(self.uptime),
            "server_time_usec": self.wall_ms * 1000,
            "maxmemory": 0,
            "maxmemory_policy": "noeviction",
            "role": "master",
        }
        return "".join(f"{name}:{fact}\r\n" for name, fact in facts.items()).encode()

    def _names(self, verb: bytes, words: Sequence[bytes]) -> bytes:
        """Return the keys that match a pattern: a SCAN gets all of them in one reply."""
        pattern = b"*"
        if verb == b"KEYS":
            pattern = words[1]
        elif b"MATCH" in words:
            pattern = words[words.index(b"MATCH") + 1]
        found = [encode_bulk(name) for name in self.keys() if name and matches(name, pattern)]
        listed = b"*%d\r\n%b" % (len(found), b"".join(found))
        return listed if verb == b"KEYS" else b"*2\r\n$1\r\n0\r\n" + listed


def unknown_command(verb: bytes) -> bytes:
    """Return the error reply to a command that the model lacks."""
    name = verb.decode(errors="replace")
    return f"-ERR unknown command '{name}': this node is a fake\r\n".encode()


def matches(name: bytes, pattern: bytes) -> bool:
    """Return whether a name matches a pattern of SCAN: a backslash quotes one character."""
    translated, letters = "", iter(pattern.decode("latin-1"))
    for letter in letters:
        if letter == "\\":
            quoted = next(letters, "\\")
            translated += f"[{quoted}]" if quoted in "*?[" else quoted
        else:
            translated += letter
    return fnmatch.fnmatchcase(name.decode("latin-1"), translated)
