"""One server as the shipped scripts see it: the scripts in a real Lua, over a memory of its own.

The simulator's nodes and `FakeNode` are made of it; contract tests hold it to a real server.
Needs lupa, which is in the extra `celery_redlock[testing]`.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery_redlock.lock.server.scripts import BREAK, GRANT, GUARD, RELEASE, RENEW, TRUST
from celery_redlock.lock.transport.encoding import encode_bulk
from celery_redlock.lock.transport.script import Script
from celery_redlock.tasks.unique.rounds import UNIQUE

SCRIPTS = (GRANT, RENEW, RELEASE, GUARD, TRUST, BREAK, UNIQUE)
NOSCRIPT = b"-NOSCRIPT No matching script. Please use EVAL.\r\n"
FOREIGN = b"-ERR this node is a fake: it runs the scripts of celery_redlock alone\r\n"

Scripts = Mapping[bytes, tuple[str, Any]]  # by digest: the name, and the body as a Lua function


class Engine:
    """One Lua for all servers of an operating system process: making it costs a lot.

    publish: called with a channel and a message; returns how many hear of it.
    """

    def __init__(self) -> None:
        try:
            from lupa.lua51 import LuaRuntime  # here: whoever has real nodes does not need it
        except ImportError:
            raise RuntimeError(
                "a fake node runs the lock's scripts in lupa's Lua, which is not installed: "
                'pip install "celery_redlock[testing]", or use embedded nodes'
            ) from None
        lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self.publish: Callable[[bytes, bytes], int] = lambda channel, message: 0
        names = lua.globals()
        names[b"publish"] = lambda channel, message: self.publish(channel, message)
        lua.execute((Path(__file__).parent / "server.lua").read_bytes())
        self.run: Callable[..., bytes] = names[b"run"]
        self.call: Callable[..., bytes | None] = names[b"call"]
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


@functools.lru_cache(maxsize=16)
def digest_of(script: Script) -> bytes:
    """Return the digest by which a script is called."""
    return script.by_digest.split(b"\r\n")[3]


def library(texts: Mapping[Script, bytes] | None = None) -> dict[bytes, tuple[str, Any]]:
    """Return by digest the shipped scripts' names and bodies.

    texts: other texts for some of them, which run under the shipped digests.
    """
    changed = texts or {}
    return {
        digest_of(script): (script.name, body_of(changed.get(script, script.source)))
        for script in SCRIPTS
    }


class Server:
    """One server: its keys, and what it replies. A subclass says what time it is.

    scripts: by digest, what it can be asked to run once it was loaded. run_id: which of its lives
    this is.
    """

    run_id = ""

    def __init__(self, scripts: Scripts) -> None:
        self.store: Any = engine().empty()
        self._scripts = scripts
        self._loaded: dict[bytes, tuple[str, Any]] = {}
        self._engine = engine()

    @property
    def wall_ms(self) -> int:
        """The ms of its own wall clock."""
        raise NotImplementedError

    @property
    def uptime(self) -> float:
        """S for which it has been up, by its own clock."""
        raise NotImplementedError

    def published(self, channel: bytes, message: bytes) -> int:
        """Hand a message to who hears a channel; returns how many did."""
        return 0

    # what stands there

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

    def keys(self) -> list[bytes]:
        """Return the names that stand there."""
        return self._engine.names(self.store, self.wall_ms).split(b"\n")

    # what it is asked

    def execute(self, words: list[bytes]) -> tuple[str, bytes]:
        """Run one command; returns the name of the script, "" for others, and the reply."""
        verb = words[0]
        if verb == b"EVALSHA":
            script = self._loaded.get(words[1])
            if script is None:
                return "", NOSCRIPT
            return script[0], self._run(script[1], words)
        if verb == b"EVAL":
            known = self._by_source(words[1])
            return ("", FOREIGN) if known is None else (known[0], self._run(known[1], words))
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
        engine.publish = self.published
        return engine.run(body, self.store, self.wall_ms, *words[2:])

    def _answer(self, verb: bytes, words: list[bytes]) -> bytes:
        if verb == b"PING":
            return b"+PONG\r\n"
        if verb == b"SCRIPT":
            return FOREIGN if self._by_source(words[-1]) is None else b"$2\r\nok\r\n"
        if verb == b"INFO":
            return encode_bulk(self._info())
        if verb in (b"SCAN", b"KEYS"):
            return self._names(verb, words)
        engine = self._engine
        engine.publish = self.published
        reply = engine.call(self.store, self.wall_ms, verb, *words[1:])
        return unknown(verb) if reply is None else reply

    def _info(self) -> bytes:
        facts = {
            "server_name": "valkey",
            "redis_version": "7.2.4",
            "run_id": self.run_id,
            "uptime_in_seconds": int(self.uptime),
            "maxmemory": 0,
            "maxmemory_policy": "noeviction",
            "role": "master",
        }
        return "".join(f"{name}:{fact}\r\n" for name, fact in facts.items()).encode()

    def _names(self, verb: bytes, words: Sequence[bytes]) -> bytes:
        """Return the names that a pattern fits: all at once, as a scan that is over."""
        pattern = b"*"
        if verb == b"KEYS":
            pattern = words[1]
        elif b"MATCH" in words:
            pattern = words[words.index(b"MATCH") + 1]
        found = [encode_bulk(name) for name in self.keys() if name and fits(name, pattern)]
        listed = b"*%d\r\n%b" % (len(found), b"".join(found))
        return listed if verb == b"KEYS" else b"*2\r\n$1\r\n0\r\n" + listed


def unknown(verb: bytes) -> bytes:
    """Return the reply to a command that the model does not have."""
    name = verb.decode(errors="replace")
    return f"-ERR unknown command '{name}': this node is a fake\r\n".encode()


def fits(name: bytes, pattern: bytes) -> bool:
    """Tell whether a name fits a pattern as SCAN takes it: a backslash quotes one letter."""
    made, letters = "", iter(pattern.decode("latin-1"))
    for letter in letters:
        if letter == "\\":
            quoted = next(letters, "\\")
            made += f"[{quoted}]" if quoted in "*?[" else quoted
        else:
            made += letter
    return fnmatch.fnmatchcase(name.decode("latin-1"), made)
