"""The text of a lock's key: templates filled from a call's arguments, and the arguments' digest.

Not here: which resources a call locks (`task_config.py`, which calls this).
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import functools
import hashlib
import json
import re
import string
import uuid
from collections.abc import Mapping
from inspect import Signature
from typing import Any, NamedTuple, TypeAlias

from celery_redlock.errors import SettingsError
from celery_redlock.lock.transport.command import encoded
from celery_redlock.lock.validation import MAX_NAME_BYTES, is_too_long
from celery_redlock.tasks.settings.app import OptionSource

_PLAIN_TYPES = (bool, int, float, str, bytes)
_CONTAINER_TYPES = (list, tuple, set, frozenset, Mapping)
_DATE_TYPES: tuple[Any, ...] = (dt.datetime, dt.date, dt.time)  # a datetime is a date, too
_TEXT_TYPES = (*_DATE_TYPES, decimal.Decimal, uuid.UUID, dt.timedelta)
_FORMATTABLE_TYPES = (*_PLAIN_TYPES, *_TEXT_TYPES)
TEMPLATE_NAMES = ("task", "queue", "digest")  # beside the arguments, whose names win

_FIELD = re.compile(r"([^.\[\]]+)((?:\[[^\[\]]+\])*)")
_ITEM = re.compile(r"\[([^\[\]]+)\]")
# A width or a precision of a format: a few bytes of a message would become a text of gigabytes.
_LONG_NUMBER = re.compile(r"\d{4}")
_NO_ATTRIBUTES_HINT = (  # for an error, also of an entry in `redlock_tasks`
    "a template reads no attributes of an object. Use a callable key, as "
    'lambda task, args, kwargs: f"event:{args[0].id}"'
)
_CALLABLE_KEY_HINT = (  # for an error of what a template cannot write
    'use a callable key at the task, as lambda task, args, kwargs: f"sku:{args[0]!r}"'
)
_MAX_DIGITS = 1000  # digits; Decimal("1e999999999") is short until a format writes its zeros


def check_key(level: str, name: str, value: Any) -> Any:
    """Return the value of an option `key`, several templates as a tuple; raises SettingsError."""
    wrong = OptionSource(level, name).wrong
    if value is None or value is False or callable(value):
        return value
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not entries:
        raise wrong(value, "must be a template, a list of templates, a callable or False")
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise wrong(value, "a template must be a text, not empty")
    if any(map(is_too_long, entries)):
        raise wrong(value, f"a template has at most {MAX_NAME_BYTES} bytes")
    for entry in entries:
        try:
            compiled(entry)
        except ValueError as error:
            raise wrong(entry, f"is not a template: {error}") from None
    return entries[0] if len(entries) == 1 else tuple(entries)


def check_args(level: str, name: str, value: Any) -> tuple[str, ...] | None:
    """Return the value of an option `args` as a tuple of names; raises SettingsError."""
    wrong = OptionSource(level, name).wrong
    if value is None:
        return None
    if isinstance(value, str):
        raise wrong(value, f"must be a list of argument names: write [{value!r}]")
    if not isinstance(value, (list, tuple)):
        raise wrong(value, 'must be a list of argument names, as ["sku"], or None')
    if not all(isinstance(entry, str) and entry for entry in value):
        raise wrong(value, "an argument name must be a text, not empty")
    if any("{" in entry for entry in value):
        raise wrong(value, "takes names without braces; set templates by the option key")
    return tuple(dict.fromkeys(value))


def templates_of(key: Any) -> tuple[str, ...]:
    """Return the templates of a key, one for each resource; () if it is something else."""
    if isinstance(key, str):
        return (key,)
    return key if isinstance(key, tuple) else ()


class Field(NamedTuple):
    """A field of a template, as {options[sku]:>9}.

    written: "options[sku]". name: the argument. items: the way to an item of it. form: ">9".
    """

    written: str
    name: str
    items: tuple[int | str, ...]
    form: str

    def find(self, values: Mapping[str, Any]) -> Any:
        """Return its value; LookupError or TypeError if there is no such argument or item."""
        value = reduced(values[self.name])
        for item in self.items:
            value = reduced(_item(value, item))
        return value

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return its text; LookupError, TypeError or ValueError if it has no stable one."""
        value = self.find(values)
        if value is None:
            raise ValueError(f"{self.written} is None")
        value = formattable(value)
        if isinstance(value, decimal.Decimal) and abs(value.adjusted()) > _MAX_DIGITS:
            raise ValueError(f"a number has at most {_MAX_DIGITS} digits")
        return format(value, self.form)


Template: TypeAlias = tuple[str | Field, ...]  # its texts and fields, in their order


@functools.lru_cache(maxsize=1024)  # a call may bring a template of its own
def compiled(template: str) -> Template:
    """Return a template's texts and fields; raises ValueError."""
    parts: list[str | Field] = []
    for text, written, form, conversion in string.Formatter().parse(template):
        if text:
            parts.append(text)
        if written is None:
            continue
        match = _FIELD.fullmatch(written)
        if match is None or not match[1].isidentifier():
            hint = "name arguments in braces, as {sku}, {rest[0]}, {options[sku]}; no attributes"
            raise ValueError(hint)
        form = form or ""
        if conversion is not None:
            raise ValueError(f"it has the conversion !{conversion}: {_CALLABLE_KEY_HINT}")
        if "{" in form:
            raise ValueError(f"it has a field in a format, {form}: {_CALLABLE_KEY_HINT}")
        if _LONG_NUMBER.search(form):
            raise ValueError("a width or a precision has at most three digits")
        items = tuple(int(item) if item.isdecimal() else item for item in _ITEM.findall(match[2]))
        parts.append(Field(written, match[1], items, form))
    return tuple(parts)


