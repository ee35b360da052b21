"""Lets redis-py ask a PostgreSQL node, so that tests look at it as they look at a Redis server."""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import functools
import hashlib
import select
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

import hiredis
import psycopg

from celery_redlock.lock.postgres.errors import error_of
from celery_redlock.lock.server import requests
from celery_redlock.lock.transport.command import Script, encode_bulk

OK = b"+OK\r\n"
WITH_SUBCOMMANDS = (b"CLIENT", b"SCRIPT")
APPLICATION = "gateway"
FOR_A_SERVER_OF_REDIS = (b"CLIENT SETINFO", b"CLIENT SETNAME", b"SCRIPT FLUSH")  # nothing to do
EMPTY = "WITH items AS (DELETE FROM redlock.item) DELETE FROM redlock.key"
COMMAND = "SELECT redlock.command(%(words)b::bytea[])"
LIVE = "SELECT name FROM redlock.key WHERE expires_at IS NULL OR expires_at > clock_timestamp()"
COUNT = "SELECT redlock.integer(count(*)) FROM redlock.items(%(key)b, clock_timestamp())"
# A listener's session keeps a lock of each channel that it hears.
LISTENERS = (
    "SELECT DISTINCT pid FROM pg_locks"
    " WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
)
# Commands that tests use and the package does not. A statement without a row replies 0.
BY_TESTS = {
    b"ZCARD": COUNT,
    b"HLEN": COUNT,
    b"ZSCORE": "SELECT redlock.bulk("
    "(redlock.item_of(%(key)b, (%(words)b::bytea[])[3], clock_timestamp())).score::text::bytea)",
    b"HSET": "WITH done AS MATERIALIZED (SELECT redlock.add(%(key)b,"
    " (%(words)b::bytea[])[3], NULL, (%(words)b::bytea[])[4], clock_timestamp()))"
    " SELECT redlock.integer(count(*)) FROM done",
    # a text that is no value of ours: on Redis it has another type
    b"RPUSH": "WITH done AS MATERIALIZED (SELECT"
    " redlock.put(%(key)b, (%(words)b::bytea[])[3], NULL, clock_timestamp()))"
    " SELECT redlock.integer(count(*)) FROM done",
    b"CLIENT KILL": "SELECT redlock.integer(count(pg_terminate_backend(pid)))"
    " FROM pg_stat_activity WHERE backend_type = 'client backend'"
    f" AND application_name <> '{APPLICATION}'"
    f" AND pid IN ({LISTENERS}) = ((%(words)b::bytea[])[4] = 'pubsub')",
    b"CLIENT LIST": "SELECT redlock.bulk(convert_to(coalesce("
    "string_agg('id=' || pid || ' sub=1', E'\\n'), ''), 'UTF8'))"
    f" FROM ({LISTENERS}) AS l",
    b"PERSIST": "UPDATE redlock.key SET expires_at = NULL"
    " WHERE id = sha256(%(key)b) AND expires_at > clock_timestamp() RETURNING redlock.integer(1)",
}
SCRIPTS = {
    word: script.name
    for script in vars(requests).values()
    if isinstance(script, Script)
    for word in (hashlib.sha1(script.source).hexdigest().encode(), script.source)
}
Connect = Callable[[], "psycopg.Connection[tuple[Any, ...]]"]


