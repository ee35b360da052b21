"""What the bodies of a storm wrote, and what must be true of it.

A run is one body. It held its locks from its first line to its last, see `tasks`; what it did
after that nobody can vouch for, and no lock can promise.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FINAL = ("SUCCESS", "FAILURE", "REVOKED")
STORED = {"RETRY": "retried", "DEFERRED": "deferred"}  # the line that is written after a state
EXPIRY = 5.0  # s: some messages wait longer than that, and some do not
GRACE = 1.0  # s: between what happens and what is written of it, on a machine that stalls
ASKED = 5.0  # s: a body begins so long after its nodes were asked, at most: else its lease is over
WAITED = 30.0  # s: a message is in a worker's hands for so long, at most, without a line of it
QUORUM = 2  # of three nodes
OVERRUN = 5.0  # s: nodes are asked a last time at the end of a wait, and one of them may be frozen
ENDS = ("LockTaken", "QuorumUnreachable", "LockLost")  # of a caller
NEVER = float("inf")


@dataclass(frozen=True)
class Kind:
    """What a kind of message ends with. late: when it acknowledges.

    states: that are right; before the last stage each of `stages` has its end. cut_as: a state that
    says that its body was cut, or did not run. limit: how many hold its keys at once. expires: s
    after which it is not to run any more.
    """

    name: str
    late: bool = True
    states: tuple[str, ...] = ("SUCCESS",)
    stages: tuple[str, ...] = ("last",)
    cut_as: str = "REVOKED"
    limit: int = 1
    expires: float = NEVER


THRICE = ("2 to go", "1 to go", "last")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("late"),
        Kind("named"),
        Kind("unfenced"),
        Kind("patient"),
        Kind("failing", states=("FAILURE",)),
        Kind("retrying", stages=THRICE),
        Kind("putting_back"),
        Kind("skipping", states=("SUCCESS", "REVOKED")),
        Kind("deciding", states=("SUCCESS", "REVOKED")),
        Kind("deduplicated"),
        Kind("permitted", limit=2),  # on a key of their own
        Kind("expiring", states=("SUCCESS", "REVOKED"), expires=EXPIRY),
        Kind("revoked", states=("SUCCESS", "REVOKED")),
        Kind("limited", states=("SUCCESS", "FAILURE"), cut_as="FAILURE"),
        Kind("joining"),  # the body of a chord of late ones
        Kind("early", late=False),
        Kind("early_retrying", late=False, stages=THRICE),
    )
}


CALLED = Kind("called")  # a caller's body outside of tasks: of no message
LIMITS = {kind.name: kind.limit for kind in (*KINDS.values(), CALLED)}


@dataclass(frozen=True)
class Wait:
    """A caller's wait that ended without a lock, or whose lock was lost. wait, waited, stalled: s.

    stalled: for how long of it the process was stopped, or had no CPU.
    """

    at: float
    error: str
    text: str = ""
    wait: float = 0.0
    waited: float = 0.0
    stalled: float = 0.0


@dataclass(frozen=True)
class Message:
    """One that was sent. at: s of the common clock. after: of a chord's body, ids of the others."""

    id: str
    kind: Kind
    keys: tuple[str, ...]
    at: float
    after: tuple[str, ...] = ()


@dataclass
class Run:
    """One body: its first line and its last. ended: it came to its end.

    freed: when it gave its lock back after that, and so left its mark that it is done.
    """

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
    freed: float | None = None

    def __str__(self) -> str:
        end = "freed" if self.freed else "ended" if self.ended else "cut"
        return (
            f"{self.first:.3f}-{self.last:.3f} {end:5} {'+'.join(self.keys)} token {self.token} "
            f"{self.kind} {self.id[:8]} {self.stage!r} try {self.retries} {self.worker} {self.pid}"
        )


@dataclass
class Blow:
    """Something done to a worker. worker: its life's name. pid: of the process; 0 for all of it.

    until: when a freeze was over, or a death for sure. slots: how many runs it may have ended.
    message: that was revoked, which strikes whatever worker runs it.
    """

    at: float
    worker: str
    pid: int
    what: str
    slots: int = 1
    message: str = ""
    until: float = NEVER


@dataclass(frozen=True)
class Line:
    """One that tells that a process had a message. cause: of a retry, the name of the error."""

    at: float
    id: str
    worker: str
    pid: int
    what: str
    retries: int = 0
    cause: str = ""


