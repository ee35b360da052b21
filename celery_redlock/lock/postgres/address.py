"""The address of a PostgreSQL server, and how to connect to it: by libpq, as psql does.

Everything in a URL, in a service file and in the environment (PGPASSWORD, PGSSLMODE) counts as for
any client of libpq.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlencode
from uuid import uuid4

import hiredis
import psycopg
import redis
from psycopg import conninfo, pq

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.postgres.connection import PostgresConnection
from celery_redlock.lock.postgres.errors import words_of
from celery_redlock.lock.postgres.pipeline import Pipeline, ready
from celery_redlock.lock.postgres.pubsub import PostgresPubSub
from celery_redlock.lock.postgres.schema import (
    APPLICATION,
    STRINGS,
    VERSION,
    create_schema,
    doubts_of,
    other_schema,
    schema_sql,
)
from celery_redlock.lock.transport.address import unknown_option
from celery_redlock.lock.transport.command import encode_bulk, encoded
from celery_redlock.lock.transport.connection import CLOCK, Peer

READ_COMMITTED = b"read committed"
FACTS = 6  # in the reply to HELLO
# Levels of messages that hide the warning that no standby has confirmed a commit.
HIDING = (b"error", b"fatal", b"panic")
# What a connection has unless its URL says otherwise. A standby cannot vote.
DEFAULTS = {"application_name": APPLICATION, "target_session_attrs": "read-write"}
PATIENCE = 10.0  # seconds to connect for a command of an operator
HEARD_WITHIN = 5.0  # seconds for a message to come
_PORT = re.compile(r"\d{0,5}")
LISTENS = ("listen_host", "listen_port")
UNHEARD = (
    "node %s sends no message (%s), so waiters poll about "
    "once a second: name listen_host and listen_port of the server in its URL"
)
POOLED = "a pooler stands between"
TRIES = 3  # to find a pooler that shares its connections: other clients may use one just then

logger = logging.getLogger(__name__)
told: set[str] = set()  # the nodes of which a line of the log says that no message comes


class PostgresDialled:
    """A new connection, with the methods of a redis-py connection that the handshake uses.

    timeout: seconds for each reply. is_pooled: whether a pooler stands between. Raises
    redis.RedisError if calls would not mean here what they mean.
    """

    def __init__(self, pipeline: Pipeline, timeout: float) -> None:
        self.pipeline = pipeline
        self.timeout = timeout
        self.send_command("HELLO")
        greeting = self.read_response()
        facts = greeting if isinstance(greeting, list) else [greeting]
        with contextlib.suppress(TypeError, ValueError):
            if (version := int(next(iter(facts), ""))) != VERSION:
                raise redis.ResponseError(other_schema(version))
        if len(facts) != FACTS:
            raise redis.ResponseError("its function redlock.command has an unexpected answer")
        _, isolation, pid, _, strings, messages = facts
        if strings != b"on":  # the functions would mean something else
            raise redis.ResponseError("SETTINGS standard_conforming_strings is off")
        if messages in HIDING:
            raise redis.ResponseError(f"SETTINGS client_min_messages is {messages.decode()}")
        if isolation != READ_COMMITTED:
            pipeline.isolate_each()
        self.server_pid = int(pid)
        self.is_pooled = pipeline.is_pooled = self.server_pid != pipeline.connection.backend_pid
        if self.is_pooled:
            self.send_command("ENDWAITS")
            with contextlib.suppress(redis.ResponseError):  # its user may not have that right
                self.read_response()

    def pack_commands(self, commands: Iterable[Sequence[Any]]) -> list[bytes]:
        return [_packed(words) for words in commands]

    def send_packed_command(self, requests: Iterable[bytes]) -> None:
        for request in requests:
            self.pipeline.send(request)
        self.pipeline.flush()

    def send_command(self, *words: Any) -> None:
        self.send_packed_command([_packed(words)])

    def read_response(self) -> Any:
        """Return the next reply. Raises redis.ResponseError for an error reply."""
        pipeline = self.pipeline
        end = CLOCK.now() + self.timeout
        try:
            while not pipeline.replies:
                if not pipeline.exchange(end):
                    raise redis.TimeoutError("no answer in time")
        except OSError as error:
            raise redis.ConnectionError(str(error)) from None
        reply = pipeline.replies.popleft()
        if isinstance(reply, hiredis.ReplyError):
            raise redis.ResponseError(str(reply))
        return reply

    def disconnect(self) -> None:
        self.pipeline.cancel()

    close = disconnect


@dataclass(frozen=True)
class PostgresAddress:
    """The address of a server: see `Address`. options: of libpq.

    listens: other options for the connection that hears messages, which no pooler brings.
    """

    keeps_locks: ClassVar[bool] = True
    name: str
    server: str
    options: dict[str, Any] = field(repr=False, compare=False)
    listens: dict[str, Any] = field(repr=False, compare=False)
    platform: Platform | None = field(default=None, repr=False)

    def dial(self, timeout: float, node_timeout: float | None = None) -> PostgresDialled:
        """Return a connection to a server that takes writes. timeout: seconds for each step."""
        return self._dial(self.options, timeout, node_timeout)

    def _dial(
        self, options: dict[str, Any], timeout: float, node_timeout: float | None
    ) -> PostgresDialled:
        end = CLOCK.now() + timeout
        text = conninfo.make_conninfo(**{**DEFAULTS, **_resolved(options)}).encode()
        connection = pq.PGconn.connect_start(text)
        try:
            _finish_connecting(connection, end)
            pipeline = Pipeline(connection, node_timeout or timeout)
            return PostgresDialled(pipeline, timeout)
        except BaseException:
            connection.finish()
            raise

    def connection(self, dialled: PostgresDialled, peer: Peer) -> PostgresConnection:
        """Return what the node writes to and reads from."""
        return PostgresConnection(dialled.pipeline, peer)

    def pubsub(self, timeout: float, node_timeout: float) -> PostgresPubSub:
        """Return a new connection that hears messages, unless a pooler stands between.

        There a message to itself arrives, and no later one.
        """
        dialled = None
        cause = ""
        try:
            dialled, cause = self._listener(timeout, node_timeout)
        except redis.RedisError as error:
            cause = str(error) if self.listens else ""  # else the node fails, and says so itself
            raise
        finally:
            if not cause:
                told.discard(self.name)
            elif self.name not in told:
                told.add(self.name)
                logger.warning(UNHEARD, self.name, cause, extra={"event": "messages_unheard"})
        return PostgresPubSub(dialled.pipeline, hears=not cause)

    def _listener(
        self, timeout: float, node_timeout: float | None = None
    ) -> tuple[PostgresDialled, str]:
        """Return a connection for messages, and why none arrives; "" if they do.

        listen_host and listen_port may name a pooler with a connection for each session. It gives
        no other client the server process of one that is still connected.
        """
        dial = functools.partial(
            self._dial, {**self.options, **self.listens}, timeout, node_timeout
        )
        dialled = dial()
        is_unheard = dialled.is_pooled and not self.listens
        if dialled.is_pooled and self.listens:
            with contextlib.suppress(redis.RedisError):  # for example, no connection is left
                for _ in range(TRIES):
                    other = dial()
                    other.disconnect()
                    is_unheard |= other.server_pid == dialled.server_pid
        return dialled, POOLED if is_unheard else ""

    def cause_of(self, error: BaseException, timeout: float) -> str:
        """Return why the node cannot be connected to. error: of `dial`."""
        return str(error).strip() or type(error).__name__

    def doubts(self, timeout: float) -> list[tuple[str, str, str]]:
        """Return what `doctor` is to report of the server; empty if it cannot be connected to."""
        unheard = ""
        try:
            dialled, unheard = self._listener(timeout)
            try:
                unheard = unheard or self._no_message(dialled, timeout)
            finally:
                dialled.disconnect()
        except redis.RedisError as error:
            unheard = str(error) if self.listens else ""
        try:
            with self.client(timeout) as client:
                return doubts_of(client, unheard)
        except psycopg.Error:  # `status` says why
            return []

    def _no_message(self, listener: PostgresDialled, timeout: float) -> str:
        """Return why no message of another connection arrives; "" if one does.

        `listen_host` may name another server, and some servers bring only a connection's own.
        """
        hearer = PostgresPubSub(listener.pipeline)
        channel = f"doctor:{uuid4()}"
        until = CLOCK.now() + HEARD_WITHIN
        with contextlib.suppress(OSError):
            hearer.send("SUBSCRIBE", channel)
            while ready(hearer.fileno(), writes=False, until=until):
                heard, replies = hearer.receive()
                if replies:  # from now on a message would come
                    with contextlib.closing(self.dial(timeout)) as sender:
                        sender.send_command("ECHO", channel)
                        sender.read_response()
                elif heard:
                    return ""
        return f"no message of another connection came within {HEARD_WITHIN:g} s"

    def setup_sql(self, prefix: str) -> str:
        begin = f"BEGIN ISOLATION LEVEL READ COMMITTED;\n{STRINGS};"
        return f"{begin}\n{schema_sql(prefix, self._applications)}COMMIT;"

    def create_schema(self, prefix: str) -> str:
        try:
            with self.client(PATIENCE) as client:
                return create_schema(client, prefix, self._applications)
        except psycopg.Error as error:
            text = error.diag.message_primary or str(error)
            raise redis.ConnectionError(words_of(text)) from None

    @property
    def _applications(self) -> set[str]:
        return {APPLICATION, str(self.options.get("application_name") or APPLICATION)}

    def client(self, timeout: float) -> psycopg.Connection[Any]:
        """Return a connection of psycopg, for what is no call of the schema. timeout: seconds."""
        options = {**DEFAULTS, **self.options, "connect_timeout": max(2, math.ceil(timeout))}
        client = psycopg.connect(**options, autocommit=True)
        client.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # as the functions need it
        return client


def address_of(url: str) -> PostgresAddress:
    """Return the address that a URL names. Raises ValueError for none of libpq's.

    Raises LookupError, with a hint, for a wrong parameter of its query.
    Two parameters of its query are our own: listen_host and listen_port, for messages.
    """
    place, mark, query = url.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    known = {one.keyword.decode(): one for one in pq.Conninfo.get_defaults()}
    if "@" not in query:  # else it may be the rest of a password
        for name, _ in given:
            if name not in (names := [*known, "ssl", *LISTENS]):
                raise LookupError(unknown_option(name, names, "libpq"))
    for name, one in given:
        is_right = name == "listen_host" or all(map(_PORT.fullmatch, one.split(",")))
        if name in LISTENS and not (one and is_right):
            raise LookupError(f"its query names {name!r} without a right value")
    listens = {name.removeprefix("listen_"): one for name, one in given if name in LISTENS}
    rest = urlencode([(name, one) for name, one in given if name not in LISTENS])
    try:
        options = conninfo.conninfo_to_dict(f"{place}{mark}{rest}" if listens else url)
    except psycopg.Error:  # its text may show a part of the password
        raise ValueError("not a URL of libpq") from None
    if "@" in url.partition("://")[2].partition("/")[2].partition("?")[0]:
        raise ValueError("a password with a slash, which libpq takes for host and database")

    def value(keyword: str, default: str) -> str:
        found = options.get(keyword) or (known[keyword].val or b"").decode()
        return str(found or default)

    hosts = value("host", value("hostaddr", "")).split(",")
    ports = _ports_of(hosts, value("port", "5432"))
    wrong_host = any("@" in host[1:] for host in hosts)  # an "@" first: an abstract socket
    if wrong_host or len(ports) != len(hosts) or not all(map(_PORT.fullmatch, ports)):
        raise ValueError("no host and port")
    pairs = zip(hosts, ports, strict=True)
    places = [f"{host or 'localhost'}:{port or '5432'}" for host, port in pairs]
    base = value("dbname", value("user", "postgres"))
    name = f"{','.join(places)}/{base}"
    return PostgresAddress(
        name, f"postgresql://{','.join(sorted(places))}/{base}", options, listens
    )


def _ports_of(hosts: Sequence[str], ports: str) -> list[str]:
    """Return a port for each host: one port is that of all."""
    each = ports.split(",")
    return each * len(hosts) if len(each) == 1 else each


def _resolved(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the addresses of the hosts: libpq would keep the GIL while it asks."""
    hosts = (options.get("host") or "").split(",")
    if options.get("hostaddr") or any(host[:1] in ("", "/", "@") for host in hosts):
        return options
    ports = _ports_of(hosts, str(options.get("port") or ""))
    found = []
    error = None
    for host, port in zip(hosts, ports, strict=True):
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as unknown:
            error = unknown
        else:
            found += [(host, str(info[4][0]), port) for info in infos]
    if not found:
        raise redis.ConnectionError(f"{hosts[-1]}: {error}")
    names, addresses, numbers = map(",".join, zip(*found, strict=True))
    return {**options, "host": names, "hostaddr": addresses, "port": numbers}


def _finish_connecting(connection: pq.abc.PGconn, until: float) -> None:
    state: int = pq.PollingStatus.WRITING
    if connection.status == pq.ConnStatus.BAD:  # for example, a wrong option: it has no socket
        state = pq.PollingStatus.FAILED
    try:
        while state not in (pq.PollingStatus.OK, pq.PollingStatus.FAILED):
            writes = state == pq.PollingStatus.WRITING
            if not ready(connection.socket, writes=writes, reads=not writes, until=until):
                raise redis.TimeoutError("timed out")
            state = connection.connect_poll()
    except psycopg.Error as error:
        raise redis.ConnectionError(words_of(str(error))) from None
    if state == pq.PollingStatus.FAILED:
        raise redis.ConnectionError(words_of(pq.error_message(connection)))


def _packed(words: Sequence[Any]) -> bytes:
    texts = [word if isinstance(word, bytes) else encoded(str(word)) for word in words]
    return b"*%d\r\n%b" % (len(texts), b"".join(map(encode_bulk, texts)))
