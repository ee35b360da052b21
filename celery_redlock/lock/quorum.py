"""One round over all nodes: write to all, then poll all, done as soon as the votes decide.

Many threads and greenlets of a process share the connections. Each polls for itself, and whoever
finds something to read hands on whatever has come, also what others wait for, and wakes them. So
nothing stands between a lone caller and its sockets, and nobody depends on another to go on.
Handlers are called under one mutex that is never held while anything waits: they do arithmetic.
"""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import hiredis

from celery_redlock.errors import NodeError, RedlockError
from celery_redlock.lock.clock import Bell, Clock, new_mutex, original
from celery_redlock.lock.lease import ACQUIRING, HELD, Fence, Hold, free_in
from celery_redlock.lock.nodes import (
    CUT,
    LONGEST_RECONNECT,
    PING,
    Address,
    Command,
    Entry,
    Greeting,
    Guard,
    Node,
    Script,
    Unheard,
    Wire,
    text_of,
)
from celery_redlock.lock.votes import (
    FAILED,
    GRANTED,
    REFUSED,
    SILENT,
    Tally,
    Vote,
    in_short,
    is_of_a_replica,
    is_split,
    quorum_of,
    way_out,
)

LONGEST_TURN, TURNS = 1.0, 3  # s, and how many, for which one thread may read and hand on
MOST_REFUSALS = 100  # texts of servers that are remembered, so as to log each once


class Round:
    """One request to all nodes that somebody waits for. A subclass decides it.

    wake: set by whoever waits; called once the round is decided, in any thread.
    """

    __slots__ = ("decided", "wake")

    wake: Callable[[], None] | None

    def __init__(self) -> None:
        self.decided = False
        self.wake = None

    def decide(self) -> None:
        """Mark the round as over and wake the one that waits for it."""
        self.decided = True
        wake = self.wake
        if wake is not None:
            wake()


@dataclass(frozen=True)
class Refusal:
    """A node's word that another holds the lock: whose, and for how many s more (inf: for ever)."""

    value: str
    expires_in: float


