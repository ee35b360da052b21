"""Commands to all nodes: write to each, then poll all of them until a round is decided.

Only `wait` blocks. Its callers poll, or look now and then. A caller that finds data calls the
handlers of all replies, so no caller depends on another one. That is one turn; nothing in it waits.
A reply stays with its connection until its handler has returned, so a handler may get it twice.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.threads import TURN_TRIES
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import (
    IGNORE_REPLY,
    PING,
    Command,
    Entry,
    IgnoreReply,
    Question,
    Round,
    Script,
    UnexpectedReplyError,
)
from celery_redlock.lock.transport.connection import CLOSED_BY_TIMEOUT, Connection, connect_budget
from celery_redlock.lock.transport.node import (
    ENDED_IDLE,
    IDLE_TOO_LONG,
    MAX_RECONNECT_PAUSE,
    Gate,
    Mailbox,
    Node,
    Report,
)
from celery_redlock.lock.transport.poller import MAX_DOZE, PollerPool

T = TypeVar("T")

_jobs_of = operator.attrgetter("jobs.pending")
RESEND_ERRORS = re.compile("NOSCRIPT|TRYAGAIN")  # errors after which a script is sent again
LOOKS_WITH_GIL = 15  # of `wait_keeping_gil`
PAUSE_WITH_GIL = 0.0002  # seconds between two of them
CONTENDED_AFTER = 0.003  # seconds: a broadcast that takes longer has waited for the GIL
CONTENDED_FOR = 1.0  # seconds until a broadcast gives it up again, to see whether it waits


class Nodes:
    """The connections of one process to some nodes: broadcast, query, wait.

    all: the nodes, by index. quorum: number of replies that make a round useful. timeout,
    longest_idle: as in `Node`. reading: the turn in which replies are read and handled. mail: the
    broken connections that are not reported yet.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        timeout: float,
        platform: Platform,
        gate: Gate,
        *,
        quorum: int,
        longest_idle: float = math.inf,
    ) -> None:
        self._platform = platform
        self.clock = platform.clock
        self._gate = gate
        self.timeout = timeout
        self.quorum = quorum
        self.pollers = PollerPool(platform)
        self._mailbox = Mailbox(self.pollers.rearm)
        self.mail = self._mailbox.reports
        self.all = [
            Node(index, address, timeout, longest_idle, platform, self._mailbox, gate)
            for index, address in enumerate(addresses)
        ]
        self.forget()

    def forget(self) -> None:
        """Reset after a fork: connections, waiters and turns stay with the parent."""
        for node in self.all:
            node.forget()
        self.pollers.forget()
        self.mail.clear()
        self.reading = self._platform.try_lock()
        self._down: set[int] = set()
        self._closed = False
        self._is_contended = False
        self._contended_until = -math.inf  # monotonic seconds

    # commands

    def reconnect(self) -> bool:
        """Begin to connect to every node without a connection; return whether there is any."""
        unconnected = [node for node in self.all if node.connection is None]
        for node in unconnected:
            node.connect()
        return bool(unconnected)

    @property
    def outstanding(self) -> bool:
        """Whether a command has no reply, or a broken connection is not reported yet."""
        return bool(self.mail) or any(node.outstanding for node in self.all)

    def broadcast(self, command: Command, sent_at: float) -> None:
        """Write one command to every node. Never waits.

        sent_at: monotonic seconds, read before this call and before any time in the request.
        Python's own calls release the GIL and wait for it again: beside a thread that computes,
        5 ms for each node. If that has happened, this and the next `wait` keep it for a while.
        """
        entries = ((command, sent_at, command.request),)
        # by position: a keyword costs each of these calls a tenth more
        keeps_gil = self._is_contended = sent_at < self._contended_until
        for node in self.all:
            connection = node.connection
            # read here as well, as most nodes have replied to everything
            if connection is not None and connection.in_flight and node.overdue(sent_at):
                self.drain()  # before the node is dropped: the reply may be unread in the socket
            node.send(entries, keeps_gil)
        if not keeps_gil and self.clock.now() - sent_at > CONTENDED_AFTER:
            self._is_contended = True
            self._contended_until = sent_at + CONTENDED_FOR

    def scatter(self, entries: Sequence[Sequence[Entry]], sent_at: float) -> None:
        """Write to each node its own entries, in one batch. Never waits."""
        for node, node_entries in zip(self.all, entries, strict=True):
            if node.overdue(sent_at):
                self.drain()
            if node_entries:
                node.send(node_entries)

    def send_to(self, node: int, command: Command, sent_at: float | None = None) -> None:
        """Write one command to one node. sent_at: monotonic seconds of its first try."""
        written_at = self.clock.now() if sent_at is None else sent_at
        self.all[node].send([(command, written_at, command.request)])

    def query(
        self,
        request: bytes,
        read: Callable[[Any], T],
        *,
        nodes: Collection[int] | None = None,
        script: Script | None = None,
    ) -> Mapping[int, T]:
        """Return the replies that come within one node timeout, by node. Errors are left out.

        Waits longer if it has to connect to so many nodes that fewer than the quorum could reply.
        read: as in `Question`. nodes: indexes; None for all. script: that of the request.
        """
        indexes = range(len(self.all)) if nodes is None else nodes
        sent_at = self.clock.now()
        question = Question(indexes, read)
        entries = [(Command(request, question, script), sent_at, request)]
        self.scatter([entries if node.index in indexes else () for node in self.all], sent_at)
        if indexes:
            self.wait(question, sent_at + self.timeout)
            self.wait_for_connects(question, sent_at)
        replies = question.replies.items()
        return {node: reply for node, reply in replies if type(reply) is not hiredis.ReplyError}

    def wait(self, round_: Round, until: float, *, native: bool = False) -> None:
        """Return when a round is decided, or at the monotonic second `until`.

        Replies that have come by then count, even if the process was paused meanwhile. Returns at
        once if the round cannot be decided: the caller is a finalizer or a signal handler, and
        it has interrupted its own thread. That thread was reading replies, or it was writing to so
        many nodes that the others are no quorum. native: whether the caller is a real thread, also
        if greenlets are in use. A native caller reads all nodes each time, because next to code
        that keeps the GIL it may not run again soon.
        """
        if (self.reading.taken or any(map(_jobs_of, self.all))) and self._is_cut_off:
            return
        keeps_gil = native or self._is_contended
        pollers = self.pollers
        poller = pollers.take(native=native) or pollers.wait_for_one(
            round_,
            until,
            functools.partial(self.read, self.all, keeps_gil=keeps_gil),
            native=native,
        )
        if poller is None:
            return
        round_.wake = poller.wake
        try:
            if self.mail:
                self.report_broken()
            while True:
                poller.parked = True  # first: who sets `decided` reads this after, and wakes
                if round_.decided:
                    return
                remaining = until - self.clock.now()
                nodes = self.all
                try:
                    ready = poller.poll(nodes, pollers.topology, max(0.0, remaining))
                    nodes = nodes if native else ready
                except OSError:  # no descriptor is left for its poll object
                    pollers.doze(round_, min(remaining, MAX_DOZE), native=native)
                self.read(nodes, TURN_TRIES if remaining <= 0 else 2, keeps_gil=keeps_gil)
                if remaining <= 0:  # read once more, but other callers' replies must not delay it
                    return
        finally:
            round_.wake = None
            # pop first: an exception may strike at the next call. In a child that was forked
            # meanwhile it is not taken, and has the parent's descriptors
            own_poller = pollers.taken.pop(id(poller), None)
            if own_poller is not None:
                pollers.put_back(poller)

    def wait_for_connects(
        self, round_: Round, sent_at: float, *, max_seconds: float = math.inf, needed: int = 0
    ) -> None:
        """Continue `wait` for nodes that are being connected to, within the budget of a connect.

        sent_at: monotonic seconds of the request. max_seconds: the longest wait since then. needed:
        number of votes that end it; 0 for a quorum. So an unreachable node delays no caller if the
        others reply.
        """
        until = sent_at + min(connect_budget(self.timeout), max_seconds)
        end = 0.0
        while not round_.decided and round_.voted < (needed or self.quorum):
            now = self.clock.now()
            latest = min(until, max(node.awaited_until for node in self.all))
            if now < end or latest <= now:  # the former: `wait` returned, the round cannot end
                return
            end = min(latest, now + self.timeout)
            self.wait(round_, end)

    def wait_keeping_gil(self, round_: Round) -> None:
        """Return when a round is decided, or after a few ms in which no other Python thread runs.

        For a caller that waited for the GIL because of C code: if it released the GIL, it would
        wait as long again. Nearby nodes reply by then. Python lets a thread keep the GIL for 5 ms.
        """
        for _ in range(LOOKS_WITH_GIL):
            self.read(self.all)
            if round_.decided:
                return
            self._platform.pause_keeping_gil(PAUSE_WITH_GIL)

    @property
    def _is_cut_off(self) -> bool:
        """Whether the caller interrupts its own thread, so that no round could end."""
        if self.reading.is_interrupted:
            return True
        interrupted = [node for node in self.all if node.jobs.lock.is_interrupted]
        return len(interrupted) > len(self.all) - self.quorum

    def connect(self, until: float) -> set[int]:
        """Return the nodes that answer by then; waits longer if no connect has failed yet."""
        pinged = Question(range(len(self.all)), lambda reply: reply)
        sent_at = self.clock.now()
        self.broadcast(Command(PING, pinged), sent_at)
        self.wait(pinged, until)
        self.wait_for_connects(pinged, sent_at, needed=len(self.all))
        return set(pinged.replies)

    def flush(self, nodes: Sequence[int], until: float) -> None:
        """Return when these nodes have answered all they were sent, or failed, or at `until`.

        Each without a connection is connected to. One that answers a PING has answered all before.
        """
        pinged = Question(nodes, lambda reply: reply)
        for index in nodes:
            if self.all[index].connection is None and self.clock.now() < until:
                self.all[index].connect_at_end()
            self.send_to(index, Command(PING, pinged))
        self.wait(pinged, until)

    def close(self) -> None:
        self._closed = True
        for node in self.all:
            node.close()

    def drain(self) -> None:
        """Read from all nodes, and drop connections with an overdue reply. Never waits."""
        now = self.clock.now()  # before reading: a reply may have come while the process was paused
        for node in self.all:
            node.jobs.go_on()
        if self.read(self.all, TURN_TRIES):
            for node in self.all:
                connection = node.connection
                if connection is not None and node.overdue(now):
                    node.drop(connection, f"no answer within {self.timeout:g} s")
            self.report_broken()

    def read(self, nodes: Sequence[Node], tries: int = 1, *, keeps_gil: bool = True) -> bool:
        """Read and handle replies; return False if other threads had the turn at each try."""
        if not nodes and not self.mail:
            return True
        if not self.reading.run_within(tries, self._dispatch_all, nodes, keeps_gil):
            return False
        if self.mail:
            self.report_broken()
        return True

    def _dispatch_all(self, nodes: Sequence[Node], keeps_gil: bool) -> None:
        try:
            if self.mail:
                self._deliver()  # first: a later command may follow on the next connection
            self._dispatch_each(nodes, keeps_gil)  # without a loop here: see `JobQueue.go_on`
        except BaseException:
            self.pollers.rearm()  # a waiting caller continues what was interrupted
            raise

    def _dispatch_each(self, nodes: Sequence[Node], keeps_gil: bool) -> None:
        for node in nodes:
            connection = node.receive(keeps_gil)
            if connection is None:
                continue
            error = self._dispatch_replies(node, connection)
            if error and self.clock.now() - connection.opened_at > MAX_RECONNECT_PAUSE:
                node.drop(connection, error)  # the address may lead to another server by now
            if self._down and node.index in self._down and node.connection is not None:
                self._down.discard(node.index)
                self._gate.up(node)

    def _dispatch_replies(self, node: Node, connection: Connection) -> str:
        """Call the handlers of all replies that a connection has read.

        Returns the error reply that requires a reconnect; "" if there is none. If an asynchronous
        exception interrupts a handler, the handler gets the reply again. After a second exception
        at the same reply, which may be the handler's own, the reply is dropped.
        """
        replies = connection.replies
        index = node.index
        run_id = connection.run_id
        reconnect_error = ""
        if connection.discarded and replies:
            self.lose_replies(node, connection, connection.discarded)
        try:
            while replies:
                pending = replies[0]
                entry, reply = pending
                command, sent_at, request = entry
                if type(reply) is not hiredis.ReplyError:
                    command.handler.on_reply(index, sent_at, reply, run_id)
                elif (
                    command.script
                    and request is command.request
                    and RESEND_ERRORS.match(str(reply))
                ):
                    self._send_source(node, command.script, command, sent_at)
                else:
                    error_text = self._dispatch_error(node, entry, reply, run_id)
                    reconnect_error = error_text or reconnect_error
                # a handler may give the connection up, which clears the replies
                if replies and replies[0] is pending:
                    replies.popleft()
        except UnexpectedReplyError as error:
            # the replies do not fit their commands, so no later reply counts
            self.lose_replies(node, connection, str(error))
            node.drop(connection, str(error))
        except BaseException:
            if replies and connection.interrupted_reply is replies[0]:
                replies.popleft()
            elif replies:
                connection.interrupted_reply = replies[0]
            raise
        return reconnect_error

    def _dispatch_error(self, node: Node, entry: Entry, reply: Any, run_id: str) -> str:
        """As `_dispatch_replies`, for one error reply."""
        command, sent_at, _ = entry
        is_hint = isinstance(command.handler, IgnoreReply)  # costs no vote
        is_demoted = not is_hint and self._gate.error_reply(node, str(reply))
        command.handler.on_reply(node.index, sent_at, reply, run_id)
        return str(reply) if is_demoted else ""

    def lose_replies(self, node: Node, connection: Connection, cause: str) -> None:
        """Report the replies that are not handled yet as lost."""
        entries = deque(entry for entry, _ in connection.replies)
        error = NodeError(node.name, cause, lost=True)
        self._mailbox.put(Report(node.index, entries, error, None))
        connection.replies.clear()

    def _send_source(self, node: Node, script: Script, command: Command, sent_at: float) -> None:
        """Send a request again, once, with the source of its script.

        A server has forgotten the script, after a flush or a restart; or it has changed nothing, as
        another client was at the same key.
        """
        request = script.with_source(command.request)
        resent = command
        if not command.handler.wanted:  # else a node that replies last would never get the script
            request = script.load
            resent = Command(script.load, IGNORE_REPLY)
        node.send([(resent, sent_at if command.dated else self.clock.now(), request)])

    def report_broken(self) -> None:
        """Call the handlers of commands whose connection broke. Never waits."""
        while self.mail and self.reading.run(self._deliver):
            pass  # again: a report may have been queued as the turn ended

    def _deliver(self) -> None:
        while self.mail:
            # kept until it is delivered: an asynchronous exception must lose no command
            index, entries, error, connection = self.mail[0]
            if connection is not None:
                self._dispatch_replies(self.all[index], connection)  # replies read before
                connection.close(reset=True)
                self.pollers.rearm()  # another file may get its descriptor number now
            # an idle connection has not failed: a connect follows, and may report more
            is_idle = error.cause == ENDED_IDLE and not entries
            if is_idle or error.cause in (IDLE_TOO_LONG, CLOSED_BY_TIMEOUT):
                self.all[index].connect()
            elif not self._closed:
                was_down = index in self._down
                self._down.add(index)
                self._gate.down(self.all[index], error, was_down)
            while entries:
                entry = entries[0]
                entry[0].handler.on_error(index, entry[0], error)
                entries.popleft()
            self.mail.popleft()
