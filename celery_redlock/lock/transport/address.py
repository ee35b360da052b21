"""Addresses of nodes, from URLs and redis-py clients, and how to connect to them.

redis-py makes the connection (URL, TLS, ACL). Its own retries are off, for Sentinels as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast
from urllib.parse import parse_qsl

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_redlock.errors import SettingsError, closest_or_all
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.transport.command import read_list, text_of
from celery_redlock.lock.transport.connection import (
    Connection,
    DialledParser,
    Peer,
    PubSub,
    RedisConnection,
    RedisPubSub,
)
from celery_redlock.lock.transport.credentials import (
    PROVIDER,
    ProviderError,
    form_of,
    login_error,
    make_provider,
    redact_url,
)

T = TypeVar("T")
POSTGRES = "celery_redlock.lock.postgres.address"
POSTGRES_SCHEMES = ("postgresql", "postgres")
URL_SCHEMES = ("redis", "rediss", "unix", "sentinel", "postgresql")
# What the query of a sentinel:// URL may name. `ssl_validate_ocsp` is not in it: redis-py ignores
# its text in a URL.
_TLS_OPTIONS = [
    name
    for name in inspect.signature(redis.SSLConnection).parameters
    if name.startswith("ssl_") and "ocsp" not in name
]
_SENTINEL_LOGIN = {"sentinel_username": "username", "sentinel_password": "password"}
_QUERY = ["db", "username", "password", "client_name", "ssl", PROVIDER, *_TLS_OPTIONS]
_QUERY += _SENTINEL_LOGIN
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_LOGIN_OPTIONS = ("username", "password", PROVIDER, "redis_connect_func")
_CLOSED_TEXT = re.compile("EOF occurred|[Cc]losed|[Rr]eset|Broken pipe")


class Address(Protocol):
    """The address of a node, and how to connect to it: its scheme names the kind of server.

    name: for logs and errors; never with credentials. server: a canonical spelling, equal for two
    addresses of one server. keeps_locks: over a restart, so such a node is the only one of its
    client.
    """

    keeps_locks: ClassVar[bool]

    @property
    def name(self) -> str: ...

    @property
    def server(self) -> str: ...

    def dial(self, timeout: float, node_timeout: float | None = None) -> Any:
        """Return a connected, authenticated connection with the methods of redis-py's."""

    def connection(self, dialled: Any, peer: Peer) -> Connection:
        """Return the connection that a node writes to and reads from. dialled: of `dial`."""

    def pubsub(self, timeout: float, node_timeout: float) -> PubSub:
        """Return a new connection that hears messages."""

    def cause_of(self, error: BaseException, timeout: float) -> str:
        """Return why the node cannot be connected to."""

    def doubts(self, timeout: float) -> list[tuple[str, str, str]]:
        """Return what `doctor` is to report: setting, value and what to do. timeout: as above."""

    def setup_sql(self, prefix: str) -> str:
        """Return the statements that an operator runs once on the server; "" for none."""

    def create_schema(self, prefix: str) -> str:
        """Run these statements; return what they did, as `redlock.setup` says in `schema.sql`.

        Raises redis.RedisError.
        """


