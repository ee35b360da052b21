"""Which connections may vote: the restart guard over a set of nodes.

A server votes only while this process knows that it has missed nothing: it is no second name of
another node, it has noted its own run, and no other server has served under its address since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.model.grace_period import Guard
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.server.error_hints import hint_of, is_of_a_replica, strip_args
from celery_redlock.lock.server.handshake import Notes, ServerInfo, handshake, noted_keys, notes_of
from celery_redlock.lock.server.scripts import GUARD
from celery_redlock.lock.server.tenures import Tenure, Tenures
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import Command
from celery_redlock.lock.transport.connection import Connection, TransportOptions
from celery_redlock.lock.transport.node_client import BUSY, NodeClient
from celery_redlock.lock.transport.node_set import NodeSet

REPLACED = "another server has served under its address since"
LONGEST_IDLE = 0.9  # of the grace period: after that another server may have served; clocks differ
MOST_REFUSALS = 100  # texts of servers that are remembered, so as to log each once


@dataclass(frozen=True)
class NodeEvents:
    """Whom a set of guarded nodes tells. None of them may wait.

    changed: called as (node, error) when a node stops answering, with None when it is back.
    connected: called as (node, info) for each new connection. replaced: called with the index of a
    node whose server turns out to have been replaced for a while.
    """

    changed: Callable[[NodeClient, NodeError | None], None]
    connected: Callable[[NodeClient, ServerInfo], None]
    replaced: Callable[[int], None]


class Introduction:
    """A node's answer to what it is told about tenures."""

    wanted = True

    def __init__(self, learn: Callable[[int, Notes, str], None], told: tuple[str, ...]) -> None:
        self._learn, self._told = learn, told

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Learn what the node had noted. Raises UnexpectedReplyError."""
        if type(reply) is not hiredis.ReplyError:
            self._learn(node, notes_of(self._told, reply), run_id)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Leave it: the next connection tells the node again."""


class KnownServer:
    """What is known of the server that a node's connection leads to.

    told: about tenures, the result of `Tenures.told`. told_at: monotonic seconds of the last time.
    """

    __slots__ = ("arguments", "run_id", "tenure", "told", "told_at")

    def __init__(self, info: ServerInfo, now: float) -> None:
        notes = info.notes
        self.run_id, self.arguments, self.told_at = info.run_id, info.arguments, now
        self.tenure: Tenure | None = None if notes is None else notes.own
        self.told: tuple[str, ...] = () if notes is None else notes.told


