"""The digest of a task's arguments: the same before and after the message."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.transport.encoding import encoded


def digest(arguments: Mapping[str, Any], task: str) -> str:
    """Return 32 hex digits that are the same wherever these arguments are equal.

    The same before and after the message: what JSON makes one (tuple and list, an enum and its
    value, a dict's keys) is one here; what it keeps apart ("1" and 1, 1 and True) stays apart.
    Raises SettingsError for a value without a stable form.
    """
    parts = []
    for name, value in arguments.items():
        try:
            text = repr(value) if type(value) in _MOST else canonical(value)
            parts.append(f"{name}={text}")
        except TypeError as error:
            raise unstable(task, f"argument {name!r}", value, error) from None
    return hashlib.sha256(encoded("\x00".join(parts))).hexdigest()[:32]


def unstable(task: str, what: str, value: Any, error: TypeError) -> SettingsError:
    """Return the error for a value that makes another key each time. what: where it stands."""
    hint = (
        f"has no stable form ({error}): name the arguments that make the key, as "
        'lock_args=["id"] or lock_key="thing:{id}"'
    )
    return SettingsError(f"task {task!r}", what, f"a {type(value).__name__}", hint)


_MOST = (int, str)  # what most arguments are, and nothing derived from it: as below, but sooner
_NATIVE = (bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, Mapping)
_DATES = (dt.datetime, dt.date, dt.time)  # a datetime is a date, too
_BY_TEXT = (*_DATES, decimal.Decimal, uuid.UUID, dt.timedelta)


def canonical(value: Any) -> str:
    """Return a text that equal values share and others do not; TypeError for an unstable one."""
    if type(value) in _MOST:
        return repr(value)
    value = _reduced(value)
    if value is None or isinstance(value, _NATIVE):
        return repr(value)
    if isinstance(value, _DATES):
        return f"{type(value).__name__}:{value.isoformat()}"
    if isinstance(value, _BY_TEXT):
        return f"{type(value).__name__}:{value}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set({', '.join(sorted(map(canonical, value)))})"
    if isinstance(value, Mapping):
        pairs = sorted(f"{canonical(_json_key(k))}: {canonical(v)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def _reduced(value: Any) -> Any:
    """Return a value as it comes out of a message, whose items are not looked at.

    Source: kombu.utils.json: JSONEncoder.default asks `__json__` first, but never for what derives
    from str, int, float, list, tuple and dict; a date keeps its offset, and not the zone's name.
    """
    if value is None or type(value) in _NATIVE or isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    reduce = getattr(value, "__json__", None)
    if callable(reduce):
        return _reduced(reduce())
    if isinstance(value, enum.Enum):
        return _reduced(value.value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return _of_own_kind(value)


def _of_own_kind(value: Any) -> Any:
    """Return a moment or number whose class may derive from Python's own as one of that."""
    if isinstance(value, dt.datetime):
        return dt.datetime.fromisoformat(dt.datetime.isoformat(value))
    if isinstance(value, dt.date):
        return dt.date.fromisoformat(dt.date.isoformat(value))
    if isinstance(value, dt.time):
        return dt.time.fromisoformat(dt.time.isoformat(value))
    if isinstance(value, uuid.UUID):
        return uuid.UUID(int=value.int)
    if isinstance(value, decimal.Decimal):
        return decimal.Decimal(value)
    if isinstance(value, dt.timedelta):
        return dt.timedelta(value.days, value.seconds, value.microseconds)
    return value


def _json_key(key: Any) -> Any:
    """Return a dict's key as JSON writes it."""
    key = _reduced(key)
    return json.dumps(key) if key is None or isinstance(key, (bool, int, float)) else key
