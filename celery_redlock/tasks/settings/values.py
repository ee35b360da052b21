"""Checks of one option's value, each a pure function of the value and the app's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.validation import check_limit, check_seconds, check_ttl, check_wait
from celery_redlock.tasks.settings.app import AppSettings
from celery_redlock.tasks.settings.backoff import Backoff
from celery_redlock.tasks.settings.sources import OptionSource

Check = Callable[[OptionSource, Any, AppSettings], Any]


def _one_of(*words: str, callables: bool = False) -> Check:
    def check(place: OptionSource, value: Any, app: AppSettings) -> Any:
        if callables and callable(value):
            return value
        if not isinstance(value, str) or value not in words:
            more = " or a callable that returns one of them" if callables else ""
            raise place.wrong(value, f"must be one of {', '.join(map(repr, words))}{more}")
        return value

    return check


def _seconds_or_none(place: OptionSource, value: Any, app: AppSettings) -> float | None:
    return None if value is None else check_seconds(place.level, place.name, value)


def _count_or_none(place: OptionSource, value: Any, app: AppSettings) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise place.wrong(value, "must be a whole number, 0 or more, or None")
    return value


def _bool(place: OptionSource, value: Any, app: AppSettings) -> bool:
    if not isinstance(value, bool):
        raise place.wrong(value, "must be True or False")
    return value


def _backoff(place: OptionSource, value: Any, app: AppSettings) -> Backoff:
    if isinstance(value, Mapping):
        try:
            return Backoff.from_message(value)
        except SettingsError as error:
            raise place.wrong(dict(value), str(error)) from None
    if not isinstance(value, Backoff):
        raise place.wrong(value, "must be a Backoff, as Backoff(first=0.25, cap=30)")
    return value


def _ttl(place: OptionSource, value: Any, app: AppSettings) -> float:
    return check_ttl(place.level, place.name, value, app.node_timeout, app.max_ttl)


def _wait(place: OptionSource, value: Any, app: AppSettings) -> float:
    return check_wait(place.level, place.name, value)


def _limit(place: OptionSource, value: Any, app: AppSettings) -> int:
    return check_limit(place.level, place.name, value)


def _key(place: OptionSource, value: Any, app: AppSettings) -> Any:
    if value is None or value is False or callable(value):
        return value
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not entries:
        raise place.wrong(value, "must be a template, a list of templates, a callable or False")
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise place.wrong(value, "a list holds templates only, none of them empty")
    return entries[0] if len(entries) == 1 else tuple(entries)


def _args(place: OptionSource, value: Any, app: AppSettings) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        raise place.wrong(value, f"must be a list of argument names: write [{value!r}]")
    if not isinstance(value, (list, tuple)):
        raise place.wrong(value, 'must be a list of argument names, as ["sku"], or None')
    if not all(isinstance(name, str) and name for name in value):
        raise place.wrong(value, "a list holds argument names only, none of them empty")
    if any("{" in name for name in value):
        raise place.wrong(value, "takes names without braces; templates stand in the option key")
    return tuple(dict.fromkeys(value))
