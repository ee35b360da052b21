"""What a caller asks of a lock, and what all locks of one `Redlock` share. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from celery_redlock.lock.model.grace_period import Guard


@dataclass(frozen=True)
class CompletionMarker:
    """A record on the nodes that a run has ended, for a message that may be delivered again.

    run: the name of the run. kept_for: seconds until the marker expires. asks_since: monotonic
    seconds. A run reads its marker before it begins, and does not begin if the marker is newer.
    None: the run does not read the marker. heeds_later: the run does not begin if a later send has
    superseded it. is_redelivered: the first delivery may still run, perhaps with another limit.
    """

    run: str
    kept_for: float
    asks_since: float | None = None
    heeds_later: bool = False
    is_redelivered: bool = False


@dataclass(frozen=True)
class LockOptions:
    """The options of one lock.

    resources: in the order of `keys.in_order`. label: the holder, for people; "" for the process
    that acquires. sender: of signals, None for the `Redlock` itself. marker: of the run that takes
    the lock. With a limit above 1 such a run also locks its own name, because another delivery
    would just take another permit.
    """

    resources: tuple[str, ...]
    ttl: float
    wait: float
    renew: bool
    max_hold: float | None
    label: str
    sender: object = None
    limit: int = 1
    fencing: bool = False
    marker: CompletionMarker | None = None


@dataclass(frozen=True)
class ClientOptions:
    """What all locks of a `Redlock` share."""

    prefix: str
    node_timeout: float
    clock_drift: float
    guard: Guard
