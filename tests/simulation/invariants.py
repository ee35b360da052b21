"""What must be true after every event, whatever befell.

A `Witness` sees the world from outside: what is written to which connection, what a node executes
and answers, and what the clients believe. Each invariant has a name and a function of its own:

- `one_holder`: at one real instant at most one client holds a key (a permit of a semaphore is one)
- `continuity`: nobody holds again after another has held in between
- `over_for_ever`: what was held and is over is not held again; lost and released are final
- `truth`: of what is held, a quorum of nodes keeps the key, or is silent and votes for nobody
- `ends_are_promised`: a lease counts from before its command left, by the ttl less the drift
- `leases_end_before_keys`: in real time, no lease that a node gave outlives its key there
- `probation_does_not_count`: a node on probation is none of those that make the validity
- `silent_nodes_grant_nothing`: a node that lost memory grants nothing new during its silence
- `one_permit`: no node that reclaimed nothing keeps a value under two permits of a lock
- `holds_refuse`: nobody but another hold gets a permit that was asked for while a quorum of nodes
  had the mark of one hold, which they keep
- `ended_before_release`: nothing is held any more when the first byte of its release leaves
- `nothing_after_release`: after its release nothing is written of a token but its release
- `fences_grow`: each holder's fencing token is greater than all before
- `done_once`: no body of a run begins whose lock was freed by the release of a body that had ended
- `lost_once`, `lost_when_over`: a loss is announced once, and nothing that is still held
- `lost_truly`: nor what was whole when its release was written
- `dropped_for_a_sent`: a send is dropped only for an earlier one that was published
- `dropped_for_a_live`: and not for one whose window a quorum knew to be over before it began
- `one_window`: no window is opened while another of the same is open and its lease runs, but in
  its place; where nodes lose their memory a message too many is sent
- `a_burst_runs`: a debounced message is dropped only for a later one that was published
- `due_runs`: and not for one whose send was made after the run was due
- `waits_end`: who waits gets the lock or gives up at its time, whatever it was told or not
- `rate_kept`: of a rate of N no more than N bodies begin in any half-open period of real time
- `starts_apart`: bodies that begin with one permit of a rate do so a period apart
- `no_cancel_after_the_start`, `nothing_after_cancel`: no start is given back whose body has begun;
  to a node where one was given back, nothing else of it is written
- `starts_after_keys`: an acquire asks for starts once it has all its keys
- `stamps_stand`: on a node a permit of a rate is freed early only by its own token, before its body
- `one_start_a_node`: no node has a start under two permits, but by a request of a lost connection
- `refusals_leave_no_start`: an acquire that fails has given back all its starts
- `waits_without_keys`: who waits has neither a key nor a start
- `no_inner_error`: the watchdog catches no error that the shipped code made
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import hiredis

from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.keys import HOLD_MARK, lock_key
from celery_redlock.lock.model.lease import MARGIN, Lease, State
from celery_redlock.lock.model.rate import Start
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.server.requests import GRANT, PERMIT, RELEASE, RENEW
from tests.simulation import starts
from tests.simulation.nodes import Node
from tests.simulation.starts import StartRecord, StartWitness
from tests.simulation.world import running

if TYPE_CHECKING:
    from celery_redlock.tasks.unique.claim import Claim
    from tests.simulation.clients import Process
    from tests.simulation.network import Link
    from tests.simulation.world import Thread, World

ROUNDING = 1e-9  # s
SLOW = 8  # node timeouts: for a look and the last try for a key, each at a bad moment
LOOK_EVERY = 8  # events: for what is expensive to look at, and stays wrong where it is
GRANTING = ("grant", "permit")  # the scripts by which a node votes
OVER = (State.LOST, State.RELEASED)


class Violation(AssertionError):  # noqa: N818 - it is no error of the program
    """An invariant that does not hold. name: which."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


@dataclass(eq=False)
class Sent:
    """What is known of one send that opened a window. Times in real s.

    made: when the send was. due: when its run is, if it is debounced. replaces: the id of another.
    lease: until when its window is its own, however late it says that it was published; shorter
    where clocks are fast. ends: somebody ends or gives it up from then on. over: since when a
    quorum is known to have heard that.
    """

    name: str
    task_id: str
    lease: float
    made: float
    due: float
    replaces: str
    published: bool = False
    ends: bool = False
    over: float = math.inf