class Gateway(socketserver.ThreadingTCPServer):
    """A Redis server that passes each command to `redlock.command` of a node, with autocommit.

    A script of the package is the function of its name. Messages are passed, too. The gateway drops
    a client whose command fails because the node is down. connect: returns a new connection to it.
    """

    daemon_threads = True

    def __init__(self, connect: Connect) -> None:
        super().__init__(("127.0.0.1", 0), _Client)
        self.port = int(self.server_address[1])
        self._connect = connect
        self._idle: list[psycopg.Connection[tuple[Any, ...]]] = []
        self.clients: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()

    def _serve(self) -> None:
        """Take clients; no timer wakes this thread up, as that of `serve_forever` does."""
        while not self._closed:
            self.handle_request()

    def reply(self, words: list[bytes]) -> bytes:
        """Return the reply to a command, as RESP. Raises ConnectionError if the node is down."""
        name = words[0].upper()
        if name in WITH_SUBCOMMANDS:
            name += b" " + words[1].upper()
        if name in FOR_A_SERVER_OF_REDIS:
            return OK
        try:
            connection = self._idle.pop() if self._idle else self.open()
        except psycopg.OperationalError as error:
            raise ConnectionAbortedError from error
        try:
            return _ask(connection, name, words)
        except psycopg.Error as error:
            if connection.closed or error.pgresult is None:
                raise ConnectionAbortedError from error
            return b"-%s\r\n" % error_of(error.pgresult).encode()
        finally:
            if not connection.closed:
                self._idle.append(connection)

    def open(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a new connection to the node."""
        connection = self._connect()
        connection.execute(f"SET application_name = '{APPLICATION}'")
        return connection

    def disconnect(self) -> None:
        """Close the connections to the node that no command uses."""
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Drop all clients, and listen no more."""
        self._closed = True
        self.socket.shutdown(socket.SHUT_RDWR)
        self._server.join()
        self.server_close()
        for client, thread in list(self.clients.items()):
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            thread.join()
        self.disconnect()


def empty(connection: psycopg.Connection[tuple[Any, ...]]) -> None:
    """Delete all that a node keeps, whatever its clients write meanwhile."""
    while True:
        with contextlib.suppress(psycopg.errors.DeadlockDetected):
            connection.execute(EMPTY)
            return


def _ask(connection: psycopg.Connection[tuple[Any, ...]], name: bytes, words: list[bytes]) -> bytes:
    """Run a command in a transaction of its own; return its reply."""
    if name in (b"FLUSHALL", b"FLUSHDB"):
        empty(connection)
        return OK
    if name == b"KEYS":
        names = [key for (key,) in connection.execute(LIVE) if _matches(key, words[1])]
        return b"*%d\r\n%s" % (len(names), b"".join(map(encode_bulk, names)))
    if name == b"SCRIPT LOAD":
        return encode_bulk(hashlib.sha1(words[2]).hexdigest().encode())
    if name in (b"EVAL", b"EVALSHA"):
        if words[1] not in SCRIPTS:
            return b"-NOSCRIPT only the package's scripts have a function\r\n"
        first = 3 + int(words[2])
        call = f'SELECT redlock."{SCRIPTS[words[1]]}"(%(keys)b::bytea[], %(args)b::bytea[])'
        parts = {"keys": words[3:first], "args": words[first:]}
        rows = connection.execute(call.encode(), parts).fetchall()
    else:
        call = BY_TESTS.get(name, COMMAND)
        values = {"words": words, "key": words[1] if len(words) > 1 else b""}
        rows = connection.execute(call.encode(), values).fetchall()
    return bytes(rows[0][0]) if rows else b":0\r\n"


def _matches(name: bytes, pattern: bytes) -> bool:
    return fnmatch.fnmatchcase(name.decode("latin-1"), pattern.decode("latin-1"))


def gateway_of(url: str) -> Gateway:
    """Return a gateway to a node, for the life of this process."""
    return Gateway(functools.partial(psycopg.connect, url, autocommit=True))


class Ear:
    """A connection to the node that hears channels for one client of the gateway."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self.connection = connection
        self._channels: dict[str, bytes] = {}  # by their name in PostgreSQL
        self._heard: list[psycopg.Notify] = []
        connection.add_notify_handler(self._heard.append)

    def fileno(self) -> int:
        return self.connection.fileno()

    def subscribe(self, channel: bytes) -> bytes:
        """Hear a channel; return what was heard before, and the confirmation."""
        hashed = hashlib.sha256(channel).hexdigest()[:48]
        self._channels[f"redlock_{hashed}"] = channel
        self.connection.execute(COMMAND, {"words": [b"SUBSCRIBE", channel]})
        return self.heard() + _pushed(b"subscribe", channel)

    def unsubscribe(self, channel: bytes) -> bytes:
        """Hear a channel no more; return what was heard before, and the confirmation."""
        self.connection.execute(COMMAND, {"words": [b"UNSUBSCRIBE", channel]})
        return self.heard() + _pushed(b"unsubscribe", channel)

    def heard(self) -> bytes:
        """Return the messages that have come. A new subscription's own one is empty."""
        self.connection.execute("SELECT")  # reads what has come
        found = [(self._channels[one.channel], one.payload) for one in self._heard]
        self._heard.clear()
        return b"".join(
            _pushed(b"message", channel, encode_bulk(base64.b64decode(payload)))
            for channel, payload in found
            if payload
        )


def _pushed(kind: bytes, channel: bytes, last: bytes = b":1\r\n") -> bytes:
    return b"*3\r\n" + encode_bulk(kind) + encode_bulk(channel) + last


class _Client(socketserver.BaseRequestHandler):
    """A connection of redis-py."""

    server: Gateway
    ear: Ear | None = None

    def handle(self) -> None:
        self.server.clients[self.request] = threading.current_thread()
        reader = hiredis.Reader()
        with contextlib.suppress(ConnectionError):  # the client has gone, or the node is down
            while data := self._data():
                reader.feed(data)
                while (words := reader.gets()) is not False:
                    self.request.sendall(self._reply(words))

    def _data(self) -> bytes:
        """Return what the client sends next; meanwhile, tell it what its ear hears."""
        while self.ear is not None:
            ready, _, _ = select.select([self.request, self.ear], [], [])
            if self.request in ready:
                break
            self.request.sendall(self.ear.heard())
        data: bytes = self.request.recv(65536)
        return data

    def _reply(self, words: list[bytes]) -> bytes:
        name = words[0].upper()
        if name not in (b"SUBSCRIBE", b"UNSUBSCRIBE"):
            return self.server.reply(words)
        if self.ear is None:
            self.ear = Ear(self.server.open())
        hear = self.ear.subscribe if name == b"SUBSCRIBE" else self.ear.unsubscribe
        return b"".join(map(hear, words[1:]))

    def finish(self) -> None:
        if self.ear is not None:
            self.ear.connection.close()
        del self.server.clients[self.request]