@dataclass
class Outage:
    """A time in which a node was killed, and then forgot all, or frozen."""

    node: int
    since: float
    until: float = NEVER
    killed: bool = True

    def robs(self, run: Run, again: Run) -> bool:
        """Tell whether the node knew nothing of a run's mark when another run asked for it."""
        if self.killed:
            return self.since < again.first and self.until > run.last - GRACE
        freed = run.freed or run.last + ASKED
        at_its_end = self.since < freed + GRACE and self.until > run.last - GRACE
        return at_its_end or (self.since < again.first and self.until > again.first - ASKED)


@dataclass
class Ledger:
    """All that is known of a storm when it is over."""

    messages: Sequence[Message]
    runs: Sequence[Run]
    states: Mapping[str, str]
    blows: Sequence[Blow] = field(default_factory=list)
    outages: Sequence[Outage] = field(default_factory=list)
    lines: Mapping[str, Sequence[Line]] = field(default_factory=dict)  # of each message
    lost: frozenset[str] = frozenset()  # which were given out by the broker, and noted by nobody
    given_back: Mapping[str, Sequence[float]] = field(default_factory=dict)  # to the broker; when
    revoked: Mapping[str, float] = field(default_factory=dict)  # when, by message
    dropped: Sequence[Message] = ()  # duplicates that were not sent, with the earlier send's id
    leftovers: Sequence[str] = ()  # what did not go when all should have been over
    waits: Sequence[Wait] = ()  # of callers, without a lock

    def faults(self) -> list[str]:
        return [
            *self.overlaps(),
            *self.tokens(),
            *self.leftovers,
            *self.accounts(),
            *self.skipped_unasked(),
            *self.dropped_for_nobody(),
            *self.overrun(),
        ]

    def by_key(self) -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: run.first):
            for key in run.keys:
                found[key].append(run)
        return dict(found)

    def overlaps(self) -> list[str]:
        told = []
        for key, runs in self.by_key().items():
            held: list[Run] = []
            for run in runs:
                held = [other for other in held if other.last >= run.first]
                if len(held) >= LIMITS[run.kind]:
                    bodies = "".join(f"\n  {one}" for one in [*held, run])
                    told.append(f"{len(held) + 1} bodies of {key!r} at once:{bodies}")
                held.append(run)
        return told

    def tokens(self) -> list[str]:
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
        early = []
        for message in self.messages:
            of_it = runs[message.id]
            wrong = self._wrong_end(message, of_it)
            if wrong is None:
                wrong = self._wrong_count(message, runs)
            elif not message.kind.late:
                early.append(message)
                continue
            elif self._is_lost_in_transit(message) or self._is_uncounted(message, runs):
                continue
            if wrong is not None:
                told.append(self._tell(message, wrong, of_it))
        lost = self._unexplained([m for m in early if not self._is_lost_in_transit(m)])
        return [*told, *(self._tell(m, "it is lost, by no death", runs[m.id]) for m in lost)]

    def skipped_unasked(self) -> list[str]:
        """Return each message that was skipped though its callable never said so."""
        return [
            self._tell(message, "it was skipped, and its callable did not say so", [])
            for message in self.messages
            if message.kind.name == "deciding"
            and self.states[message.id] == "REVOKED"
            and not any(line.what == "skips" for line in self.lines.get(message.id, ()))
        ]

    def dropped_for_nobody(self) -> list[str]:
        """Return each duplicate for which no earlier send of its keys came to its end."""
        ended = {run.id for run in self.runs if run.ended}
        earlier = {
            (message.id, message.keys): message.at
            for message in self.messages
            if message.id in ended or self._is_lost_in_transit(message)
        }
        return [
            self._tell(message, "for it another send was dropped, and it did not come", [])
            for message in self.dropped
            if not earlier.get((message.id, message.keys), message.at) < message.at
        ]

    def overrun(self) -> list[str]:
        """Return each wait of a caller that did not end in time, or with an error of its own."""
        return [
            f"a caller's wait: {wait}"
            for wait in self.waits
            if wait.error not in ENDS or wait.waited - wait.stalled > wait.wait + OVERRUN
            if wait.error != "LockLost"  # by then its body had begun
        ]

    def _is_lost_in_transit(self, message: Message) -> bool:
        """Tell whether a message never ended because the broker gave it, or its like, to nobody."""
        unfinished = self.states[message.id] not in FINAL
        return unfinished and not self.lost.isdisjoint((message.id, *message.after))

    def _is_uncounted(self, message: Message, runs: Mapping[str, Sequence[Run]]) -> bool:
        """Tell whether a chord's body was never sent, for one of its header was not counted.

        Source: celery.worker.request.Request.on_failure: what a child had stored before it was
        killed is acknowledged, also where it was killed before it counted that for the chord.
        """
        of_header = [run for id_ in message.after for run in runs[id_]]
        return message.id not in self.lines and any(
            run.ended
            and run.freed is None
            and blow.what == "kill"
            and blow.pid
            and self._hits(blow, run.worker, run.pid)
            and run.last < blow.at < run.last + GRACE
            for run in of_header
            for blow in self.blows
        )

    def _unexplained(self, early: Sequence[Message]) -> list[Message]:
        """Return those lost early messages that no death of the process explains that had them.

        A worker's death takes no more of them with it than it has slots.
        """
        left = [blow.slots if blow.what != "freeze" else 0 for blow in self.blows]
        unexplained = []
        for message in sorted(early, key=lambda m: self._last_line(m).at):
            last = self._last_line(message)
            fit = [
                number
                for number, blow in enumerate(self.blows)
                if left[number] and self._takes(blow, last)
            ]
            if fit:
                left[fit[0]] -= 1
            else:
                unexplained.append(message)
        return unexplained

    def _last_line(self, message: Message) -> Line:
        lines = self.lines.get(message.id)
        return lines[-1] if lines else Line(message.at, message.id, "nobody", 0, "sent")

    def _takes(self, blow: Blow, last: Line) -> bool:
        """Tell whether a death may have come right after a message's last line."""
        if not last.at - GRACE < blow.until or not blow.at < last.at + WAITED:
            return False
        # which child it was given to is not known before that writes a line
        return self._hits(blow, last.worker, 0 if last.what == "received" else last.pid)

    def _hits(self, blow: Blow, worker: str, pid: int) -> bool:
        """Tell whether a blow is one to a process; pid 0: to any of its worker."""
        if blow.message:  # it ends what the process runs, be it the next one by then
            return self._had(worker, blow.message, blow.until)
        return blow.worker == worker and (0 in (blow.pid, pid) or blow.pid == pid)

    def _had(self, worker: str, message: str, until: float) -> bool:
        lines = self.lines.get(message, ())
        return any(line.worker == worker and line.at < until + GRACE for line in lines)

    def _tell(self, message: Message, wrong: str, runs: Sequence[Run]) -> str:
        lines = [f"{message.kind.name} {message.id}: {wrong}", f"{message.at:.3f} sent"]
        lines += map(str, self.lines.get(message.id, ())[-1:])
        return "\n  ".join([*lines, *map(str, runs)])

    def _wrong_end(self, message: Message, runs: Sequence[Run]) -> str | None:
        """Return what is wrong with a message's end, None where nothing is."""
        kind, state = message.kind, self.states[message.id]
        is_late = self._is_overwritten(message, runs) or self._is_of_retry_that_was_over(message)
        if state not in kind.states and not is_late:
            return f"its state is {state}"
        ended = {run.stage for run in runs if run.ended}
        is_cut = state == kind.cut_as or self._is_of_retry_that_was_over(message)
        if not is_cut and (missing := [s for s in kind.stages if s not in ended]):
            return f"no run of it came to its end: {', '.join(missing)}"
        return None

    def _is_overwritten(self, message: Message, runs: Sequence[Run]) -> bool:
        """Tell whether a state was stored late, by a process that was stopped just before.

        Celery publishes a retry before it stores RETRY, and who is refused a lock stores DEFERRED
        some time after that. Here the published one, or another delivery, came to its end while
        the process was stopped, and that process went on with the storing.
        """
        late, last = STORED.get(self.states[message.id]), message.kind.stages[-1]
        return any(
            line.what == late
            and freeze.what == "freeze"
            and self._hits(freeze, line.worker, line.pid)
            and freeze.at < run.last < freeze.until < line.at + GRACE
            and run.last < line.at
            for line in self.lines.get(message.id, ())
            for freeze in self.blows
            for run in runs
            if run.ended and run.stage == last and run.retries >= line.retries + (late == "retried")
        )

    def _is_of_retry_that_was_over(self, message: Message) -> bool:
        """Tell whether RETRY was stored over REVOKED: the retry was over when it was published.

        Whoever gets one that has expired, or was revoked, stores REVOKED at once, and Celery stores
        RETRY after it has published.
        """
        over_at = min(message.at + message.kind.expires, self.revoked.get(message.id, NEVER))
        lines = self.lines.get(message.id, ())
        return self.states[message.id] == "RETRY" and any(
            line.what == "retried" and line.at > over_at for line in lines
        )

    def _wrong_count(self, message: Message, runs: Mapping[str, Sequence[Run]]) -> str | None:
        """Return whether a message ran again though nothing that befell its runs explains it."""
        stages: dict[str, list[Run]] = defaultdict(list)
        for run in runs[message.id]:
            if run.ended and run.stage != "rejected":
                stages[run.stage].append(run)
        may_follow = self._may_follow if message.kind.late else self._early_may_follow
        of_others = [run for id_ in message.after for run in runs[id_] if run.ended]
        for same in stages.values():
            for run, again in itertools.combinations(same, 2):
                # a chord whose last one was cut as it sent the body may send it again
                sent_twice = any(may_follow(other, again) for other in of_others)
                retried = self._was_sent_twice(runs[message.id], run, again, may_follow)
                if not (sent_twice or retried or may_follow(run, again)):
                    return "again, though nothing explains it"
        return None

    def _was_sent_twice(
        self, runs: Sequence[Run], run: Run, again: Run, may_follow: Callable[[Run, Run], bool]
    ) -> bool:
        """Tell whether two runs come of two retries, of which an earlier run sent one too many.

        Because it lost its lock, or because it ran again itself.
        """
        later = max(run.retries, again.retries)
        told = [line for line in self.lines.get(run.id, ()) if line.what == "retried"]
        lost = Counter(line.retries for line in told if line.cause == "LockLost")
        needed = 2 if run.retries == again.retries else 1
        before = [run for run in runs if run.retries < later and run.ended]
        return any(retries < later and count >= needed for retries, count in lost.items()) or any(
            may_follow(earlier, again) for earlier in before
        )

    def _is_struck(self, run: Run, again: Run) -> bool:
        """Tell whether a run was cut, or stopped, after its last line and before another run."""
        return any(
            self._hits(blow, run.worker, run.pid)
            and blow.until > run.last - GRACE
            and blow.at < again.first + GRACE
            for blow in self.blows
        )

    def _may_follow(self, run: Run, again: Run) -> bool:
        """Tell whether a message could run again after a run that had ended.

        Either that one was cut, or lost its lock, before it could leave its mark; or so many nodes
        have lost the mark, or did not hear of it, that no quorum knows it.
        """
        if run.freed is None and self._is_struck(run, again):
            return True
        robbed = {outage.node for outage in self.outages if outage.robs(run, again)}
        return len(robbed) >= QUORUM

    def _early_may_follow(self, run: Run, again: Run) -> bool:
        """Tell whether an early message could run again: it leaves no mark that it is done.

        So a worker may have run it, or passed it on, and ended before it had acknowledged: then
        that delivery was given back to the broker, whoever did so.
        """
        return any(at < again.first + GRACE for at in self.given_back.get(run.id, ()))

    def around(self, fault: str) -> str:
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
    runs: dict[str, Run] = {}
    for line in lines:
        if line["what"] == "released":
            who = line["id"], line["pid"], line["retries"]
            of_it = [r for r in runs.values() if (r.id, r.pid, r.retries) == who and r.ended]
            for run in of_it[-1:]:
                run.freed = line["at"]
        elif "run" in line:
            run = runs.get(line["run"])
            if run is None:
                told = {name: line[name] for name in ("id", "kind", "run", "worker", "pid",
                                                       "stage", "retries", "token")}  # fmt: skip
                keys = tuple(line["keys"])
                run = Run(**told, keys=keys, first=line["at"], last=line["at"])
                runs[line["run"]] = run
            run.last = max(run.last, line["at"])
            run.ended = run.ended or line["what"] == "end"
    return list(runs.values())


def read(log: Path) -> tuple[list[Run], dict[str, list[Line]], list[Wait]]:
    """Return the runs whose lines are in a file, who had each message in order, and the waits."""
    lines = []
    for text in log.read_text().splitlines():
        with contextlib.suppress(ValueError):  # what a killed process left half is no line
            lines.append(json.loads(text))
    told: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        known = {name: line[name] for name in Line.__dataclass_fields__ if name in line}
        told[line["id"]].append(Line(**known))
    waits = [
        Wait(**{name: line[name] for name in Wait.__dataclass_fields__ if name in line})
        for line in lines
        if line["what"] in ("ended", "broken")
    ]
    return runs_of(lines), dict(told), waits
