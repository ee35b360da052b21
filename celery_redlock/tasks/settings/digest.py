"""The digest of a task's arguments: the same before and after a message carries them."""

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
    """Return 32 hex digits that are the same in every process if the arguments are equal.

    They are the same before and after a message: values that JSON makes equal are equal here
    (a tuple and a list, an enum and its value, a dict's keys), and values that JSON keeps apart
    stay apart ("1" and 1, 1 and True). Raises SettingsError for a value without a stable form.
    """
    text = ""
    for name, value in arguments.items():
        if type(value) in PLAIN:
            text += f"\x00{name}={value!r}"
            continue
        try:
            text += f"\x00{name}={canonical(value)}"
        except TypeError as error:
            raise unstable(task, f"argument {name!r}", value, error) from None
    return hashlib.sha256(encoded(text[1:])).hexdigest()[:32]


def unstable(task: str, what: str, value: Any, error: TypeError) -> SettingsError:
    """Return the error for a value that would make another key each time. what: its name."""
    hint = (
        f"has no stable form ({error}): name the arguments that make the key, as "
        'lock_args=["id"] or lock_key="thing:{id}"'
    )
    return SettingsError(f"task {task!r}", what, f"a {type(value).__name__}", hint)


PLAIN = (int, str)  # the exact types of most arguments; their short cuts give the same results
NATIVE = (bool, int, float, str, bytes)
CONTAINERS = (list, tuple, set, frozenset, Mapping)
_DATES = (dt.datetime, dt.date, dt.time)  # a datetime is a date, too
BY_TEXT = (*_DATES, decimal.Decimal, uuid.UUID, dt.timedelta)


def canonical(value: Any) -> str:
    """Return a text that equal values share and unequal ones do not.

    Raises TypeError for a value without a stable form.
    """
    if type(value) in PLAIN:
        return repr(value)
    value = reduced(value)
    if value is None or isinstance(value, NATIVE):
        return repr(value)
    if isinstance(value, _DATES):
        return f"{type(value).__name__}:{value.isoformat()}"
    if isinstance(value, BY_TEXT):
        return f"{type(value).__name__}:{value}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set({', '.join(sorted(map(canonical, value)))})"
    if isinstance(value, Mapping):
        pairs = sorted(f"{canonical(json_key(k))}: {canonical(v)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def reduced(value: Any) -> Any:
    """Return a value as it comes out of a message; the items of a container stay as they are.

    Source: kombu.utils.json: JSONEncoder.default asks `__json__` first, but never for a class that
    derives from str, int, float, list, tuple or dict; a date keeps its offset, not its zone's name.
    """
    if value is None or type(value) in NATIVE or isinstance(value, CONTAINERS):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    reduce = getattr(value, "__json__", None)
    if callable(reduce):
        return reduced(reduce())
    if isinstance(value, enum.Enum):
        return reduced(value.value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return _of_own_kind(value)


def _of_own_kind(value: Any) -> Any:
    """Return a value of a class that derives from a date's or number's as one of that class."""
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


def json_key(key: Any) -> Any:
    """Return a dict's key as JSON writes it."""
    key = reduced(key)
    return json.dumps(key) if key is None or isinstance(key, (bool, int, float)) else key
