"""Commands to all nodes: write to each, then poll all of them until a round is decided.

Only `wait` blocks. Its callers poll, or look now and then. A caller that finds data calls the
handlers of all replies, so no caller depends on another one. That is one turn; nothing in it waits.
A reply stays with its connection until its handler has returned, so a handler may get it twice.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import (
    IGNORE_REPLY,
    PING,
    Command,
    Entry,
    Question,
    Round,
    Script,
)
from celery_redlock.lock.transport.connection import (
    Connection,
    Peer,
    TransportOptions,
    connect_budget,
)
from celery_redlock.lock.transport.encoding import UnexpectedReplyError
from celery_redlock.lock.transport.node_client import (
    IDLE,
    LONGEST_RECONNECT,
    PAUSE,
    PAUSES,
    NodeClient,
)
from celery_redlock.lock.transport.poller import LONGEST_DOZE, PollerPool

T = TypeVar("T")
P = TypeVar("P", bound=Peer)

_jobs_of = operator.attrgetter("jobs")
LOOKS, LOOK = 15, 0.0002  # how often, and every how many seconds, `wait_keeping_gil` reads


class NodeSet(Generic[P]):
    """The connections of one process to some nodes: broadcast, query, wait.

    A subclass may override `handshake`, `admit`, `on_error_reply`, `on_down`, `on_still_down`,
    `reset` and `keep_alive`. on_change: called as (node, error) when a node stops answering, and as
    (node, None) when the node answers again; must not wait. needed: number of replies that make a
    round useful.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        options: TransportOptions,
        platform: Platform,
        on_change: Callable[[NodeClient, NodeError | None], None],
    ) -> None:
        self._platform, self.clock, self.timeout = platform, platform.clock, options.timeout
        self._on_change = on_change
        self.nodes = [
            NodeClient(index, address, options, platform, self)
            for index, address in enumerate(addresses)
        ]
        self.needed = len(self.nodes)
        self.reset()

    def forget(self) -> None:
        """Reset after a fork: connections, waiters and turns stay with the parent."""
        for node in self.nodes:
            node.forget()
        self.reset()

    def reset(self) -> None:
        """Forget every connection, waiter and turn. An override calls this, too."""
        self._reading = self._platform.try_lock()
        self.pollers = PollerPool(self._platform)
        self._mail: deque[tuple[int, deque[Entry], NodeError, Connection | None]] = deque()
        self._down: set[int] = set()
        self._closed = False

    # what a subclass may override

    def handshake(self, connection: Any, node: int) -> P:
        """Return the `Peer` of a new connection, before any command is written.

        connection: a result of `Address.dial`. May wait. Raises an error to refuse the connection.
        """
        return cast("P", Peer())

    def admit(self, node: int, info: P, use: Callable[[], None]) -> None:
        """Call `use` to let a connection be used, or raise NodeError to refuse it.

        info: what `handshake` returned.
        """
        use()

    def on_error_reply(self, node: NodeClient, text: str) -> bool:
        """Take note of an error reply; called before the command's handler.

        Return whether to reconnect, because the address may lead to another server by now.
        """
        return False

    def on_down(self, node: NodeClient, error: NodeError) -> None:
        """Take note that a node stopped answering. Called once until the node answers again."""
        self._on_change(node, error)

    def on_still_down(self, node: NodeClient, error: NodeError) -> None:
        """Take note of the error of another try to reach a node."""

    # commands

    def reconnect(self) -> bool:
        """Begin to connect to every node without a connection; return whether there is any."""
        gone = [node for node in self.nodes if node.connection is None]
        for node in gone:
            node.connect()
        return bool(gone)

    @property
    def outstanding(self) -> bool:
        """Whether a command has no reply, or a broken connection is not reported yet."""
        return bool(self._mail) or any(node.outstanding for node in self.nodes)

    def broadcast(self, command: Command, sent: float) -> None:
        """Write one command to every node. Never waits.

        sent: monotonic seconds, read before this call and before any time in the request.
        """
        entries = ((command, sent, command.request),)
        for node in self.nodes:
            if node.overdue(sent):
                self.drain()  # before the node is dropped: the reply may be unread in the socket
            node.send(entries, keeps_gil=False)

    def scatter(self, entries: Sequence[Sequence[Entry]], sent: float) -> None:
        """Write to each node its own entries, in one batch. Never waits."""
        for node, own in zip(self.nodes, entries, strict=True):
            if node.overdue(sent):
                self.drain()
            if own:
                node.send(own)

    def send_to(self, node: int, command: Command, sent: float | None = None) -> None:
        """Write one command to one node. sent: monotonic seconds of its first try."""
        sent = self.clock.now() if sent is None else sent
        self.nodes[node].send([(command, sent, command.request)])

    def query(
        self,
        request: bytes,
        read: Callable[[Any], T],
        *,
        nodes: Collection[int] | None = None,
        script: Script | None = None,
    ) -> Mapping[int, T]:
        """Return the replies that come within one node timeout, by node. Errors are left out.

        Waits longer if it has to connect to so many nodes that fewer than `needed` could reply.
        read: as in `Question`. nodes: indexes; None for all. script: that of the request.
        """
        asked, sent = range(len(self.nodes)) if nodes is None else nodes, self.clock.now()
        question = Question(asked, read)
        command = Command(request, question, script)
        if nodes is None:
            self.broadcast(command, sent)
        for node in nodes or ():
            self.send_to(node, command, sent)
        if asked:
            self.wait(question, sent + self.timeout)
            self.wait_for_connects(question, sent)
        replies = question.replies.items()
        return {node: reply for node, reply in replies if type(reply) is not hiredis.ReplyError}

    def keep_alive(self, idle: float) -> None:
        """Send PING to every node without a write for this many seconds."""
        now = self.clock.now()
        for node in self.nodes:
            connection = node.connection
            if connection is not None and now - connection.used_at > idle:
                node.send([(Command(PING, IGNORE_REPLY), now, PING)])

    def wait(self, round_: Round, until: float, *, native: bool = False) -> None:
        """Return when a round is decided, or at the monotonic second `until`.

        Replies that have come by then count, even if the process was paused meanwhile. Returns at
        once if the round cannot end: in a finalizer or a signal handler that interrupted its own
        thread as that read, or wrote to so many nodes that fewer than `needed` are left. native: a
        real thread, also if greenlets are in use. It reads all nodes each time: next to code that
        keeps the GIL it may not run again soon.
        """
        if (self._reading.taken or any(map(_jobs_of, self.nodes))) and self._is_cut_off:
            return
        pollers = self.pollers
        poller = pollers.take(native=native) or pollers.wait_for_one(
            round_, until, functools.partial(self.read, self.nodes, keeps_gil=native), native=native
        )
        if poller is None:
            return
        round_.wake = poller.wake
        try:
            if self._mail:
                self.hand_on_mail()
            while True:
                poller.parked = True  # first: who sets `decided` reads this after, and wakes
                if round_.decided:
                    return
                left = until - self.clock.now()
                nodes = self.nodes
                try:
                    ready = poller.poll(nodes, pollers.topology, max(0.0, left))
                    nodes = nodes if native else ready
                except OSError:  # no descriptor is left for its poll object
                    pollers.doze(round_, min(left, LONGEST_DOZE), native=native)
                self.read(nodes, PAUSES if left <= 0 else 2, keeps_gil=native)
                if left <= 0:  # the last look: other callers' replies must not delay the return
                    return
        finally:
            round_.wake = None
            pollers.taken.pop(id(poller), None)  # first: an exception may strike at the next call
            pollers.put_back(poller)

    def wait_for_connects(
        self, round_: Round, sent: float, *, longest: float = math.inf, needed: int = 0
    ) -> None:
        """After `wait`, wait on for nodes that are being connected to, within a connect's budget.

        sent: monotonic seconds. longest: seconds since then. needed: how many votes are enough; 0:
        as many as `self.needed`. So a node that is away delays nobody if the others answer.
        """
        until, end = sent + min(connect_budget(self.timeout), longest), 0.0
        while not round_.decided and round_.voted < (needed or self.needed):
            now = self.clock.now()
            latest = min(until, max(node.awaited_until for node in self.nodes))
            if now < end or latest <= now:  # the former: `wait` returned, the round cannot end
                return
            end = min(latest, now + self.timeout)
            self.wait(round_, end)

    def wait_keeping_gil(self, round_: Round) -> None:
        """Return when a round is decided, or after a few ms in which no other Python thread runs.

        For a caller that waited for the GIL because of C code. If the caller released the GIL, it
        would wait as long again. Nearby nodes reply within this time. Python itself lets a thread
        keep the GIL for 5 ms.
        """
        for _ in range(LOOKS):
            self.read(self.nodes)
            if round_.decided:
                return
            self._platform.pause_keeping_gil(LOOK)

    @property
    def _is_cut_off(self) -> bool:
        """Whether the caller interrupts its own thread, so that no round could end."""
        if self._reading.is_interrupted:
            return True
        return len([n for n in self.nodes if n.is_interrupted]) > len(self.nodes) - self.needed

    def connect(self, until: float) -> set[int]:
        """Connect to every node; return those that answer by the monotonic second `until`.

        Waits longer for nodes that no connect has failed to yet.
        """
        pinged = Question(range(len(self.nodes)), lambda reply: reply)
        sent = self.clock.now()
        self.broadcast(Command(PING, pinged), sent)
        self.wait(pinged, until)
        self.wait_for_connects(pinged, sent, needed=len(self.nodes))
        return set(pinged.replies)

    def close(self) -> None:
        """Close every connection for ever."""
        self._closed = True
        for node in self.nodes:
            node.close()

    def run_in_turn(self, work: Callable[..., object], *arguments: object) -> bool:
        """Call a function in the turn of reading; return False if the turn stays taken."""
        for number in range(PAUSES):
            if number:
                self._platform.pause(PAUSE)
            if self._reading.run(work, *arguments):
                return True
        return False

    def read_from(self, nodes: Iterable[int]) -> None:
        """Read the replies of some nodes, by index. Never waits."""
        self.read([self.nodes[node] for node in nodes])

    def drain(self) -> None:
        """Read from all nodes, and drop connections with an overdue reply. Never waits."""
        now = self.clock.now()  # before reading: a reply may have come while the process was paused
        for node in self.nodes:
            node.go_on()
        if self.read(self.nodes, PAUSES):
            for node in self.nodes:
                connection = node.connection
                if connection is not None and node.overdue(now):
                    node.drop(connection, f"no answer within {self.timeout:g} s")
            self.hand_on_mail()

    def read(self, nodes: Sequence[NodeClient], tries: int = 1, *, keeps_gil: bool = True) -> bool:
        """Read and handle replies; return False if other threads had the turn at each try."""
        if not nodes and not self._mail:
            return True
        for number in range(tries):
            if number:
                self._platform.pause(PAUSE)
            reading = self._reading
            if reading.run(self._hand_on_all, nodes, keeps_gil):
                if self._mail:
                    self.hand_on_mail()
                return True
            if reading.is_interrupted:
                return False
        return False

    def _hand_on_all(self, nodes: Sequence[NodeClient], keeps_gil: bool) -> None:
        try:
            if self._mail:
                self._deliver()  # first: a later command may follow on the next connection
            for node in nodes:
                self._hand_on(node, keeps_gil=keeps_gil)
        except BaseException:
            self.rearm()  # a waiting caller continues what was interrupted
            raise

    def _hand_on(self, node: NodeClient, *, keeps_gil: bool) -> None:
        connection = node.receive(keeps_gil=keeps_gil)
        if connection is None:
            return
        demoted = self._hand_on_answers(node, connection)
        if demoted and self.clock.now() - connection.opened_at > LONGEST_RECONNECT:
            node.drop(connection, demoted)  # the address may lead to another server by now
        if node.index in self._down and node.connection is not None:
            self._down.discard(node.index)
            self._on_change(node, None)

    def _hand_on_answers(self, node: NodeClient, connection: Connection) -> str:
        """Call the handlers of replies; return the error that requires a reconnect, else "".

        A reply is removed after its handler has returned. If an asynchronous exception interrupts
        the handler, it is called again. A second exception is taken for the handler's own.
        """
        answers, index, run_id, demoted = connection.answers, node.index, connection.run_id, ""
        if connection.discarded and answers:
            self.lose_answers(node, connection, connection.discarded)
        try:
            while answers:
                found = (command, sent, text), reply = answers[0]
                if type(reply) is not hiredis.ReplyError:
                    command.handler.on_reply(index, sent, reply, run_id)
                elif text is command.request and str(reply).startswith("NOSCRIPT"):
                    self._send_source(node, command, sent)
                else:
                    demoted = self._hand_on_error(node, found[0], reply, run_id) or demoted
                if answers and answers[0] is found:  # otherwise the connection was given up
                    answers.popleft()
        except UnexpectedReplyError as error:
            # no later reply counts: these do not fit their commands
            self.lose_answers(node, connection, str(error))
            node.drop(connection, str(error))
        except BaseException:
            if answers and connection.struck is answers[0]:
                answers.popleft()
            elif answers:
                connection.struck = answers[0]
            raise
        return demoted

    def _hand_on_error(self, node: NodeClient, entry: Entry, reply: Any, run_id: str) -> str:
        """Call a handler with an error reply; return its text if the node must be reconnected."""
        command, sent, _ = entry
        text = str(reply)
        is_hint = command.handler is IGNORE_REPLY  # costs no vote
        demoted = text if not is_hint and self.on_error_reply(node, text) else ""
        command.handler.on_reply(node.index, sent, reply, run_id)
        return demoted

    def lose_answers(self, node: NodeClient, connection: Connection, cause: str) -> None:
        """Report the replies that are not handled yet as lost. None of them counts."""
        entries = deque(entry for entry, _ in connection.answers)
        self.report(node.index, entries, NodeError(node.name, cause, lost=True), None)
        connection.answers.clear()

    def _send_source(self, node: NodeClient, command: Command, sent: float) -> None:
        """Send the source of a script that a server has forgotten, after a flush or a restart."""
        script = command.script
        if script is None:
            return
        if not command.dated:
            sent = self.clock.now()
        if command.handler.wanted:
            node.send([(command, sent, script.with_source(command.request))])
        else:  # otherwise a node that always replies last would never get the script again
            node.send([(Command(script.load, IGNORE_REPLY), sent, script.load)])

    def hand_on_mail(self) -> None:
        """Call the handlers of commands whose connection broke. Never waits."""
        while self._mail and self._reading.run(self._deliver):
            pass  # again: a report may have been queued as the turn ended

    def _deliver(self) -> None:
        while self._mail:
            # kept until it is delivered: an asynchronous exception must lose no command
            index, entries, error, connection = self._mail[0]
            if connection is not None:
                self._hand_on_answers(self.nodes[index], connection)  # replies read before
                connection.close(reset=True)
                self.rearm()  # another file may get its descriptor number now
            if error.cause != IDLE:  # else nothing failed: a connect follows, and may report more
                self._note_down(index, error)
            while entries:
                entry = entries[0]
                entry[0].handler.on_error(index, entry[0], error)
                entries.popleft()
            self._mail.popleft()

    def _note_down(self, index: int, error: NodeError) -> None:
        if self._closed:
            return
        if index in self._down:
            self.on_still_down(self.nodes[index], error)
        else:
            self._down.add(index)
            self.on_down(self.nodes[index], error)

    def report(
        self, node: int, entries: deque[Entry], error: NodeError, connection: Connection | None
    ) -> None:
        """Queue a broken connection for the next turn of reading. Any thread may call this."""
        self._mail.append((node, entries, error, connection))
        self.rearm()

    def rearm(self) -> None:
        """Make every waiter look at the connections again."""
        self.pollers.rearm()
