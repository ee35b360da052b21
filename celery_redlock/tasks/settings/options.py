"""The options of a lock: each name, its check and its built-in value; and how levels are merged."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.engine.acquirer import ROUNDS_IN_TTL
from celery_redlock.lock.validation import check_permits
from celery_redlock.tasks.settings.app import AppSettings
from celery_redlock.tasks.settings.backoff import Backoff
from celery_redlock.tasks.settings.sources import OptionSource
from celery_redlock.tasks.settings.values import (
    Check,
    _args,
    _backoff,
    _bool,
    _count_or_none,
    _key,
    _limit,
    _one_of,
    _seconds_or_none,
    _ttl,
    _wait,
)


@dataclass(frozen=True)
class TaskLockOptions:
    """The options in force for one run; times in s. The README's table says what each means."""

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


def templates_of(key: Any) -> tuple[str, ...]:
    """Return the templates of a key, one for each resource; none where it is something else."""
    if isinstance(key, str):
        return (key,)
    return key if isinstance(key, tuple) else ()


OPTIONS: Mapping[str, Check] = {
    "key": _key,
    "args": _args,
    "ttl": _ttl,
    "renew": _bool,
    "max_hold": _seconds_or_none,
    "wait": _wait,
    "on_conflict": _one_of("defer", "skip", "fail", callables=True),
    "backoff": _backoff,
    "max_wait": _seconds_or_none,
    "max_deferrals": _count_or_none,
    "on_give_up": _one_of("fail", "skip"),
    "on_lost": _one_of("abort", "warn"),
    "on_unreachable": _one_of("defer", "fail", "run"),
    "limit": _limit,
    "fencing": _bool,
    "unique_for": _seconds_or_none,
    "unique_until": _one_of("started", "finished", "expired"),
    "on_duplicate": _one_of("existing", "fail", "replace"),
}
BUILT_IN: Mapping[str, Any] = {
    "key": None,
    "args": None,
    "renew": True,
    "max_hold": None,
    "wait": 0.0,
    "on_conflict": "defer",
    "backoff": Backoff(),
    "max_wait": None,
    "max_deferrals": None,
    "on_give_up": "fail",
    "on_lost": "abort",
    "on_unreachable": "defer",
    "limit": 1,
    "fencing": False,
    "unique_for": None,
    "unique_until": "finished",
    "on_duplicate": "existing",
}
APP_ONLY = (
    "nodes",
    "prefix",
    "node_timeout",
    "clock_drift",
    "max_ttl",
    "restart_guard",
    "done_ttl",
    "metrics",
    "queues",
    "tasks",
)
# what other locks call it: by its spelling alone, `timeout` would be taken for `limit`
ELSEWHERE = {
    **dict.fromkeys(("timeout", "expire", "expires", "expiry", "lease"), "ttl"),
    **dict.fromkeys(("blocking_timeout", "acquire_timeout"), "wait"),
}
KEY_OPTIONS = ("key", "args")  # two ways to say what is locked: a level that names one decides both


def check_options(
    options: Mapping[str, Any],
    app: AppSettings,
    source: Callable[[str], OptionSource],
    *,
    travels: bool,
) -> dict[str, Any]:
    """Return the options of one level, each checked; raises SettingsError.

    source: from an option's name to where it stands. travels: the level is one that a message
    carries or a queue shares, where a callable cannot stand.
    """
    result = {}
    for name, value in options.items():
        if name not in OPTIONS:
            raise source(str(name)).wrong(value, f"is not an option{_option_meant(name)}")
        if travels and callable(value):
            raise source(name).wrong(value, "callables stand at task and app level only")
        result[name] = OPTIONS[name](source(name), value, app)
    if result.get("key") is not None and result.get("args") is not None:
        hint = (
            f"{source('key').name} is set at the same level, and one of them says what is locked: "
            "leave one out, or set the one that is inherited to None"
        )
        raise source("args").wrong(options["args"], hint)
    return result


def decides_key(options: Mapping[str, Any]) -> bool:
    """Tell whether a level says what is locked, so that it decides both `key` and `args`."""
    return any(name in options for name in KEY_OPTIONS)


def merged(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of several levels as one; the nearest level is the last one."""
    result: dict[str, Any] = {}
    for options in levels:
        if decides_key(options):
            result.update(dict.fromkeys(KEY_OPTIONS))
        result.update(options)
    return result


def check_outside(options: Mapping[str, Any]) -> None:
    """Refuse options of ours among those of a call: Celery would ignore them; SettingsError."""
    for written, value in options.items():
        name = written.removeprefix("lock_")
        if name != written and name in OPTIONS:
            hint = f'stands in one with the others of a call: lock={{"{name}": ...}}'
            raise SettingsError("call", written, repr(value), hint)


def check_together(level: str, options: Mapping[str, Any]) -> None:
    """Refuse options that are right each by itself and not together; raises SettingsError.

    options: merged so far, each checked; what is missing is as built in.
    """
    whole = {**BUILT_IN, **options}
    limit, fencing = whole["limit"], whole["fencing"]
    check_permits(level, limit=limit, fencing=fencing, resources=templates_of(whole["key"]))


def check_built_in(app: AppSettings, options: Mapping[str, Any]) -> None:
    """Raise SettingsError where the built-in ttl holds, and leaves no time to renew it.

    options: those in force; a ttl that somebody set was checked where it stands.
    """
    least = ROUNDS_IN_TTL * app.node_timeout
    if options.get("key") is False or options["ttl"] >= least:
        return
    longer = " and redlock_max_ttl" if least > app.max_ttl else ""
    hint = (
        f"must be at least {ROUNDS_IN_TTL} x redlock_node_timeout = {least:g} s: set redlock_ttl"
        f"{longer}, or lower redlock_node_timeout={app.node_timeout:g}"
    )
    raise OptionSource("built-in", "ttl").wrong(options["ttl"], hint)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ", did you mean ...?" for a name close to a known one, else the list of known ones."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _option_meant(written: object, prefix: str = "") -> str:
    """Return the same for an option, which may be written as at another level, or elsewhere."""
    bare = str(written).removeprefix("redlock_").removeprefix("lock_")
    meant = ELSEWHERE.get(bare, bare)
    known = [f"{prefix}{option}" for option in OPTIONS]
    return did_you_mean(f"{prefix}{meant}" if meant in OPTIONS else written, known)
