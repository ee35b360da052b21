"""What people are shown of nodes, locks, rates, waiters and claims: records, without I/O.

The methods of `Redlock` return them, and the commands show them. A field that no repr shows is not
in the JSON of the commands either: a token is a secret. Not here: what makes them
(`inspection.py`, `claims.py`, `node_status.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.label import Holder
from celery_redlock.lock.model.keys import in_order, resources_of

__all__ = [
    "BreakReport",
    "BrokenLock",
    "ClaimList",
    "ClaimReport",
    "EndedClaim",
    "FreedRate",
    "LockList",
    "LockReport",
    "NodeList",
    "NodeStatus",
    "RateReport",
    "WaitingList",
    "WaitingProcess",
]


@dataclass(frozen=True)
class NodeStatus:
    """The status of one node. Its fields are those of the documented JSON.

    node: the address. error: the cause if the node does not answer, or grants no lock to anybody;
    all other fields are unknown then. role: "master" or "slave". uptime, latency: seconds. clock:
    seconds by which the node's clock is ahead of this machine's. policy: the maxmemory-policy.
    silent_for: remaining seconds of the grace period, in which the node abstains. knows_us: whether
    the server has voted for this prefix, or may do so without `trust`. evicts: whether it deletes
    keys once its memory is full. in_cluster: whether it is a member of a cluster.
    """

    node: str = ""
    error: str = ""
    server: str = ""
    role: str = ""
    uptime: float = 0.0
    latency: float = 0.0
    clock: float = 0.0
    policy: str = ""
    silent_for: float = 0.0
    knows_us: bool = False
    votes: bool = False
    evicts: bool = False
    in_cluster: bool = False

    @property
    def fails(self) -> bool:
        """Whether it gives no vote before somebody mends that: no grace period ends it."""
        return bool(self.error) or self.role != "master"


@dataclass(frozen=True)
class NodeList:
    """The status of all nodes, in the order of the setting.

    guard: the restart guard's mode. needed: size of a quorum. voting: how many nodes vote.
    grace_period: seconds for which a new node does not vote.
    """

    guard: str
    needed: int
    voting: int
    nodes: tuple[NodeStatus, ...]
    grace_period: float = field(repr=False, compare=False)

    @property
    def has_quorum(self) -> bool:
        """Whether enough nodes vote for locks to be granted."""
        return self.voting >= self.needed

    @property
    def failing(self) -> dict[str, str]:
        """By node, the cause of its failure."""
        return {node.node: node.error for node in self.nodes if node.error}

    @property
    def silent(self) -> dict[str, float]:
        """By node that abstains, the remaining seconds."""
        return {node.node: node.silent_for for node in self.nodes if node.silent_for > 0}


class Answers:
    """What lists have in common: they are of the nodes that answer."""

    failing: Mapping[str, str]
    asked: int
    needed: int

    @property
    def is_known(self) -> bool:
        """Whether enough nodes answer."""
        return self.asked - len(self.failing) >= self.needed


@dataclass(frozen=True)
class LockReport:
    """A lock on the nodes: one value of one key. Its fields are those of the documented JSON.

    permit: number of a semaphore's permit. limit: how many permits the lock has, as its holder
    wrote it; used: how many of them are taken. A permit is free if a quorum of nodes has it free.
    since: a moment by the holder's clock, in ISO 8601. held_for: seconds since then. since_renewal:
    seconds since the last renewal, or the grant; a living holder renews every third of its ttl.
    These three are None if another program wrote the value. held: whether a quorum has the key; if
    not, the lock changes hands or is about to expire. valid_for: seconds for which a quorum keeps
    the key without a renewal; 0.0 if none has it. votes: by node, the seconds until the key
    expires; inf for never. needed: size of a quorum.
    """

    resource: str
    permit: int
    limit: int
    used: int
    holder: Holder
    since: str | None
    held_for: float | None
    since_renewal: float | None
    held: bool
    valid_for: float
    votes: Mapping[str, float]
    needed: int
    key: Any = field(repr=False, compare=False)
    value: Any = field(repr=False, compare=False)

    @property
    def is_late(self) -> bool:
        """Whether the holder may have died: two thirds of its ttl have passed without a renewal."""
        return self.since_renewal is not None and self.since_renewal > 2 * self.valid_for


@dataclass(frozen=True)
class RateReport:
    """A rate of which starts are used. Its fields are those of the documented JSON.

    rate: as "100/h", of the last start. used: how many of its `starts` a refused client finds used
    up: a start is free if a quorum of nodes has it free. next_start_in: seconds until a start is
    free, 0.0 if one is; inf if too few nodes answer. next_start: that moment by this machine's
    clock, in ISO 8601. kept_ms: for how long a node counts a start.
    """

    resource: str
    rate: str
    used: int
    starts: int
    next_start_in: float
    next_start: str | None
    kept_ms: int = field(repr=False, compare=False)


@dataclass(frozen=True)
class LockList(Answers):
    """The locks and the rates on the nodes that answer. failing: by node, the cause of its failure.

    asked: the number of nodes. needed: how many must answer; with fewer, a lock may be held that
    none of them knows.
    """

    locks: tuple[LockReport, ...]
    rates: tuple[RateReport, ...]
    failing: Mapping[str, str]
    asked: int = field(repr=False, compare=False)
    needed: int = field(repr=False, compare=False)

    def of(self, resources: Collection[str]) -> LockList:
        """Return those of some resources alone."""
        locks = tuple(lock for lock in self.locks if lock.resource in resources)
        rates = tuple(rate for rate in self.rates if rate.resource in resources)
        return LockList(locks, rates, self.failing, self.asked, self.needed)


@dataclass(frozen=True)
class BrokenLock:
    """The result of breaking a lock.

    gone_from: the nodes that have deleted the key. failing: by node, why it could not be reached.
    """

    lock: LockReport
    gone_from: tuple[str, ...]
    failing: Mapping[str, str]


@dataclass(frozen=True)
class FreedRate:
    """The result of giving the starts of a rate back.

    starts_from: by node, how many starts that counted were given back. failing: by node, why it
    could not be reached.
    """

    rate: RateReport
    starts_from: Mapping[str, int]
    failing: Mapping[str, str]


@dataclass(frozen=True)
class BreakReport:
    """What was broken of a resource: its locks, and its rate. needed: size of a quorum."""

    resource: str
    locks: tuple[BrokenLock, ...]
    rates: tuple[FreedRate, ...]
    needed: int = field(repr=False, compare=False)

    @property
    def is_complete(self) -> bool:
        """Whether a quorum of nodes was told of each."""
        missed = any(one.failing and len(one.gone_from) < self.needed for one in self.locks)
        return not missed and all(len(one.starts_from) >= self.needed for one in self.rates)


@dataclass(frozen=True)
class WaitingProcess:
    """A process that waits for a resource, as the nodes know it. The JSON has the same fields."""

    resource: str
    waits_for: str  # "lock", or "rate": for a start of its rate
    rank: int  # how many processes are before it
    name: str  # of the worker; if a caller with `wait` registered it, of the machine
    pid: int | None  # None if another program wrote the name
    waiter: str  # its name on the nodes, new in each process
    since: str | None  # when its first caller or message began to wait, in ISO 8601
    nodes: tuple[str, ...]  # that have it registered
    listens: bool  # whether it is connected to any node; a process that is gone is not
    next_start: str | None  # of a rate: when a start is free at the latest, in ISO 8601


@dataclass(frozen=True)
class WaitingList(Answers):
    """The waiting processes on the nodes that answer, by resource and in order."""

    processes: tuple[WaitingProcess, ...]
    # by resource: the nodes on which a key of another program has the name of the set of waiters
    wrong_type: Mapping[str, tuple[str, ...]]
    failing: Mapping[str, str]  # by node, the cause
    asked: int = field(repr=False, compare=False)  # the number of nodes
    needed: int = field(repr=False, compare=False)  # how many must answer


@dataclass(frozen=True)
class ClaimReport:
    """The claim of a deduplicated send on the nodes.

    resource: of the task's lock; of several, all their names. task, task_id: of the send. is_sent:
    whether its sender has confirmed the send. counts: whether a quorum has the claim, so that a
    later send is a duplicate. expires_in: seconds until no quorum has it; inf for never. votes: by
    node, the seconds until the key expires. needed: size of a quorum.
    """

    resource: str
    task: str
    task_id: str
    is_sent: bool
    counts: bool
    expires_in: float
    votes: Mapping[str, float]
    needed: int
    name: str = field(repr=False, compare=False)
    token: str = field(repr=False, compare=False)

    @property
    def known_as(self) -> set[str]:
        """What a caller may call it: each resource, and all as the error and the lock name them."""
        each = resources_of(self.name.partition(":")[2])
        return {self.resource, ", ".join(in_order(each)), *each}


@dataclass(frozen=True)
class ClaimList(Answers):
    """The claims on the nodes that answer. failing, asked, needed: as of `LockList`."""

    claims: tuple[ClaimReport, ...]
    failing: Mapping[str, str]
    asked: int = field(repr=False, compare=False)
    needed: int = field(repr=False, compare=False)


@dataclass(frozen=True)
class EndedClaim:
    """The result of ending a claim. gone_from, failing: as of `BrokenLock`."""

    claim: ClaimReport
    gone_from: tuple[str, ...]
    failing: Mapping[str, str]
