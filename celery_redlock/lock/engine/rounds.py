"""Turns the nodes' replies into votes, leases, and the places of those that wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.model.fencing import MAX_TOKEN
from celery_redlock.lock.model.handoff import Place, free_in, place_of_quorum
from celery_redlock.lock.model.lease import ACQUIRING, HELD, Lease, expires_in
from celery_redlock.lock.model.options import CompletionMarker
from celery_redlock.lock.model.votes import (
    ABSTAINED,
    FAILED,
    GRANTED,
    REFUSED,
    HeldByOther,
    Tally,
    Vote,
    quorum_of,
)
from celery_redlock.lock.platform.clock import Clock
from celery_redlock.lock.server.error_hints import causes_of, strip_args
from celery_redlock.lock.server.restart_guard import SERVER_REPLACED
from celery_redlock.lock.transport.command import Command, Round, UnexpectedReplyError, text_of
from celery_redlock.lock.transport.node import Node

KEY_NOT_OURS = "its key is gone or another client's"
# types of the items in replies of lua/grant.lua
REFUSAL = (int, int, bytes, int)
INT_PAIR = (int, int)


class AcquireRound(Round):
    """The attempt to get one key: counts the votes, and records the present holders.

    Grants that come after the decision still count for the lease. Once the lease has ended they do
    not count, because a release follows on the same connection. resend: writes the command to one
    node once more; a dated command keeps its time. marker: if it has `asks_since`, the nodes also
    report whether the run has ended. completed: one node reported that the run has ended or is
    superseded. One report is enough, because a marker records a fact. superseded: one node reported
    that a later send has superseded the run.
    """

    __slots__ = ("_due_nodes", "_held_by", "_is_plain", "_lease", "_marker", "_resend",
                 "abstaining", "completed", "errors", "superseded", "tally")  # fmt: skip
    is_released = True  # a release follows
    is_later_round = False  # whether an earlier round may have reached the nodes

    def __init__(
        self,
        lease: Lease,
        resend: Callable[[int, Command, float | None], None],
        marker: CompletionMarker | None = None,
    ) -> None:
        self.decided = False
        self.wake = None
        self._lease = lease
        self._resend = resend
        self._marker = marker if marker is not None and marker.asks_since is not None else None
        self._is_plain = lease.fence is None and self._marker is None
        self.completed = self.superseded = False
        nodes = len(lease.ends)
        self.tally = Tally(nodes, lease.quorum)
        self._due_nodes = (1 << nodes) - 1  # nodes whose vote is not counted yet, as bits
        self._held_by: dict[int, HeldByOther] = {}
        self.abstaining: dict[int, float] = {}  # seconds for which a node does not vote
        self.errors: dict[int, NodeError] = {}

    @property
    def wanted(self) -> bool:
        """True also after a quorum has granted, but not once a release may have been written."""
        state = self._lease.state
        return state is ACQUIRING or state is HELD

    def on_reply(self, node: int, sent_at: float, reply: Any, run_id: str) -> None:
        """Count one node's vote. Raises UnexpectedReplyError."""
        lease = self._lease
        if reply == 1 and type(reply) is int and self._is_plain:
            vote = GRANTED
        else:
            counted_vote = self._vote(node, sent_at, reply)
            if counted_vote is None:
                self.completed = True
                self.decide()
                return
            vote = counted_vote
        if vote is GRANTED:
            lease.granted.add(node)
            lease.confirm(node, sent_at, run_id)
        if not self.decided:
            self._count(node, vote)

    def _count(self, node: int, vote: Vote) -> None:
        """Count a node's vote, but only once for each node."""
        bit = 1 << node
        if self._due_nodes & bit:
            self._due_nodes ^= bit
            is_decided = self.tally.add(vote)
            if is_decided:
                fence = self._lease.fence
                lacks_counters = fence is not None and self.tally.reached and not fence.has_quorum
                if not lacks_counters or not self._due_nodes:  # else the nodes that are due decide
                    self.decide()

    def _vote(self, node: int, sent_at: float, reply: Any) -> Vote | None:
        """Return the vote in a reply; None if the run has ended or is superseded."""
        if type(reply) is hiredis.ReplyError:
            self.errors[node] = NodeError("", strip_args(str(reply)))
            return FAILED
        vote, items = self._parsed(node, reply)
        if self._marker is not None and self._has_ended(items[-1], sent_at):
            return None
        if vote is REFUSED:
            expires_in = items[1] / 1000 if items[1] >= 0 else math.inf
            self._held_by[node] = HeldByOther(text_of(items[2]), expires_in, items[3] / 1000)
        elif vote is ABSTAINED:
            self.abstaining[node] = max(0, items[1]) / 1000
        elif self._lease.fence is not None:
            self._lease.fence.counted(node, items[1])
        return vote

    def _parsed(self, node: int, reply: Any) -> tuple[Vote, list[Any]]:
        """Return a vote and the items of a reply of lua/grant.lua; raises UnexpectedReplyError."""
        items: list[Any] = reply if type(reply) is list else []
        item_types = tuple(map(type, items))
        reads_marker = self._marker is not None
        has_token = self._lease.fence is not None
        if reads_marker:
            item_types = item_types[:-1] if item_types[-1:] == (int,) else ()
        if item_types == REFUSAL and items[0] == 0:
            return REFUSED, items
        if item_types == INT_PAIR and items[0] == -1:
            return ABSTAINED, items
        is_grant = item_types == INT_PAIR and items[0] == 1 and (reads_marker or has_token)
        if is_grant and (not has_token or 0 <= items[1] <= MAX_TOKEN):
            return GRANTED, items
        raise UnexpectedReplyError(reply)

    def _has_ended(self, age_ms: int, sent_at: float) -> bool:
        """Return whether a marker of this age, as of lua/marker.lua, says not to begin the run."""
        marker = self._marker
        if marker is None or marker.asks_since is None:
            return False
        if age_ms < 0 and marker.heeds_later:
            self.superseded = True
            return True
        return age_ms > 0 and sent_at - age_ms / 1000 >= marker.asks_since

    def withdraw_replaced(self, replaced_at: dict[int, float]) -> None:
        for node in self._lease.replaced(replaced_at):
            if node in self._lease.granted:
                self.tally.granted -= 1
                self.tally.add(FAILED)
                self.errors[node] = NodeError("", SERVER_REPLACED)
            self._lease.withdraw(node)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Resend once if the connection broke, else count a failed vote."""
        lease = self._lease
        is_first_error = node not in lease.asked_again
        if error.lost:
            lease.asked_again.add(node)
            if is_first_error and not self.decided:
                self._resend(node, command, lease.sent if command.dated else None)
                return
        elif is_first_error and not self.is_later_round:
            lease.never_asked.add(node)
        self.errors[node] = error
        if not self.decided:
            self._count(node, FAILED)

    @property
    def voted(self) -> int:
        """How many nodes granted or refused the key."""
        return self.tally.granted + self.tally.refused

    @property
    def held_by(self) -> dict[int, HeldByOther]:
        """A copy of the refusals so far, by node index: any thread may add a late refusal."""
        return self._held_by.copy()

    def expires_in(self) -> float | None:
        """Return the seconds until a quorum of nodes is free without renewals; None if unknown."""
        waits = [math.inf] * self.tally.nodes
        for node in self._voted:
            waits[node] = 0.0
        for node, refusal in self._held_by.copy().items():
            waits[node] = refusal.expires_in
        return expires_in(waits, self.tally.quorum)

    @property
    def holders(self) -> list[str]:
        """The value on each node that refused."""
        return [refusal.value for refusal in self._held_by.copy().values()]

    def causes(self, nodes: Sequence[Node], *, time_is_up: bool) -> list[str]:
        """Return one text for each node that gave no vote. time_is_up: the node timeout is over."""
        voters = self._voted if time_is_up else None
        return causes_of(nodes, self.errors, self.abstaining, voters)

    @property
    def _voted(self) -> set[int]:
        return {*self._lease.granted.copy(), *self._held_by.copy()}


class RenewRound(Round):
    """One extension of some keys, in one request to each node.

    Decided when a quorum confirmed each key, or every node has replied. With fencing tokens that
    are not usable yet, it is decided when all of these are usable. on_missing: called with the
    number of a key after a node replied that the key does not have our value. errors: by node.
    """

    __slots__ = ("_clock", "_doubt_counts", "_due_nodes", "_leases", "_on_missing", "_quorum",
                 "_renewed_nodes", "_unconfirmed_fences", "errors")  # fmt: skip

    def __init__(
        self, leases: Sequence[Lease], clock: Clock, on_missing: Callable[[int], object]
    ) -> None:
        self.decided = False
        self.wake = None
        self._leases = leases
        self._on_missing = on_missing
        self._clock = clock
        self.errors: dict[int, NodeError] = {}
        self._renewed_nodes = 0  # nodes that replied without an error, as bits
        # by index of a key: how many of these nodes did not renew the key
        self._doubt_counts: dict[int, int] = {}
        self._quorum = leases[0].quorum
        self._due_nodes = (1 << len(leases[0].ends)) - 1  # nodes still due, as bits
        fences = [lease.fence for lease in leases if lease.fence is not None]
        self._unconfirmed_fences = [fence for fence in fences if not fence.usable]

    @property
    def wanted(self) -> bool:
        """False once all the leases are over. A reclaim, which sets a missing key, has only one."""
        return any(lease.state is HELD for lease in self._leases)

    @property
    def unconfirmed(self) -> list[int]:
        if self._all_confirmed:
            return []
        doubted = self._doubt_counts
        spare_nodes = self._renewed_nodes.bit_count() - self._quorum
        return [index for index in range(len(self._leases)) if doubted.get(index, 0) > spare_nodes]

    @property
    def _all_confirmed(self) -> bool:
        renewed_count = self._renewed_nodes.bit_count()
        return renewed_count - max(self._doubt_counts.values(), default=0) >= self._quorum

    def on_reply(self, node: int, sent_at: float, reply: Any, run_id: str) -> None:
        """Extend the deadlines, or stop counting the node. An odd reply counts in no part."""
        if type(reply) is hiredis.ReplyError:
            self.errors[node] = NodeError("", strip_args(str(reply)))
        else:
            self._check(reply)
            now = self._clock.now
            leases = self._leases
            for index in Lease.renew_each(leases, reply, node, sent_at, now, run_id):
                item = reply[index]
                if item != 1 or not leases[index].renewed(node, sent_at, now(), run_id):
                    self._on_unconfirmed(index, node, sent_at, item, run_id)
            self._renewed_nodes |= 1 << node
        self._note_reply(node)

    def _check(self, reply: Any) -> None:
        """Raise UnexpectedReplyError unless each item is as in lua/renew.lua."""
        if type(reply) is not list or len(reply) != len(self._leases):
            raise UnexpectedReplyError(reply)
        if reply.count(1) == len(reply) and {*map(type, reply)} == {int}:
            return  # nearly always
        for index, item in enumerate(reply):
            if item is None or (type(item) is int and -1 <= item <= 1):  # None: no vote on this key
                continue
            has_token = self._leases[index].fence is not None and type(item) is list
            if not has_token or [type(part) for part in item] != [int, int] or item[0] != 1:
                raise UnexpectedReplyError(reply)

    def _on_unconfirmed(
        self, index: int, node: int, sent_at: float, item: Any, run_id: str
    ) -> None:
        lease = self._leases[index]
        now = self._clock.now()
        if type(item) is list and lease.renewed(node, sent_at, now, run_id):
            # above MAX_TOKEN another program has changed the counter
            if lease.fence is not None and item[1] <= MAX_TOKEN:
                lease.fence.counted(node, item[1])
            return
        self._doubt_counts[index] = self._doubt_counts.get(index, 0) + 1
        self.errors[node] = NodeError("", KEY_NOT_OURS)
        if item == 0:
            lease.missing(node, now, run_id)
        elif item == -1:
            lease.denied(node, now)
        if item in (0, -1):
            self._on_missing(index)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Leave the deadlines unchanged: without a reply, the node may keep the keys."""
        self.errors[node] = error
        self._note_reply(node)

    def causes(self, nodes: Sequence[Node]) -> list[str]:
        """Return one text for each node that did not renew all keys in time."""
        renewed = {node.index for node in nodes if self._renewed_nodes >> node.index & 1}
        return causes_of(nodes, self.errors.copy(), voters=renewed)

    def _note_reply(self, node: int) -> None:
        self._due_nodes &= ~(1 << node)
        if self.decided:
            return
        fences = self._unconfirmed_fences
        is_confirmed = all(fence.usable for fence in fences) if fences else self._all_confirmed
        if is_confirmed or not self._due_nodes:
            self.decide()


class PlaceRound(Round):
    """One question to all nodes. Decided once the replies still due cannot change the answer.

    nodes: how many there are.
    """

    wanted = True

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self._quorum = quorum_of(nodes)
        self._due_nodes = set(range(nodes))
        self._places: dict[int, Place] = {}

    @property
    def place(self) -> Place | None:
        """What the replies so far say together; None if no quorum has replied."""
        return place_of_quorum(list(self._places.copy().values()), self._quorum)

    def on_reply(self, node: int, sent_at: float, reply: Any, run_id: str) -> None:
        """Store a node's reply. Raises UnexpectedReplyError."""
        if type(reply) is not hiredis.ReplyError:
            if type(reply) is not list or [type(item) for item in reply] != [int, int, int]:
                raise UnexpectedReplyError(reply)
            self._places[node] = Place(reply[0], reply[1], free_in(reply[2]))
        self._note_reply(node)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Count the node as done, because it will not reply."""
        self._note_reply(node)

    def _note_reply(self, node: int) -> None:
        self._due_nodes.discard(node)
        free_count = sum(place.free > 0 for place in self._places.values())
        taken_count = len(self._places) - free_count
        if not self._due_nodes or free_count >= self._quorum or taken_count >= self._quorum:
            self.decide()
