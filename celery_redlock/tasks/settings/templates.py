"""Templates of lock keys: their checks, their fields, and how a call's arguments fill them."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from celery_redlock.lock.validation import MOST_BYTES, is_too_long
from celery_redlock.tasks.settings.digest import (
    BY_TEXT,
    CONTAINERS,
    NATIVE,
    PLAIN,
    canonical,
    digest,
    json_key,
    reduced,
)
from celery_redlock.tasks.settings.sources import OptionSource

TEMPLATE_NAMES = ("task", "queue", "digest")  # beside the arguments, whose names win

_QUEUE = re.compile(r"\{queue[}!:\[]")
_FIELD = re.compile(r"[^.\[\]]*(\[[^\[\]]*\])*")
# A width or a precision of a format: a few bytes of a message would become a text of gigabytes.
_WIDE = re.compile(r"\d{4}")
_WIDEST_DECIMAL = 1000  # digits; Decimal("1e999999999") is short until a format writes its zeros


def check_key(source: OptionSource, value: Any, app: object) -> Any:
    """Return the value of an option `key`, several templates as a tuple; raises SettingsError."""
    if value is None or value is False or callable(value):
        return value
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not entries:
        raise source.wrong(value, "must be a template, a list of templates, a callable or False")
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise source.wrong(value, "a list holds templates only, none of them empty")
    if any(map(is_too_long, entries)):
        raise source.wrong(value, f"a template has at most {MOST_BYTES} bytes")
    return entries[0] if len(entries) == 1 else tuple(entries)


def check_args(source: OptionSource, value: Any, app: object) -> tuple[str, ...] | None:
    """Return the value of an option `args` as a tuple of names; raises SettingsError."""
    if value is None:
        return None
    if isinstance(value, str):
        raise source.wrong(value, f"must be a list of argument names: write [{value!r}]")
    if not isinstance(value, (list, tuple)):
        raise source.wrong(value, 'must be a list of argument names, as ["sku"], or None')
    if not all(isinstance(name, str) and name for name in value):
        raise source.wrong(value, "a list holds argument names only, none of them empty")
    if any("{" in name for name in value):
        raise source.wrong(value, "takes names without braces; templates stand in the option key")
    return tuple(dict.fromkeys(value))


def templates_of(key: Any) -> tuple[str, ...]:
    """Return the templates of a key, one for each resource; () if it is something else."""
    if isinstance(key, str):
        return (key,)
    return key if isinstance(key, tuple) else ()


def names_queue(key: Any) -> bool:
    """Return whether a key, as a level sets it, may depend on the queue."""
    return not callable(key) and _QUEUE.search(repr(key)) is not None


def template_names(template: str, source: OptionSource) -> list[str]:
    """Return the first name of each {field} of a template.

    Raises SettingsError for a field that names an attribute, or no argument.
    """
    roots = []
    for name in template_fields(template, source):
        root = name.partition("[")[0]
        if not root.isidentifier() or not _FIELD.fullmatch(name):
            hint = "name arguments in braces, as {sku}, {rest[0]}, {options[sku]}; no attributes"
            raise source.wrong(template, hint)
        roots.append(root)
    return roots


def template_fields(template: str, source: OptionSource) -> Iterator[str]:
    """Give the text of each field of a template, also of fields within a format; SettingsError."""
    try:
        for _, name, form, _ in FORMATTER.parse(template):
            if name is not None:
                _check_format(form or "")
                yield name
                yield from template_fields(form or "", source)
    except ValueError as error:
        raise source.wrong(template, f"is not a template: {error}") from None


def fill(template: str, arguments: Mapping[str, Any], task: str, queue: str) -> str:
    """Return a template filled from the arguments of one call.

    Raises LookupError, TypeError or ValueError for a value that is missing, None or has no stable
    text, and SettingsError for a {digest} of such a value.
    """
    names = _simple_fields(template)
    if names is None:
        return fill_any(template, arguments, task, queue)
    known = arguments
    for name in names:
        if name not in arguments:
            known = _KnownNames(task, queue, arguments)
        elif type(arguments[name]) not in PLAIN:
            return fill_any(template, arguments, task, queue)
    if known is not arguments and not type(task) is type(queue) is str:
        return fill_any(template, arguments, task, queue)
    return template.format_map(known)


def fill_any(template: str, arguments: Mapping[str, Any], task: str, queue: str) -> str:
    """Return the same as `fill`, which is a short cut for names alone and exact texts and ints."""
    return FORMATTER.vformat(template, (), _KnownNames(task, queue, arguments))


@functools.lru_cache(maxsize=1024)  # a call may bring a template of its own
def _simple_fields(template: str) -> tuple[str, ...] | None:
    """Return the arguments that a template names.

    None if a field names an item, or has a conversion or a format. Raises ValueError.
    """
    fields = [part[1:] for part in FORMATTER.parse(template) if part[1] is not None]
    for name, form, conversion in fields:
        if form or conversion or not (name or "").isidentifier():
            return None
    return tuple(dict.fromkeys(name or "" for name, _, _ in fields))


class _KnownNames(dict[str, Any]):
    """The names that a template may use; the digest is made only for a template that names it."""

    def __init__(self, task: str, queue: str, arguments: Mapping[str, Any]) -> None:
        super().__init__({"task": task, "queue": queue, **arguments})
        self._task, self._arguments = task, arguments

    def __missing__(self, name: str) -> str:
        if name == "digest":
            return digest(self._arguments, self._task)
        raise KeyError(name)


class _Value:
    """An argument of which a template may name an item: one of a mapping by its key as in JSON."""

    def __init__(self, value: Any) -> None:
        self.value = reduced(value)

    def __getitem__(self, name: int | str) -> _Value:
        if not isinstance(self.value, Mapping):
            return _Value(self.value[name])
        found = [item for key, item in self.value.items() if json_key(key) == str(name)]
        if not found:
            raise KeyError(name)
        return _Value(found[-1])  # if JSON makes several keys one, it keeps the last


class _CanonicalText(str):
    """A text that is its own repr, so that a conversion does not change how a list is shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def formattable(value: Any) -> Any:
    """Return what a format may be applied to; TypeError for a value without a stable text.

    value: reduced. Sets and mappings show their items in order. An object of another class may
    define its own text, but Python's default text of an object is its address.
    """
    if isinstance(value, CONTAINERS):
        return _CanonicalText(canonical(value))
    kind: Any = type(value)
    if value is None or isinstance(value, (*NATIVE, *BY_TEXT)):
        return value
    if kind.__str__ is object.__str__ and kind.__format__ is object.__format__:
        raise TypeError(f"a {kind.__name__} is not a plain value and has no text of its own")
    return value


def _check_format(form: str) -> None:
    """Raise ValueError for a format with a width or a precision of four digits and more."""
    if _WIDE.search(form):
        raise ValueError("a width or a precision has at most three digits")


class _Formatter(string.Formatter):
    """str.format, without attributes, which no message keeps, and without None."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return _Value(super().get_value(key, args, kwargs))

    def find(self, field_name: str, known: Mapping[str, Any]) -> Any:
        """Return the value of a field; LookupError or TypeError if there is no such item."""
        return super().get_field(field_name, (), known)[0].value

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value = kwargs[field_name] if field_name in kwargs else self.find(field_name, kwargs)
        if type(value) in PLAIN:
            return value, field_name
        value = reduced(value)
        if value is None:
            raise ValueError(f"{field_name} is None")
        return formattable(value), field_name

    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_format(format_spec)  # again, for an argument may be a part of it
        if isinstance(value, Decimal) and abs(value.adjusted()) > _WIDEST_DECIMAL:
            raise ValueError(f"a number has at most {_WIDEST_DECIMAL} digits")
        return super().format_field(value, format_spec)


FORMATTER = _Formatter()
