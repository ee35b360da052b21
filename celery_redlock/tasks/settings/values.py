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
    def check(source: OptionSource, value: Any, app: AppSettings) -> Any:
        if callables and callable(value):
            return value
        if not isinstance(value, str) or value not in words:
            more = " or a callable that returns one of them" if callables else ""
            raise source.wrong(value, f"must be one of {', '.join(map(repr, words))}{more}")
        return value

    return check


def _seconds_or_none(source: OptionSource, value: Any, app: AppSettings) -> float | None:
    return None if value is None else check_seconds(source.level, source.name, value)


def _count_or_none(source: OptionSource, value: Any, app: AppSettings) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise source.wrong(value, "must be a whole number, 0 or more, or None")
    return value


def _bool(source: OptionSource, value: Any, app: AppSettings) -> bool:
    if not isinstance(value, bool):
        raise source.wrong(value, "must be True or False")
    return value


def _backoff(source: OptionSource, value: Any, app: AppSettings) -> Backoff:
    if isinstance(value, Mapping):
        try:
            return Backoff.from_message(value)
        except SettingsError as error:
            raise source.wrong(dict(value), str(error)) from None
    if not isinstance(value, Backoff):
        raise source.wrong(value, "must be a Backoff, as Backoff(first=0.25, cap=30)")
    return value


def _ttl(source: OptionSource, value: Any, app: AppSettings) -> float:
    return check_ttl(source.level, source.name, value, app.node_timeout, app.max_ttl)


def _wait(source: OptionSource, value: Any, app: AppSettings) -> float:
    return check_wait(source.level, source.name, value)


def _limit(source: OptionSource, value: Any, app: AppSettings) -> int:
    return check_limit(source.level, source.name, value)


def _key(source: OptionSource, value: Any, app: AppSettings) -> Any:
    if value is None or value is False or callable(value):
        return value
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not entries:
        raise source.wrong(value, "must be a template, a list of templates, a callable or False")
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise source.wrong(value, "a list holds templates only, none of them empty")
    return entries[0] if len(entries) == 1 else tuple(entries)


def _args(source: OptionSource, value: Any, app: AppSettings) -> tuple[str, ...] | None:
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
