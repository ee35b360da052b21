"""The table of a lock's options: the only list of their names, checks, defaults and meanings.

The checks of every level, the built-in values, and the sections of docs/reference/options.md are
made from it; `python -m docs --tables` writes them, with the examples of docs/option_examples.py.
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

LONGEST_WAIT = 3600.0  # seconds in a worker slot; after that most brokers deliver a message again

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


OPTIONS = (
    Option(
        name="key", check=check_key, default=None, shown_default="all arguments",
        may_be_callable=True,
        values=(
            "a template, a list of templates, a callable, `False` for no lock, or `None` for the "
            "default"
        ),
        doc="The resource to lock.",
        details=(
            'A template names arguments in braces: `"stock:{sku}"`. A text without braces is one '
            "lock for all arguments. A list of templates locks several resources, all of them or "
            "none. `None` makes the key from all arguments, for this task alone. [Lock "
            "keys](docs/reference/keys.md) has the rules."
        ),
    ),
    Option(
        name="args", check=check_args, default=None,
        values="a list of argument names, `[]`, or `None`",
        doc="The arguments that make the key, for this task alone.",
        details=(
            "The resource is the task's name with a digest of these arguments. `[]`: one run of "
            "the task at a time, whatever its arguments. Set `key` or `args`, not both: at one "
            "level both are a `SettingsError`, and the nearest level that sets one decides both."
        ),
    ),
    Option(
        name="ttl", check=_ttl, default=DEFAULT_TTL, unit="s",
        values="seconds, from four times `redlock_node_timeout` to `redlock_max_ttl`",
        doc="The lease: how long the lock of a dead worker stays.",
        details=(
            "It is not the runtime of the task: the watchdog renews the lock while the body runs. "
            "A `redlock_max_ttl` below 30 s lowers the default."
        ),
    ),
    Option(
        name="renew", check=_bool, default=True,
        values="`True` or `False`",
        doc="Whether the watchdog renews the lock every `ttl`/3.",
        details=(
            "`False`: the lease is fixed. A body that runs longer than `ttl` loses its lock, and "
            "`on_lost` applies."
        ),
    ),
    Option(
        name="max_hold", check=_seconds_or_none, default=None,
        values="seconds, above 0, or `None` for no maximum",
        doc="The longest time that a task may keep its lock.",
        details=(
            "After that, the lock is no longer renewed and expires within one `ttl`. If the body "
            "still runs, the lock is lost and `on_lost` applies."
        ),
    ),
    Option(
        name="wait", check=_wait, default=0.0, unit="s",
        values="seconds, from 0 to 3,600",
        doc="How long a run waits for its lock in its worker slot, before `on_conflict` applies.",
        details="A release wakes the run. The wait blocks the slot, so keep it short.",
    ),
    Option(
        name="on_conflict", check=_one_of("defer", "skip", "fail", or_callable=True),
        default="defer", may_be_callable=True,
        values='`"defer"`, `"skip"`, `"fail"`, or a callable that returns one of them',
        doc="What a run does if another run holds the lock.",
        details=(
            '`"defer"`: the message returns to its queue and runs later (DEFERRED). `"skip"`: the '
            'body does not run (REVOKED). `"fail"`: the run ends as FAILURE with `LockTaken`. A '
            "callable gets a "
            "[`Contention`](docs/reference/settings.md#a-callable-that-decides)."
        ),
    ),
    Option(
        name="backoff", check=check_backoff, default=Backoff(),
        shown_default="`Backoff(first=0.25, cap=30)`",
        values=(
            "`Backoff(first, cap, factor=2, jitter=\"full\")`, or a mapping of these fields; "
            '`jitter` is `"full"`, `"decorrelated"` or `"none"`'
        ),
        doc="The delays between the deferrals of a message.",
        details=(
            "`first` and `cap` are the first and the longest delay in seconds. A delay ends with "
            "the lease of the holder at the latest. It is at most a quarter of the broker's "
            "visibility timeout, and half of `redlock_done_ttl`. A release ends it early: see "
            "[waiting](docs/explanation/waiting.md)."
        ),
    ),
    Option(
        name="max_wait", check=_seconds_or_none, default=None,
        values="seconds, above 0, or `None` for no limit",
        doc="The time since the first try after which `on_give_up` applies.",
    ),
    Option(
        name="on_give_up", check=_one_of("fail", "skip"), default="fail",
        values='`"fail"` or `"skip"`',
        doc="What a run does after `max_wait`.",
        details=(
            '`"fail"`: FAILURE with `LockTaken` or `QuorumUnreachable`. `"skip"`: the body does '
            "not run (REVOKED)."
        ),
    ),
    Option(
        name="on_lost", check=_one_of("abort", "warn"), default="abort",
        values='`"abort"` or `"warn"`',
        doc="What happens if the lock is lost while the body runs.",
        details=(
            '`"abort"`: `LockLost` is raised in the body if the '
            "[pool](docs/explanation/how-it-works.md#if-the-lock-is-lost) can do that, and the "
            'run does not end as SUCCESS. `"warn"`: a log line, a signal and an event report the '
            "loss."
        ),
    ),
    Option(
        name="on_unreachable", check=_one_of("defer", "fail", "run"), default="defer",
        values='`"defer"`, `"fail"` or `"run"`',
        doc="What a run does if no quorum of nodes votes.",
        details=(
            '`"defer"`: the message returns to its queue. `"fail"`: FAILURE with '
            '`QuorumUnreachable`. `"run"`: the body runs without a lock, with an ERROR in the log.'
        ),
    ),
    Option(
        name="limit", check=_limit, default=1,
        values="a whole number, from 1 to 1,000",
        doc="How many runs may hold the lock at once: a semaphore.",
        details=(
            "If clients set different limits for a resource, the largest one is never exceeded. A "
            "limit above 1 excludes several resources and `fencing`."
        ),
    ),
    Option(
        name="fencing", check=_bool, default=False,
        values="`True` or `False`",
        doc="Whether each holder gets a fencing token.",
        details=(
            "`lock.fencing_token` is an `int` for a `BIGINT` column. It is greater than the token "
            "of every earlier holder."
        ),
    ),
    Option(
        name="unique_for", check=_seconds_or_none, default=None,
        values="seconds, above 0, or `None` to publish every send",
        doc="The time in which a second *send* of the same task and key is a duplicate.",
        details=(
            "`unique_until` can end the time earlier. [Deduplicate "
            "calls](docs/how-to/deduplicate-calls.md) has the details."
        ),
    ),
    Option(
        name="unique_until", check=_one_of("started", "finished", "expired"), default="finished",
        values='`"started"`, `"finished"` or `"expired"`',
        doc="What ends the time of `unique_for`.",
        details=(
            '`"started"`: the start of the body. `"finished"`: the end of the run. `"expired"`: '
            "the time alone."
        ),
    ),
    Option(
        name="on_duplicate", check=_one_of("existing", "fail", "replace"), default="existing",
        values='`"existing"`, `"fail"` or `"replace"`',
        doc="What a duplicate send does.",
        details=(
            '`"existing"`: returns the `AsyncResult` of the first send. `"fail"`: raises '
            '`DuplicateTask`. `"replace"`: is published, and the first run is dropped if it has '
            "not begun."
        ),
    ),
)  # fmt: skip
OPTION: Mapping[str, Option] = {option.name: option for option in OPTIONS}
BUILT_IN: Mapping[str, Any] = {option.name: option.default for option in OPTIONS}


def built_in(app: AppSettings) -> dict[str, Any]:
    """Return the options that hold if no level sets them; a small max_ttl lowers the ttl."""
    return {**BUILT_IN, "ttl": app.built_in_ttl}
