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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
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
    SERVING_VERSIONS,
    STRINGS_SETTING,
    VERSION,
    create_schema,
    doubts_of,
    other_schema,
    schema_sql,
)
from celery_redlock.lock.transport.address import unknown_option
from celery_redlock.lock.transport.command import encode_bulk, encoded
from celery_redlock.lock.transport.connection import CLOCK, Peer

T = TypeVar("T")
READ_COMMITTED = b"read committed"
HELLO_ITEMS = 6  # in the reply to HELLO
# Levels of messages that hide the warning that no standby has confirmed a commit.
HIDING_LEVELS = (b"error", b"fatal", b"panic")
# What a connection has unless its URL says otherwise. A standby cannot vote.
DEFAULTS = {"application_name": APPLICATION, "target_session_attrs": "read-write"}
OPERATOR_TIMEOUT = 10.0  # seconds to connect for a command of an operator
MESSAGE_TIMEOUT = 5.0  # seconds for a message to come
_PORT = re.compile(r"\d{0,5}")
LISTENER_PARAMETERS = ("listen_host", "listen_port")
NO_MESSAGES_WARNING = (
    "node %s sends no message (%s), so waiters poll about "
    "once a second: name listen_host and listen_port of the server in its URL"
)
POOLER_CAUSE = "a pooler stands between"
# to find a pooler that shares its connections: other clients may use one just then
POOLER_PROBES = 3

logger = logging.getLogger(__name__)
warned_nodes: set[str] = set()  # the nodes of which a line of the log says that no message comes


