"""The table of a lock's options: the only list of their names, checks, defaults and meanings.

The checks of every level, the built-in values, and the tables of docs/reference/options.md and
docs/reference/settings.md are made from it; `python -m docs --tables` writes the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_redlock.lock.validation import check_limit, check_seconds, check_ttl, check_wait
from celery_redlock.tasks.settings.app import DEFAULT_TTL, AppSettings, Setting
from celery_redlock.tasks.settings.backoff import Backoff, check_backoff
from celery_redlock.tasks.settings.sources import OptionSource
from celery_redlock.tasks.settings.templates import check_args, check_key

Check = Callable[[OptionSource, Any, AppSettings], Any]


@dataclass(frozen=True, kw_only=True)
class Option(Setting):
    """An option of a task's lock.

    check: takes the source, the value and the app's settings; returns the value to use, or raises
    SettingsError. may_be_callable: at task and app level, as no message carries a callable.
    """

    check: Check
    may_be_callable: bool = False


@dataclass(frozen=True)
class TaskLockOptions:
    """The options in force for one run; times in seconds. `OPTIONS` has the meaning of each."""

    key: Any
    args: tuple[str, ...] | None
    ttl: float
    renew: bool
    max_hold: float | None
    wait: float
    on_conflict: Any
    backoff: Backoff
    max_wait: float | None
    max_deferrals: int | None
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


def _ttl(source: OptionSource, value: Any, app: AppSettings) -> float:
    return check_ttl(source.level, source.name, value, app.node_timeout, app.max_ttl)


def _wait(source: OptionSource, value: Any, app: AppSettings) -> float:
    return check_wait(source.level, source.name, value)


def _limit(source: OptionSource, value: Any, app: AppSettings) -> int:
    return check_limit(source.level, source.name, value)


OPTIONS = (
    Option(
        name="key", check=check_key, default=None, shown_default="all arguments",
        may_be_callable=True,
        values="a template, a list of templates, `False`, or `None` for the default",
        doc=(
            'The resource to lock, as a template: `"stock:{sku}"`, `"{queue}:{task}:{digest}"`, '
            '`"{rest[0]}"`.'
        ),
        details=(
            "A text without braces is one lock for all arguments. A list of templates, "
            '`["account:{a}", "account:{b}"]`: several resources, all of them or none. At task '
            "and app level also a callable of `(task, args, kwargs)` that returns a text or a "
            "list of texts. `False`: no lock. Positional, keyword and defaulted calls give one "
            "key. Values stand in a template as text; the default key holds a digest only."
        ),
    ),
    Option(
        name="args", check=check_args, default=None,
        values="a list of argument names, or `None`",
        doc=(
            'Instead of a key, a list of argument names, `["sku"]`: one resource, for this task '
            "alone, made from a digest of these arguments."
        ),
        details=(
            "`[]`: one run of the task at a time, whatever the arguments. `key` and `args` at one "
            "level are an error; of two levels the nearer one decides."
        ),
    ),
    Option(
        name="ttl", check=_ttl, default=DEFAULT_TTL, unit="s",
        values="seconds, from four times `redlock_node_timeout` to `redlock_max_ttl`",
        doc="Lease on each node: how long a dead worker's lock stays.",
        details=(
            "Not a guess at the task's length: a running task renews its lock. At least four "
            "times `redlock_node_timeout`, at most `redlock_max_ttl`."
        ),
    ),
    Option(
        name="renew", check=_bool, default=True,
        values="`True` or `False`",
        doc="The watchdog renews the lock every ttl/3.",
        details="`False`: a fixed lease.",
    ),
    Option(
        name="max_hold", check=_seconds_or_none, default=None,
        values="seconds, above 0, or `None`",
        doc="Maximum time in seconds that a task may keep its lock.",
        details="After that the lock is no longer renewed and expires within one `ttl`.",
    ),
    Option(
        name="wait", check=_wait, default=0.0, unit="s",
        values="seconds, 0 or more",
        doc="Time to wait for the lock inside the worker slot before `on_conflict` applies.",
        details="A release wakes the tasks that wait.",
    ),
    Option(
        name="on_conflict", check=_one_of("defer", "skip", "fail", or_callable=True),
        default="defer", may_be_callable=True,
        values='`"defer"`, `"skip"` or `"fail"`',
        doc="What to do if another run holds the lock.",
        details=(
            '`"defer"`: put the message back; `"skip"`: do not run (REVOKED); `"fail"`: FAILURE '
            "with `LockTaken`. At task and app level also a callable that gets a "
            "[`Contention`](docs/reference/settings.md#a-callable-that-decides) and returns one of "
            "these."
        ),
    ),
    Option(
        name="backoff", check=check_backoff, default=Backoff(),
        shown_default="`Backoff(first=0.25, cap=30)`",
        values="a `Backoff`, or a mapping of its fields",
        doc=(
            "Delays between deferrals: `Backoff(first, cap, factor=2, "
            'jitter="full"|"decorrelated"|"none")`.'
        ),
        details=(
            "A delay is at most the rest of the lease that refused, a quarter of the broker's "
            "visibility timeout, and half of `redlock_done_ttl`."
        ),
    ),
    Option(
        name="max_wait", check=_seconds_or_none, default=None,
        values="seconds, above 0, or `None`",
        doc="Time in seconds since the first try after which `on_give_up` applies.",
    ),
    Option(
        name="max_deferrals", check=_count_or_none, default=None,
        values="a whole number, 0 or more, or `None`",
        doc="Number of deferrals after which `on_give_up` applies.",
    ),
    Option(
        name="on_give_up", check=_one_of("fail", "skip"), default="fail",
        values='`"fail"` or `"skip"`',
        doc="What to do after `max_wait` or `max_deferrals`.",
        details=(
            '`"fail"`: FAILURE with `LockTaken` or `QuorumUnreachable`; `"skip"`: do not run '
            "(REVOKED)."
        ),
    ),
    Option(
        name="on_lost", check=_one_of("abort", "warn"), default="abort",
        values='`"abort"` or `"warn"`',
        doc="What to do if the lock is lost while the body runs.",
        details=(
            '`"abort"`: `LockLost` is raised in the body if the '
            "[pool](docs/explanation/how-it-works.md#if-the-lock-is-lost) can, and the run does "
            'not end as SUCCESS; `"warn"`: log, signal and event only.'
        ),
    ),
    Option(
        name="on_unreachable", check=_one_of("defer", "fail", "run"), default="defer",
        values='`"defer"`, `"fail"` or `"run"`',
        doc="What to do if no quorum answers.",
        details='`"defer"`, `"fail"`, or `"run"`: without a lock, with an error in the log.',
    ),
    Option(
        name="limit", check=_limit, default=1,
        values="a whole number, 1 or more",
        doc="Permits: how many may hold the lock at once.",
        details=(
            "If clients set different limits, they are together never more than the largest one. "
            "Above 1 neither with several resources nor with `fencing`."
        ),
    ),
    Option(
        name="fencing", check=_bool, default=False,
        values="`True` or `False`",
        doc=(
            "Each holder gets a `fencing_token` (an int for a `BIGINT` column) greater than that "
            "of every holder before it."
        ),
    ),
    Option(
        name="unique_for", check=_seconds_or_none, default=None,
        values="seconds, above 0, or `None`",
        doc=(
            "Time in seconds in which a second *send* of the same task and key is not published, "
            "while the first is good."
        ),
    ),
    Option(
        name="unique_until", check=_one_of("started", "finished", "expired"), default="finished",
        values='`"started"`, `"finished"` or `"expired"`',
        doc=(
            'What ends the time of `unique_for`: the body has `"started"`, the run has '
            '`"finished"`, or the time has `"expired"`.'
        ),
    ),
    Option(
        name="on_duplicate", check=_one_of("existing", "fail", "replace"), default="existing",
        values='`"existing"`, `"fail"` or `"replace"`',
        doc="What a second send does.",
        details=(
            '`"existing"`: returns the first one\'s result; `"fail"`: raises `DuplicateTask`; '
            '`"replace"`: takes its place.'
        ),
    ),
)  # fmt: skip
OPTION: Mapping[str, Option] = {option.name: option for option in OPTIONS}
BUILT_IN: Mapping[str, Any] = {option.name: option.default for option in OPTIONS}


def built_in(app: AppSettings) -> dict[str, Any]:
    """Return the options that hold if no level sets them; a small max_ttl lowers the ttl."""
    return {**BUILT_IN, "ttl": app.built_in_ttl}