class GuardedNodeSet(NodeSet[ServerInfo]):
    """The lock's nodes: a connection is used only if its server may vote."""

    def __init__(
        self,
        addresses: Sequence[Address],
        timeout: float,
        platform: Platform,
        guard: Guard,
        events: NodeEvents,
    ) -> None:
        self._guard, self._events = guard, events
        self._tenures = Tenures([address.server for address in addresses])
        if guard.word == "off":
            options = TransportOptions(timeout)
        else:
            options = TransportOptions(timeout, LONGEST_IDLE * guard.grace_period)
        super().__init__(addresses, options, platform, events.changed)
        self.needed = self.size = quorum_of(len(self.nodes))

    def reset(self) -> None:
        """Forget every connection, and what was learned by one."""
        super().reset()
        self._known: list[KnownServer | None] = [None] * len(self.nodes)
        self._servers: dict[str, int] = {}  # run id -> the node that is connected to it
        self._refusals: set[tuple[int, str]] = set()
        self.replaced_at: dict[int, float] = {}  # monotonic s: when a node's server turned out so
        self.same_server: tuple[str, str] | None = None  # the names of two nodes, once found

    def keep_alive(self, idle: float) -> None:
        """Also tell every node about tenures that has not been told for so many seconds."""
        self._introduce(idle)
        super().keep_alive(idle)

    # extension methods of `NodeSet`

    def handshake(self, connection: Any, node: int) -> ServerInfo:
        """Load the scripts, and let the server note its run. Raises redis.ResponseError."""
        return handshake(connection, self._guard, self._tenures, node)

    def admit(self, node: int, info: ServerInfo, use: Callable[[], None]) -> None:
        """Let a connection be used, unless its vote would count though it must not."""
        self._refuse_same_server(node, info.run_id)
        # in the turn: no vote is counted between the look at tenures and what follows
        if not self.run_in_turn(self._let_in, node, info, use):
            raise NodeError(self.nodes[node].name, BUSY)  # and connected anew
        self.hand_on_mail()
        self._events.connected(self.nodes[node], info)

    def on_error_reply(self, node: NodeClient, text: str) -> bool:
        """Say once of each node what it refuses; return whether it is a replica by now."""
        cause = strip_args(text)
        if self._is_news(node.index, cause):
            self._events.changed(node, NodeError(node.name, cause))
        return is_of_a_replica(text)

    def on_down(self, node: NodeClient, error: NodeError) -> None:
        """Say that a node is gone; what an operator must act on is said once."""
        if not hint_of(error.cause) or self._is_news(node.index, error.cause):
            super().on_down(node, error)

    def _is_news(self, node: int, text: str) -> bool:
        """Return whether a node says this for the first time, by what is to be done about it.

        The words themselves vary: they name a script's line, or a digest.
        """
        refusal = (node, hint_of(text) or text)
        if refusal in self._refusals or len(self._refusals) >= MOST_REFUSALS:
            return False
        self._refusals.add(refusal)
        return True

    # the tenures; all in the turn of reading, except what `keep_alive` asks for

    def _let_in(self, index: int, info: ServerInfo, use: Callable[[], None]) -> None:
        if info.notes is not None:
            self._learn(index, info.notes)
            if self._tenures.ended(index, info.notes.own):
                raise NodeError(self.nodes[index].name, REPLACED)
        before = self._known[index]
        # first: each reply of the connection is from a server whose tenure is known
        self._known[index] = KnownServer(info, self.clock.now())
        try:
            use()
        except NodeError:
            self._known[index] = before
            raise
        self._introduce()

    def _known_by(self, node: NodeClient, connection: Connection) -> KnownServer | None:
        """Return what is known of the server at the end of a node's connection."""
        known = self._known[node.index]
        return known if known is not None and known.run_id == connection.run_id else None

    def _learn(self, index: int, notes: Notes) -> None:
        """Learn the newest tenures; give up connections to servers that were replaced."""
        self._tenures.learn(index, notes.own)
        for other, tenure in zip(self._tenures.others(index), notes.others, strict=True):
            self._tenures.learn(other, tenure)
        for node in self.nodes:
            connection = node.connection
            known = None if connection is None else self._known_by(node, connection)
            if connection is not None and known and self._tenures.ended(node.index, known.tenure):
                self._give_up(node, connection)

    def _give_up(self, node: NodeClient, connection: Connection) -> None:
        """Drop a connection with the votes that came by it: its server has missed others' locks.

        On the next connection that server is told, and abstains.
        """
        connection.discarded = (
            REPLACED  # first: another thread may have its turn, and the drop wait
        )
        self.replaced_at[node.index] = self.clock.now()
        self.lose_answers(node, connection, REPLACED)
        self._events.replaced(node.index)
        node.drop(connection, REPLACED)

    def _introduce(self, every: float | None = None) -> None:
        """Exchange tenures with each connected node that lacks one, or after so many seconds."""
        if self._guard.word == "off":
            return
        now = self.clock.now()
        for node in self.nodes:
            connection, told = node.connection, self._tenures.told(node.index)
            known = None if connection is None else self._known_by(node, connection)
            if known is None or not known.run_id:
                continue
            # one that could note nothing, read-only or full, is asked again after a while
            is_told = known.tenure is None or known.told == told
            if is_told and (every is None or now - known.told_at <= every):
                continue
            known.told, known.told_at = told, now
            keys = noted_keys(self._guard.prefix, self._tenures, node.index)
            request = GUARD.call(keys, *known.arguments, *told)
            reply = Introduction(self._on_notes, told)
            node.send([(Command(request, reply, GUARD), now, request)])

    def _on_notes(self, index: int, notes: Notes, run_id: str) -> None:
        node = self.nodes[index]
        connection = node.connection
        if connection is not None and connection.run_id == run_id:
            known = self._known_by(node, connection)
            if known is not None:
                known.tenure = notes.own
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
