"""From the nodes' replies to votes and leases: one acquire round, and one renew round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.model.fencing import LAST_TOKEN
from celery_redlock.lock.model.key_lease import KeyLease
from celery_redlock.lock.model.lease import ACQUIRING, HELD, expires_in
from celery_redlock.lock.model.options import CompletionMarker
from celery_redlock.lock.model.votes import (
    ABSTAINED,
    FAILED,
    GRANTED,
    REFUSED,
    HeldByOther,
    Tally,
    Vote,
    is_split,
    quorum_of,
)
from celery_redlock.lock.platform.clock import Clock
from celery_redlock.lock.server.error_hints import causes_of, strip_args
from celery_redlock.lock.server.restart_guard import REPLACED
from celery_redlock.lock.transport.command import Command, Round
from celery_redlock.lock.transport.encoding import UnexpectedReplyError, text_of
from celery_redlock.lock.transport.node_client import NodeClient


class AcquireRound(Round):
    """The attempt to get one key: the votes, and what is known of those that hold it.

    resend: writes the command to one node once more, under its old sending time. Grants that come
    after the decision are counted on the lease; after its end they are nothing, for a release
    follows on the same connection. marker: the nodes are asked whether the run has ended, if it
    asks: completed: one node says so, which is enough, for it tells a fact; superseded: one node
    says that a later send has replaced it.
    """

    __slots__ = ("_due", "_held_by", "_is_plain", "_key_lease", "_marker", "_resend", "abstaining",
                 "completed", "errors", "superseded", "tally")  # fmt: skip

    def __init__(
        self,
        key_lease: KeyLease,
        nodes: int,
        resend: Callable[[int, Command, float | None], None],
        marker: CompletionMarker | None = None,
    ) -> None:
        self.decided, self.wake = False, None
        self._key_lease, self._resend = key_lease, resend
        self._marker = marker if marker is not None and marker.asks_since is not None else None
        self._is_plain = key_lease.fence is None and self._marker is None
        self.completed = self.superseded = False
        self.tally = Tally(nodes)
        self._due = (1 << nodes) - 1  # nodes whose vote is not counted yet, as bits
        self._held_by: dict[int, HeldByOther] = {}
        self.abstaining: dict[int, float] = {}  # seconds for which a node does not vote
        self.errors: dict[int, NodeError] = {}

    @property
    def wanted(self) -> bool:
        """Also after a quorum has granted, but not once a release may be on its way."""
        state = self._key_lease.lease.state
        return state is ACQUIRING or state is HELD

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count one node's vote. Raises UnexpectedReplyError."""
        key_lease = self._key_lease
        is_granted = reply == 1 and type(reply) is int and self._is_plain
        vote = GRANTED if is_granted else self._vote(node, reply)
        if vote is None:
            self.completed = True
            self.decide()
            return
        if vote is GRANTED:
            key_lease.granted.add(node)
            key_lease.lease.confirm(node, sent, run_id)
        if not self.decided:
            self._count(node, vote)

    def _count(self, node: int, vote: Vote) -> None:
        """Count a node's vote, once however often it is told."""
        bit = 1 << node
        if self._due & bit:
            self._due ^= bit
            if self.tally.add(vote):
                self.decide()

    def _vote(self, node: int, reply: Any) -> Vote | None:
        """Return what a node's reply means, and keep what it says beside it.

        None: the run has ended, or is not to be made, whatever the node's vote is.
        """
        if type(reply) is hiredis.ReplyError:
            self.errors[node] = NodeError("", strip_args(str(reply)))
            return FAILED
        vote, words = self._parsed(reply)
        if self._marker is not None and self._has_ended(words[-1]):
            return None
        if vote is REFUSED:
            expires_in = words[1] / 1000 if words[1] >= 0 else math.inf
            self._held_by[node] = HeldByOther(text_of(words[2]), expires_in)
        elif vote is ABSTAINED:
            self.abstaining[node] = max(0, words[1]) / 1000
        elif self._key_lease.fence is not None:
            self._key_lease.fence.counted(node, words[1])
        return vote

    def _parsed(self, reply: Any) -> tuple[Vote, list[Any]]:
        """Return a vote and its words, as in lua/grant.lua; raises UnexpectedReplyError."""
        words: list[Any] = reply if type(reply) is list else []
        kinds = [type(word) for word in words]
        asks, has_token = self._marker is not None, self._key_lease.fence is not None
        if asks and kinds[-1:] == [int]:
            kinds.pop()
        elif asks:
            kinds = []
        if kinds == [int, int, bytes] and words[0] == 0:
            return REFUSED, words
        if kinds == [int, int] and words[0] == -1:
            return ABSTAINED, words
        is_grant = kinds == [int, int] and words[0] == 1 and (asks or has_token)
        if is_grant and (not has_token or 0 <= words[1] <= LAST_TOKEN):
            return GRANTED, words
        raise UnexpectedReplyError(reply)

    def _has_ended(self, at_ms: int) -> bool:
        """Return whether a completion marker, written at `at_ms` since 1970, is of this run.

        Below 0: a later send has replaced the run.
        """
        marker = self._marker
        if marker is None or marker.asks_since is None:
            return False
        if at_ms < 0 and marker.heeds_later:
            self.superseded = True
            return True
        return at_ms > 0 and at_ms / 1000 >= marker.asks_since

    def withdraw_replaced(self, replaced_at: dict[int, float]) -> None:
        """Take back the votes of nodes whose server another one had replaced meanwhile."""
        for node in self._key_lease.replaced(replaced_at):
            if node in self._key_lease.granted:
                self.tally.granted -= 1
                self.tally.add(FAILED)
                self.errors[node] = NodeError("", REPLACED)
            self._key_lease.withdraw(node)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Ask once more on a new connection if one broke, else count a failed vote."""
        key_lease = self._key_lease
        first = node not in key_lease.asked_again
        if error.lost:
            key_lease.asked_again.add(node)
            if first and not self.decided:
                self._resend(node, command, key_lease.sent if command.dated else None)
                return
        elif first:
            key_lease.never_asked.add(node)
        self.errors[node] = error
        if not self.decided:
            self._count(node, FAILED)

    @property
    def held_by(self) -> dict[int, HeldByOther]:
        """What the nodes that refused said, by index, as of now: any thread may add a late one."""
        return self._held_by.copy()

    def expires_in(self) -> float | None:
        """Return the seconds until a quorum of nodes is free if nobody renews; None if unknown."""
        known = dict.fromkeys(self._key_lease.granted, 0.0)
        known |= {node: other.expires_in for node, other in self.held_by.items()}
        waits = [known.get(node, math.inf) for node in range(self.tally.nodes)]
        return expires_in(waits, self.tally.quorum)

    @property
    def is_split(self) -> bool:
        """Whether others share the nodes, so that none of them has got the lock either."""
        holders = [other.value for other in self.held_by.values()]
        return is_split(holders, self.tally.unheard, self.tally.quorum)

    def holder(self) -> str:
        """Return the value that stands on most of the nodes that refused."""
        values = [other.value for other in self.held_by.values()]
        return max(values, key=values.count, default="")

    def causes(self, nodes: Sequence[NodeClient], *, time_is_up: bool) -> list[str]:
        """Return one text for each node that gave no vote; time_is_up: every node had its time."""
        voted = {*self._key_lease.granted, *self._held_by} if time_is_up else None
        return causes_of(nodes, self.errors, self.abstaining, voted)


class RenewRound(Round):
    """One extension of some keys, in one request to each node.

    Decided when a quorum confirmed each of them, or every node has replied. on_missing: called with
    the number of a key after a node said that our value does not stand there. A fencing token that
    is not usable yet decides in its key's place.
    """

    __slots__ = ("_clock", "_doubted", "_due", "_key_leases", "_leases", "_on_missing", "_quorum",
                 "_renewed", "_unsettled")  # fmt: skip

    def __init__(
        self,
        key_leases: Sequence[KeyLease],
        nodes: int,
        clock: Clock,
        on_missing: Callable[[int], object],
    ) -> None:
        self.decided, self.wake = False, None
        self._key_leases, self._on_missing, self._clock = key_leases, on_missing, clock
        self._leases = [one.lease for one in key_leases]
        self._renewed = 0  # nodes that renewed all of them, or all but some, as bits
        self._doubted: dict[int, int] = {}  # by the number of a key: how many of them did not
        self._quorum, self._due = quorum_of(nodes), (1 << nodes) - 1  # unheard nodes, as bits
        fences = [one.fence for one in key_leases if one.fence is not None]
        self._unsettled = [fence for fence in fences if not fence.usable]

    @property
    def wanted(self) -> bool:
        """Not once all the leases are over.

        One of several may be over: its key is gone then, and a renewal does not bring it back. A
        reclaim would, so a reclaim is of one key alone.
        """
        return any(lease.state is HELD for lease in self._leases)

    @property
    def unconfirmed(self) -> list[int]:
        """The numbers of the keys that no quorum confirmed."""
        if self._all_confirmed:
            return []
        doubted, enough = self._doubted, self._renewed.bit_count() - self._quorum
        return [i for i in range(len(self._key_leases)) if doubted.get(i, 0) > enough]

    @property
    def _all_confirmed(self) -> bool:
        renewing = self._renewed.bit_count()
        return renewing - max(self._doubted.values(), default=0) >= self._quorum

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Extend the node's deadline of each lease, or stop counting the node.

        Raises UnexpectedReplyError, and then none of it counts.
        """
        if type(reply) is not hiredis.ReplyError:
            self._check(reply)
            now = self._clock.now
            for number, (lease, word) in enumerate(zip(self._leases, reply, strict=True)):
                # the clock each time: a thread that was stopped in between must not revive a lease
                if word != 1 or not lease.renewed(node, sent, now(), run_id):
                    self._look_closer(number, node, sent, word, run_id)
            self._renewed |= 1 << node
        self._heard(node)

    def _check(self, reply: Any) -> None:
        """Raise UnexpectedReplyError unless each word is as in lua/renew.lua."""
        if type(reply) is not list or len(reply) != len(self._key_leases):
            raise UnexpectedReplyError(reply)
        for number, word in enumerate(reply):
            if type(word) is int and -1 <= word <= 1:
                continue
            has_token = self._key_leases[number].fence is not None and type(word) is list
            if not has_token or [type(part) for part in word] != [int, int] or word[0] != 1:
                raise UnexpectedReplyError(reply)

    def _look_closer(self, number: int, node: int, sent: float, word: Any, run_id: str) -> None:
        """Take a reply on one key that is not just yes, or is of a node on probation."""
        one, now = self._key_leases[number], self._clock.now()
        if type(word) is list and one.lease.renewed(node, sent, now, run_id):
            if one.fence is not None and word[1] <= LAST_TOKEN:  # else somebody has spoiled it
                one.fence.counted(node, word[1])
            return
        self._doubted[number] = self._doubted.get(number, 0) + 1
        if word == 0:
            one.lease.missing(node, now, run_id)
        elif word == -1:
            one.lease.denied(node, now)
        if word in (0, -1):
            self._on_missing(number)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Leave the deadlines as they were: no reply is not a no."""
        self._heard(node)

    def _heard(self, node: int) -> None:
        self._due &= ~(1 << node)
        if self.decided:
            return
        fences = self._unsettled
        if not self._due or (all(f.usable for f in fences) if fences else self._all_confirmed):
            self.decide()
