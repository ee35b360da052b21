"""One round over all nodes: write to all, then poll all, done as soon as the votes decide.

Many threads and greenlets of a process share the connections. Each polls for itself, and whoever
finds something to read hands on whatever has come, also what others wait for, and wakes them. So
nothing stands between a lone caller and its sockets, and nobody depends on another to go on.
Handlers are called in one turn in which nothing waits: they do arithmetic. An answer stays with its
connection until its handler is through with it, so a handler may be told the same twice.
"""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.clock import (
    Platform,
    Turn,
    gevent_here,
)
from celery_redlock.lock.nodes import (
    BUSY,
    CUT,
    GUARD,
    LONGEST_RECONNECT,
    PAUSE,
    PAUSES,
    PING,
    Address,
    Command,
    Entry,
    Greeting,
    Guard,
    Node,
    Notes,
    Unheard,
    Wire,
    noted_keys,
    notes_of,
)
from celery_redlock.lock.tenures import Tenures
from celery_redlock.lock.votes import (
    UnexpectedReplyError,
    hint_of,
    in_short,
    is_of_a_replica,
    quorum_of,
)

T = TypeVar("T")

SPARE_SEATS, SPARED_FOR = 2, 3.0  # how many are kept that nobody needs; s after which others go
LONGEST_TURN, TURNS = 1.0, 3  # s, and how many, for which one thread may read and hand on
LOOKS, LOOK = 15, 0.0002  # how often, and s after which, what holds up all threads looks
REPLACED = "another server has served under its address since"
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


