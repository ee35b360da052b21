"""Reads from all nodes, and passes the replies to the handlers of the commands.

The threads and greenlets of a process share the connections. The thread that finds data to read
calls the handlers of all replies, also those of other waiters, and wakes these. So a single caller
uses its sockets directly, and no caller depends on another one. Handlers are called in one turn in
which nothing waits: they do arithmetic. A reply stays with its connection until its handler has
returned, so a handler may get the same reply twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, Entry
from celery_redlock.lock.transport.connection import Connection
from celery_redlock.lock.transport.encoding import UnexpectedReplyError
from celery_redlock.lock.transport.node_client import (
    IDLE,
    LONGEST_RECONNECT,
    PAUSE,
    PAUSES,
    NodeClient,
)
from celery_redlock.lock.transport.poller import PollerPool


class Dispatcher:
    """The connections to some nodes, and the one turn in which replies are read and handled.

    on_change: called as (node, error) when a node stops answering, and as (node, None) when the
    node answers again. Must not wait.
    """

    def __init__(
        self,
        platform: Platform,
        timeout: float,
        on_change: Callable[[NodeClient, NodeError | None], None],
    ) -> None:
        self._platform, self.clock, self.timeout = platform, platform.clock, timeout
        self._on_change = on_change
        self.nodes: list[NodeClient] = []

    def reset(self) -> None:
        """Forget every connection, waiter and turn. An override calls this, too."""
        self._reading = self._platform.turn()
        self.pollers = PollerPool(self._platform)
        self._mail: deque[tuple[int, deque[Entry], NodeError, Connection | None]] = deque()
        self._down: set[int] = set()
        self._closed = False

    # what a subclass may override

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
            self._deliver_mail()

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
                    self._deliver_mail()
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
            self._distrust(node, connection, str(error))
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

    def _distrust(self, node: NodeClient, connection: Connection, cause: str) -> None:
        """Drop a connection whose replies do not fit its commands. No later reply counts."""
        self.lose_answers(node, connection, cause)
        node.drop(connection, cause)

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
        if self._mail:
            self._deliver_mail()

    def _deliver_mail(self) -> None:
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