class PostgresDialled:
    """A new connection, with the methods of a redis-py connection that the handshake uses.

    timeout: seconds for each reply. is_pooled: whether a pooler stands between. Raises
    redis.RedisError if calls would not mean here what they mean.
    """

    def __init__(self, pipeline: Pipeline, timeout: float) -> None:
        self.pipeline = pipeline
        self.timeout = timeout
        self.send_command("HELLO", str(VERSION))
        greeting = self.read_response()
        fields = greeting if isinstance(greeting, list) else [greeting]
        with contextlib.suppress(TypeError, ValueError):
            if (version := int(next(iter(fields), ""))) not in SERVING_VERSIONS:
                raise redis.ResponseError(other_schema(version))
        if len(fields) != HELLO_ITEMS:
            raise redis.ResponseError("its function redlock.command has an unexpected answer")
        _, isolation, pid, _, strings, messages = fields
        if strings != b"on":  # the functions would mean something else
            raise redis.ResponseError("SETTINGS standard_conforming_strings is off")
        if messages in HIDING_LEVELS:
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
                warned_nodes.discard(self.name)
            elif self.name not in warned_nodes:
                warned_nodes.add(self.name)
                logger.warning(
                    NO_MESSAGES_WARNING, self.name, cause, extra={"event": "messages_unheard"}
                )
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
                for _ in range(POOLER_PROBES):
                    second = dial()
                    second.disconnect()
                    is_unheard |= second.server_pid == dialled.server_pid
        return dialled, POOLER_CAUSE if is_unheard else ""

    def cause_of(self, error: BaseException, timeout: float) -> str:
        """Return why the node cannot be connected to. error: of `dial`."""
        return str(error).strip() or type(error).__name__

    def doubts(self, timeout: float) -> list[tuple[str, str, str]]:
        """Return what `doctor` is to report of the server; empty if it cannot be connected to."""
        silence_cause = ""
        try:
            dialled, silence_cause = self._listener(timeout)
            try:
                silence_cause = silence_cause or self._no_message(dialled, timeout)
            finally:
                dialled.disconnect()
        except redis.RedisError as error:
            silence_cause = str(error) if self.listens else ""
        try:
            with self.client(timeout) as client:
                return doubts_of(client, silence_cause)
        except psycopg.Error:  # `status` says why
            return []

    def _no_message(self, listener: PostgresDialled, timeout: float) -> str:
        """Return why no message of another connection arrives; "" if one does.

        `listen_host` may name another server, and some servers bring only a connection's own.
        """
        hearer = PostgresPubSub(listener.pipeline)
        channel = f"doctor:{uuid4()}"
        until = CLOCK.now() + MESSAGE_TIMEOUT
        with contextlib.suppress(OSError):
            hearer.send("SUBSCRIBE", channel)
            while ready(hearer.fileno(), writes=False, until=until):
                has_spoken, replies = hearer.receive()
                if replies:  # from now on a message would come
                    with contextlib.closing(self.dial(timeout)) as sender:
                        sender.send_command("ECHO", channel)
                        sender.read_response()
                elif has_spoken:
                    return ""
        return f"no message of another connection came within {MESSAGE_TIMEOUT:g} s"

    def setup_sql(self, prefix: str) -> str:
        begin = f"BEGIN ISOLATION LEVEL READ COMMITTED;\n{STRINGS_SETTING};"
        return f"{begin}\n{schema_sql(prefix, self.applications)}COMMIT;"

    def create_schema(self, prefix: str) -> str:
        return self.operate(lambda client: create_schema(client, prefix, self.applications))

    def operate(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Return the result of an operator's work on a new connection. Raises redis.RedisError."""
        try:
            with self.client(OPERATOR_TIMEOUT) as client:
                return work(client)
        except psycopg.Error as error:
            text = error.diag.message_primary or str(error)
            raise redis.ConnectionError(words_of(text)) from None

    @property
    def applications(self) -> set[str]:
        """What clients name themselves."""
        return {APPLICATION, str(self.options.get("application_name") or APPLICATION)}

    def client(self, timeout: float) -> psycopg.Connection[Any]:
        """Return a connection of psycopg, for what is no call of the schema. timeout: seconds."""
        options = {**DEFAULTS, **self.options, "connect_timeout": max(2, math.ceil(timeout))}
        client = psycopg.connect(**options, autocommit=True)
        client.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # as the functions need it
        return client


def address_of(url: str) -> PostgresAddress:
    """Return the address that a URL names.

    Two parameters of the query are our own, for messages: listen_host and listen_port. Raises
    ValueError for what is no URL of libpq, and LookupError, with a hint, for a wrong parameter.
    """
    location, mark, query = url.partition("?")
    parameters = parse_qsl(query, keep_blank_values=True)
    defaults = {
        option.keyword.decode(): (option.val or b"").decode()
        for option in pq.Conninfo.get_defaults()
    }
    if "@" not in query:  # otherwise it may be the end of a password
        _refuse_unknown(parameters, [*defaults, "ssl", *LISTENER_PARAMETERS])
    listens = _listener_options(parameters)
    if listens:
        libpq_query = urlencode([pair for pair in parameters if pair[0] not in LISTENER_PARAMETERS])
        options = _libpq_options(f"{location}{mark}{libpq_query}")
    else:
        options = _libpq_options(url)
    settings = defaults | {keyword: str(value) for keyword, value in options.items() if value}
    servers = _servers(settings)
    database = settings.get("dbname") or settings.get("user") or "postgres"
    name = f"{','.join(servers)}/{database}"
    server = f"postgresql://{','.join(sorted(servers))}/{database}"
    return PostgresAddress(name, server, options, listens)


def _refuse_unknown(parameters: Iterable[tuple[str, str]], names: Sequence[str]) -> None:
    """Raise LookupError for a parameter of a query that has none of these names."""
    for name, _ in parameters:
        if name not in names:
            raise LookupError(unknown_option(name, names, "libpq"))


def _listener_options(parameters: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return host and port of the connection for messages, as options of libpq.

    Raises LookupError for a value that is empty, or is no port.
    """
    options = {}
    for name, value in parameters:
        if name not in LISTENER_PARAMETERS:
            continue
        is_right = name == "listen_host" or all(map(_PORT.fullmatch, value.split(",")))
        if not value or not is_right:
            raise LookupError(f"its query names {name!r} without a right value")
        options[name.removeprefix("listen_")] = value
    return options


def _libpq_options(url: str) -> dict[str, Any]:
    """Return the options of a URL as libpq reads it. Raises ValueError for a wrong URL."""
    try:
        options = conninfo.conninfo_to_dict(url)
    except psycopg.Error:  # its text may show a part of the password
        raise ValueError("not a URL of libpq") from None
    path = url.partition("://")[2].partition("/")[2].partition("?")[0]
    if "@" in path:
        raise ValueError("a password with a slash, which libpq takes for host and database")
    return options


def _servers(settings: Mapping[str, str]) -> list[str]:
    """Return host and port of each server. Raises ValueError for a wrong host or port."""
    hosts = (settings.get("host") or settings.get("hostaddr") or "").split(",")
    ports = _ports_of(hosts, settings.get("port") or "5432")
    is_wrong_host = any("@" in host[1:] for host in hosts)  # an "@" first: an abstract socket
    if is_wrong_host or len(ports) != len(hosts) or not all(map(_PORT.fullmatch, ports)):
        raise ValueError("no host and port")
    pairs = zip(hosts, ports, strict=True)
    return [f"{host or 'localhost'}:{port or '5432'}" for host, port in pairs]


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
    resolved = []
    error = None
    for host, port in zip(hosts, ports, strict=True):
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as unknown:
            error = unknown
        else:
            resolved += [(host, str(info[4][0]), port) for info in infos]
    if not resolved:
        raise redis.ConnectionError(f"{hosts[-1]}: {error}")
    names, addresses, numbers = map(",".join, zip(*resolved, strict=True))
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
    items = [item if isinstance(item, bytes) else encoded(str(item)) for item in words]
    return b"*%d\r\n%b" % (len(items), b"".join(map(encode_bulk, items)))
