"""Templates of lock keys: how a key is filled from a task's arguments."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from celery_redlock.tasks.settings.digest import (
    _BY_TEXT,
    _CONTAINERS,
    _MOST,
    _NATIVE,
    _json_key,
    _reduced,
    canonical,
    digest,
)
from celery_redlock.tasks.settings.sources import OptionSource

TEMPLATE_NAMES = ("task", "queue", "digest")  # beside the arguments, whose names win


_QUEUE = re.compile(r"\{queue[}!:\[]")


def _names_queue(key: Any) -> bool:
    return not callable(key) and _QUEUE.search(repr(key)) is not None


class _Arguments(dict[str, Any]):
    """The names that a template knows; the digest is made only where it is asked for."""

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
        self.value = _reduced(value)

    def __getitem__(self, name: int | str) -> _Value:
        if not isinstance(self.value, Mapping):
            return _Value(self.value[name])
        found = [item for key, item in self.value.items() if _json_key(key) == str(name)]
        if not found:
            raise KeyError(name)
        return _Value(found[-1])  # of keys that JSON makes one, the last is what it keeps


def _for_template(value: Any) -> Any:
    """Return what a format may be applied to; TypeError for a value without a stable text.

    value: reduced. Sets and mappings show what they hold in order. What an object of another class
    says of itself is its author's matter, but the text that Python gives it names its address.
    """
    if isinstance(value, _CONTAINERS):
        return _Shown(canonical(value))
    kind: Any = type(value)
    if value is None or isinstance(value, (*_NATIVE, *_BY_TEXT)):
        return value
    if kind.__str__ is object.__str__ and kind.__format__ is object.__format__:
        raise TypeError(f"a {kind.__name__} is not a plain value and has no text of its own")
    return value


class _Shown(str):
    """A text that is its own repr: what is shown of a list does not depend on the conversion."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Formatter(string.Formatter):
    """str.format, without attributes (the wire keeps none) and without None."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return _Value(super().get_value(key, args, kwargs))

    def find(self, field_name: str, known: Mapping[str, Any]) -> _Value:
        """Return what a field names; LookupError or TypeError where there is no such item."""
        found: _Value = super().get_field(field_name, (), known)[0]
        return found

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value = kwargs[field_name] if field_name in kwargs else self.find(field_name, kwargs).value
        if type(value) in _MOST:
            return value, field_name
        value = _reduced(value)
        if value is None:
            raise ValueError(f"{field_name} is None")
        return _for_template(value), field_name


_FORMATTER = _Formatter()
_FIELD = re.compile(r"[^.\[\]]*(\[[^\[\]]*\])*")


def template_names(template: str, source: OptionSource) -> list[str]:
    """Return the first name of each {field} of a template; raises SettingsError."""
    roots = []
    for name in _fields(template, source):
        root = name.partition("[")[0]
        if not root.isidentifier() or not _FIELD.fullmatch(name):
            hint = "name arguments in braces, as {sku}, {rest[0]}, {options[sku]}; no attributes"
            raise source.wrong(template, hint)
        roots.append(root)
    return roots


def _fields(template: str, source: OptionSource) -> Iterator[str]:
    """Give what stands in the braces of a template, also of those in a format; SettingsError."""
    try:
        for _, name, form, _ in _FORMATTER.parse(template):
            if name is not None:
                yield name
                yield from _fields(form or "", source)
    except ValueError as error:
        raise source.wrong(template, f"is not a template: {error}") from None