def fields_of_key(key: Any) -> list[Field]:
    """Return the fields of all templates of a key; none of a callable."""
    parts = map(compiled, templates_of(key))
    return [part for template in parts for part in template if isinstance(part, Field)]


def reads_arguments(key: Any, args: tuple[str, ...] | None, signature: Signature) -> bool:
    """Return whether a key is made of arguments by their names. key, args: the options."""
    if key is None:
        return args is None or bool(args)
    names = {"digest", *signature.parameters}
    return any(field.name in names for field in fields_of_key(key))


def fill(template: str, arguments: Mapping[str, Any], task: str, queue: str) -> str:
    """Return a template filled from the arguments of one call; raises as `Field.fill`."""
    values = {"task": task, "queue": queue, **arguments}
    if "digest" in template and any(field.name == "digest" for field in fields_of_key(template)):
        values.setdefault("digest", digest(arguments, task))
    text = ""
    for part in compiled(template):
        if isinstance(part, str):
            text += part
            continue
        value = values.get(part.written)
        # most fields: a name, whose value is its own text. This is what `Field.fill` does with it
        is_plain = type(value) is str or type(value) is int
        text += str(value) if is_plain and not part.form else part.fill(values)
    return text


def _item(value: Any, name: int | str) -> Any:
    """Return an item of a value: of a mapping by its key as in JSON, which keeps the last."""
    if not isinstance(value, Mapping):
        return value[name]
    items = [item for key, item in value.items() if json_key(key) == str(name)]
    if not items:
        raise KeyError(name)
    return items[-1]


def formattable(value: Any) -> Any:
    """Return what a format may be applied to; TypeError for a value without a stable text.

    value: reduced. Sets and mappings show their items in order. An object of another class may
    define its own text, but Python's default text of an object is its address.
    """
    if value is None or isinstance(value, _FORMATTABLE_TYPES):
        return value
    if isinstance(value, _CONTAINER_TYPES):
        return canonical(value)
    value_type: Any = type(value)
    if value_type.__str__ is object.__str__ and value_type.__format__ is object.__format__:
        raise TypeError(f"{_not_plain(value)} and has no text of its own; {_NO_ATTRIBUTES_HINT}")
    return value


def digest(arguments: Mapping[str, Any], task: str) -> str:
    """Return 32 hex digits that are the same in every process if the arguments are equal.

    They are the same before and after a message: values that JSON makes equal are equal here
    (a tuple and a list, an enum and its value, a dict's keys), and values that JSON keeps apart
    stay apart ("1" and 1, 1 and True). Raises SettingsError for a value without a stable form.
    """
    text = ""
    for name, value in arguments.items():
        try:
            text += f"\x00{name}={canonical(value)}"
        except TypeError as error:
            raise unstable(task, f"argument {name!r}", value, error) from None
    return hashlib.sha256(encoded(text[1:])).hexdigest()[:32]


def unstable(task: str, name: str, value: Any, error: TypeError) -> SettingsError:
    """Return the error for a value that would make another key each time. name: of the value."""
    hint = (
        f"has no stable form ({error}): name the arguments that make the key, as "
        'lock_args=["id"] or lock_key="thing:{id}", or set the key to False to take no lock'
    )
    return SettingsError(f"task {task!r}", name, f"a {type(value).__name__}", hint)


def canonical(value: Any) -> str:
    """Return a text that only equal values share; TypeError for one without a stable form."""
    value = reduced(value)
    if value is None or isinstance(value, _PLAIN_TYPES):
        return repr(value)
    if isinstance(value, _DATE_TYPES):
        return f"{type(value).__name__}:{value.isoformat()}"
    if isinstance(value, _TEXT_TYPES):
        return f"{type(value).__name__}:{value}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set({', '.join(sorted(map(canonical, value)))})"
    if isinstance(value, Mapping):
        pairs = sorted(
            f"{canonical(json_key(key))}: {canonical(item)}" for key, item in value.items()
        )
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"{_not_plain(value)}; {_NO_ATTRIBUTES_HINT}")


def _not_plain(value: Any) -> str:
    return f"a {type(value).__name__} is not a plain value"


def reduced(value: Any) -> Any:
    """Return a value as it comes out of a message; the items of a container stay as they are.

    Source: kombu.utils.json: JSONEncoder.default asks `__json__` first, but never for a class that
    derives from str, int, float, list, tuple or dict; a date keeps its offset, not its zone's name.
    """
    if value is None or type(value) in _PLAIN_TYPES or isinstance(value, _CONTAINER_TYPES):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    to_json = getattr(value, "__json__", None)
    if callable(to_json):
        return reduced(to_json())
    if isinstance(value, enum.Enum):
        return reduced(value.value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return _as_base_type(value)


def _as_base_type(value: Any) -> Any:
    """Return a value of a class that derives from a date's or number's as one of that class."""
    for base_type in _DATE_TYPES:
        if isinstance(value, base_type):
            return base_type.fromisoformat(base_type.isoformat(value))
    if isinstance(value, uuid.UUID):
        return uuid.UUID(int=value.int)
    if isinstance(value, decimal.Decimal):
        return decimal.Decimal(value)
    if isinstance(value, dt.timedelta):
        return dt.timedelta(value.days, value.seconds, value.microseconds)
    return value


def json_key(key: Any) -> Any:
    key = reduced(key)
    return json.dumps(key) if key is None or isinstance(key, (bool, int, float)) else key
