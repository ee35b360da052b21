"""Addresses of nodes, from URLs and redis-py clients, and how to connect to them.

redis-py makes the connection (URL, TLS, ACL, Sentinel). Its own retries are off.
"""

from __future__ import annotations

import ipaddress
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


@dataclass(frozen=True)
class Address:
    """The address of a node, and how to connect to it.

    name: host and port, or path, for logs and errors; never with credentials.
    server: a canonical spelling, equal for two addresses of one server.
    """

    name: str
    server: str
    pool: redis.ConnectionPool = field(repr=False)
    platform: Platform | None = field(default=None, repr=False)  # None: the machine's

    def dial(self, timeout: float) -> Any:
        """Return a connected, authenticated redis-py connection; timeout: seconds for each step."""
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

    def without_secrets(self, text: str) -> str:
        """Return a server's text without credentials, which some servers echo."""
        for name in ("password", "username"):
            secret = self.pool.connection_kwargs.get(name)
            text = text.replace(str(secret), "***") if secret else text
        return text


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
    """Return a URL without user, password and query, for logs."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "..." if "@" in url else url
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


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


def _say_nothing_of_client(options: dict[str, Any]) -> None:
    """Keep redis-py from CLIENT SETINFO, which takes two round trips; versions differ in names."""
    options.update(dict.fromkeys({"driver_info", "lib_name", "lib_version"} & options.keys()))


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
        sentinel_kwargs={"socket_timeout": timeout, "protocol": 2},
        **{key: value for key, value in credentials.items() if value},
    )
    for one in sentinel.sentinels:
        _say_nothing_of_client(one.connection_pool.connection_kwargs)
    return _address_of(sentinel.master_for(service).connection_pool)
