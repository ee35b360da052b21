"""Credentials of a node: what logs show of its URL and of a failed login; credential providers.

`?credential_provider=module.Class` is for tokens that end (IAM, Entra ID), as kombu and Celery take
it. redis-py takes an object alone, and no name.
"""

from __future__ import annotations

import re
from pkgutil import resolve_name
from typing import Any

import redis
from redis import CredentialProvider

PROVIDER = "credential_provider"  # the option of redis-py, and its name in a query
_HOST = r"(?:\[[\da-fA-F:.]+\]|[\w.-]+)(?::\d{1,5})?(?=[,/]|$)"
_PLACE = re.compile(rf"(?:{_HOST}(?:,{_HOST})*)?(?:/[\w./-]*$)?")

# The scheme of a URL of a node, also as SQLAlchemy and Celery's result backend write it, and with a
# mistake in what follows it.
_BEGINNING = re.compile(
    r"((?:db\+|sqla\+)?(?:rediss?|valkeys?|unix|sentinel|postgres(?:ql)?)(?:\+[a-z]\w*)?)"
    r"(://|:/|//)"
)

# The start of a server's reply to AUTH. Any other words may repeat the password.
_REPLY_TO_AUTH = re.compile(
    "(?:(?:WRONGPASS|NOAUTH|NOPERM|LOADING) )?(?:"
    "invalid password|invalid username-password pair"
    "|AUTH <password> called without any password configured for the default user"
    "|Client sent AUTH, but no password is set|Invalid Username or Password"
    "|Authentication required|DENIED .{,40}protected mode|max number of clients"
    "|unknown command .?AUTH|wrong number of arguments for 'auth' command"
    "|(?:Redis|Valkey) is loading the dataset in memory)"
)


class ProviderError(Exception):
    """A provider that a URL names cannot be made. Its text says why."""


def make_provider(options: dict[str, Any]) -> None:
    """Replace the name of a provider in a connection's options by the provider itself.

    Source: kombu.transport.redis: user and password of the URL do not count beside it. Raises
    ProviderError.
    """
    name = options.get(PROVIDER)
    if name is None:
        return
    option = f"its query names {PROVIDER}={name!r}"
    try:
        provider = resolve_name(name)()
    except Exception as error:  # of any module
        is_import = isinstance(error, (ImportError, AttributeError, ValueError))
        cause = error if is_import else type(error).__name__  # other words may have a secret
        raise ProviderError(f"{option}, which cannot be made: {cause}") from None
    if not isinstance(provider, CredentialProvider):
        raise ProviderError(
            f"{option}, which must be a class derived from redis.CredentialProvider"
        )
    options[PROVIDER] = provider
    for replaced in ("username", "password"):
        options.pop(replaced, None)


def redact_url(url: str) -> str:
    """Return scheme, hosts, ports and path of a URL, for logs; "..." for what may be a secret."""
    scheme, separator, location = url.partition("://")
    if beginning := _BEGINNING.match(url):
        scheme, separator = beginning.groups()
        location = url[beginning.end() :]
    elif not separator or not scheme.isidentifier():
        scheme = ""
        separator = ""
        location = url
    match = re.fullmatch("([^?#]*)(?:[?#][^@]*)?", location)  # None: a password with "?" in it
    place = match[1].rpartition("@")[2] if match else "?"
    safe_match = _PLACE.match(place)
    safe_place = safe_match[0] if safe_match else ""
    return f"{scheme}{separator}{safe_place}{'' if safe_place == place else '...'}"


def form_of(url: str) -> str:
    """Return how a PostgreSQL is named, if a URL means one; else "".

    url: of an unknown scheme, such as that of SQLAlchemy or of Celery's result backend.
    """
    beginning = _BEGINNING.match(url)
    if beginning is None or "postgres" not in beginning[1]:
        return ""
    form = "postgresql://user:password@host:5432/database"
    return f", a PostgreSQL as {form}, without the name of a driver"


def login_error(error: redis.RedisError) -> str:
    """Return why a login failed, without the password that a server's own words may repeat.

    error: of redis-py, for the reply to AUTH.
    """
    if isinstance(error, redis.InvalidResponse):
        return "not a Redis server"
    match = _REPLY_TO_AUTH.match(str(error))
    if match:
        return match[0]
    is_login = isinstance(error, redis.AuthenticationError)
    return f"{'invalid password' if is_login else 'refused'}: AUTH failed, in words not shown here"