class Question(Round):
    """Asks some nodes, by index; decided when each has spoken.

    An error is a reply as well: it comes from a server that is there. read: returns what any other
    reply means; raises UnexpectedReplyError.
    """

    wanted = True

    def __init__(self, nodes: Iterable[int], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self._read = read
        self._replies: dict[int, Any] = {}
        self._due = set(nodes)

    @property
    def replies(self) -> dict[int, Any]:
        """What the nodes said, by index, as of now: any thread may bring in a late one."""
        return self._replies.copy()

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Keep what it says."""
        is_error = type(reply) is hiredis.ReplyError
        self._replies[node] = reply if is_error else self._read(reply)
        self._heard(node)

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Take note that it does not answer."""
        self._heard(node)

    def _heard(self, node: int) -> None:
        self._due.discard(node)
        if not self._due:
            self.decide()


class Introduction:
    """A node's answer to what it is told about tenures."""

    wanted = True

    def __init__(self, heard: Callable[[int, Notes, str], None], told: tuple[str, ...]) -> None:
        self._heard, self._told = heard, told

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Learn what the node had noted. Raises UnexpectedReplyError."""
        if type(reply) is not hiredis.ReplyError:
            self._heard(node, notes_of(self._told, reply), run_id)

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Leave it: the next connection tells the node again."""


class Seat:
    """What one waiter polls with: every node's socket, and a pipe of its own to be woken by.

    native: made for a real thread, also where greenlets are in use.
    """

    def __init__(self, platform: Platform, *, native: bool) -> None:
        self._platform, self._native = platform, native
        self._bell = platform.new_bell()
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
        self._poll = self._platform.new_poll(self._native)
        self._poll.register(self._bell.descriptor, select.POLLIN)
        self._by_descriptor = {}
        for node in nodes:
            if node.jobs:
                node.go_on()
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


def _take_out(queue: deque[T], done: T) -> None:
    """Take out what is done, unless another has: the turn is taken from one that keeps it long."""
    if queue and queue[0] is done:
        queue.popleft()


class Quorum:
    """One process's connections to N nodes, and the rounds over them.

    changed: called as (node, error) when a node stops answering, with None when it is back.
    greeted: called as (node, greeting) when one is connected. replaced: called with the index of a
    node whose server turns out to have been replaced for a while. None of them must wait.
    guard: what keeps a node from voting that may have forgotten what it granted.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        timeout: float,
        platform: Platform,
        changed: Callable[[Node, NodeError | None], None],
        greeted: Callable[[Node, Greeting], None],
        replaced: Callable[[int], None],
        guard: Guard,
    ) -> None:
        self._platform, self.clock, self.timeout = platform, platform.clock, timeout
        self._changed, self._greeted, self._replaced = changed, greeted, replaced
        self._guard, self._tenures = guard, Tenures([address.server for address in addresses])
        own = self._report, self._rearm, self._admit, guard, self._tenures
        self.nodes = [
            Node(index, address, timeout, platform, *own) for index, address in enumerate(addresses)
        ]
        self.size = quorum_of(len(self.nodes))
        self._reset()

    def forget(self) -> None:
        """Start anew after a fork: connections, waiters and turns stay with the parent."""
        for node in self.nodes:
            node.forget()
        self._reset()

    def _reset(self) -> None:
        self._reading = self._platform.turn()
        self._seats: dict[bool, list[Seat]] = {False: [], True: []}  # free ones, by `native`
        self._unneeded = {False: 0, True: 0}  # how many of them were free all the time, lately
        self._spared_until = 0.0  # monotonic s
        self._taken: dict[int, Seat] = {}
        self._mail: deque[tuple[int, deque[Entry], NodeError, Wire | None]] = deque()
        self._topology = 0
        self._down: set[int] = set()
        self._refusals: set[tuple[int, str]] = set()
        self.replaced_at: dict[int, float] = {}  # monotonic s: when a node's server turned out so
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
            node.send(entries, keeps_gil=False)

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
        self,
        request: bytes,
        read: Callable[[Any], T],
        *,
        nodes: Collection[int] | None = None,
    ) -> Mapping[int, T]:
        """Return what nodes reply within one node timeout, by index; an error is no reply.

        read: as for `Question`. nodes: by index; all where None.
        """
        asked, sent = range(len(self.nodes)) if nodes is None else nodes, self.clock.now()
        question = Question(asked, read)
        command = Command(request, question)
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
        self._introduce(idle)
        now = self.clock.now()
        for node in self.nodes:
            wire = node.wire
            if wire is not None and now - wire.used_at > idle:
                node.send([(Command(PING, Unheard()), now, PING)])

    def wait(self, round_: Round, until: float, *, native: bool = False) -> None:
        """Return when a round is decided, or at the monotonic second `until`.

        What has come by then is counted, however late the caller is: it may have been paused.
        Returns at once in a finalizer or a signal handler that keeps its own thread from reading,
        or from writing to so many nodes that there is no quorum.
        native: the caller is a thread of ours, real also where greenlets are in use. What it waits
        for is to come as soon next to code that keeps the GIL, so once it has that, it reads all.
        """
        if (self._reading.taken or [node for node in self.nodes if node.jobs]) and self._is_cut_off:
            return
        by_poll = native or gevent_here() is None
        seat = self._take_seat(by_poll)
        round_.wake = seat.wake
        try:
            if self._mail:
                self._deliver_mail()
            while not seat.rests_on(round_):
                left = until - self.clock.now()
                ready = seat.poll(self.nodes, self._topology, max(0.0, left))
                nodes = self.nodes if native else ready
                self._read(nodes, PAUSES if left <= 0 else 2, keeps_gil=native)
                if left <= 0:  # that was the last look: others' answers must not keep us here
                    return
        finally:
            round_.wake = None
            self._taken.pop(id(seat), None)
            self._seats[by_poll].append(seat)

    def wait_keeping_gil(self, round_: Round) -> None:
        """Return when a round is decided, or after some ms in which no other Python thread runs.

        For a caller that C code has kept waiting for the GIL: once given up, it is gone as long
        again. Nodes nearby answer meanwhile. Python itself lets any thread keep it for 5 ms.
        """
        for _ in range(LOOKS):
            self._read(self.nodes)
            if round_.decided:
                return
            self._platform.pause_keeping_gil(LOOK)

    @property
    def _is_cut_off(self) -> bool:
        """Whether the caller keeps its own thread from going on, and so each round from its end."""
        if self._reading.is_interrupted:
            return True
        return len([n for n in self.nodes if n.is_interrupted]) > len(self.nodes) - self.size

    def _take_seat(self, native: bool) -> Seat:
        free = self._seats[native]
        try:
            seat = free.pop()
        except IndexError:
            seat = Seat(self._platform, native=native)
        if len(free) < self._unneeded[native]:
            self._unneeded[native] = len(free)
        self._taken[id(seat)] = seat
        return seat

    def drop_spare_seats(self) -> float:
        """Give up what a peak of waiters has left; returns the monotonic s to look again at.

        Only those that were free since the last look: who waits often makes none anew.
        """
        now = self.clock.now()
        if now >= self._spared_until:
            for native, free in self._seats.items():
                del free[: max(0, self._unneeded[native] - SPARE_SEATS)]
                self._unneeded[native] = len(free)
            self._spared_until = now + SPARED_FOR
        has_spare = any(len(free) > SPARE_SEATS for free in self._seats.values())
        return self._spared_until if has_spare else math.inf

    def mend(self) -> None:
        """Take the turn from one that keeps it for too long; called by the watchdog's thread.

        Reading and handing on is some arithmetic, but a finalizer or a signal handler may interrupt
        it, and sleep. No connection is trusted any more that it may read from when it goes on.
        """
        if self._reading.is_stuck(self.clock.now(), LONGEST_TURN, TURNS):
            self._reading = self._platform.turn()
            for node in self.nodes:
                node.abandon(CUT)

    def read_from(self, nodes: Iterable[int]) -> None:
        """Read what some nodes have said by now. Never waits."""
        self._read([self.nodes[node] for node in nodes])

    def drain(self) -> None:
        """Read what has come without waiting, and give up nodes that owe an answer for too long."""
        now = self.clock.now()  # before reading: an answer may have come while we were paused
        for node in self.nodes:
            node.go_on()
        if self._read(self.nodes, PAUSES):
            for node in self.nodes:
                wire = node.wire
                if wire is not None and node.overdue(now):
                    node.drop(wire, f"no answer within {self.timeout:g} s")
            self._deliver_mail()

    def _read(self, nodes: Sequence[Node], tries: int = 1, *, keeps_gil: bool = True) -> bool:
        """Read and hand on what nodes have said; False if others had the turn at each try."""
        if not nodes and not self._mail:
            return True
        for number in range(tries):
            if number:
                self._platform.pause(PAUSE)
            reading = self._reading
            if reading.run(self._hand_on_all, reading, nodes, keeps_gil):
                if self._mail:
                    self._deliver_mail()
                return True
            if reading.is_interrupted:
                return False
        return False

    def _hand_on_all(self, reading: Turn, nodes: Sequence[Node], keeps_gil: bool) -> None:
        try:
            if self._mail:
                self._deliver()  # first: a release may follow on the next connection
            for node in nodes:
                if self._reading is reading:  # else it was taken from us
                    self._hand_on(node, keeps_gil=keeps_gil)
        except BaseException:
            self._rearm()  # whoever waits looks at what was cut
            raise

    def _hand_on(self, node: Node, *, keeps_gil: bool) -> None:
        wire = node.receive(keeps_gil=keeps_gil)
        if wire is None:
            return
        demoted = self._hand_on_answers(node, wire)
        if demoted and self.clock.now() - wire.opened_at > LONGEST_RECONNECT:
            node.drop(wire, demoted)  # its name may lead to another server by now
        if node.index in self._down and node.wire is not None:
            self._down.discard(node.index)
            self._changed(node, None)

    def _hand_on_answers(self, node: Node, wire: Wire) -> str:
        """Tell handlers what has come; returns what a server said that is no primary any more.

        An answer is taken out once its handler is through with it. If an exception from outside
        cuts that, it is handed on again; a second time, the handler itself is at fault.
        """
        answers, index, run_id, demoted = wire.answers, node.index, wire.run_id, ""
        if wire.is_replaced and answers:
            self._lose_answers(node, wire, REPLACED)
        try:
            while answers:
                found = (command, sent, text), reply = answers[0]
                if type(reply) is not hiredis.ReplyError:
                    command.handler.answered(index, sent, reply, run_id)
                elif text is command.request and str(reply).startswith("NOSCRIPT"):
                    self._send_source(node, command, sent)
                else:
                    self._say_refusal(node, str(reply))
                    demoted = str(reply) if is_of_a_replica(str(reply)) else demoted
                    command.handler.answered(index, sent, reply, run_id)
                if answers and answers[0] is found:  # else the connection was given up
                    answers.popleft()
        except UnexpectedReplyError as error:
            self._distrust(node, wire, str(error))
        except BaseException:
            if answers and wire.struck is answers[0]:
                answers.popleft()
            elif answers:
                wire.struck = answers[0]
            raise
        return demoted

    def _distrust(self, node: Node, wire: Wire, cause: str) -> None:
        """Give up a connection whose replies are not those of its commands: none behind counts."""
        self._lose_answers(node, wire, cause)
        node.drop(wire, cause)

    def _lose_answers(self, node: Node, wire: Wire, cause: str) -> None:
        """Report what a server has answered as lost: none of it counts."""
        entries = deque(entry for entry, _ in wire.answers)
        self._report(node.index, entries, NodeError(node.name, cause, lost=True), None)
        wire.answers.clear()

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
        refusal = (node, hint_of(text) or text)
        if refusal in self._refusals or len(self._refusals) >= MOST_REFUSALS:
            return False
        self._refusals.add(refusal)
        return True

    def hand_on_mail(self) -> None:
        """Tell handlers of connections that broke, where that is still due. Never waits."""
        if self._mail:
            self._deliver_mail()

    def _deliver_mail(self) -> None:
        while self._mail and self._reading.run(self._deliver):
            pass  # once more: some may have come as the turn ended

    def _deliver(self) -> None:
        while self._mail:
            # kept until it is delivered: an exception from outside must lose no release
            mail = index, entries, error, wire = self._mail[0]
            if wire is not None:
                self._hand_on_answers(self.nodes[index], wire)  # those that somebody has read
                wire.close(reset=True)
                self._rearm()  # its descriptor is a stranger's from now on
            if index not in self._down and not self._closed:
                self._down.add(index)
                if not hint_of(error.cause) or self._is_news(index, error.cause):
                    self._changed(self.nodes[index], error)
            while entries:
                entry = entries[0]
                entry[0].handler.failed(index, entry[0], error)
                _take_out(entries, entry)
            _take_out(self._mail, mail)

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

    def _admit(self, index: int, greeting: Greeting, use: Callable[[], None]) -> None:
        """Let a connection be used, unless its vote would count though it must not."""
        self._refuse_same_server(index, greeting.run_id)
        # in the turn: no vote is counted between the look at tenures and what follows
        for number in range(PAUSES):
            if number:
                self._platform.pause(PAUSE)
            if self._reading.run(self._let_in, index, greeting, use):
                break
        else:
            raise NodeError(self.nodes[index].name, BUSY)  # and connected anew
        if self._mail:
            self._deliver_mail()
        self._greeted(self.nodes[index], greeting)

    def _let_in(self, index: int, greeting: Greeting, use: Callable[[], None]) -> None:
        if greeting.notes is not None:
            self._learn(index, greeting.notes)
            if self._tenures.ended(index, greeting.notes.own):
                raise NodeError(self.nodes[index].name, REPLACED)
        use()
        self._introduce()

    def _learn(self, index: int, notes: Notes) -> None:
        """Learn who serves where, and give up connections to servers that were replaced."""
        self._tenures.learn(index, notes.own)
        for other, tenure in zip(self._tenures.others(index), notes.others, strict=True):
            self._tenures.learn(other, tenure)
        for node in self.nodes:
            wire = node.wire
            if wire is not None and self._tenures.ended(node.index, wire.tenure):
                self._give_up(node, wire)

    def _give_up(self, node: Node, wire: Wire) -> None:
        """Drop a connection with the votes that came by it: its server has missed others' locks.

        On the next connection that server is told, and is silent.
        """
        wire.is_replaced = True  # first: another thread may have its turn, and the drop wait
        self.replaced_at[node.index] = self.clock.now()
        self._lose_answers(node, wire, REPLACED)
        self._replaced(node.index)
        node.drop(wire, REPLACED)

    def _introduce(self, every: float = math.inf) -> None:
        """Exchange tenures with each connected node that lacks one, or after so many s."""
        now = self.clock.now()
        for node in self.nodes:
            wire, told = node.wire, self._tenures.words(node.index)
            if wire is None or not wire.run_id or self._guard.word == "off":
                continue
            # one that could note nothing, read-only or full, is asked again after a while
            is_told = wire.tenure is None or wire.told == told
            if is_told and now - wire.told_at <= every:
                continue
            wire.told, wire.told_at = told, now
            keys = noted_keys(self._guard.prefix, self._tenures, node.index)
            request = GUARD.call(keys, *wire.arguments, *told)
            node.send([(Command(request, Introduction(self._heard, told), GUARD), now, request)])

    def _heard(self, index: int, notes: Notes, run_id: str) -> None:
        wire = self.nodes[index].wire
        if wire is not None and wire.run_id == run_id:
            wire.tenure = notes.own
        self._learn(index, notes)
        self._introduce()

    def _refuse_same_server(self, index: int, run_id: str) -> None:
        """Refuse a second connection to one server: its one vote would count twice."""
        other = self._servers.setdefault(run_id, index) if run_id else index
        if other != index and self.nodes[other].run_id not in ("", run_id):
            other = self._servers[run_id] = index  # the other one is elsewhere by now
        if other != index:
            name, first = self.nodes[index].name, self.nodes[other].name
            self.same_server = (first, name)
            raise NodeError(name, f"is the same server as {first}")
        if self.same_server is not None and self.nodes[index].name in self.same_server:
            self.same_server = None  # its name leads to a server of its own again

    def connect(self, until: float) -> set[int]:
        """Connect to every node; returns those that answer by the monotonic second `until`."""
        pinged = Question(range(len(self.nodes)), lambda reply: reply)
        self.broadcast(Command(PING, pinged), self.clock.now())
        self.wait(pinged, until)
        return set(pinged.replies)

    def close(self) -> None:
        """Close every connection for good."""
        self._closed = True
        for node in self.nodes:
            node.close()
