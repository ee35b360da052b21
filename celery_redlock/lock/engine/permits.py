"""Turns the nodes' replies into one permit of a lock with several holders.

Not here: the round for a plain key (`rounds.py`), and how many rounds a try has (`acquirer.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.errors import NodeError
from celery_redlock.lock.engine.rounds import NUMBERS, REFUSAL, AcquireRound
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.model.options import CompletionMarker
from celery_redlock.lock.model.votes import ABSTAINED, GRANTED, REFUSED, Vote
from celery_redlock.lock.server.requests import PERMIT
from celery_redlock.lock.transport.command import Command, Script, UnexpectedReplyError, text_of

# kinds of replies of lua/permit.lua
_GRANT = (int, int, bytes)
_REFUSAL = (*REFUSAL, bytes)


class PermitRound(AcquireRound):
    """The attempt to get one permit of a lock: each node grants the first free one from `first` on.

    The lock is granted if a quorum has granted the same permit. A node that has granted another one
    is asked for that permit instead, and then has our value there alone. No release is sent to it:
    that might be delayed, and run after the grant.
    request: makes the request for one permit, or for any (None). asked: the only permit that the
    nodes were asked for, or None. views: by node, a "1" for each permit that other clients have.
    """

    __slots__ = ("_chosen", "_moved", "_offers", "_request", "asked", "views")

    script: Script = PERMIT

    def __init__(
        self,
        lease: Lease,
        resend: Callable[[int, Command, float | None], None],
        marker: CompletionMarker | None,
        request: Callable[[int | None], bytes],
        asked: int | None = None,
    ) -> None:
        super().__init__(lease, resend, marker)
        self._is_plain = False
        self._request = request
        self.asked = asked
        self._chosen: int | None = None  # the permit that a quorum has granted
        self._offers: dict[int, tuple[int, float, str]] = {}  # by node: its permit, sent, run id
        self._moved: set[int] = set()  # nodes that were asked for another permit than they gave
        self.views: dict[int, str] = {}

    def command(self, permit: int | None) -> Command:
        return Command(self._request(permit), self, self.script, suffixed=True)

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count one node's vote, for the permit that it granted. Raises UnexpectedReplyError."""
        vote = self._vote(node, sent, reply)
        if vote is None:
            self.completed = True
            self.decide()
            return
        if vote is GRANTED:
            self._offers[node] = (reply[1], sent, run_id)
            self.views[node] = text_of(reply[2])
        if not self.decided:
            self._count(node, vote)
        elif self._chosen is not None and vote is GRANTED:
            self._settle_on(self._chosen, node)

    def _parsed(self, node: int, reply: Any) -> tuple[Vote, list[Any]]:
        """Return a vote and the items of a reply of lua/permit.lua; raises UnexpectedReplyError."""
        words: list[Any] = reply if type(reply) is list else []
        kinds = tuple(map(type, words))
        if self._marker is not None:
            kinds = kinds[:-1] if kinds[-1:] == (int,) else ()
        if kinds == _GRANT and words[0] == 1 and self._is_asked(words):
            return GRANTED, words
        if kinds == _REFUSAL and words[0] == 0 and len(words[4]) == self._lease.key.limit:
            self.views[node] = text_of(words[4])
            return REFUSED, words
        if kinds == NUMBERS and words[0] == -1:
            return ABSTAINED, words
        raise UnexpectedReplyError(reply)

    def _is_asked(self, words: Sequence[Any]) -> bool:
        """Return whether a grant is of a permit that was asked for, with a view of all."""
        _, permit, view, *_ = words
        limit = self._lease.key.limit
        return 0 <= permit < limit == len(view) and self.asked in (None, permit)

    def _count(self, node: int, vote: Vote) -> None:
        """Count the votes so far; decide once those still due cannot change what to do next.

        It counts all of them each time, as an exception may have cut the count of an earlier one.
        """
        tally = self.tally
        permits = [permit for permit, _, _ in self._offers.values()]
        best = max(permits, key=permits.count, default=0)
        granted = permits.count(best)
        voted = self._voted
        withheld = {*self.abstaining, *self.errors} - voted
        due = tally.nodes - len(voted) - len(withheld)
        is_enough = granted >= tally.quorum and not self._is_doubted(best, due)
        if is_enough and self._chosen is None:
            self._lease.key.choose(best)
            self._chosen = best
        if self._chosen is not None:
            for other in list(self._offers):
                self._settle_on(self._chosen, other)
        # after that: who sees a quorum here begins the lease
        tally.granted = granted if self._chosen is not None else min(granted, tally.quorum - 1)
        tally.refused = len(voted) - tally.granted
        tally.withheld = len(withheld)
        if tally.reached or not due or (tally.impossible and self._is_known(due)):
            self.decide()

    def _is_doubted(self, permit: int, due: int) -> bool:
        """Return whether a quorum's grant of a permit does not count. due: replies to come."""
        return False

    def _is_known(self, due: int) -> bool:
        """Return whether the next step is known before the replies that are still due."""
        most = max(self.free(), default=0)
        return most >= self.tally.quorum or most + due < self.tally.quorum

    def free(self) -> list[int]:
        """Return, for each permit, how many of the nodes that replied have it free or as ours."""
        views = list(self.views.copy().values())
        return [ones.count("0") for ones in zip(*views, strict=True)]

    def _settle_on(self, permit: int, node: int) -> None:
        offered, sent, run_id = self._offers[node]
        if offered == permit:
            self._lease.granted.add(node)
            self._lease.confirm(node, sent, run_id)
        elif self.wanted and node not in self._moved:
            self._resend(node, self.command(permit), None)
            self._moved.add(node)  # last: cut before this, it is asked again, which has no effect

    @property
    def is_free_somewhere(self) -> bool:
        """Whether a node has a permit free: then rivals, or late requests, share the nodes."""
        return any("0" in view for view in self.views.copy().values())

    def takable(self) -> int | None:
        """Return a permit that a quorum of nodes has free or as ours; None if there is none.

        It is the one that most nodes have granted, else a random one: rivals ask for others.
        """
        quorum = self.tally.quorum
        free = [permit for permit, nodes in enumerate(self.free()) if nodes >= quorum]
        permits = [permit for permit, _, _ in self._offers.copy().values()]
        best = max(permits, key=permits.count, default=None)
        if best in free or not free:
            return best if free else None
        return random.choice(free)  # noqa: S311 - no secret

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """As for one key. A node that has granted a permit may keep our value there."""
        if node not in self._offers:
            super().on_error(node, command, error)
        elif error.lost:
            self._lease.asked_again.add(node)

    @property
    def _voted(self) -> set[int]:
        return {*self._offers.copy(), *self._held_by.copy()}
