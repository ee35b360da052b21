"""The types of a lock's options, for editors and type checkers. Nothing here acts at run time.

A test compares `TaskOptions`, `CallOptions` and the attributes of `LockedTask` with the table in
`settings/options.py`, which has the checks and the defaults. A type admits no more than its check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from celery_redlock.tasks.execution.deferral import Contention
from celery_redlock.tasks.settings.options import Backoff

Arguments = tuple[Any, ...]  # by position
Resources = str | list[str] | tuple[str, ...]
FixedKey = Resources | Literal[False] | None
Key = FixedKey | Callable[[Any, Arguments, dict[str, Any]], Resources | None]
Names = list[str] | tuple[str, ...] | None
FixedLimit = int | Mapping[str, int]
Limit = FixedLimit | Callable[[Any, Arguments, dict[str, Any]], FixedLimit]
OneRate = str | tuple[int, float]
AnyRate = OneRate | Mapping[str, OneRate] | None
Seconds = float | None
OnConflict = Literal["defer", "skip", "fail"]
Decision = OnConflict | Callable[[Contention], str]
Delays = Backoff | Mapping[str, float]
OnGiveUp = Literal["fail", "skip"]
OnLost = Literal["abort", "warn"]
OnUnreachable = Literal["defer", "fail", "run"]
UniqueUntil = Literal["started", "finished", "expired"]
OnDuplicate = Literal["existing", "fail", "newest"]


class TaskOptions(TypedDict, total=False):
    """The options of a task: `@app.task(base=LockedTask, **TaskOptions(lock_ttl=30))`.

    A dict, of which editors and type checkers know all names and types. The page of options has
    their meaning. At run time it checks nothing; the app does when it finalizes.
    """

    lock_key: Key
    lock_args: Names
    lock_ttl: float
    lock_renew: bool
    lock_max_hold: Seconds
    lock_wait: float
    lock_on_conflict: Decision
    lock_backoff: Delays
    lock_max_wait: Seconds
    lock_on_give_up: OnGiveUp
    lock_on_lost: OnLost
    lock_on_unreachable: OnUnreachable
    lock_limit: Limit
    lock_rate: AnyRate
    lock_fencing: bool
    lock_unique_for: Seconds
    lock_unique_until: UniqueUntil
    lock_on_duplicate: OnDuplicate
    lock_debounce: Seconds
    lock_debounce_max: Seconds


class CallOptions(TypedDict, total=False):
    """The options of one call: `task.apply_async(args, lock=CallOptions(ttl=60))`.

    As `TaskOptions`. A message carries them, so none of them is a callable.
    """

    key: FixedKey
    args: Names
    ttl: float
    renew: bool
    max_hold: Seconds
    wait: float
    on_conflict: OnConflict
    backoff: Delays
    max_wait: Seconds
    on_give_up: OnGiveUp
    on_lost: OnLost
    on_unreachable: OnUnreachable
    limit: FixedLimit
    rate: AnyRate
    fencing: bool
    unique_for: Seconds
    unique_until: UniqueUntil
    on_duplicate: OnDuplicate
    debounce: Seconds
    debounce_max: Seconds
