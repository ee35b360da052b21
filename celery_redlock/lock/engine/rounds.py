"""From the nodes' replies to votes and leases: one acquire round, and one renew round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.lease import ACQUIRING, HELD, LAST_TOKEN, Fence, Hold, expires_in
from celery_redlock.lock.platform.clock import Clock
from celery_redlock.lock.server.error_hints import strip_args
from celery_redlock.lock.server.restart_guard import REPLACED
from celery_redlock.lock.transport.command import Command, Round
from celery_redlock.lock.transport.encoding import UnexpectedReplyError, text_of
from celery_redlock.lock.votes import FAILED, GRANTED, REFUSED, SILENT, Tally, Vote, is_split


@dataclass(frozen=True)
class Refusal:
    """A node's word that another holds the lock: whose, and for how many s more (inf: for ever)."""

    value: str
    expires_in: float


class GrantRound(Round):
    """The attempt to get one lock: the votes, and what is known of those that hold it.

    fence: takes the nodes' fencing counters, where a token is wanted. resend: writes the command
    to one node once more, under its old sending time. Grants that come after the decision are
    counted on the hold; after its end they are nothing, for a release follows on the same wire.
    asks_since: s since 1970 where nodes are asked whether the run is done: a mark made after that
    says so. heeds_later: so does a mark that a later send has taken its place.
    done: one node has such a mark, which is enough, for it tells a fact; and so is superseded.
    """

    heeds_later: bool
    superseded: bool
    __slots__ = (
        "_due",
        "_refusals",
        "_resend",
        "asked_again",
        "asks_since",
        "done",
        "errors",
        "fence",
        "granted",
        "heeds_later",
        "hold",
        "never_asked",
        "sent",
        "silent",
        "superseded",
        "tally",
    )

    def __init__(
        self,
        hold: Hold,
        nodes: int,
        resend: Callable[[int, Command, float | None], None],
        fence: Fence | None = None,
    ) -> None:
        self.decided, self.wake = False, None
        self.asks_since: float | None = None  # with it the two flags are set
        self.done = False
        self.hold, self.fence = hold, fence
        self.tally = Tally(nodes)
        self._due = (1 << nodes) - 1  # nodes whose vote is not counted yet, as bits
        self.sent = 0.0  # monotonic s; an older fencing proposal must not meet a younger lease
        self._refusals: dict[int, Refusal] = {}
        self.silent: dict[int, float] = {}  # s for which a node does not vote
        self.errors: dict[int, NodeError] = {}
        self.granted: set[int] = set()
        self.never_asked: set[int] = set()  # nodes that the request surely did not reach
        self._resend = resend
        self.asked_again: set[int] = set()  # nodes where an older request may still run some day

    @property
    def wanted(self) -> bool:
        """Also after a quorum has granted, but not once a release may be on its way."""
        state = self.hold.state
        return state is ACQUIRING or state is HELD

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count one node's vote. Raises UnexpectedReplyError."""
        if reply == 1 and type(reply) is int and self.fence is None and self.asks_since is None:
            vote: Vote | None = GRANTED
        else:
            vote = self._vote(node, reply)
        if vote is None:
            self.done = True
            self.decide()
            return
        if vote is GRANTED:
            self.granted.add(node)
            self.hold.confirm(node, sent, run_id)
        if not self.decided and self._due & (1 << node):
            self._count(node, vote)

    def _count(self, node: int, vote: Vote) -> None:
        """Count a node's vote, once however often it is told."""
        bit = 1 << node
        if self._due & bit:
            self._due ^= bit
            if self.tally.add(vote):
                self.decide()

    def _vote(self, node: int, reply: Any) -> Vote | None:
        """Return what a node's reply means, with what it says beside it taken down.

        None: the run is done, or not to be made, whatever the node's vote is.
        """
        if type(reply) is hiredis.ReplyError:
            self.errors[node] = NodeError("", strip_args(str(reply)))
            return FAILED
        vote, words = self._parsed(reply)
        if self.asks_since is not None and self._is_done(words[-1]):
            return None
        if vote is REFUSED:
            expires_in = words[1] / 1000 if words[1] >= 0 else math.inf
            self._refusals[node] = Refusal(text_of(words[2]), expires_in)
        elif vote is SILENT:
            self.silent[node] = max(0, words[1]) / 1000
        elif self.fence is not None:
            self.fence.counted(node, words[1])
        return vote

    def _parsed(self, reply: Any) -> tuple[Vote, list[Any]]:
        """Return a vote and its words, as in lua/grant.lua; raises UnexpectedReplyError."""
        words: list[Any] = reply if type(reply) is list else []
        kinds = [type(word) for word in words]
        asks, has_token = self.asks_since is not None, self.fence is not None
        if asks and kinds[-1:] == [int]:
            kinds.pop()
        elif asks:
            kinds = []
        if kinds == [int, int, bytes] and words[0] == 0:
            return REFUSED, words
        if kinds == [int, int] and words[0] == -1:
            return SILENT, words
        is_grant = kinds == [int, int] and words[0] == 1 and (asks or has_token)
        if is_grant and (not has_token or 0 <= words[1] <= LAST_TOKEN):
            return GRANTED, words
        raise UnexpectedReplyError(reply)

    def withdraw(self, node: int) -> None:
        """Take back the vote of a node whose server another one had replaced meanwhile."""
        if node in self.granted:
            self.granted.discard(node)
            self.tally.granted -= 1
            self.tally.add(FAILED)
            self.errors[node] = NodeError("", REPLACED)
        self.hold.withdraw(node)

    def _is_done(self, at_ms: int) -> bool:
        if at_ms < 0 and self.heeds_later:
            self.superseded = True
            return True
        return at_ms > 0 and self.asks_since is not None and at_ms / 1000 >= self.asks_since

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Ask once more on a new connection where one broke, else count a failed vote."""
        first = node not in self.asked_again
        if error.lost:
            self.asked_again.add(node)
            if first and not self.decided:
                self._resend(node, command, self.sent if command.dated else None)
                return
        elif first:
            self.never_asked.add(node)
        self.errors[node] = error
        if not self.decided:
            self._count(node, FAILED)

    def asked_anew(self, node: int) -> None:
        """Take note that a repair, which may set the key, is about to leave for a node."""
        self.never_asked.discard(node)
        self.asked_again.add(node)

    @property
    def refusals(self) -> dict[int, Refusal]:
        """What the nodes that refused said, as of now: any thread may bring in a late one."""
        return self._refusals.copy()

    def expires_in(self) -> float | None:
        """Return the s until a quorum of nodes is free if nobody renews; None where unknown."""
        known = dict.fromkeys(self.granted, 0.0)
        known |= {node: refusal.expires_in for node, refusal in self.refusals.items()}
        waits = [known.get(node, math.inf) for node in range(self.tally.nodes)]
        return expires_in(waits, self.tally.quorum)

    @property
    def is_split(self) -> bool:
        """Whether others share the nodes, so that none of them has got it either."""
        holders = [refusal.value for refusal in self.refusals.values()]
        return is_split(holders, self.tally.unheard, self.tally.quorum)

    def holder(self) -> str:
        """Return the value that stands on most of the nodes that refused."""
        values = [refusal.value for refusal in self.refusals.values()]
        return max(values, key=values.count, default="")


class Renewable(Protocol):
    """A claim as a round sees that renews it.

    fence: takes the nodes' fencing counters, where a token is wanted.
    """

    @property
    def hold(self) -> Hold:
        """Its lease."""

    @property
    def fence(self) -> Fence | None:
        """Its fencing token."""


class RenewRound(Round):
    """One extension of some locks, in one request to each node.

    Decided when a quorum confirmed each of them, or every node has spoken.
    changed: called with the number of a claim after a node said that its token does not stand
    there. A fencing token that is not usable yet decides in its claim's place.
    """

    __slots__ = (
        "_changed",
        "_claims",
        "_clock",
        "_doubted",
        "_due",
        "_holds",
        "_quorum",
        "_renewed",
        "_unsettled",
    )

    def __init__(
        self,
        claims: Sequence[Renewable],
        nodes: int,
        clock: Clock,
        changed: Callable[[int], object],
    ) -> None:
        self.decided, self.wake = False, None
        self._claims, self._changed, self._clock = claims, changed, clock
        self._holds = [claim.hold for claim in claims]
        self._renewed = 0  # nodes that renewed all of them, or all but some, as bits
        self._doubted: dict[int, int] = {}  # by the number of a claim: how many of them did not
        self._quorum, self._due = nodes // 2 + 1, (1 << nodes) - 1  # unheard nodes, as bits
        self._unsettled = [c.fence for c in claims if c.fence is not None and not c.fence.usable]

    @property
    def wanted(self) -> bool:
        """Not once all the holds are over.

        Of several, one may be: its key is gone then, and a renewal does not bring it back. A
        repair would, so it is of one alone.
        """
        return any(hold.state is HELD for hold in self._holds)

    @property
    def short(self) -> list[int]:
        """The numbers of the claims that no quorum confirmed."""
        if self._all_confirmed:
            return []
        doubted, enough = self._doubted, self._renewed.bit_count() - self._quorum
        return [i for i in range(len(self._claims)) if doubted.get(i, 0) > enough]

    @property
    def _all_confirmed(self) -> bool:
        renewing = self._renewed.bit_count()
        return renewing - max(self._doubted.values(), default=0) >= self._quorum

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Renew the node's deadline of each lock, or stop counting it.

        Raises UnexpectedReplyError, and then none of it counts.
        """
        if type(reply) is not hiredis.ReplyError:
            self._check(reply)
            now = self._clock.now
            for number, (hold, word) in enumerate(zip(self._holds, reply, strict=True)):
                # the clock each time: whoever was stopped in between must not revive a lease
                if word != 1 or not hold.renewed(node, sent, now(), run_id):
                    self._look_closer(number, node, sent, word, run_id)
            self._renewed |= 1 << node
        self._heard(node)

    def _check(self, reply: Any) -> None:
        """Raise UnexpectedReplyError unless each word is as in lua/renew.lua."""
        if type(reply) is list and len(reply) == len(self._claims):
            for number, word in enumerate(reply):
                if type(word) is int and -1 <= word <= 1:
                    continue
                if self._claims[number].fence is None or type(word) is not list:
                    break
                if [type(part) for part in word] != [int, int] or word[0] != 1:
                    break
            else:
                return
        raise UnexpectedReplyError(reply)

    def _look_closer(self, number: int, node: int, sent: float, word: Any, run_id: str) -> None:
        """Take a word on one lock that is not just yes, or is of a node on probation."""
        claim, now = self._claims[number], self._clock.now()
        if type(word) is list and claim.hold.renewed(node, sent, now, run_id):
            if claim.fence is not None and word[1] <= LAST_TOKEN:  # else somebody has spoiled it
                claim.fence.counted(node, word[1])
            return
        self._doubted[number] = self._doubted.get(number, 0) + 1
        if word == 0:
            claim.hold.missing(node, now, run_id)
            self._changed(number)
        elif word == -1:
            claim.hold.denied(node, now)
            self._changed(number)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Leave the deadlines as they were: no answer is not a no."""
        self._heard(node)

    def _heard(self, node: int) -> None:
        self._due &= ~(1 << node)
        if self.decided:
            return
        if self._unsettled:
            enough = all(fence.usable for fence in self._unsettled)
        else:
            enough = self._all_confirmed
        if enough or not self._due:
            self.decide()


class Batch(Round):
    """Several rounds that one waits for together; decided when all of them are."""

    def __init__(self) -> None:
        super().__init__()
        self._open = 1  # itself, until it is closed

    def add(self, round_: Round) -> None:
        """Wait for a round, too; before it is sent."""
        self._open += 1
        round_.wake = self._one_less

    def close(self) -> None:
        """Say that all rounds are in it."""
        self._one_less()

    def _one_less(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.decide()