@dataclass(frozen=True)
class RedisAddress:
    """The address of a Redis or Valkey node: see `Address`. name: host and port, or path.

    sentinels: the Sentinels that know the place of the node; the one to ask first is the first.
    """

    keeps_locks: ClassVar[bool] = False
    name: str
    server: str
    pool: Any = field(repr=False)  # redis-py's
    platform: Platform | None = field(default=None, repr=False)  # None: the machine's
    sentinels: list[RedisAddress] = field(
        default_factory=list, repr=False, compare=False, kw_only=True
    )

    def dial(self, timeout: float, node_timeout: float | None = None) -> Any:
        """Return a connected, authenticated redis-py connection.

        timeout: seconds for each step. node_timeout: for each step with a Sentinel, as another
        Sentinel may answer; None for `timeout`.
        """
        try:
            connection = self._connect(timeout, node_timeout)
        except redis.RedisError as error:
            if type(error) in (redis.ConnectionError, redis.TimeoutError):  # no server's words
                raise
            raise redis.ConnectionError(login_error(error)) from None
        options = self.pool.connection_kwargs
        commands = [
            ("CLIENT", "SETNAME", options.get("client_name")),
            ("SELECT", options.get("db")),
        ]
        try:
            for command in (requests := [words for words in commands if words[-1]]):
                connection.send_command(*command)
            for _ in requests:
                connection.read_response()
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def _connect(self, timeout: float, node_timeout: float | None = None, **changed: Any) -> Any:
        """Return a connection to which AUTH is all that was sent. changed: options of redis-py."""
        options = {
            **self.pool.connection_kwargs,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_timeout": False,
            "retry_on_error": [],
            "health_check_interval": 0,
            "protocol": 2,
            "parser_class": DialledParser,
            "decode_responses": False,  # a key may be invalid in the client's own encoding
            "db": 0,
            "client_name": None,
            **changed,
        }
        connection = self.pool.connection_class(**options)
        # otherwise redis-py sends CLIENT SETINFO, and loses the error of a server that rejects it
        connection.driver_info = connection.lib_name = connection.lib_version = None
        if self.sentinels:
            connection.connect_to(self._primary(node_timeout or timeout))
        else:
            connection.connect()
        return connection

    def connection(self, dialled: Any, peer: Peer) -> Connection:
        return RedisConnection(dialled, peer)

    def pubsub(self, timeout: float, node_timeout: float) -> PubSub:
        return RedisPubSub(self.dial(timeout, node_timeout), node_timeout)

    def doubts(self, timeout: float) -> list[tuple[str, str, str]]:
        return []  # `status` shows what counts of it

    def setup_sql(self, prefix: str) -> str:
        return ""

    def create_schema(self, prefix: str) -> str:
        return ""

    def _primary(self, timeout: float) -> tuple[str, int]:
        """Return host and port of the primary, as the first Sentinel says that knows it.

        redis-py's own query tries a dead Sentinel many times, and a frozen one for ever.
        """
        manager = self.pool.sentinel_manager
        errors = []
        service = self.pool.service_name
        min_sentinels = manager.min_other_sentinels
        ask_primary = functools.partial(
            _named_primary, service=service, min_sentinels=min_sentinels
        )
        for sentinel in tuple(self.sentinels):
            try:
                host, port = ask(sentinel, timeout, ask_primary)
            except Exception as error:  # also an error of the user's credential provider
                errors.append((sentinel, error))
                continue
            others = [other for other in self.sentinels if other is not sentinel]
            self.sentinels[:] = [sentinel, *others]  # in one step: other threads read it
            return getattr(manager, "_force_master_ip", None) or host, port
        causes = [
            f"Sentinel {sentinel.name}: {sentinel.cause_of(error, timeout)}"
            for sentinel, error in errors
        ]
        raise redis.ConnectionError("; ".join(causes))

    def cause_of(self, error: BaseException, timeout: float) -> str:
        """Return why the node cannot be connected to. If it is by TLS, look for a known mistake.

        error: of `dial`, or of the first commands. timeout: seconds for each step.
        """
        text = str(error).strip() or type(error).__name__
        if issubclass(self.pool.connection_class, redis.SSLConnection):
            with contextlib.suppress(Exception):  # the node cannot be asked now
                return self._tls_mistake(error, text, timeout) or text
        return text

    def _tls_mistake(self, error: BaseException, text: str, timeout: float) -> str:
        for name in _TLS_FILES:
            try:
                Path(self.pool.connection_kwargs.get(name) or os.devnull).open("rb").close()
            except OSError as unread:
                if str(unread.strerror) in text:
                    return f"cannot read {name}: {unread.strerror}"
        if isinstance(error, redis.TimeoutError) and self._answers_without_tls(timeout):
            return "it answers without TLS"
        if isinstance(error, redis.ConnectionError) and _CLOSED_TEXT.search(text):
            return self._alert(timeout)
        return ""

    def _answers_without_tls(self, timeout: float) -> bool:
        """Return whether the node replies to a plain PING; it never replies to a TLS greeting."""
        place = self._primary(timeout) if self.sentinels else _place_of(self.pool.connection_kwargs)
        with socket.create_connection(place, timeout) as plain:
            plain.sendall(b"PING\r\n")
            return plain.recv(1) in (b"+", b"-")

    def _alert(self, timeout: float) -> str:
        """Return the TLS alert after a handshake, which a failing write on the connection hides."""
        connection = self._connect(timeout, **dict.fromkeys(_LOGIN_OPTIONS))
        try:
            connection._sock.recv(1)
        except ssl.SSLError as alert:
            return str(alert)
        finally:
            connection.disconnect()
        return ""


