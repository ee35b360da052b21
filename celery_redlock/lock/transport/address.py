"""Addresses of nodes, from URLs and redis-py clients, and how to connect to them.

redis-py makes the connection (URL, TLS, ACL, Sentinel). Its own retries are off.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_redlock.errors import SettingsError
from celery_redlock.lock.platform.clock import Platform

T = TypeVar("T")
URL_SCHEMES = ("redis", "rediss", "unix", "sentinel")
# The start of a server's reply to AUTH. Any other words may repeat the password.
_REPLY_TO_AUTH = re.compile(
    "invalid password|invalid username-password pair"
    "|AUTH <password> called without any password configured for the default user"
    "|Client sent AUTH, but no password is set|Invalid Username or Password"
    "|Authentication required|DENIED .{,40}protected mode|max number of clients"
    "|unknown command .?AUTH|wrong number of arguments for 'auth' command"
    "|(?:Redis|Valkey) is loading the dataset in memory"
)
_HOST = r"(?:\[[\da-fA-F:.]+\]|[\w.-]+)(?::\d{1,5})?(?=[,/]|$)"
_PLACE = re.compile(rf"(?:{_HOST}(?:,{_HOST})*)?(?:/[\w./-]*$)?")


@dataclass(frozen=True)
class Address:
    """The address of a node, and how to connect to it.

    name: host and port, or path, for logs and errors; never with credentials.
    server: a canonical spelling, equal for two addresses of one server.
    """

    name: str
    server: str
    pool: Any = field(repr=False)  # redis-py's
    platform: Platform | None = field(default=None, repr=False)  # None: the machine's

    def dial(self, timeout: float) -> Any:
        """Return a connected, authenticated redis-py connection; timeout: seconds for each step."""
        try:
            connection = self._connect(timeout)
        except redis.RedisError as error:
            if type(error) in (redis.ConnectionError, redis.TimeoutError):  # no server's words
                raise
            raise redis.ConnectionError(_words_of_refusal(error)) from None
        given = self.pool.connection_kwargs
        commands = [("CLIENT", "SETNAME", given.get("client_name")), ("SELECT", given.get("db"))]
        try:
            for command in (sent := [words for words in commands if words[-1]]):
                connection.send_command(*command)
            for _ in sent:
                connection.read_response()
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def _connect(self, timeout: float) -> Any:
        """Return a connection to which AUTH is all that was sent."""
        options = {
            **self.pool.connection_kwargs,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_timeout": False,
            "retry_on_error": [],
            "health_check_interval": 0,
            "protocol": 2,
            "decode_responses": False,  # a key may be invalid in the client's own encoding
            "db": 0,
            "client_name": None,
        }
        connection = self.pool.connection_class(**options)
        # otherwise redis-py sends CLIENT SETINFO, and loses the error of a server that rejects it
        connection.driver_info = connection.lib_name = connection.lib_version = None
        connection.connect()
        return connection

    def ask(self, timeout: float, do: Callable[[Any], T]) -> T:
        """Call a function with a new connection and return its result; timeout: as for `dial`."""
        connection = self.dial(timeout)
        try:
            return do(connection)
        finally:
            connection.disconnect()

    def cause_of(self, error: BaseException, timeout: float) -> str:
        """Return why the node cannot be connected to.

        error: of `dial`, or of the first commands. timeout: seconds for each step.
        """
        return str(error).strip() or type(error).__name__


def _words_of_refusal(error: redis.RedisError) -> str:
    """Return a server's reply to AUTH, as far as it cannot repeat the password."""
    if isinstance(error, redis.InvalidResponse):
        return "not a Redis server"
    known = _REPLY_TO_AUTH.match(str(error))
    if known:
        return known[0]
    is_login = isinstance(error, redis.AuthenticationError)
    return f"{'invalid password' if is_login else 'refused'}: AUTH failed, in words not shown here"


