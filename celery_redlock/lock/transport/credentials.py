"""Credentials in a node's URL: what logs show of it, and providers that its query names.

`?credential_provider=module.Class` is for tokens that end (IAM, Entra ID), as kombu and Celery take
it. redis-py takes an object alone, and no name.
"""

from __future__ import annotations

import re
from pkgutil import resolve_name
from typing import Any

from redis import CredentialProvider

PROVIDER = "credential_provider"  # the option of redis-py, and its name in a query
_HOST = r"(?:\[[\da-fA-F:.]+\]|[\w.-]+)(?::\d{1,5})?(?=[,/]|$)"
_PLACE = re.compile(rf"(?:{_HOST}(?:,{_HOST})*)?(?:/[\w./-]*$)?")


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
    shown = f"its query names {PROVIDER}={name!r}"
    try:
        made = resolve_name(name)()
    except Exception as error:  # of any module
        is_import = isinstance(error, (ImportError, AttributeError, ValueError))
        why = error if is_import else type(error).__name__  # other words may have a secret
        raise ProviderError(f"{shown}, which cannot be made: {why}") from None
    if not isinstance(made, CredentialProvider):
        raise ProviderError(f"{shown}, which must be a class derived from redis.CredentialProvider")
    options[PROVIDER] = made
    for replaced in ("username", "password"):
        options.pop(replaced, None)


def redact_url(url: str) -> str:
    """Return scheme, hosts, ports and path of a URL, for logs; "..." for what may be a secret."""
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme.isidentifier():
        scheme = ""
        separator = ""
        rest = url
    found = re.fullmatch("([^?#]*)(?:[?#][^@]*)?", rest)  # None: a password with "?" in it
    place = found[1].rpartition("@")[2] if found else "?"
    known = _PLACE.match(place)
    shown = known[0] if known else ""
    return f"{scheme}{separator}{shown}{'' if shown == place else '...'}"