def ask(address: Address, timeout: float, do: Callable[[Any], T]) -> T:
    """Call a function with a new connection and return its result; timeout: as for `dial`."""
    connection = address.dial(timeout)
    try:
        return do(connection)
    finally:
        connection.disconnect()


def _named_primary(connection: Any, service: str, min_sentinels: int) -> tuple[str, int]:
    """Return host and port of a service's primary that is up, as this Sentinel says.

    The query is redis-py's own command, so it needs the same rights. min_sentinels: the number of
    other Sentinels that this one must know.
    """
    connection.send_command("SENTINEL", "MASTERS")
    reply = connection.read_response()
    for entry in read_list(reply):
        words = [text_of(word) for word in read_list(entry)]
        state = dict(zip(words[::2], words[1::2], strict=True))
        flags = state["flags"].split(",")
        is_up = "master" in flags and not {"s_down", "o_down"}.intersection(flags)
        if state["name"] != service or not is_up:
            continue
        if int(state["num-other-sentinels"]) >= min_sentinels:
            return state["ip"], int(state["port"])
    raise redis.ConnectionError(f"No master found for {service!r}")


def parse_address(node: Any, level: str, name: str) -> Address:
    """Return the address that a URL or a redis-py client names.

    level, name: of the setting, for the error. Raises SettingsError for anything else, for an
    unknown scheme, and for a query of Sentinels that names an unknown option.
    """
    if hasattr(node, "dial"):
        return cast("Address", node)
    if isinstance(node, redis.Redis):
        return _address_of(node.connection_pool)
    schemes = ", ".join(f"{scheme}://" for scheme in URL_SCHEMES)
    if not isinstance(node, str):
        hint = f"must be a URL ({schemes}) or a redis.Redis"
        raise SettingsError(level, name, f"a {type(node).__name__}", hint)
    scheme, separator, _ = node.partition("://")
    if separator and scheme in POSTGRES_SCHEMES:
        return _postgres_address(node, level, name)
    if separator and scheme in URL_SCHEMES:
        return _redis_address(node, level, name)
    hint = f"a node's URL starts with one of {schemes}{form_of(node)}"
    raise SettingsError(level, name, repr(redact_url(node)), hint)


def _redis_address(url: str, level: str, name: str) -> RedisAddress:
    """Return the address of a Redis node, or of the primary that Sentinels know."""
    try:
        if url.startswith("sentinel://"):
            hint = _wrong_query(url.partition("?")[2])
            if not hint:
                return _sentinel_address(url)
        else:
            pool = redis.ConnectionPool.from_url(url)
            make_provider(pool.connection_kwargs)
            pool.connection_class(**pool.connection_kwargs)  # raises for an unknown option
            return _address_of(pool)
    except ProviderError as error:
        hint = str(error)
    except (ValueError, TypeError, NameError, redis.RedisError):
        # the text of redis-py's error shows parts of the URL, so maybe of a password
        hint = (
            "is not a URL of a node; in user and password, write special characters with a "
            "percent sign (%2F for /), and Sentinels as sentinel://host:port,[::1]:port/name; "
            "a query has options of redis-py alone, those of TLS with rediss://"
        )
    raise SettingsError(level, name, repr(redact_url(url)), hint)


def _postgres_address(url: str, level: str, name: str) -> Address:
    try:  # by name: nothing else imports what only users of PostgreSQL have installed
        address_of = importlib.import_module(POSTGRES).address_of
    except ImportError as missing:
        if (missing.name or "psycopg").partition(".")[0] != "psycopg":
            raise
        hint = 'needs psycopg: pip install "psycopg[binary]>=3.2.4"'
        if not missing.name:  # psycopg is there, and finds no libpq
            hint = f"{hint}, and unset PSYCOPG_IMPL: {' '.join(str(missing).split())}"
    else:
        try:
            return cast("Address", address_of(url))
        except LookupError as unknown:
            hint = str(unknown.args[0])
        except ValueError:
            hint = (
                "is not a URL of a PostgreSQL server; in user and password, write special "
                "characters with a percent sign (%2F for /)"
            )
    raise SettingsError(level, name, repr(redact_url(url)), hint)