class GrantRound(Round):
    """The attempt to get one lock: the votes, and what is known of those that hold it.

    fence: takes the nodes' fencing counters, where a token is wanted. resend: writes the command
    to one node once more, under its old sending time. Grants that come after the decision are
    counted on the hold; after its end they are nothing, for a release follows on the same wire.
    asks_since: s since 1970 where nodes are asked whether the run is done: a mark made after that
    says so. heeds_later: so does a mark that a later send has taken its place.
    done: one node has such a mark, which is enough, for it tells a fact; and so is superseded.
    """

    heeds_later: bool
    superseded: bool
    __slots__ = (
        "_refusals",
        "_resend",
        "asked_again",
        "asks_since",
        "done",
        "errors",
        "fence",
        "granted",
        "heeds_later",
        "hold",
        "never_asked",
        "sent",
        "silent",
        "superseded",
        "tally",
    )

    def __init__(
        self,
        hold: Hold,
        nodes: int,
        resend: Callable[[int, Command, float | None], None],
        fence: Fence | None = None,
    ) -> None:
        self.decided, self.wake = False, None
        self.asks_since: float | None = None  # with it the two flags are set
        self.done = False
        self.hold, self.fence = hold, fence
        self.tally = Tally(nodes)
        self.sent = 0.0  # monotonic s; an older fencing proposal must not meet a younger lease
        self._refusals: dict[int, Refusal] = {}
        self.silent: dict[int, float] = {}  # s for which a node does not vote
        self.errors: dict[int, NodeError] = {}
        self.granted: set[int] = set()
        self.never_asked: set[int] = set()  # nodes that the request surely did not reach
        self._resend = resend
        self.asked_again: set[int] = set()  # nodes where the first request may still run some day

    @property
    def wanted(self) -> bool:
        """Also after a quorum has granted, but not once a release may be on its way."""
        state = self.hold.state
        return state is ACQUIRING or state is HELD

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count one node's vote."""
        vote = GRANTED if reply == 1 else self._vote(node, reply)
        if vote is None:
            self.done = True
            self.decide()
            return
        if vote is GRANTED:
            self.granted.add(node)
            self.hold.confirm(node, sent, run_id)
        if not self.decided and self.tally.add(vote):
            self.decide()

    def _vote(self, node: int, reply: Any) -> Vote | None:
        """Return what a node's reply means, with what it says beside it taken down.

        None: the run is done, or not to be made, whatever the node's vote is.
        """
        if type(reply) is not list:
            self.errors[node] = NodeError("", in_short(str(reply)))
            return FAILED
        if self.asks_since is not None and self._is_done(reply.pop()):
            return None
        if reply[0] == 1:
            if self.fence is not None:
                self.fence.counted(node, reply[1])
            return GRANTED
        if reply[0] == 0:
            expires_in = reply[1] / 1000 if reply[1] >= 0 else math.inf
            self._refusals[node] = Refusal(text_of(reply[2]), expires_in)
            return REFUSED
        self.silent[node] = max(0, reply[1]) / 1000
        return SILENT

    def _is_done(self, at_ms: int) -> bool:
        if at_ms < 0 and self.heeds_later:
            self.superseded = True
            return True
        return at_ms > 0 and self.asks_since is not None and at_ms / 1000 >= self.asks_since

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Ask once more on a new connection where one broke, else count a failed vote."""
        first = node not in self.asked_again
        if error.lost:
            self.asked_again.add(node)
            if first and not self.decided:
                self._resend(node, command, self.sent if command.dated else None)
                return
        elif first:
            self.never_asked.add(node)
        self.errors[node] = error
        if not self.decided and self.tally.add(FAILED):
            self.decide()

    @property
    def refusals(self) -> dict[int, Refusal]:
        """What the nodes that refused said, as of now: any thread may bring in a late one."""
        return self._refusals.copy()

    def free_in(self) -> float | None:
        """Return the s until a quorum of nodes is free if nobody renews; None where unknown."""
        known = dict.fromkeys(self.granted, 0.0)
        known |= {node: refusal.expires_in for node, refusal in self.refusals.items()}
        waits = [known.get(node, math.inf) for node in range(self.tally.nodes)]
        return free_in(waits, self.tally.quorum)

    @property
    def is_split(self) -> bool:
        """Whether others share the nodes, so that none of them has got it either."""
        holders = [refusal.value for refusal in self.refusals.values()]
        return is_split(holders, self.tally.unheard, self.tally.quorum)

    def holder(self) -> str:
        """Return the value that stands on most of the nodes that refused."""
        values = [refusal.value for refusal in self.refusals.values()]
        return max(values, key=values.count, default="")


class Renewable(Protocol):
    """A claim as a round sees that renews it.

    fence: takes the nodes' fencing counters, where a token is wanted.
    """

    @property
    def hold(self) -> Hold:
        """Its lease."""

    @property
    def fence(self) -> Fence | None:
        """Its fencing token."""


class RenewRound(Round):
    """One extension of some locks, in one request to each node.

    Decided when a quorum confirmed each of them, or every node has spoken.
    changed: called with the number of a claim after a node said that its token does not stand
    there. A fencing token that is not usable yet decides in its claim's place.
    """

    __slots__ = (
        "_changed",
        "_claims",
        "_clock",
        "_doubted",
        "_holds",
        "_quorum",
        "_renewing",
        "_unsettled",
        "unheard",
    )

    def __init__(
        self,
        claims: Sequence[Renewable],
        nodes: int,
        clock: Clock,
        changed: Callable[[int], object],
    ) -> None:
        self.decided, self.wake = False, None
        self._claims, self._changed, self._clock = claims, changed, clock
        self._holds = [claim.hold for claim in claims]
        self._renewing = 0  # nodes that renewed all of them, or all but some
        self._doubted: dict[int, int] = {}  # by the number of a claim: how many of them did not
        self._quorum, self.unheard = nodes // 2 + 1, nodes
        self._unsettled = [c.fence for c in claims if c.fence is not None and not c.fence.usable]

    @property
    def wanted(self) -> bool:
        """Not once all the holds are over.

        Of several, one may be: its key is gone then, and a renewal does not bring it back. A
        repair would, so it is of one alone.
        """
        return any(hold.state is HELD for hold in self._holds)

    @property
    def short(self) -> list[int]:
        """The numbers of the claims that no quorum confirmed."""
        if self._all_confirmed:
            return []
        doubted, enough = self._doubted, self._renewing - self._quorum
        return [i for i in range(len(self._claims)) if doubted.get(i, 0) > enough]

    @property
    def _all_confirmed(self) -> bool:
        return self._renewing - max(self._doubted.values(), default=0) >= self._quorum

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Renew the node's deadline of each lock, or stop counting it."""
        if type(reply) is list:
            now = self._clock.now
            for number, (hold, word) in enumerate(zip(self._holds, reply, strict=True)):
                # the clock each time: whoever was stopped in between must not revive a lease
                if word != 1 or not hold.renewed(node, sent, now(), run_id):
                    self._look_closer(number, node, sent, word, run_id)
            self._renewing += 1
        self._heard()

    def _look_closer(self, number: int, node: int, sent: float, word: Any, run_id: str) -> None:
        """Take a word on one lock that is not just yes, or is of a node on probation."""
        claim, now = self._claims[number], self._clock.now()
        if type(word) is list and claim.hold.renewed(node, sent, now, run_id):
            if claim.fence is not None:
                claim.fence.counted(node, word[1])
            return
        self._doubted[number] = self._doubted.get(number, 0) + 1
        if word == 0:
            claim.hold.missing(node, now, run_id)
            self._changed(number)
        elif word == -1:
            claim.hold.denied(node, now)
            self._changed(number)

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Leave the deadlines as they were: no answer is not a no."""
        self._heard()

    def _heard(self) -> None:
        self.unheard -= 1
        if self.decided:
            return
        if self._unsettled:
            enough = all(fence.usable for fence in self._unsettled)
        else:
            enough = self._all_confirmed
        if enough or self.unheard == 0:
            self.decide()


class Batch(Round):
    """Several rounds that one waits for together; decided when all of them are."""

    def __init__(self) -> None:
        super().__init__()
        self._open = 1  # itself, until it is closed

    def add(self, round_: Round) -> None:
        """Wait for a round, too; before it is sent."""
        self._open += 1
        round_.wake = self._one_less

    def close(self) -> None:
        """Say that all rounds are in it."""
        self._one_less()

    def _one_less(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.decide()


class Question(Round):
    """Asks some nodes, by index; decided when each has spoken.

    An error is a reply as well: it comes from a server that is there.
    """

    wanted = True

    def __init__(self, nodes: Iterable[int]) -> None:
        super().__init__()
        self._replies: dict[int, Any] = {}
        self._due = set(nodes)

    @property
    def replies(self) -> dict[int, Any]:
        """What the nodes said, by index, as of now: any thread may bring in a late one."""
        return self._replies.copy()

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Keep what it says."""
        self._replies[node] = reply
        self._heard(node)

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Take note that it does not answer."""
        self._heard(node)

    def _heard(self, node: int) -> None:
        self._due.discard(node)
        if not self._due:
            self.decide()


class Seat:
    """What one waiter polls with: every node's socket, and a pipe of its own to be woken by.

    native: made for a real thread, also where greenlets are in use.
    """

    def __init__(self, *, native: bool) -> None:
        self._native = native
        self._bell = Bell()
        self._topology = -1
        self._poll: Any = None
        self._by_descriptor: dict[int, Node] = {}
        self._resting = False

    def wake(self) -> None:
        """Let the waiter look up; nothing happens while it does so anyway."""
        if self._resting:
            self._bell.ring()

    def rests_on(self, round_: Round) -> bool:
        """Tell whether a round is decided; if not, whoever decides it now wakes this seat.

        The flag goes up before the look, as in Dekker's algorithm: one of the two sees the other.
        """
        self._resting = True
        return round_.decided

    def poll(self, nodes: Sequence[Node], topology: int, seconds: float) -> list[Node]:
        """Return the nodes that have something to say, after so many s at the most.

        topology: counts the changes among the connections, for the poll object to be made anew.
        """
        if topology != self._topology:
            self._topology = -1  # where an exception from outside cuts it, it is done again
            self._topology = topology if self._arrange(nodes) else -1
        ready = self._poll.poll(math.ceil(seconds * 1000))
        self._resting = False
        found = [self._by_descriptor[fd] for fd, _ in ready if fd in self._by_descriptor]
        if len(found) < len(ready):
            self._bell.hush()
        return found

    def _arrange(self, nodes: Sequence[Node]) -> bool:
        """Make the poll object anew; True where it stays right until the connections change."""
        lasts = True
        self._poll = new_poll(native=self._native)
        self._poll.register(self._bell.descriptor, select.POLLIN)
        self._by_descriptor = {}
        for node in nodes:
            wire = node.wire
            if wire is None:
                continue
            descriptor = wire.socket.fileno()
            if wire.cut or descriptor < 0:
                node.drop(wire, CUT)
                continue
            self._by_descriptor[descriptor] = node
            self._poll.register(descriptor, select.POLLIN | (select.POLLOUT if wire.unsent else 0))
            if wire.unsent:
                lasts = False  # look again whether it still is
        return lasts


class Quorum:
    """One process's connections to N nodes, and the rounds over them.

    changed: called as (node, error) when a node stops answering, with None when it is back.
    greeted: called as (node, greeting) when one is connected. Neither must wait.
    guard: what keeps a node from voting that may have forgotten what it granted.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        timeout: float,
        clock: Clock,
        changed: Callable[[Node, NodeError | None], None],
        greeted: Callable[[Node, Greeting], None],
        guard: Guard,
    ) -> None:
        self.clock, self.timeout = clock, timeout
        self._changed, self._greeted = changed, greeted
        self.nodes = [
            Node(index, address, timeout, clock, self._report, self._rearm, self._admit, guard)
            for index, address in enumerate(addresses)
        ]
        self.size = quorum_of(len(self.nodes))
        self._reset()

    def forget(self) -> None:
        """Start anew after a fork: connections, waiters and mutexes stay with the parent."""
        for node in self.nodes:
            node.forget()
        self._reset()

    def _reset(self) -> None:
        self._reading = new_mutex()
        self._seats: dict[bool, list[Seat]] = {False: [], True: []}  # free ones, by `native`
        self._taken: dict[int, Seat] = {}
        self._mail: deque[tuple[int, deque[Entry], NodeError, Wire | None]] = deque()
        self._topology = 0
        self._down: set[int] = set()
        self._refusals: set[tuple[int, str]] = set()
        self._servers: dict[str, int] = {}  # run id -> the node that is connected to it
        self.same_server: tuple[str, str] | None = None  # the names of two nodes, once found
        self._closed = False

    def reconnect(self) -> bool:
        """Begin to connect to every node that is not connected; True where there is one."""
        gone = [node for node in self.nodes if node.wire is None]
        for node in gone:
            node.connect()
        return bool(gone)

    @property
    def outstanding(self) -> bool:
        """Whether anything has been written that is not answered yet."""
        return bool(self._mail) or any(node.outstanding for node in self.nodes)

    def broadcast(self, command: Command, sent: float) -> None:
        """Write one command to every node. Never waits.

        sent: monotonic s, read before this call, and before what the request says of the time.
        """
        entries = ((command, sent, command.request),)
        for node in self.nodes:
            if node.overdue(sent):
                self.drain()  # before it is judged: the answer may lie unread in the socket
            node.send(entries)

    def scatter(self, entries: Sequence[Sequence[Entry]], sent: float) -> None:
        """Write to each node entries of its own, in one batch. Never waits."""
        for node, own in zip(self.nodes, entries, strict=True):
            if node.overdue(sent):
                self.drain()
            if own:
                node.send(own)

    def send_to(self, node: int, command: Command, sent: float | None = None) -> None:
        """Write one command to one node; sent: monotonic s, where it is a repetition."""
        sent = self.clock.now() if sent is None else sent
        self.nodes[node].send([(command, sent, command.request)])

    def ask(
        self, request: bytes, script: Script | None = None, nodes: Collection[int] | None = None
    ) -> Mapping[int, Any]:
        """Return what nodes reply within one node timeout, by index; an error is no reply.

        script: what the request calls. nodes: by index; all where None.
        """
        asked, sent = range(len(self.nodes)) if nodes is None else nodes, self.clock.now()
        question = Question(asked)
        command = Command(request, question, script)
        if nodes is None:
            self.broadcast(command, sent)
        for node in nodes or ():
            self.send_to(node, command, sent)
        if asked:
            self.wait(question, sent + self.timeout)
        replies = question.replies.items()
        return {node: reply for node, reply in replies if type(reply) is not hiredis.ReplyError}

    def keep_alive(self, idle: float) -> None:
        """Ask every node that has been left alone for so many s whether it is still there."""
        now = self.clock.now()
        for node in self.nodes:
            wire = node.wire
            if wire is not None and now - wire.used_at > idle:
                node.send([(Command(PING, Unheard()), now, PING)])

    def wait(self, round_: Round, until: float, *, native: bool = False) -> None:
        """Return when a round is decided, or at the monotonic second `until`.

        What has come by then is counted, however late the caller is: it may have been paused.
        native: the caller is a real thread, also where greenlets are in use.
        """
        seat = self._take_seat(native)
        round_.wake = seat.wake
        try:
            if self._mail:
                self._deliver_mail()
            while not seat.rests_on(round_):
                left = until - self.clock.now()
                self._read(seat.poll(self.nodes, self._topology, max(0.0, left)))
                if left <= 0:  # that was the last look: others' answers must not keep us here
                    return
        finally:
            round_.wake = None
            self._taken.pop(id(seat), None)
            self._seats[native].append(seat)

    def _take_seat(self, native: bool) -> Seat:
        try:
            seat = self._seats[native].pop()
        except IndexError:
            seat = Seat(native=native)
        self._taken[id(seat)] = seat
        return seat

    def mend(self) -> None:
        """See that the mutex of those who read comes free; called where no exception can strike.

        Nobody keeps it for longer than some arithmetic takes. Where it does not come free in
        several waits, each begun anew (a process that was stopped runs out one), an exception from
        outside has cut its owner's way out: it is freed, and no connection is trusted any more.
        """
        mutex = self._reading
        if not any(mutex.acquire(True, LONGEST_TURN) for _ in range(TURNS)):
            for node in self.nodes:
                node.abandon(CUT)
        mutex.release()

    def read_from(self, nodes: Iterable[int]) -> None:
        """Read what some nodes have said by now. Never waits."""
        self._read([self.nodes[node] for node in nodes])

    def drain(self) -> None:
        """Read what has come without waiting, and give up nodes that owe an answer for too long."""
        now = self.clock.now()  # before reading: an answer may have come while we were paused
        self._read(self.nodes)
        for node in self.nodes:
            wire = node.wire
            if wire is not None and node.overdue(now):
                node.drop(wire, f"no answer within {self.timeout:g} s")
        self._deliver_mail()

    def _read(self, nodes: Sequence[Node]) -> None:
        with self._reading:
            for node in nodes:
                self._hand_on(node)
        if self._mail:
            self._deliver_mail()

    def _hand_on(self, node: Node) -> None:
        wire = node.receive()
        if wire is None:
            return
        answers, index, run_id, demoted = wire.answers, node.index, wire.run_id, ""
        while answers:
            (command, sent, text), reply = answers.popleft()
            if type(reply) is hiredis.ReplyError:
                if text is command.request and str(reply).startswith("NOSCRIPT"):
                    self._send_source(node, command, sent)
                    continue
                self._say_refusal(node, str(reply))
                demoted = str(reply) if is_of_a_replica(str(reply)) else demoted
            command.handler.answered(index, sent, reply, run_id)
        if demoted and self.clock.now() - wire.opened_at > LONGEST_RECONNECT:
            node.drop(wire, demoted)  # its name may lead to another server by now
        if index in self._down and node.wire is not None:
            self._down.discard(index)
            self._changed(node, None)

    def _send_source(self, node: Node, command: Command, sent: float) -> None:
        """Send a script that a server has forgotten, after a flush, or a restart behind a proxy."""
        script = command.script
        if script is None:
            return
        if not command.dated:
            sent = self.clock.now()
        if command.handler.wanted:
            node.send([(command, sent, script.with_source(command.request))])
        else:  # else a node that is always the last to answer would never get it back
            node.send([(Command(script.load, Unheard()), sent, script.load)])

    def _say_refusal(self, node: Node, text: str) -> None:
        """Say once of each node what it refuses: read-only, out of memory, no permission."""
        text = in_short(text)
        if self._is_news(node.index, text):
            self._changed(node, NodeError(node.name, text))

    def _is_news(self, node: int, text: str) -> bool:
        """Tell whether a node says this for the first time, by what is to be done about it.

        The words themselves vary: they name a script's line, or a digest.
        """
        refusal = (node, way_out(text) or text)
        if refusal in self._refusals or len(self._refusals) >= MOST_REFUSALS:
            return False
        self._refusals.add(refusal)
        return True

    def hand_on_mail(self) -> None:
        """Tell handlers of connections that broke, where that is still due. Never waits."""
        if self._mail:
            self._deliver_mail()

    def _deliver_mail(self) -> None:
        while self._mail:
            with self._reading:
                if not self._mail:  # another thread was faster
                    return
                # kept until it is delivered: an exception from outside must lose no release
                index, entries, error, wire = self._mail[0]
                if wire is not None:
                    wire.close(reset=True)
                    self._rearm()  # its descriptor is a stranger's from now on
                if index not in self._down and not self._closed:
                    self._down.add(index)
                    if not way_out(error.cause) or self._is_news(index, error.cause):
                        self._changed(self.nodes[index], error)
                while entries:
                    command = entries[0][0]
                    command.handler.failed(index, command, error)
                    entries.popleft()
                self._mail.popleft()

    def _report(
        self, node: int, entries: deque[Entry], error: NodeError, wire: Wire | None
    ) -> None:
        """Take word of a broken connection, in any thread; whoever reads next hands it on."""
        self._mail.append((node, entries, error, wire))
        self._rearm()

    def _rearm(self) -> None:
        """Make every waiter look at the connections anew."""
        self._topology += 1
        for seat in list(self._taken.values()):
            seat.wake()

    def _admit(self, index: int, greeting: Greeting) -> None:
        """Refuse a second connection to one server: its one vote would count twice."""
        run_id = greeting.run_id
        other = self._servers.setdefault(run_id, index) if run_id else index
        if other != index and self.nodes[other].run_id not in ("", run_id):
            other = self._servers[run_id] = index  # the other one is elsewhere by now
        if other != index:
            name, first = self.nodes[index].name, self.nodes[other].name
            self.same_server = (first, name)
            raise NodeError(name, f"is the same server as {first}")
        if self.same_server is not None and self.nodes[index].name in self.same_server:
            self.same_server = None  # its name leads to a server of its own again
        self._greeted(self.nodes[index], greeting)

    def connect(self, until: float) -> set[int]:
        """Connect to every node; returns those that answer by the monotonic second `until`."""
        pinged = Question(range(len(self.nodes)))
        self.broadcast(Command(PING, pinged), self.clock.now())
        self.wait(pinged, until)
        return set(pinged.replies)

    def close(self) -> None:
        """Close every connection for good."""
        self._closed = True
        for node in self.nodes:
            node.close()