@dataclass(eq=False)
class Record:
    """What is known of one claim. name: its token. value: what it sets.

    sent: by node, the s of its client's clock at which the last command was written that the node
    executed in its favour. ends: by node, the real s at which its key ends there, as was known
    then.
    """

    claim: Lease
    process: Process
    name: str
    value: bytes
    sent: list[float]
    ends: list[float]
    released: set[int]  # nodes to which its release was written
    reclaimed: set[int] = field(default_factory=set)  # nodes: a late request may add a permit there
    was_held: bool = False
    is_over: bool = False  # it was held, and is not any more
    was_whole: bool = False  # a quorum had kept it, or their word, when its release was written
    run: str = ""  # of what may be delivered again: its name
    body_ended: bool = False  # as its client knows, before it gives the lock back
    too_late: set[int] = field(default_factory=set)  # nodes that granted it what such an end freed
    marks: dict[int, bytes] = field(default_factory=dict)  # by node: of a hold, as it was claimed
    probation: frozenset[int] = frozenset()  # as it was looked at last
    valid_until: float = -math.inf  # as it was looked at last

    @property
    def base(self) -> bytes:
        """The key of the first permit."""
        return lock_key("redlock", self.claim.key.resource).encode()

    @property
    def key(self) -> bytes:
        """The key of its permit; that of the first one as long as no quorum has granted one."""
        return self.claim.key.name.encode()

    @property
    def held(self) -> bool:
        """Whether its client believes that it holds it now."""
        return self.claim.held(self.process.clock.now())


@dataclass(eq=False)
class Wait:
    """A caller that waits. ends: the real s by which it is to end."""

    process: Process
    ends: float
    thread: object