def _address_of(pool: Any) -> RedisAddress:
    service = getattr(pool, "service_name", None)
    if service is not None:  # names the Sentinels, too: two groups may use the same service name
        sentinels = [
            _address_of(sentinel.connection_pool) for sentinel in pool.sentinel_manager.sentinels
        ]
        name = f"sentinel://{','.join(sentinel.name for sentinel in sentinels)}/{service}"
        servers = ",".join(sorted(sentinel.server for sentinel in sentinels))
        return RedisAddress(name, f"sentinel://{servers}/{service}", pool, sentinels=sentinels)
    options = pool.connection_kwargs
    if "path" in options:
        return RedisAddress(options["path"], options["path"], pool)
    host, port = _place_of(options)
    host_text = f"[{host}]" if ":" in host else host
    return RedisAddress(f"{host_text}:{port}", f"{_canonical(host)}:{port}", pool)


def _place_of(options: Mapping[str, Any]) -> tuple[str, int]:
    return options.get("host", "localhost"), int(options.get("port", 6379))


def _canonical(host: str) -> str:
    """Return the canonical spelling of a host, without a DNS query."""
    if host.lower() in ("localhost", "localhost.localdomain", ""):
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def unknown_option(name: str, known: Sequence[str], owner: str) -> str:
    text = f"its query names {name!r}, which is not an option of {owner}"
    return f"{text}; {closest_or_all(name, known)}"


def _wrong_query(query: str) -> str:
    """Return what is wrong with the query of a sentinel:// URL; "" if all of it is used."""
    if "@" in query:
        raise ValueError("the rest of a password")
    options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    for name, value in options.items():
        if name not in _QUERY:
            return unknown_option(name, _QUERY, "Sentinels")
        if not value:
            return f"its query names {name!r} without a value"
        if name in _TLS_OPTIONS and not is_on(options.get("ssl")):
            return f"its query names {name!r} without ssl=true, so without TLS"
    return ""


def _parsed(url: str) -> dict[str, Any]:
    """Return what a URL says of a connection, as redis-py's own `from_url` reads it."""
    parse_url = getattr(redis.connection, "parse_url", None)
    if parse_url is None:  # then with what a pool adds for itself
        return dict(redis.ConnectionPool.from_url(url).connection_kwargs)
    return dict(parse_url(url))


def is_on(value: str | None) -> bool:
    """Return whether a word of a query says yes, in redis-py's reading."""
    return bool(value) and str(value).upper() not in ("0", "F", "FALSE", "N", "NO")


def _sentinel_address(url: str) -> RedisAddress:
    # by hand: urlsplit takes the brackets of one IPv6 address, not those of a list
    place, _, query = url.partition("://")[2].partition("?")
    netloc, _, service = place.partition("/")
    login, at, hosts = netloc.rpartition("@")
    options = _parsed(f"redis://{login}{at}?{query}")
    make_provider(options)
    options["ssl"] = is_on(options.get("ssl"))
    sentinel_options = {
        option: options.pop(name) for name, option in _SENTINEL_LOGIN.items() if name in options
    }
    sentinel_options |= {name: value for name, value in options.items() if name.startswith("ssl")}
    if not service.strip("/"):
        raise ValueError("no service")
    places = [_place_in(entry) for entry in hosts.split(",")]
    sentinel = Sentinel(places, sentinel_kwargs=sentinel_options, **options)
    return _address_of(sentinel.master_for(service.strip("/")).connection_pool)


def _place_in(entry: str) -> tuple[str, int]:
    """Return the parts of "host:port" or "[IPv6 address]:port"; raises ValueError."""
    match = re.fullmatch(r"(?:\[(?P<address>[^][]+)\]|(?P<host>[^][:]+)):(?P<port>[0-9]+)", entry)
    if match is None:
        raise ValueError("not host:port")
    if match["address"]:
        ipaddress.IPv6Address(match["address"])
    return match["address"] or match["host"], int(match["port"])