def parse_address(node: Any, level: str, name: str, timeout: float) -> Address:
    """Return the address that a URL or a redis-py client names.

    level, name: of the setting, for the error. timeout: seconds for each query of a Sentinel.
    Raises SettingsError for anything else, and for an unknown scheme.
    """
    if isinstance(node, Address):
        return node
    if isinstance(node, redis.Redis):
        pool = node.connection_pool
        return _address_of(pool)
    if not isinstance(node, str):
        hint = f"must be a URL ({', '.join(f'{s}://' for s in URL_SCHEMES)}) or a redis.Redis"
        raise SettingsError(level, name, f"a {type(node).__name__}", hint)
    scheme, separator, _ = node.partition("://")
    if not separator or scheme not in URL_SCHEMES:
        known = ", ".join(f"{s}://" for s in URL_SCHEMES)
        raise SettingsError(
            level, name, repr(redact_url(node)), f"a node's URL starts with one of {known}"
        )
    try:
        if scheme == "sentinel":
            return _sentinel_address(node, timeout)
        return _address_of(redis.ConnectionPool.from_url(node))
    except (ValueError, TypeError):
        # the text of redis-py's error shows parts of the URL, so maybe of a password
        hint = (
            "is not a URL of a node; in user and password, write special characters with a "
            "percent sign (%2F for /), and Sentinels as sentinel://host:port,host:port/name"
        )
        raise SettingsError(level, name, repr(redact_url(node)), hint) from None


def redact_url(url: str) -> str:
    """Return scheme, hosts, ports and path of a URL, for logs; "..." for what may be a secret."""
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme.isidentifier():
        scheme, separator, rest = "", "", url
    found = re.fullmatch("([^?#]*)(?:[?#][^@]*)?", rest)  # None: a password with "?" in it
    place = found[1].rpartition("@")[2] if found else "?"
    known = _PLACE.match(place)
    shown = known[0] if known else ""
    return f"{scheme}{separator}{shown}{'' if shown == place else '...'}"


def _address_of(pool: Any) -> Address:
    if getattr(pool, "service_name", None) is not None:
        return _watched_address(pool)
    options = pool.connection_kwargs
    if "path" in options:
        return Address(options["path"], options["path"], pool)
    host, port = _place_of(options)
    return Address(f"{host}:{port}", f"{_canonical(host)}:{port}", pool)


def _place_of(options: Mapping[str, Any]) -> tuple[str, int]:
    return options.get("host", "localhost"), int(options.get("port", 6379))


def _watched_address(pool: Any) -> Address:
    """Return the address of a service that Sentinels watch.

    The address also names the Sentinels: two groups of them may use the same service name.
    """
    sentinels = pool.sentinel_manager.sentinels
    places = [_place_of(one.connection_pool.connection_kwargs) for one in sentinels]
    name = f"sentinel://{','.join(f'{host}:{port}' for host, port in places)}/{pool.service_name}"
    each = sorted(f"{_canonical(host)}:{port}" for host, port in places)
    return Address(name, f"sentinel://{','.join(each)}/{pool.service_name}", pool)


def _canonical(host: str) -> str:
    """Return the canonical spelling of a host, without a DNS query."""
    if host.lower() in ("localhost", "localhost.localdomain", ""):
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def _sentinel_address(url: str, timeout: float) -> Address:
    parts = urlsplit(url)
    hosts = [entry.rpartition(":") for entry in parts.netloc.rpartition("@")[2].split(",")]
    service = parts.path.strip("/")
    if not service or not all(host and port.isdigit() for host, _, port in hosts):
        raise ValueError("sentinel://host:port,host:port/name")
    credentials = {
        "username": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
    }
    sentinel = Sentinel(
        [(host, int(port)) for host, _, port in hosts],
        sentinel_kwargs={"socket_timeout": timeout},
        **{key: value for key, value in credentials.items() if value},
    )
    return _address_of(sentinel.master_for(service).connection_pool)
