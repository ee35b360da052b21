"""The table of a lock's options: the only list of their names, checks and defaults.

The checks of every level and the built-in values are made from it. The meaning of each option
stands in docs/reference/options.md; a test compares its names and defaults with the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_redlock.lock.validation import check_limit, check_ttl, check_wait
from celery_redlock.tasks.settings.app import (
    DEFAULT_TTL,
    AppSettings,
    Setting,
    seconds_or_none,
)
from celery_redlock.tasks.settings.backoff import Backoff, check_backoff
from celery_redlock.tasks.settings.sources import OptionSource
from celery_redlock.tasks.settings.templates import check_args, check_key

LONGEST_WAIT = 3600.0  # seconds in a worker slot; after that most brokers deliver a message again

Check = Callable[[OptionSource, Any, AppSettings], Any]


@dataclass(frozen=True)
class TaskLockOptions:
    """The options in force for one run; times in seconds. The page of options has the meanings."""

    key: Any
    args: tuple[str, ...] | None
    ttl: float
    renew: bool
    max_hold: float | None
    wait: float
    on_conflict: Any
    backoff: Backoff
    max_wait: float | None
    on_give_up: str
    on_lost: str
    on_unreachable: str
    limit: int
    fencing: bool
    unique_for: float | None
    unique_until: str
    on_duplicate: str


def _one_of(*words: str, or_callable: bool = False) -> Check:
    def check(source: OptionSource, value: Any, app: AppSettings) -> Any:
        if or_callable and callable(value):
            return value
        if not isinstance(value, str) or value not in words:
            more = " or a callable that returns one of them" if or_callable else ""
            raise source.wrong(value, f"must be one of {', '.join(map(repr, words))}{more}")
        return value

    return check


def _bool(source: OptionSource, value: Any, app: AppSettings) -> bool:
    if not isinstance(value, bool):
        raise source.wrong(value, "must be True or False")
    return value


def _ttl(source: OptionSource, value: Any, app: AppSettings) -> float:
    return check_ttl(source.level, source.name, value, app.node_timeout, app.max_ttl)


def _wait(source: OptionSource, value: Any, app: AppSettings) -> float:
    return check_wait(source.level, source.name, value, most=LONGEST_WAIT)


def _limit(source: OptionSource, value: Any, app: AppSettings) -> int:
    return check_limit(source.level, source.name, value)


OPTION: Mapping[str, Setting] = {
    "key": Setting(check_key, None),
    "args": Setting(check_args, None),
    "ttl": Setting(_ttl, DEFAULT_TTL),
    "renew": Setting(_bool, True),
    "max_hold": Setting(seconds_or_none, None),
    "wait": Setting(_wait, 0.0),
    "on_conflict": Setting(_one_of("defer", "skip", "fail", or_callable=True), "defer"),
    "backoff": Setting(check_backoff, Backoff()),
    "max_wait": Setting(seconds_or_none, None),
    "on_give_up": Setting(_one_of("fail", "skip"), "fail"),
    "on_lost": Setting(_one_of("abort", "warn"), "abort"),
    "on_unreachable": Setting(_one_of("defer", "fail", "run"), "defer"),
    "limit": Setting(_limit, 1),
    "fencing": Setting(_bool, False),
    "unique_for": Setting(seconds_or_none, None),
    "unique_until": Setting(_one_of("started", "finished", "expired"), "finished"),
    "on_duplicate": Setting(_one_of("existing", "fail", "replace"), "existing"),
}
BUILT_IN: Mapping[str, Any] = {name: option.default for name, option in OPTION.items()}


def built_in(app: AppSettings) -> dict[str, Any]:
    """Return the options that hold if no level sets them; a small max_ttl lowers the ttl."""
    return {**BUILT_IN, "ttl": app.built_in_ttl}
