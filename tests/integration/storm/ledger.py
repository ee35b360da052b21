"""What the bodies of a storm wrote, and what must be true of it.

A run is one body. It held its locks from its first line to its last, see `tasks`; what it did
after that nobody can vouch for, and no lock can promise.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FINAL = ("SUCCESS", "FAILURE", "REVOKED")
GRACE = 1.0  # s: a worker may have died so long before it was noted


@dataclass(frozen=True)
class Kind:
    """What a kind of message ends with. late: when it acknowledges.

    states: that are right; before the last stage each of `stages` has its end.
    """

    name: str
    late: bool = True
    states: tuple[str, ...] = ("SUCCESS",)
    stages: tuple[str, ...] = ("last",)
    keys: int = 1


THRICE = ("2 to go", "1 to go", "last")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("late"),
        Kind("unfenced"),
        Kind("patient"),
        Kind("failing", states=("FAILURE",)),
        Kind("retrying", stages=THRICE),
        Kind("putting_back"),
        Kind("skipping", states=("SUCCESS", "REVOKED")),
        Kind("early", late=False),
        Kind("early_retrying", late=False, stages=THRICE),
    )
}


@dataclass(frozen=True)
class Message:
    """One that was sent. at: s of the common clock."""

    id: str
    kind: Kind
    keys: tuple[str, ...]
    at: float


@dataclass
class Run:
    """One body: its first line and its last. ended: it came to its end."""

    id: str
    kind: str
    run: str
    worker: str
    pid: int
    stage: str
    retries: int
    keys: tuple[str, ...]
    token: int | None
    first: float
    last: float
    ended: bool = False

    def __str__(self) -> str:
        end = "ended" if self.ended else "cut"
        return (
            f"{self.first:.3f}-{self.last:.3f} {end:5} {'+'.join(self.keys)} token {self.token} "
            f"{self.kind} {self.id[:8]} {self.stage!r} try {self.retries} {self.worker} {self.pid}"
        )


@dataclass(frozen=True)
class Blow:
    """Something done to a worker. pid: of the process; 0 for all of the worker."""

    at: float
    worker: str
    pid: int
    what: str
    slots: int = 1  # how many runs it may have ended


@dataclass
class Ledger:
    """All that is known of a storm when it is over."""

    messages: Sequence[Message]
    runs: Sequence[Run]
    states: Mapping[str, str]
    blows: Sequence[Blow] = field(default_factory=list)
    seen: Mapping[str, float] = field(default_factory=dict)  # when messages were put back last
    leftovers: Sequence[str] = ()  # what did not go when all should have been over

    def faults(self) -> list[str]:
        """Return everything that is not as it must be."""
        return [*self.overlaps(), *self.tokens(), *self.leftovers, *self.accounts()]

    def by_key(self) -> dict[str, list[Run]]:
        """Return the runs of each key, in the order in which they began."""
        found: dict[str, list[Run]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: run.first):
            for key in run.keys:
                found[key].append(run)
        return dict(found)

    def overlaps(self) -> list[str]:
        """Return each run that began while another one of its key held the lock."""
        told = []
        for key, runs in self.by_key().items():
            latest = None
            for run in runs:
                if latest is not None and run.first <= latest.last:
                    told.append(f"two bodies of {key!r} at once:\n  {latest}\n  {run}")
                if latest is None or run.last > latest.last:
                    latest = run
        return told

    def tokens(self) -> list[str]:
        """Return each run whose fencing token is not greater than an earlier one's of its key."""
        told = []
        for key, runs in self.by_key().items():
            fenced = [(run.token, run) for run in runs if run.token is not None]
            for (a, before), (b, after) in itertools.pairwise(fenced):
                if b <= a:
                    told.append(f"tokens of {key!r} do not grow:\n  {before}\n  {after}")
        return told

    def accounts(self) -> list[str]:
        """Return each message that is lost, ended wrongly, or ran more often than it may."""
        runs: dict[str, list[Run]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: run.first):
            runs[run.id].append(run)
        told: list[str] = []
        late, early = [], []
        for message in self.messages:
            wrong = self._wrong_end(message, runs[message.id])
            if wrong is None:
                wrong = self._wrong_count(message, runs[message.id])
            elif not message.kind.late:
                early.append(message)
                continue
            elif self.states[message.id] not in FINAL:
                late.append(message)
                continue
            if wrong is not None:
                told.append(self._tell(message, wrong, runs[message.id]))
        may = sum(blow.slots for blow in self.blows if blow.what != "freeze")
        if len(early) > may:
            told.append(f"{len(early)} messages that acknowledge early are lost, by {may} deaths")
        lost = [(m, self._wrong_end(m, runs[m.id]) or "") for m in self._lost(late)]
        return [*told, *(self._tell(m, wrong, runs[m.id]) for m, wrong in lost)]

    def _tell(self, message: Message, wrong: str, runs: Sequence[Run]) -> str:
        lines = [f"{message.kind.name} {message.id}: {wrong}", f"{message.at:.3f} sent"]
        seen = self.seen.get(message.id)
        lines += [] if seen is None else [f"{seen:.3f} put back for the last time"]
        return "\n  ".join([*lines, *map(str, runs)])

    def _wrong_end(self, message: Message, runs: Sequence[Run]) -> str | None:
        """Return what is wrong with a message's end, None where nothing is."""
        kind, state = message.kind, self.states[message.id]
        if state not in kind.states:
            return f"its state is {state}"
        ended = {run.stage for run in runs if run.ended}
        if state != "REVOKED" and (missing := [s for s in kind.stages if s not in ended]):
            return f"no run of it came to its end: {', '.join(missing)}"
        return None

    def _wrong_count(self, message: Message, runs: Sequence[Run]) -> str | None:
        """Return whether a message ran again though nothing that befell its workers explains it."""
        tries: dict[tuple[str, int], list[Run]] = defaultdict(list)
        for run in runs:
            if run.ended and run.stage != "rejected":
                tries[run.stage, run.retries].append(run)
        again = (run for same in tries.values() for run in same[1:])
        unexcused = [run for run in again if not self._is_excused(message, runs, run)]
        return "again, though nothing befell its workers" if unexcused else None

    def _is_excused(self, message: Message, runs: Sequence[Run], again: Run) -> bool:
        """Tell whether a run may have followed one that had ended: a worker of theirs was killed.

        Before it could acknowledge; so with what a run that came again sent in turn. Nothing is
        frozen for as long as the broker waits before it delivers again. Early ones leave no mark
        that they are done, so a worker that never ran it may have passed it on, too.
        """
        until = again.first + GRACE
        workers = {run.worker for run in runs if run.first < until}
        pids = {0, *(run.pid for run in runs if run.first < until)}
        return any(
            blow.what != "freeze"
            and (not message.kind.late or blow.worker in workers)
            and blow.pid in pids
            and message.at - GRACE < blow.at < until
            for blow in self.blows
        )

    def _lost(self, messages: Sequence[Message]) -> list[Message]:
        """Return those late messages whose loss no death of a main process explains.

        The Redis transport takes a message from its queue, and notes that it is not acknowledged,
        in two steps; a worker that is killed between them takes one message with it.
        Source: kombu.transport.redis, Channel._brpop_read and QoS.append.
        """
        deaths = sorted(b.at for b in self.blows if b.what == "kill" and b.pid == 0)
        unexplained = []
        by_time = sorted(messages, key=lambda m: self._last_seen(m), reverse=True)
        for message in by_time:
            if deaths and deaths[-1] > self._last_seen(message) - GRACE:
                deaths.pop()
            else:
                unexplained.append(message)
        return unexplained

    def _last_seen(self, message: Message) -> float:
        ends = [run.last for run in self.runs if run.id == message.id]
        return max([message.at, self.seen.get(message.id, 0.0), *ends])

    def around(self, fault: str) -> str:
        """Return a fault with the runs of the keys that it names."""
        lines = []
        for key, runs in self.by_key().items():
            named = [n for n, run in enumerate(runs) if str(run) in fault]
            if named:
                near = runs[max(0, named[0] - 5) : named[-1] + 6]
                lines += [f"-- around it, of {key!r}:", *map(str, near)]
                since, until = near[0].first, near[-1].last
                blows = [blow for blow in self.blows if since < blow.at < until]
                lines += [f"-- what befell workers by then: {blow}" for blow in blows]
        return "\n".join([fault, *lines])


def runs_of(lines: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Return the runs that wrote these lines."""
    runs: dict[str, Run] = {}
    for line in lines:
        run = runs.get(line["run"])
        if run is None:
            told = {name: line[name] for name in ("id", "kind", "run", "worker", "pid", "stage",
                                                   "retries", "token")}  # fmt: skip
            keys = tuple(line["keys"])
            run = runs[line["run"]] = Run(**told, keys=keys, first=line["at"], last=line["at"])
        run.last = max(run.last, line["at"])
        run.ended = run.ended or line["what"] == "end"
    return list(runs.values())


def read(log: Path) -> tuple[list[Run], dict[str, float]]:
    """Return the runs whose lines are in a file, and when each message was put back last."""
    lines = []
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError):  # what a killed process left half is no line
            lines.append(json.loads(line))
    seen = {line["id"]: line["at"] for line in lines if line["what"] == "deferred"}
    return runs_of(line for line in lines if line["what"] != "deferred"), seen
