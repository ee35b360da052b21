"""A node and its connection: one ordered connection, replaced when it breaks.

On one ordered connection, no command overtakes an earlier one.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.backoff import ExponentialBackoff

from celery_redlock.errors import NodeError
from celery_redlock.label import escaped
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.threads import TURN_TRIES, DeadlineTimer, JobQueue, call_with
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import Entry
from celery_redlock.lock.transport.connection import Connection, GarbledError, Peer, connect_budget

MAX_RECONNECT_PAUSE = 1.0  # seconds between two tries to reach a node
RECONNECT_BACKOFF = ExponentialBackoff(cap=MAX_RECONNECT_PAUSE, base=0.05)
CONNECTION_BUSY = "another thread was at its connection for too long"
# causes that are no failure of the node
IDLE_TOO_LONG = "idle for too long: another server may have answered meanwhile"
ENDED_IDLE = "closed by the server while no command waited"
UNREAD_LIMIT = 1.0  # seconds without a write, after which a connection may be at its end
MAX_CAUSE_LENGTH = 500  # characters of an error that are kept
CONNECTOR_IDLE_LIMIT = 30.0  # seconds that the connecting thread waits for its next use


@dataclass(frozen=True)
class Gate:
    """Which connections are used, and who hears of the nodes. Any thread may call each function.

    handshake: returns the `Peer` of a result of `Address.dial` to a node, before any command is
    written, or raises an error to refuse it. May wait. admit: gets this `Peer`; calls the function
    that lets the connection be used, or raises NodeError to refuse it. error_reply: hears of an
    error reply before its handler does; returns whether to reconnect, because the address may lead
    to another server by now. down: hears of a node's error, and whether the node was down before.
    up: hears that the node answers again. The last three may not wait.
    """

    handshake: Callable[[Any, int], Peer]
    admit: Callable[[int, Any, Callable[[], None]], None]
    error_reply: Callable[[Node, str], bool]
    down: Callable[[Node, NodeError, bool], None]
    up: Callable[[Node], None]


class Report(NamedTuple):
    """A connection that broke or could not be made."""

    node: int
    entries: deque[Entry]  # the commands that get no reply
    error: NodeError
    connection: Connection | None  # to be closed in the turn of reading


class Mailbox:
    """The reports of all nodes, for the next turn of reading.

    rearm: makes every waiter look at the connections again, because one has changed.
    """

    def __init__(self, rearm: Callable[[], None]) -> None:
        self.rearm = rearm
        self.reports = deque[Report]()

    def put(self, report: Report) -> None:
        self.reports.append(report)
        self.rearm()


class Node:
    """The one ordered connection of this process to one node, replaced when it breaks.

    Every change of the connection is one of its `jobs`, and no caller waits. index: position in the
    list of nodes. name: without credentials. timeout: seconds for a reply. longest_idle: a
    connection without a write for so many seconds is replaced before it is used again.
    """

    def __init__(
        self,
        index: int,
        address: Address,
        timeout: float,
        longest_idle: float,
        platform: Platform,
        mailbox: Mailbox,
        gate: Gate,
    ) -> None:
        self.index = index
        self.address = address
        self.name = address.name
        self.timeout = timeout
        self.connect_budget = connect_budget(timeout)
        self._longest_idle = longest_idle
        self._unread_for = min(UNREAD_LIMIT, longest_idle)
        self._platform = platform
        self._clock = platform.clock
        self._mailbox = mailbox
        self._gate = gate
        self.forget()

    def forget(self) -> None:
        """Forget the connection after a fork: it belongs to the parent."""
        self.jobs = JobQueue(self._platform.try_lock(), self._mailbox.rearm)
        self.connection: Connection | None = None
        self.run_id = ""
        self.error: NodeError | None = None
        self._connecting = self._closed = False
        self._connector: DeadlineTimer | None = None  # of the connecting thread, if it runs
        # connects that failed, and connections without an answer in time, since the last connect
        self._failures = 0
        self._retry_at = 0.0
        self._connect_by = 0.0  # monotonic seconds until which callers wait for the connect
        self._queued: list[Entry] = []
        self._cancellers = deque[Callable[[], None]]()  # of overdue connections

    @property
    def outstanding(self) -> bool:
        """Whether a command waits for its reply, a reply for its handler, or a job for its turn."""
        connection = self.connection
        waits = connection is not None and (connection.in_flight or connection.replies)
        return bool(self._queued or self.jobs.pending or waits)

    @property
    def is_used(self) -> bool:
        return self.connection is not None or self._connector is not None

    def send(self, entries: Sequence[Entry], keeps_gil: bool = True) -> None:
        """Write commands that are wanted, or keep them for a connection that is being made.

        Never waits. Commands that cannot be written are reported. keeps_gil: do not release the GIL
        in the system call, so that C code in another thread cannot take it. It is a little slower.
        """
        jobs = self.jobs
        if jobs.pending or not jobs.lock.run_pair(self._write, entries, keeps_gil):
            jobs.pending.append(functools.partial(self._write, entries))
        if jobs.pending:
            jobs.go_on()

    def receive(self, keeps_gil: bool = True) -> Connection | None:
        """Return the connection, with what has come in its `replies`; None if there is none."""
        connection = self.connection
        if connection is None:
            return None
        try:
            if connection.is_tls:
                if not self.jobs.lock.run(functools.partial(connection.read, keeps_gil)):
                    return None
            else:
                connection.read(keeps_gil)
        except OSError as error:
            self.drop(connection, _cause_of(connection, error))
        if connection.write_buffer:
            self.jobs.do(self._flush)
        elif self.jobs.pending:
            self.jobs.go_on()
        return connection

    def overdue(self, now: float) -> bool:
        connection = self.connection
        if connection is None or not connection.in_flight:
            return False
        try:
            latest = now - self.timeout  # a command sent before that is overdue
            return connection.in_flight[0][1] < latest and connection.opened_at < latest
        except IndexError:  # another thread has read the reply meanwhile
            return False

    @property
    def awaited_until(self) -> float:
        """The monotonic second until which a caller waits for this node, as it is connected to.

        0 for a node that failed before: it costs no caller more than a node timeout.
        """
        connection = self.connection
        if connection is not None:
            return connection.opened_at + self.timeout
        is_awaited = self._connecting and not self._failures and not self._closed
        return self._connect_by if is_awaited else 0.0

    def drop(self, connection: Connection, cause: str) -> None:
        """Give a connection up, and report every command in flight."""
        self.jobs.do(functools.partial(self._give_up, connection, cause))

    def close(self) -> None:
        """Close the connection for ever. Commands in flight are not reported."""
        self.jobs.do(self._close)

    def connect(self) -> None:
        """Begin to connect in the background, unless connected or in backoff."""
        if self.connection is None and not self._connecting:
            self.jobs.do(self._start_connecting)

    def connect_at_end(self) -> None:
        """As `connect`, without a rest, for what is still to be sent; waits if it has no thread."""
        self.jobs.do(self._start_at_end)
        if self._connecting and self._connector is None:
            self._connect(self.timeout)

    # the jobs: each is idempotent, because an interrupted job is done again

    def _write(self, entries: Sequence[Entry], keeps_gil: bool = True) -> None:
        connection = self.connection
        wanted_entries = entries
        sent_at = entries[-1][1]
        if connection is not None and sent_at - connection.used_at > self._unread_for:
            connection = self._unless_ended(connection, sent_at)
        for entry in entries:
            if not entry[0].handler.wanted:
                wanted_entries = [entry for entry in entries if entry[0].handler.wanted]
                break
        if connection is not None:
            try:
                if wanted_entries:
                    connection.write(wanted_entries, keeps_gil)
                    connection.used_at = sent_at
            except OSError as error:
                self._give_up(connection, _text_of(error))
            else:
                if connection.write_buffer:
                    self._mailbox.rearm()
        elif self._start_connecting():
            self._queued += wanted_entries
        else:
            failure = self.error or NodeError(self.name, "not connected")
            self._mailbox.put(Report(self.index, deque(entries), failure, None))

    def _unless_ended(self, connection: Connection, now: float) -> Connection | None:
        """Return a connection without a recent write; give it up if it has ended, or is too old."""
        cause = IDLE_TOO_LONG if now - connection.used_at > self._longest_idle else ""
        if not cause and not connection.in_flight:
            try:
                connection.read()  # otherwise a command would be lost with it
            except OSError as error:
                cause = _cause_of(connection, error)
        if cause:
            self._give_up(connection, cause)
        return self.connection

    def _flush(self) -> None:
        connection = self.connection
        if connection is not None and connection.write_buffer:
            try:
                connection.write(())
            except OSError as error:
                self._give_up(connection, _text_of(error))

    def _give_up(self, connection: Connection, cause: str) -> None:
        if self.connection is not connection:
            return
        error = NodeError(self.name, cause, lost=True)
        needs_rest = cause == ENDED_IDLE
        if self.overdue(self._clock.now()):
            self._failures = 1  # callers do not wait for the next connect
            if (canceller := connection.canceller()) is not None:
                self._cancellers.append(canceller)
                needs_rest = True
        # Emptied and closed in the turn of reading. Otherwise a thread that has read a reply would
        # match it with the next command, or a thread at the socket would read another file.
        # Reported first: after an exception it is reported twice, but no command is lost.
        self._mailbox.put(Report(self.index, connection.in_flight, error, connection))
        # a server that ends or blocks each new connection would be connected to without a rest
        rest_until = connection.opened_at + MAX_RECONNECT_PAUSE if needs_rest else 0.0
        self.connection = None
        self.error = error
        self._retry_at = rest_until

    def _close(self) -> None:
        connection = self.connection
        if connection is not None:
            connection.close(reset=False)
        self.connection = None
        self._closed = True
        self._queued.clear()
        self._cancel_overdue()
        if self._connector is not None:  # last: ends its thread
            self._connector.wake()

    def _start_connecting(self) -> bool:
        """Return whether a connection is there or on its way: False if closed, or in backoff."""
        if self._connecting or self.connection is not None:
            return True
        now = self._clock.now()
        if self._closed or now < self._retry_at:
            return False
        if self._connector is None:
            connector = self._platform.deadline_timer()
            try:
                self._platform.start_thread(functools.partial(self._serve_connects, connector))
            except RuntimeError:  # the interpreter ends: `connect_at_end` connects
                return False
            self._connector = connector
        self._connector.wake()  # first: an exception in between must not lose the wake-up
        self._connect_by = now + self.connect_budget
        self._connecting = True
        return True

    def _start_at_end(self) -> None:
        self._retry_at = 0.0
        if not self._start_connecting() and not self._closed:
            self._connecting = True  # in the caller's thread

    def _use(self, connection: Connection) -> None:
        self._connecting = False
        self._failures = 0
        self.error = None
        if self._closed:
            connection.close(reset=False)
            return
        now = connection.opened_at = connection.used_at = self._clock.now()
        self.connection = connection
        self.run_id = connection.run_id
        if self._queued:  # written now: ages in the replies count from the write
            entries = [
                (command, sent_at if command.dated else now, request)
                for command, sent_at, request in self._queued
            ]
            self._write(entries)
        self._queued = []
        self._mailbox.rearm()

    def _connect_failed(self, error: NodeError) -> None:
        pause = RECONNECT_BACKOFF.compute(self._failures)
        self._mailbox.put(Report(self.index, deque(self._queued), error, None))
        self._queued = []
        self._connecting = False
        self.error = error
        self._failures = min(self._failures + 1, 16)
        self._retry_at = self._clock.now() + pause

    def _end_connector(self, connector: DeadlineTimer) -> None:
        if self._connector is connector:
            self._connector = None
            if self._connecting:  # requested just now
                self._connecting = False
                self._start_connecting()

    # the connecting thread

    def _serve_connects(self, connector: DeadlineTimer) -> None:
        """Keep the thread for later requests: under gevent, a new one costs an event loop."""
        while connector.sleep(CONNECTOR_IDLE_LIMIT):
            if self._closed:
                return
            if self.connection is None:
                self._connect(self.connect_budget)
        self.jobs.do(functools.partial(self._end_connector, connector))

    def adopt(self, dialled: Any, info: Any) -> None:
        """Use a connection if the gate admits it; raises NodeError.

        dialled: a result of `Address.dial`. info: that of the handshake.
        """
        connection = self.address.connection(dialled, info)

        def use() -> None:  # not as a job: the connection may be refused before a job runs
            if not self.jobs.lock.run_within(TURN_TRIES, call_with, self._use, (connection,)):
                raise NodeError(self.name, CONNECTION_BUSY)
            self.jobs.go_on()

        self._gate.admit(self.index, info, use)

    def _cancel_overdue(self) -> None:
        with contextlib.suppress(IndexError):  # none, or another thread has it
            while True:
                self._cancellers.popleft()()

    def _connect(self, budget: float) -> None:
        dialled = None
        try:
            self._cancel_overdue()
            dialled = self.address.dial(budget, self.timeout)
            self.adopt(dialled, self._gate.handshake(dialled, self.index))
        except Exception as error:  # also an error of the user's credential provider
            if dialled is not None:
                dialled.disconnect()
            if not isinstance(error, NodeError):
                cause = self.address.cause_of(error, self.timeout)
                error = NodeError(self.name, escaped(cause.rstrip("."), MAX_CAUSE_LENGTH))
            self.jobs.do(functools.partial(self._connect_failed, error))


def _cause_of(connection: Connection, error: OSError) -> str:
    is_idle = not connection.in_flight and not isinstance(error, GarbledError)
    return ENDED_IDLE if is_idle else _text_of(error)


def _text_of(error: OSError) -> str:
    return escaped(str(error).strip().rstrip(".") or type(error).__name__, MAX_CAUSE_LENGTH)