class Witness:
    """Sees everything, and says what must not be.

    nodes: all of them. drift: the fraction that clients allow for.
    """

    def __init__(self, world: World, nodes: Sequence[Node], drift: float) -> None:
        self.world, self.nodes, self.drift = world, nodes, drift
        self.quorum = quorum_of(len(nodes))
        self.broken: Violation | None = None
        self.active: list[Record] = []
        self._records: dict[bytes, Record] = {}
        self._over: list[Record] = []
        self._last: dict[bytes, Record] = {}  # by key: who held it last
        self._last_of: dict[Process, Record] = {}  # what a process has asked for last
        self._fences: dict[str, int] = {}  # by resource: the greatest token handed out
        self._said_lost: list[Acquisition] = []
        self._sends: dict[str, Sent] = {}  # by the id of the task
        self._open: dict[str, Sent] = {}  # by name: the one whose window was opened last
        self._waits: list[Wait] = []
        self._tokens = self._looks = 0
        self.starts = StartWitness(world, drift, self.violated)

    def violated(self, name: str, text: str, *args: object) -> None:
        """Take note that an invariant does not hold; the first one ends the schedule."""
        if self.broken is None:
            self.broken = Violation(name, text % args)

    # what happens

    def new_token(self) -> str:
        """Return the next token; its first eight digits, which a name shows, are a number."""
        self._tokens += 1
        return f"{self._tokens:08x}{0:024x}"

    def claimed(self, claim: Lease, run: str, process: Process) -> None:
        """See a claim begin. run: the name of what may be delivered again, if it asks."""
        value, never = claim.value.encode(), [-math.inf] * len(self.nodes)
        name = claim.value.partition(":")[0]
        record = Record(claim, process, name, value, never[:], never[:], set())
        record.run = run
        if not claim.value.startswith(HOLD_MARK):
            record.marks = self._marks_beside(record)
        self._records[value] = self._last_of[process] = record
        self.active.append(record)
        self.world.counts["claims"] += 1

    def written(self, link: Link, words: list[bytes]) -> list[Any]:
        """See a command handed to a socket; returns of which claims, none where it is of none."""
        if len(words) > 1 and words[1] in starts.SCRIPTS:
            return self.starts.written(link, words)
        script = script_of(words)
        subjects = subjects_of(script, words) if script else []
        found = [self._records.get(value) for value in subjects]
        known = [record for record in found if record is not None]
        for record in known:
            if self.world.lines is not None:
                where = link.process.name, link.node.name
                self.world.note("%s > %s %s %s", *where, script, record.name)
            if script == "release":
                if record.held:
                    self.violated("ended_before_release", "%s", record.name)
                if not record.released and record.was_held:
                    in_time = record.process.clock.now() < record.valid_until - MARGIN
                    record.was_whole = in_time and self._true_of(record) >= self.quorum
                record.released.add(link.node.index)
            elif link.node.index in record.released and len(subjects) == 1:
                # a renewal of several may follow: it sets no key that is gone
                self.violated("nothing_after_release", "%s of %s", script, record.name)
        return known

    def executed(
        self,
        records: list[Any],
        node: Node,
        script: str,
        words: list[bytes],
        reply: bytes,
        written: float,
    ) -> None:
        """See a node execute a command. written: s of the client's clock."""
        if isinstance(records[0], StartRecord):
            self.starts.executed(records[0], node, words, reply)
            return
        by_value = {record.value: record for record in records}
        subjects = subjects_of(script, words)
        answers = answers_of(script, reply, len(subjects))
        for value, answer in zip(subjects, answers, strict=True):
            record = by_value.get(value)
            if record is not None:
                self._answered(record, node, script, words, answer, written)

    def _answered(
        self,
        record: Record,
        node: Node,
        script: str,
        words: list[bytes],
        answer: Any,
        written: float,
    ) -> None:
        if self.world.lines is not None:
            self.world.note("%s: %s %s -> %r", node.name, script, record.name, answer)
        first = answer[0] if isinstance(answer, list) else answer
        if script == "release":
            if record.body_ended and first == 1:
                node.freed.add((record.run, record.base))
        elif first == 1:
            index = node.index
            record.sent[index] = max(record.sent[index], written)
            key = record.key
            if script == "permit":
                key = record.base + (b"#%d" % answer[1] if answer[1] else b"")
                if index not in record.reclaimed:
                    self._check_permits(record, node)
            record.ends[index] = max(record.ends[index], node.end_of(key, record.value))
            self._favoured(record, node, script, words)
        elif script in GRANTING and first == -1:
            self.world.counts["silences"] += 1

    def _check_permits(self, record: Record, node: Node) -> None:
        limit, base = record.claim.key.limit, record.base
        names = [base, *(base + b"#%d" % permit for permit in range(1, limit))]
        if sum(node.holder(name) == record.value for name in names) != 1:
            self.violated("one_permit", "%s on %s", record.name, node.name)

    def _favoured(self, record: Record, node: Node, script: str, words: list[bytes]) -> None:
        if script == "renew" and is_repair(words):
            self.world.counts["repairs"] += 1
            record.reclaimed.add(node.index)
        if script in GRANTING and (record.run, record.base) in node.freed:
            record.too_late.add(node.index)
        # one that is behind may not know it yet: then its vote must not count (`one_holder`)
        if script in GRANTING and node.was_free and node.is_silent and not node.is_behind:
            self.violated("silent_nodes_grant_nothing", "%s to %s", node.name, record.name)

    def acquired(self) -> None:
        """See an acquisition succeed."""
        self.world.counts["holds"] += 1

    @contextlib.contextmanager
    def waiting(self, process: Process, wait: float, keys: int) -> Iterator[None]:
        """See a caller wait for so many s of its clock, for so many keys."""
        slack = SLOW * keys * process.redlock.node_timeout
        one = Wait(process, process.clock.real(wait + slack), running())
        self._waits.append(one)
        try:
            yield
        finally:
            self._waits.remove(one)

    def rests(self, thread: Thread) -> None:
        """See a thread rest until somebody wakes it: a caller that waits has nothing then."""
        process = thread.process
        if not any(one.thread is thread for one in self._waits):
            return
        for record in self.active:
            if record.process is process and record.claim.state not in OVER:
                self.violated("waits_without_keys", "%s has %s", process.name, record.name)
        if self.starts.unflagged(process):
            self.violated("waits_without_keys", "%s has a start", process.name)

    def _check_waits(self) -> None:
        now = self.world.now
        for one in self._waits:
            process = one.process
            late = process.stopped_until + SLOW * process.redlock.node_timeout
            if not process.dead and now > max(one.ends, late):
                self.violated("waits_end", "%s since %.4f", process.name, one.ends)

    def start_asked(self, start: Start, process: Process) -> None:
        """See a start of a rate begin."""
        record = self._last_of.get(process)
        if record is None or record.claim.state not in (State.HELD, State.LOST):
            self.violated("starts_after_keys", "%s of %s", start.key.resource, process.name)
        self.starts.asked(start, process)

    def body_began(self, holding: Acquisition) -> None:
        """See the body of a run begin under what it has acquired."""
        for record in self._records_of(holding):
            counted = record.too_late & record.claim.granted
            if counted:
                self.violated("done_once", "%s after the end of %s", record.name, record.run)

    def body_ended(self, holding: Acquisition) -> None:
        """See the body of a run end, before its client gives anything back."""
        self.world.counts["bodies"] += 1
        for record in self._records_of(holding):
            record.body_ended = True

    def _records_of(self, holding: Acquisition) -> list[Record]:
        return [self._records[claim.value.encode()] for claim in holding.leases]

    def fenced(self, resources: Sequence[str], token: int) -> None:
        """See a fencing token handed out for the holder of some resources."""
        for resource in resources:
            before = self._fences.get(resource, 0)
            if token <= before:
                self.violated("fences_grow", "%s: %d after %d", resource, token, before)
            self._fences[resource] = token

    def lost(self, holding: Acquisition, process: Process) -> None:
        """See a loss announced."""
        self.world.counts["losses"] += 1
        if holding in self._said_lost:
            self.violated("lost_once", "%s", holding.resource)
        self._said_lost.append(holding)
        if holding.held(process.clock.now()):
            self.violated("lost_when_over", "%s", holding.resource)
        if not self.world.counts["forgotten"] and holding.leases:
            records = self._records_of(holding)
            if all(r.was_whole and r.claim.state is State.RELEASED for r in records):
                self.violated("lost_truly", "%s", holding.resource)

    def failed(self, error: BaseException | None) -> None:
        """See an error that the shipped code caught, though there should be none."""
        self.violated("no_inner_error", "%r", error)

    def window_opened(
        self, send: Claim, lease: float, began: float, replaces: str, made: float, due: float
    ) -> None:
        """See a send open its window. began: real s ago, below 0; the others: as of `Sent`."""
        lasting = lease * (1 - self.drift) + began
        task_id = send.run_id.task_id
        sent = Sent(send.name, task_id, self.world.now + lasting, made, due, replaces)
        other = self._open.get(send.name)
        if (
            not self.world.counts["wiped"]
            and other is not None
            and not other.ends
            and other.task_id != replaces
            and self.world.now < min(other.lease, sent.lease)
        ):
            self.violated("one_window", "%s beside %s", task_id, other.task_id)
        self._sends[task_id] = self._open[send.name] = sent
        self.world.counts["windows"] += 1
        self.world.note("%s opens the window of %s", task_id, send.name)

    def published(self, task_id: str) -> None:
        """See a message published."""
        self.world.note("%s is published", task_id)
        if task_id in self._sends:
            self._sends[task_id].published = True

    def window_ends(self, task_id: str) -> None:
        """See somebody begin to end a window, or give it up."""
        if task_id in self._sends:
            self._sends[task_id].ends = True

    def window_over(self, task_id: str) -> None:
        """See that a quorum has heard that a window is over."""
        self.world.note("the window of %s is over", task_id)
        self._sends[task_id].over = self.world.now

    def run_dropped(self, task_id: str) -> None:
        """See a worker drop a debounced message, as a later send has marked it."""
        self.world.counts["superseded"] += 1
        later = [one for one in self._sends.values() if one.replaces == task_id and one.published]
        if not later:
            self.violated("a_burst_runs", "%s is dropped for nothing", task_id)
        elif all(one.made > self._sends[task_id].due for one in later):
            self.violated("due_runs", "%s, due at %.4f", task_id, self._sends[task_id].due)

    def dropped(self, task_id: str, began: float) -> None:
        """See a send dropped for an earlier one; began: the real s at which it was made."""
        self.world.counts["duplicates"] += 1
        self.world.note("dropped for %s", task_id)
        earlier = self._sends.get(task_id)
        if earlier is None or not earlier.published:
            self.violated("dropped_for_a_sent", "for %s", task_id)
        elif earlier.over < began:
            self.violated("dropped_for_a_live", "for %s, over at %.4f", task_id, earlier.over)

    # what must be true after every event

    def check(self) -> None:
        """Raise Violation where an invariant does not hold."""
        self._looks += 1
        holders: dict[bytes, Record] = {}
        over = False
        for record in self.active:
            hold = record.claim
            if hold.state is State.HELD:
                if record.process.clock.now() < hold.valid_until - hold.margin:
                    self._check_alone(record, holders)
                    self._check_held(record)
                elif record.was_held:
                    record.is_over = True
            elif hold.state is not State.ACQUIRING:
                over = True
        if over:
            self._set_aside()
        if self._looks % LOOK_EVERY == 0:
            self._check_over()
            self._check_waits()
        if self.broken is not None:
            raise self.broken

    def _set_aside(self) -> None:
        self._over += [record for record in self.active if record.claim.state in OVER]
        self.active = [record for record in self.active if record.claim.state not in OVER]

    def _check_over(self) -> None:
        for record in self._over:
            if record.claim.state not in OVER:
                self.violated("over_for_ever", "%s came back", record.name)

    def _check_alone(self, record: Record, holders: dict[bytes, Record]) -> None:
        other = holders.setdefault(record.key, record)
        if other is not record:
            self.violated("one_holder", "%s beside %s", record.name, other.name)

    def _check_held(self, record: Record) -> None:
        hold = record.claim
        if not record.was_held:
            record.was_held = True
            self.world.note("%s is held until %.4f", record.name, hold.valid_until)
            self._check_marks(record)
        self._check_continuity(record)
        if hold.valid_until != record.valid_until or self._looks % LOOK_EVERY == 0:
            record.valid_until = hold.valid_until
            self._check_ends(record)
            self._check_truth(record)
        if hold.probation or record.probation:
            self._check_probation(record)

    def _marks_beside(self, record: Record) -> dict[int, bytes]:
        """Return by node the hold that has a permit which a request for this claim reads."""
        limit, found = record.claim.key.limit, {}
        names = [record.base, *(record.base + b"#%d" % permit for permit in range(1, limit))]
        for node in self.nodes if limit > 1 else ():
            values = [] if node.down else [node.holder(name) or b"" for name in names]
            marks = [value for value in values if value.startswith(HOLD_MARK.encode())]
            if marks:
                found[node.index] = marks[0]
        return found

    def _check_marks(self, record: Record) -> None:
        standing = self._marks_beside(record) if record.marks else {}
        kept = Counter(mark for node, mark in record.marks.items() if standing.get(node) == mark)
        if any(count >= self.quorum for count in kept.values()):
            self.violated("holds_refuse", "%s beside a hold", record.name)

    def _check_continuity(self, record: Record) -> None:
        if record.is_over:
            another = self._last.get(record.key) is not record
            name = "continuity" if another else "over_for_ever"
            self.violated(name, "%s came back", record.name)
        self._last[record.key] = record

    def _check_ends(self, record: Record) -> None:
        hold, clock = record.claim, record.process.clock
        longest = hold.ttl * (1 - self.drift) - MARGIN
        for node, end in enumerate(hold.ends):
            if end > record.sent[node] + longest + ROUNDING:
                what = record.name, end, record.sent[node]
                self.violated("ends_are_promised", "%s until %.4f, sent %.4f", *what)
            real = self.world.now + (end - clock.now()) / clock.rate
            if real > record.ends[node] + ROUNDING:
                what = record.name, real, record.ends[node]
                self.violated("leases_end_before_keys", "%s until %.4f, key until %.4f", *what)

    def _check_truth(self, record: Record) -> None:
        true = self._true_of(record)
        # where locks are forgotten unseen: so many that every rival's quorum meets one of them
        unseen = self.world.counts["forgotten"]
        least = len(self.nodes) - self.quorum + 1 if unseen else self.quorum
        if true < least:
            self.violated("truth", "%s has %d nodes", record.name, true)

    def _true_of(self, record: Record) -> int:
        return sum([self._is_true(record, node) for node in self.nodes])

    def _is_true(self, record: Record, node: Node) -> bool:
        return node.down or node.is_silent or node.holder(record.key) == record.value

    def _check_probation(self, record: Record) -> None:
        hold, now = record.claim, record.process.clock.now()
        counted = sorted(end for node, end in enumerate(hold.ends) if node not in hold.probation)
        best = counted[-self.quorum] if len(counted) >= self.quorum else -math.inf
        if hold.valid_until > best + ROUNDING:
            self.violated("probation_does_not_count", "%s", record.name)
        here = frozenset(hold.probation)
        left = record.probation - here
        self.world.counts["probations"] += len(here - record.probation)
        self.world.counts["promotions"] += sum(hold.ends[node] > now for node in left)
        record.probation = here