def new_poll(*, native: bool) -> Any:
    """Return a poll object; a cooperative one where greenlets are in use, unless `native`.

    Raises RedlockError under eventlet on a system without epoll.
    """
    make = original("select", "poll") if native else getattr(select, "poll", None)
    return (make or PollBehindSelect)()


class PollBehindSelect:
    """poll's face for eventlet, which takes poll away and leaves select.

    eventlet's select may go wrong where several descriptors are ready at once: the second one
    switches to a greenlet that waits for something else by then. And it lets one greenlet alone
    wait for a descriptor. So this gives it a single one of its own: an epoll object's.
    """

    def __init__(self) -> None:
        try:
            self._epoll = original("select", "epoll")()
        except AttributeError:
            raise RedlockError("eventlet is supported on Linux alone, which has epoll") from None

    def register(self, descriptor: int, events: int) -> None:
        """Watch a descriptor; events: as of poll, which are epoll's own."""
        self._epoll.register(descriptor, events)

    def poll(self, milliseconds: int) -> Any:
        """Return what is ready, after so many ms at the most; other greenlets run meanwhile."""
        select.select([self._epoll.fileno()], [], [], milliseconds / 1000)
        return self._epoll.poll(0)

    def __del__(self) -> None:
        if hasattr(self, "_epoll"):
            self._epoll.close()
