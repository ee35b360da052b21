"""What the journal of a drill proves: grants, overlaps, and how long a lock or a message was idle.

A body takes the time *before* it asks whether its lock is held. If it is, the lock was held at that
time, however long the process was stopped between the two. So a body has held its lock from the
first to the last such time, by one clock for all processes of the machine.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

# lines of the journal: a body begins, and still has its lock; it ends with it, or has lost it
BEGUN = "begun"
KEPT = "kept"
DONE = "done"
LOCK_GONE = "gone"
READY = "ready"  # a worker consumes
OF_BODIES = (BEGUN, KEPT, DONE, LOCK_GONE)


@dataclass(frozen=True)
class JournalLine:
    """One line. run: of a body, no two have the same. worker: with the number of its life."""

    what: str
    worker: str
    pid: int
    at: float
    run: str = ""
    message: str = ""
    resource: str = ""

    @classmethod
    def of(cls, text: str) -> JournalLine | None:
        """Read a line; None for one that a killed process has not ended."""
        try:
            return cls(*json.loads(text))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        told = [self.what, self.worker, self.pid, self.at, self.run, self.message, self.resource]
        return json.dumps(told)


@dataclass(frozen=True)
class DrillRun:
    """A body that had its lock from `began` to `until`.

    end: DONE, LOCK_GONE, or "" if it was killed.
    """

    message: str
    resource: str
    worker: str
    pid: int
    began: float
    until: float
    end: str = ""


@dataclass(frozen=True)
class SentMessage:
    """A message of the drill, and when it was sent."""

    id: str
    resource: str
    at: float


@dataclass(frozen=True)
class Overlap:
    """Two bodies that held one lock at the same time, for so many seconds."""

    resource: str
    messages: tuple[str, str]
    seconds: float


@dataclass(frozen=True)
class Audit:
    """What was seen. Times in seconds; None: it has not happened.

    grants: how often a body got its lock. longest_idle: the longest time that a lock was free after
    a body that ended by itself, while a message waited for it. slowest_takeover: the same after a
    holder that was struck, from when it was last seen with its lock. recovery: the longest time
    from the death of a worker until a message that ran in it began again. unfinished: messages that
    the broker still has. lost: messages that are nowhere.
    """

    sent: int
    grants: int
    overlaps: tuple[Overlap, ...]
    longest_idle: float | None
    slowest_takeover: float | None
    recovery: float | None
    unfinished: int
    lost: tuple[str, ...]

    @property
    def is_bad(self) -> bool:
        """Whether two bodies held one lock, a message is lost, or no lock was granted at all."""
        return bool(self.overlaps or self.lost) or not self.grants


@dataclass
class RunsSoFar:
    """The bodies of a drill, as the lines of its journal come in.

    ready: lives of workers that consume. ended: messages that need no other run. unheld: of these,
    the messages of bodies that had lost their lock before their first look at it.
    """

    by_run: dict[str, DrillRun] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    unheld: set[str] = field(default_factory=set)

    def add(self, line: JournalLine) -> None:
        if line.what == READY:
            self.ready.add(line.worker)
        elif line.what == BEGUN:
            run = DrillRun(line.message, line.resource, line.worker, line.pid, line.at, line.at)
            self.by_run[line.run] = run
        elif line.run in self.by_run:
            run = self.by_run[line.run]
            until = run.until if line.what == LOCK_GONE else max(run.until, line.at)
            end = line.what if line.what in (DONE, LOCK_GONE) else ""
            self.by_run[line.run] = replace(run, until=until, end=end)
            if end:
                self.ended.add(run.message)
        elif line.what == LOCK_GONE:
            self.unheld.add(line.message)
            self.ended.add(line.message)

    def running_in(self, worker: str, since: float) -> list[DrillRun]:
        """Return the bodies of a worker that were seen with their lock since then."""
        of_worker = [run for run in self.by_run.values() if run.worker == worker]
        return [run for run in of_worker if not run.end and run.until > since]


def audit(
    sent: Sequence[SentMessage],
    runs: Collection[DrillRun],
    deaths: Mapping[str, float],
    still_there: Collection[str],
    unheld: Collection[str] = (),
) -> Audit:
    """Return what a history shows.

    deaths: when each life of a worker was killed. still_there: messages that the broker has.
    unheld: as of `RunsSoFar`.
    """
    ended = {run.message for run in runs if run.end} | {*unheld}
    unended = [message.id for message in sent if message.id not in ended]
    by_resource = {
        name: sorted((run for run in runs if run.resource == name), key=lambda run: run.began)
        for name in sorted({run.resource for run in runs})
    }
    overlaps = tuple(
        overlap for name, in_order in by_resource.items() for overlap in _overlaps(name, in_order)
    )
    gaps = [
        (before.end == DONE, gap)
        for name, in_order in by_resource.items()
        for before, gap in _gaps(
            in_order, [message for message in sent if message.resource == name]
        )
    ]
    return Audit(
        sent=len(sent),
        grants=len(runs),
        overlaps=overlaps,
        longest_idle=max((gap for is_done, gap in gaps if is_done), default=None),
        slowest_takeover=max((gap for is_done, gap in gaps if not is_done), default=None),
        recovery=max(_recoveries(runs, deaths), default=None),
        unfinished=sum(message_id in still_there for message_id in unended),
        lost=tuple(message_id for message_id in unended if message_id not in still_there),
    )


def _overlaps(resource: str, in_order: Sequence[DrillRun]) -> Iterator[Overlap]:
    """Yield each body that began before one that had begun earlier was last seen with its lock."""
    latest: DrillRun | None = None
    for run in in_order:
        if latest is not None and run.began < latest.until:
            seconds = min(run.until, latest.until) - run.began
            yield Overlap(resource, (latest.message, run.message), seconds)
        if latest is None or run.until > latest.until:
            latest = run


def _gaps(
    in_order: Sequence[DrillRun], sent: Sequence[SentMessage]
) -> Iterator[tuple[DrillRun, float]]:
    """Yield each body with the seconds until the next one began, while a message waited."""
    ends: dict[str, float] = {}
    for run in in_order:
        if run.end:
            ends[run.message] = min(run.until, ends.get(run.message, run.until))
    coming = deque(sorted(sent, key=lambda message: message.at))
    waiting: list[SentMessage] = []
    for before, after in itertools.pairwise(in_order):
        while coming and coming[0].at < after.began:
            waiting.append(coming.popleft())
        waiting = [
            message for message in waiting if ends.get(message.id, after.began) > before.until
        ]
        since = max(before.until, min((message.at for message in waiting), default=after.began))
        yield before, max(0.0, after.began - since)


def _recoveries(runs: Iterable[DrillRun], deaths: Mapping[str, float]) -> Iterator[float]:
    """Yield how long after a worker's death each message that ran in it began again."""
    by_message: dict[str, list[DrillRun]] = {}
    for run in sorted(runs, key=lambda run: run.began):
        by_message.setdefault(run.message, []).append(run)
    for run in runs:
        if not run.end and run.worker in deaths:
            died = deaths[run.worker]
            again = [x.began - died for x in by_message[run.message] if x.began > died]
            yield from again[:1]
