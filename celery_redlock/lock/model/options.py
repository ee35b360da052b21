"""What a caller asks of a lock, and what all locks of one `Redlock` share. Times in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from celery_redlock.errors import LockLost
from celery_redlock.lock.model.rate import Rate


def grace_period(max_ttl: float) -> float:
    """Return the seconds for which a node that lost its data must not vote.

    Longer than any lease that the node may have forgotten. The extra second allows for differences
    of the clients' wall clocks, so that proposed fencing tokens stay in order, too.
    Source: RFC 7530, section 9.6.2: after a restart an NFS server grants no new locks for a while.
    """
    return max_ttl + 1.0


@dataclass(frozen=True)
class Guard:
    """The restart guard: a node that may have forgotten locks abstains for a grace period.

    mode: "strict": a node that does not know this prefix abstains, unless an operator
    trusted it. "off": every node votes. prefix: of the guard's keys. grace_period: seconds.
    """

    mode: str
    prefix: str
    grace_period: float

    def arguments(self, run_id: str) -> tuple[str, str]:
        """Return the guard's arguments of the scripts: the server's run id, the period in ms."""
        if self.mode == "off":
            return "", ""
        return run_id, str(math.ceil(self.grace_period * 1000))


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


class LockOptions(NamedTuple):
    """The options of one lock. A tuple: a frozen dataclass takes ten times as long to make.

    resources: in the order of `keys.in_order`. label: the holder, for people; "" for the process
    that acquires. sender: of signals, None for the `Redlock` itself. reentrant: whether an owner
    that holds a resource already acquires it again. limits: those above 1, by resource; None: one
    holder of each. rates: by resource. body_follows: the body begins some time after the acquire,
    and the caller says when (`Ownership.begin_body`). marker: of the run that takes the lock. If
    each resource has a limit above 1, such a run also locks its own name, because another delivery
    would just take another permit. is_hold: it is an operator's hold, so its value is marked
    (`keys.MARK`), and it waits before all others. on_lost: called once it is lost.
    """

    resources: tuple[str, ...]
    ttl: float
    wait: float
    renew: bool
    max_hold: float | None
    label: str
    sender: object = None
    reentrant: bool = True
    limits: Mapping[str, int] | None = None
    rates: Mapping[str, Rate] | None = None
    body_follows: bool = False
    fencing: bool = False
    marker: CompletionMarker | None = None
    on_lost: Callable[[LockLost], object] | None = None
    is_hold: bool = False

    @property
    def resource(self) -> str:
        """The name of the resource, as errors show it."""
        return ", ".join(self.resources)


@dataclass(frozen=True)
class ClientOptions:
    """What all locks of a `Redlock` share."""

    prefix: str
    node_timeout: float
    clock_drift: float
    max_ttl: float
    guard: Guard
