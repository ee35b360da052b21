"""Which connections may vote: the restart guard over a set of nodes.

A server votes only while this process knows that the server has missed no grant. It must not be
another node's server under a second name, and it must have recorded its run id. No other server may
have served under its address since.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.errors import NodeError
from celery_redlock.lock.model.options import Guard
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.threads import TURN_TRIES, call_with
from celery_redlock.lock.server.error_hints import hint_of, is_of_a_replica, strip_args
from celery_redlock.lock.server.handshake import (
    ServerInfo,
    format_request,
    handshake,
    other_format,
)
from celery_redlock.lock.server.requests import GUARD
from celery_redlock.lock.server.tenures import Tenure, Tenures, tenures_of
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import TIME, Command, IgnoreReply, Question, read_list
from celery_redlock.lock.transport.connection import Connection
from celery_redlock.lock.transport.node import CONNECTION_BUSY, Gate, Node
from celery_redlock.lock.transport.nodes import Nodes

SERVER_REPLACED = "another server has served under its address since"
# of the grace period: after that, another server may have granted; clocks drift
MAX_IDLE_SHARE = 0.9
OWN_CLOCK_TOLERANCE = 0.25  # s: the least difference for which a wall clock of our own is not used
MAX_REFUSALS = 100  # error texts that are remembered, so that each is logged once
REFUSAL_LIFETIME = 3600.0  # seconds without the error


class RestartGuard:
    """The lock's `nodes`, of which a connection is used only if its server may vote.

    changed: called as (node, error) when a node stops answering, and as (node, None) when the node
    answers again. connected: called as (node, info) for each new connection. replaced: called with
    the index of a node if its server was replaced by another server for a while. None may wait.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        timeout: float,
        platform: Platform,
        options: Guard,
        changed: Callable[[Node, NodeError | None], None],
        connected: Callable[[Node, ServerInfo], None],
        replaced: Callable[[int], None],
    ) -> None:
        self._options = options
        self._ask_format = format_request(options.prefix)
        self._clock = platform.clock
        self._changed = changed
        self._connected = connected
        self._replaced = replaced
        servers = [address.server for address in addresses]
        self._tenures = Tenures(
            options.prefix, servers, lambda node: self.nodes.all[node].error is not None
        )
        # by node: seconds since 1970 by its clock, less the monotonic seconds; stays over a fork
        self._clock_offsets: dict[int, float] = {}
        self.nodes = Nodes(
            addresses,
            timeout,
            platform,
            Gate(
                lambda connection, node: handshake(connection, options, self._tenures, node),
                self._admit,
                self.on_error_reply,
                self._on_down,
                self._on_up,
            ),
            quorum=quorum_of(len(addresses)),
            longest_idle=math.inf
            if options.mode == "off"
            else MAX_IDLE_SHARE * options.grace_period,
        )
        self.forget()

    def forget(self) -> None:
        self.nodes.forget()
        self._servers: dict[str, int] = {}  # run id -> the node that is connected to it
        # by node, whether it refused a connection, and hint: monotonic seconds of the last one
        self._refusals: dict[tuple[int, bool, str], float] = {}
        self.replaced_at: dict[int, float] = {}  # monotonic seconds of detection, by node
        self.same_server: tuple[str, str] | None = None  # names of two nodes that are one server

    def keep_alive(self, idle: float) -> None:
        """Exchange tenures with every node, and ask for time and format, every `idle` seconds.

        A clock may be set, and an operator may give the node to another release. The question also
        keeps a connection that is not used.
        """
        self._exchange_tenures(idle)
        now = self._clock.now()
        for node in self.nodes.all:
            connection = node.connection
            if connection is not None and now - connection.peer.timed_at > idle:
                connection.peer.timed_at = now
                questions = (
                    Command(TIME, IgnoreReply(self._on_time)),
                    Command(self._ask_format, IgnoreReply(self._on_format)),
                )
                node.send([(question, now, question.request) for question in questions])

    def learn_time(self, node: int, wall: float, read_at: float) -> None:
        """Note a node's time. wall: seconds since 1970 by its clock; read_at: monotonic seconds."""
        connection = self.nodes.all[node].connection
        self._clock_offsets[node] = wall - (
            read_at if connection is None else max(read_at, connection.opened_at)
        )

    def _on_format(self, index: int, _sent_at: float, reply: Any) -> None:
        node = self.nodes.all[index]
        error = other_format(reply)
        if error and node.connection is not None:  # the handshake of the next one is refused
            self._give_up(node, node.connection, error)

    def _on_time(self, node: int, sent_at: float, reply: Any) -> None:
        seconds, microseconds = map(int, read_list(reply, 2))
        self.learn_time(node, seconds + microseconds / 1e6, sent_at)

    def wall(self) -> float:
        """Return seconds since 1970 by the nodes' clocks: the median of the nodes that are known.

        By the own wall clock if that agrees, so that the processes of a machine have one order; or
        if no node is known.
        """
        offsets = sorted(self._clock_offsets.copy().values())
        own_wall = self._clock.wall_us() / 1e6
        if not offsets:
            return own_wall
        wall = self._clock.now() + offsets[(len(offsets) - 1) // 2]
        return own_wall if abs(own_wall - wall) < OWN_CLOCK_TOLERANCE else wall

    # called by the nodes

    def _admit(self, node: int, info: ServerInfo, use_connection: Callable[[], None]) -> None:
        self._refuse_same_server(node, info.run_id)
        # in the turn: no vote is counted between the check of tenures and its consequences
        arguments = node, info, use_connection
        if not self.nodes.reading.run_within(TURN_TRIES, call_with, self._let_in, arguments):
            raise NodeError(self.nodes.all[node].name, CONNECTION_BUSY)  # the node connects again
        self.nodes.report_broken()
        self._connected(self.nodes.all[node], info)

    def on_error_reply(self, node: Node, text: str) -> bool:
        """Report each kind of error of a node once; return whether the server is a replica now."""
        cause = strip_args(text)
        is_demoted = is_of_a_replica(text)  # then the next connection is refused, too
        if self._is_news(node.index, cause, at_connect=is_demoted):
            self._changed(node, NodeError(node.name, cause))
        return is_demoted

    def _on_down(self, node: Node, error: NodeError, was_down: bool) -> None:
        """Report that a node is down; only once if an operator must fix the cause."""
        is_news = not was_down
        if hint_of(error.cause):
            at_connect = not error.lost or is_of_a_replica(error.cause)
            is_news = self._is_news(node.index, error.cause, at_connect=at_connect)
        if is_news:
            self._changed(node, error)

    def _on_up(self, node: Node) -> None:
        """Report that a node answers again; it connects, so its last refusal of that has ended."""
        for refusal in list(self._refusals):  # not error replies: the connection stays
            if refusal[:2] == (node.index, True):
                self._refusals.pop(refusal, None)
        self._changed(node, None)

    def _is_news(self, node: int, text: str, *, at_connect: bool = False) -> bool:
        """Return whether no error with the same hint came lately: texts vary, as by a digest."""
        refusal = (node, at_connect, hint_of(text) or text)
        now = self._clock.now()
        for remembered, seen_at in self._refusals.copy().items():
            if now - seen_at > REFUSAL_LIFETIME:
                self._refusals.pop(remembered, None)
        is_news = refusal not in self._refusals
        if is_news and len(self._refusals) >= MAX_REFUSALS:
            return False
        self._refusals[refusal] = now
        return is_news

    # the tenures; all in the turn of reading, except for calls from `keep_alive`

    def _let_in(self, index: int, info: ServerInfo, use_connection: Callable[[], None]) -> None:
        if info.sent_tenures:
            self._learn(index, info.tenure, info.others)
            if self._tenures.ended(index, info.tenure):
                raise NodeError(self.nodes.all[index].name, SERVER_REPLACED)
        info.sent_at = info.timed_at = self._clock.now()
        if info.wall is not None:
            self.learn_time(index, info.wall, info.sent_at)
        use_connection()
        self._exchange_tenures()

    def _learn(
        self, index: int, own_tenure: Tenure | None, other_tenures: Sequence[Tenure | None]
    ) -> None:
        self._tenures.learn(index, own_tenure, other_tenures)
        for node in self.nodes.all:
            connection = node.connection
            if connection is not None and self._tenures.ended(node.index, connection.peer.tenure):
                self._give_up(node, connection)

    def _give_up(self, node: Node, connection: Connection, cause: str = SERVER_REPLACED) -> None:
        """Drop a connection and its votes, because its server has missed grants of other clients.

        The handshake of the next connection informs the server, which then abstains.
        """
        # first: if another thread has the node's turn, the drop comes later
        connection.discarded = cause
        self.replaced_at[node.index] = self._clock.now()
        self.nodes.lose_replies(node, connection, cause)
        self._replaced(node.index)
        node.drop(connection, cause)

    def _exchange_tenures(self, every: float | None = None) -> None:
        """Exchange tenures with each connected node that lacks one, or every `every` seconds."""
        if self._options.mode == "off":
            return
        now = self._clock.now()
        for node in self.nodes.all:
            connection = node.connection
            if connection is None or not connection.run_id:
                continue
            server: ServerInfo = connection.peer
            sent_tenures = self._tenures.arguments_for(node.index)
            # a node that could record nothing (read-only, or full) is asked again after `every`
            has_news = server.sent_tenures != sent_tenures and self._tenures.has_news(
                node.index, server.tenure
            )
            is_informed = server.tenure is None or not has_news
            if is_informed and (every is None or now - server.sent_at <= every):
                continue
            server.sent_tenures = sent_tenures
            server.sent_at = now
            request = GUARD.call(self._tenures.keys(node.index), *server.arguments, *sent_tenures)
            learn = functools.partial(self._on_tenures, node.index, server)
            command = Command(request, Question([node.index], learn), GUARD)
            node.send([(command, now, request)])

    def _on_tenures(self, index: int, server: ServerInfo, reply: Any) -> None:
        _, server.tenure, other_tenures = tenures_of(reply, len(self.nodes.all) + 1)
        self._learn(index, server.tenure, other_tenures)
        self._exchange_tenures()

    def _refuse_same_server(self, index: int, run_id: str) -> None:
        connected_index = self._servers.setdefault(run_id, index) if run_id else index
        if connected_index != index and self.nodes.all[connected_index].run_id not in ("", run_id):
            connected_index = self._servers[run_id] = (
                index  # the other node has another server by now
            )
        if connected_index != index:
            name = self.nodes.all[index].name
            connected_name = self.nodes.all[connected_index].name
            self.same_server = (connected_name, name)
            raise NodeError(name, f"is the same server as {connected_name}")
        if self.same_server is not None and self.nodes.all[index].name in self.same_server:
            self.same_server = None  # the node has its own server again
