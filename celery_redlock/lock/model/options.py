"""What a caller asks of a lock, and what all locks of one `Redlock` share. Times in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CompletionMarker:
    """A note on the nodes that a run has ended, for a message that may be delivered again.

    run: its name. kept_for: how long the note stays. asks_since: seconds since 1970. The run itself
    asks for the note before it begins, and does not begin if the note is younger than that. None:
    it does not ask. heeds_later: it does not begin either if a later send has replaced it.
    is_redelivered: the first delivery may still run, and may go by another limit.
    """

    run: str
    kept_for: float
    asks_since: float | None = None
    heeds_later: bool = False
    is_redelivered: bool = False


@dataclass(frozen=True)
class LockOptions:
    """What one lock is to be.

    resources: in the order of `keys.in_order`. label: the holder, for people. sender: of signals,
    None for the `Redlock` itself. marker: of the run that takes the lock. With a limit above 1 such
    a run also takes a lock of its own: another delivery of it would just take another permit.
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
class Guard:
    """The restart guard: it keeps a node from voting that may have forgotten what it granted.

    word: "strict": a node that does not know this prefix abstains, unless an operator trusted it;
    "on": unless it has been up for longer than the grace period; "off". prefix: of its notes.
    grace_period: seconds.
    """

    word: str
    prefix: str
    grace_period: float

    def arguments(self, run_id: str, uptime: float) -> tuple[str, ...]:
        """Return what a server is told of itself: its run id, and for how long it abstains if new.

        uptime: whole seconds, as a server says it.
        """
        if self.word == "off":
            return ("", "", "")
        changed = math.ceil(self.grace_period * 1000)
        known_for = 0 if self.word == "strict" else max(0, math.floor((uptime - 1) * 1000))
        return run_id, str(max(0, changed - known_for)), str(changed)


@dataclass(frozen=True)
class ClientOptions:
    """What all locks of a `Redlock` share."""

    prefix: str
    node_timeout: float
    clock_drift: float
    guard: Guard
