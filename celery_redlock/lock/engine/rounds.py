"""Turns the nodes' replies into votes, leases, and the places of those that wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.model.fencing import LAST_TOKEN
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
from celery_redlock.lock.server.restart_guard import REPLACED
from celery_redlock.lock.transport.command import Command, Round, UnexpectedReplyError, text_of
from celery_redlock.lock.transport.node import Node

KEY_GONE = "its key is gone or another client's"
# kinds of replies of lua/grant.lua
REFUSAL = (int, int, bytes, int)
NUMBERS = (int, int)


class AcquireRound(Round):
    """The attempt to get one key: counts the votes, and records the present holders.

    Grants that come after the decision still count for the lease. Once the lease has ended they do
    not count, because a release follows on the same connection. resend: writes the command to one
    node once more; a dated command keeps its time. marker: if it has `asks_since`, the nodes also
    report whether the run has ended. completed: one node reported that the run has ended or is
    superseded. One report is enough, because a marker records a fact. superseded: one node reported
    that a later send has superseded the run.
    """

    __slots__ = ("_due", "_held_by", "_is_plain", "_lease", "_marker", "_resend", "abstaining",
                 "completed", "errors", "superseded", "tally")  # fmt: skip
    is_released = True  # a release follows
    is_again = False  # whether an earlier round may have reached the nodes

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
        self._due = (1 << nodes) - 1  # nodes whose vote is not counted yet, as bits
        self._held_by: dict[int, HeldByOther] = {}
        self.abstaining: dict[int, float] = {}  # seconds for which a node does not vote
        self.errors: dict[int, NodeError] = {}

    @property
    def wanted(self) -> bool:
        """True also after a quorum has granted, but not once a release may have been written."""
        state = self._lease.state
        return state is ACQUIRING or state is HELD

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count one node's vote. Raises UnexpectedReplyError."""
        lease = self._lease
        is_granted = reply == 1 and type(reply) is int and self._is_plain
        vote = GRANTED if is_granted else self._vote(node, sent, reply)
        if vote is None:
            self.completed = True
            self.decide()
            return
        if vote is GRANTED:
            lease.granted.add(node)
            lease.confirm(node, sent, run_id)
        if not self.decided:
            self._count(node, vote)

    def _count(self, node: int, vote: Vote) -> None:
        """Count a node's vote, but only once for each node."""
        bit = 1 << node
        if self._due & bit:
            self._due ^= bit
            is_decided = self.tally.add(vote)
            if is_decided:
                fence = self._lease.fence
                lacks_counters = fence is not None and self.tally.reached and not fence.has_quorum
                if not lacks_counters or not self._due:  # else the nodes that are due decide
                    self.decide()

    def _vote(self, node: int, sent: float, reply: Any) -> Vote | None:
        """Return the vote in a reply; None if the run has ended or is superseded."""
        if type(reply) is hiredis.ReplyError:
            self.errors[node] = NodeError("", strip_args(str(reply)))
            return FAILED
        vote, words = self._parsed(node, reply)
        if self._marker is not None and self._has_ended(words[-1], sent):
            return None
        if vote is REFUSED:
            expires_in = words[1] / 1000 if words[1] >= 0 else math.inf
            self._held_by[node] = HeldByOther(text_of(words[2]), expires_in, words[3] / 1000)
        elif vote is ABSTAINED:
            self.abstaining[node] = max(0, words[1]) / 1000
        elif self._lease.fence is not None:
            self._lease.fence.counted(node, words[1])
        return vote

    def _parsed(self, node: int, reply: Any) -> tuple[Vote, list[Any]]:
        """Return a vote and the items of a reply of lua/grant.lua; raises UnexpectedReplyError."""
        words: list[Any] = reply if type(reply) is list else []
        kinds = tuple(map(type, words))
        asks = self._marker is not None
        has_token = self._lease.fence is not None
        if asks:
            kinds = kinds[:-1] if kinds[-1:] == (int,) else ()
        if kinds == REFUSAL and words[0] == 0:
            return REFUSED, words
        if kinds == NUMBERS and words[0] == -1:
            return ABSTAINED, words
        is_grant = kinds == NUMBERS and words[0] == 1 and (asks or has_token)
        if is_grant and (not has_token or 0 <= words[1] <= LAST_TOKEN):
            return GRANTED, words
        raise UnexpectedReplyError(reply)

    def _has_ended(self, age_ms: int, sent: float) -> bool:
        """Return whether a marker of this age, as of lua/marker.lua, says not to begin the run."""
        marker = self._marker
        if marker is None or marker.asks_since is None:
            return False
        if age_ms < 0 and marker.heeds_later:
            self.superseded = True
            return True
        return age_ms > 0 and sent - age_ms / 1000 >= marker.asks_since

    def withdraw_replaced(self, replaced_at: dict[int, float]) -> None:
        for node in self._lease.replaced(replaced_at):
            if node in self._lease.granted:
                self.tally.granted -= 1
                self.tally.add(FAILED)
                self.errors[node] = NodeError("", REPLACED)
            self._lease.withdraw(node)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Resend once if the connection broke, else count a failed vote."""
        lease = self._lease
        first = node not in lease.asked_again
        if error.lost:
            lease.asked_again.add(node)
            if first and not self.decided:
                self._resend(node, command, lease.sent if command.dated else None)
                return
        elif first and not self.is_again:
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
        for node, other in self._held_by.copy().items():
            waits[node] = other.expires_in
        return expires_in(waits, self.tally.quorum)

    @property
    def holders(self) -> list[str]:
        """The value on each node that refused."""
        return [other.value for other in self._held_by.copy().values()]

    def causes(self, nodes: Sequence[Node], *, time_is_up: bool) -> list[str]:
        """Return one text for each node that gave no vote. time_is_up: the node timeout is over."""
        voted = self._voted if time_is_up else None
        return causes_of(nodes, self.errors, self.abstaining, voted)

    @property
    def _voted(self) -> set[int]:
        return {*self._lease.granted.copy(), *self._held_by.copy()}


class RenewRound(Round):
    """One extension of some keys, in one request to each node.

    Decided when a quorum confirmed each key, or every node has replied. With fencing tokens that
    are not usable yet, it is decided when all of these are usable. on_missing: called with the
    number of a key after a node replied that the key does not have our value. errors: by node.
    """

    __slots__ = ("_clock", "_doubted", "_due", "_leases", "_on_missing", "_quorum",
                 "_renewed", "_unsettled", "errors")  # fmt: skip

    def __init__(
        self, leases: Sequence[Lease], clock: Clock, on_missing: Callable[[int], object]
    ) -> None:
        self.decided = False
        self.wake = None
        self._leases = leases
        self._on_missing = on_missing
        self._clock = clock
        self.errors: dict[int, NodeError] = {}
        self._renewed = 0  # nodes that replied without an error, as bits
        self._doubted: dict[int, int] = {}  # by number of a key: how many of these did not renew it
        self._quorum = leases[0].quorum
        self._due = (1 << len(leases[0].ends)) - 1  # nodes still due, as bits
        fences = [one.fence for one in leases if one.fence is not None]
        self._unsettled = [fence for fence in fences if not fence.usable]

    @property
    def wanted(self) -> bool:
        """False once all the leases are over. A reclaim, which sets a missing key, has only one."""
        return any(lease.state is HELD for lease in self._leases)

    @property
    def unconfirmed(self) -> list[int]:
        if self._all_confirmed:
            return []
        doubted = self._doubted
        enough = self._renewed.bit_count() - self._quorum
        return [i for i in range(len(self._leases)) if doubted.get(i, 0) > enough]

    @property
    def _all_confirmed(self) -> bool:
        renewing = self._renewed.bit_count()
        return renewing - max(self._doubted.values(), default=0) >= self._quorum

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Extend the deadlines, or stop counting the node. An odd reply counts in no part."""
        if type(reply) is hiredis.ReplyError:
            self.errors[node] = NodeError("", strip_args(str(reply)))
        else:
            self._check(reply)
            now = self._clock.now
            for number, (lease, word) in enumerate(zip(self._leases, reply, strict=True)):
                # reads the clock each time: a thread that was stopped here must not revive a lease
                if word != 1 or not lease.renewed(node, sent, now(), run_id):
                    self._on_unconfirmed(number, node, sent, word, run_id)
            self._renewed |= 1 << node
        self._heard(node)

    def _check(self, reply: Any) -> None:
        """Raise UnexpectedReplyError unless each item is as in lua/renew.lua."""
        if type(reply) is not list or len(reply) != len(self._leases):
            raise UnexpectedReplyError(reply)
        for number, word in enumerate(reply):
            if word is None or (type(word) is int and -1 <= word <= 1):  # None: no vote on this key
                continue
            has_token = self._leases[number].fence is not None and type(word) is list
            if not has_token or [type(part) for part in word] != [int, int] or word[0] != 1:
                raise UnexpectedReplyError(reply)

    def _on_unconfirmed(self, number: int, node: int, sent: float, word: Any, run_id: str) -> None:
        one = self._leases[number]
        now = self._clock.now()
        if type(word) is list and one.renewed(node, sent, now, run_id):
            # above LAST_TOKEN another program has changed the counter
            if one.fence is not None and word[1] <= LAST_TOKEN:
                one.fence.counted(node, word[1])
            return
        self._doubted[number] = self._doubted.get(number, 0) + 1
        self.errors[node] = NodeError("", KEY_GONE)
        if word == 0:
            one.missing(node, now, run_id)
        elif word == -1:
            one.denied(node, now)
        if word in (0, -1):
            self._on_missing(number)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Leave the deadlines unchanged: without a reply, the node may keep the keys."""
        self.errors[node] = error
        self._heard(node)

    def causes(self, nodes: Sequence[Node]) -> list[str]:
        """Return one text for each node that did not renew all keys in time."""
        renewed = {node.index for node in nodes if self._renewed >> node.index & 1}
        return causes_of(nodes, self.errors.copy(), voted=renewed)

    def _heard(self, node: int) -> None:
        self._due &= ~(1 << node)
        if self.decided:
            return
        fences = self._unsettled
        if not self._due or (all(f.usable for f in fences) if fences else self._all_confirmed):
            self.decide()


class PlaceRound(Round):
    """One question to all nodes. Decided once the replies still due cannot change the answer.

    nodes: how many there are.
    """

    wanted = True

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self._quorum = quorum_of(nodes)
        self._due = set(range(nodes))
        self._places: dict[int, Place] = {}

    @property
    def place(self) -> Place | None:
        """What the replies so far say together; None if no quorum has replied."""
        return place_of_quorum(list(self._places.copy().values()), self._quorum)

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Store a node's reply. Raises UnexpectedReplyError."""
        if type(reply) is not hiredis.ReplyError:
            if type(reply) is not list or [type(word) for word in reply] != [int, int, int]:
                raise UnexpectedReplyError(reply)
            self._places[node] = Place(reply[0], reply[1], free_in(reply[2]))
        self._heard(node)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Count the node as done, because it will not reply."""
        self._heard(node)

    def _heard(self, node: int) -> None:
        self._due.discard(node)
        free = sum(one.free > 0 for one in self._places.values())
        taken = len(self._places) - free
        if not self._due or free >= self._quorum or taken >= self._quorum:
            self.decide()
