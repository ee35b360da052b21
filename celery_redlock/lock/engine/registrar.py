"""Registers the waiters of this process on the nodes, and asks there whose turn it is.

A registration is written without waiting, and its reply is not needed: a wrong or missing one costs
time only. `ask` and `standing` register, too, and say how the waiter stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.model.handoff import Registration, Standing, free_in, merged
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.platform.coroutines import ThreadPool, WorkItem
from celery_redlock.lock.server.requests import REGISTER
from celery_redlock.lock.server.restart_guard import Servers
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, Round
from celery_redlock.lock.transport.encoding import UnexpectedReplyError

Report = Callable[[Standing | None], object]


class Registrar:
    """Writes the registrations of one `Redlock`'s waiters.

    drain_by: has the replies read by a monotonic second. threads: in which `ask` waits for replies.
    """

    def __init__(
        self, servers: Servers, threads: ThreadPool, drain_by: Callable[[float], None]
    ) -> None:
        self._servers, self._threads, self._drain_by = servers, threads, drain_by

    def register(self, registration: Registration) -> None:
        """Write a registration to all nodes; it replaces the waiter's earlier one. Never waits."""
        request = self._servers.requests.register(registration, asks=False)
        self._write(Command(request, IGNORE_REPLY, REGISTER))

    def update(self, registration: Registration) -> None:
        """Write since when a registered waiter waits; a node that lacks it stays so. Never waits.

        That costs a node one command, and cannot make a set that never expires.
        """
        self._write(Command(self._servers.requests.update(registration), IGNORE_REPLY))

    def unregister(self, waiter: str, resource: str) -> None:
        """Write to all nodes that a process does not wait for a resource any more. Never waits."""
        request = self._servers.requests.unregister(waiter, resource)
        self._write(Command(request, IGNORE_REPLY))

    def _write(self, command: Command) -> None:
        nodes = self._servers.nodes
        now = nodes.clock.now()
        nodes.broadcast(command, now)
        self._drain_by(now + nodes.timeout)

    def ask(self, registration: Registration, report: Report) -> None:
        """Register, and report how the waiter stands. Never waits.

        report: called in another thread, within one node timeout. None: no quorum has replied.
        """
        round_, until = self._send(registration)

        def wait() -> None:
            self._servers.nodes.wait(round_, until, native=True)

        self._threads.add(WorkItem(wait, lambda: report(round_.standing)))

    def standing(self, registration: Registration) -> Standing | None:
        """Register, and return how the waiter stands; None if no quorum replies in time."""
        round_, until = self._send(registration)
        self._servers.nodes.wait(round_, until)
        return round_.standing

    def _send(self, registration: Registration) -> tuple[StandingRound, float]:
        """Send a question; return it, and until when replies count, in monotonic seconds."""
        nodes = self._servers.nodes
        request = self._servers.requests.register(registration, asks=True)
        round_, now = StandingRound(len(nodes.nodes)), nodes.clock.now()
        nodes.broadcast(Command(request, round_, REGISTER), now)
        return round_, now + nodes.timeout


class StandingRound(Round):
    """One question to all nodes. Decided once the replies still due cannot change the answer.

    nodes: how many there are.
    """

    wanted = True

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self._quorum, self._due = quorum_of(nodes), set(range(nodes))
        self._standings: dict[int, Standing] = {}

    @property
    def standing(self) -> Standing | None:
        """What the replies so far say together; None if no quorum has replied."""
        return merged(list(self._standings.copy().values()), self._quorum)

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Store a node's reply. Raises UnexpectedReplyError."""
        if type(reply) is not hiredis.ReplyError:
            if type(reply) is not list or [type(word) for word in reply] != [int, int]:
                raise UnexpectedReplyError(reply)
            self._standings[node] = Standing(reply[0], free_in(reply[1]))
        self._heard(node)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Count the node as done, because it will not reply."""
        self._heard(node)

    def _heard(self, node: int) -> None:
        self._due.discard(node)
        free = sum(one.is_free for one in self._standings.values())
        taken = len(self._standings) - free
        if not self._due or free >= self._quorum or taken >= self._quorum:
            self.decide()