@functools.lru_cache(maxsize=1)
def _scripts() -> dict[bytes, str]:
    named = {"grant": GRANT, "permit": PERMIT, "renew": RENEW, "release": RELEASE}
    digests = {script.digest: name for name, script in named.items()}
    return digests | {script.source: name for name, script in named.items()}


def script_of(words: list[bytes]) -> str:
    """Return the name of the lock's script that a command runs, "" for other commands."""
    return _scripts().get(words[1], "") if words[0] in (b"EVALSHA", b"EVAL") else ""


def subjects_of(script: str, words: list[bytes]) -> list[bytes]:
    """Return the values that a command of one of the lock's scripts is about."""
    first = 3 + int(words[2])  # where the arguments begin
    return words[first::3] if script == "renew" else [words[first]]


def is_repair(words: list[bytes]) -> bool:
    """Tell whether a renewal sets its key where none stands."""
    keys = int(words[2])
    return keys > (len(words) - 3 - keys) // 3 + 1


def answers_of(script: str, reply: bytes, count: int) -> list[Any]:
    """Return what a node's reply says of each of so many subjects."""
    reader = hiredis.Reader()
    reader.feed(reply)
    answer = reader.gets()
    if script != "renew" or isinstance(answer, hiredis.ReplyError):
        return [answer] * count
    return list(answer)
