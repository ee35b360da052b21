"""A model of one server: it runs the shipped scripts in a real Lua, over keys in memory.

The simulator's nodes and `FakeNode` use it; contract tests compare it with a real server.
Needs lupa, which is in the extra `celery_redlock[testing]`.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery_redlock.lock.server.requests import FENCE, SCRIPTS
from celery_redlock.lock.transport.command import Script, encode_bulk

NOSCRIPT = b"-NOSCRIPT No matching script. Please use EVAL.\r\n"
FOREIGN_SCRIPT = b"-ERR this node is a fake: it runs the scripts of celery_redlock alone\r\n"

Scripts = Mapping[bytes, tuple[str, Any]]  # by digest: the name and the Lua function


class Engine:
    """The Lua runtime that all servers of one process share, because creating one is slow.

    functions: the functions of server.lua, by name. server: the server whose command runs; what a
    script publishes goes to its subscribers.
    """

    server: Any

    def __init__(self) -> None:
        try:
            from lupa.lua51 import LuaRuntime  # late: a test with real nodes needs no lupa
        except ImportError:
            raise RuntimeError(
                "a fake node runs the lock's scripts in lupa's Lua, which is not installed: "
                'pip install "lupa>=2.2", or use embedded nodes'
            ) from None
        lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self.functions = lua.globals()
        self.functions[b"publish"] = lambda channel, message: self.server.publish(channel, message)
        self.functions[b"subscribers"] = lambda channel: len(self.server.subscribers(channel))
        lua.execute((Path(__file__).parent / "server.lua").read_bytes())
        self.empty: Callable[[], Any] = lua.table
        make = lua.eval(b"function(text) return assert(loadstring(text)) end")
        self.compiled: Callable[[bytes], Any] = functools.lru_cache(maxsize=64)(make)


@functools.lru_cache(maxsize=1)
def engine() -> Engine:
    return Engine()


def library(texts: Mapping[Script, bytes] | None = None) -> Scripts:
    """Return the shipped scripts. texts: replacements that run under the shipped digests."""
    changed = texts or {}
    compiled = engine().compiled
    return {
        script.digest: (script.name, compiled(changed.get(script, script.source)))
        for script in SCRIPTS
        if script is not FENCE
    }


class Server:
    """One server: its keys and its replies. A subclass gives the time.

    scripts: the scripts that a client can load, by digest. run_id: as in INFO, new at each start.
    subscriptions: the channels of each subscriber. The server calls `published(channel, message)`
    of a subscriber for each message.
    """

    run_id = ""

    def __init__(self, scripts: Scripts) -> None:
        self.store: Any = engine().empty()
        self._scripts = scripts
        self._loaded: dict[bytes, tuple[str, Any]] = {}  # by digest, for EVALSHA
        self.subscriptions: dict[Any, set[bytes]] = {}
        self._lua = engine().functions

    @property
    def wall_ms(self) -> int:
        """Milliseconds since 1970, by the server's own clock."""
        raise NotImplementedError

    @property
    def uptime(self) -> float:
        """Seconds since the start, by the server's own clock."""
        raise NotImplementedError

    def publish(self, channel: bytes, message: bytes) -> int:
        """Send a message to the subscribers of a channel; return how many there are."""
        subscribers = self.subscribers(channel)
        for subscriber in subscribers:
            subscriber.published(channel, message)
        return len(subscribers)

    def subscribers(self, channel: bytes) -> list[Any]:
        return [
            subscriber for subscriber, channels in self.subscriptions.items() if channel in channels
        ]

    def keys(self) -> list[bytes]:
        return [name for name in self._lua[b"names"](self.store, self.wall_ms).split(b"\n") if name]

    def execute(self, words: list[bytes]) -> tuple[str, bytes]:
        """Run one command; return the name of its script, "" if it has none, and the reply."""
        if words[0] == b"EVALSHA":
            script = self._loaded.get(words[1])
            missing = NOSCRIPT
        elif words[0] == b"EVAL":
            script = self._load(words[1])
            missing = FOREIGN_SCRIPT
        else:
            return "", self._answer(words[0].upper(), words)
        return ("", missing) if script is None else self._run(script, words)

    def _load(self, source: bytes) -> tuple[str, Any] | None:
        """Keep a script for EVALSHA and return it; None if it is not a script of the package."""
        digest = hashlib.sha1(source).hexdigest().encode()  # noqa: S324 - as the server names it
        if digest in self._scripts:
            self._loaded[digest] = self._scripts[digest]
        return self._scripts.get(digest)

    def _run(self, script: tuple[str, Any], words: list[bytes]) -> tuple[str, bytes]:
        name, body = script
        engine().server = self
        return name, self._lua[b"run"](body, self.store, self.wall_ms, *words[2:])

    def _answer(self, verb: bytes, words: list[bytes]) -> bytes:
        if verb == b"PING":
            return b"+PONG\r\n"
        if verb == b"SCRIPT":
            return FOREIGN_SCRIPT if self._load(words[-1]) is None else b"$2\r\nok\r\n"
        if verb == b"INFO":
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
            lines = (f"{name}:{fact}\r\n" for name, fact in facts.items())
            return encode_bulk("".join(lines).encode())
        if verb in (b"SCAN", b"KEYS"):
            return self._names(verb, words)
        return self._call(verb, *words[1:])

    def _call(self, verb: bytes, *words: bytes) -> bytes:
        """Run a plain command. Replies with an error for the many that the model lacks."""
        engine().server = self
        reply: bytes | None = self._lua[b"call"](self.store, self.wall_ms, verb, *words)
        return reply or b"-ERR unknown command '%b': this node is a fake\r\n" % verb

    def _names(self, verb: bytes, words: Sequence[bytes]) -> bytes:
        """Return the keys that match a pattern; SCAN returns all of them in one reply."""
        pattern = b"*"
        if verb == b"KEYS":
            pattern = words[1]
        elif b"MATCH" in words:
            pattern = words[words.index(b"MATCH") + 1]
        names = [encode_bulk(name) for name in self.keys() if matches(name, pattern)]
        array = b"*%d\r\n%b" % (len(names), b"".join(names))
        return array if verb == b"KEYS" else b"*2\r\n$1\r\n0\r\n" + array


def matches(name: bytes, pattern: bytes) -> bool:
    """Return whether a name matches a pattern of SCAN: a backslash quotes one character."""
    unquoted = re.sub(
        r"\\(.)",
        lambda match: f"[{match[1]}]" if match[1] in "*?[" else match[1],
        pattern.decode("latin-1"),
        flags=re.DOTALL,
    )
    return fnmatch.fnmatchcase(name.decode("latin-1"), unquoted)
