"""Turns the nodes' replies into one permit of a lock with several holders.

Not here: the round for a plain key (`rounds.py`), and how many rounds a try has (`acquirer.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.errors import NodeError
from celery_redlock.lock.engine.rounds import INT_PAIR, REFUSAL, AcquireRound
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.model.options import CompletionMarker
from celery_redlock.lock.model.votes import ABSTAINED, GRANTED, REFUSED, Vote
from celery_redlock.lock.server.requests import PERMIT
from celery_redlock.lock.transport.command import Command, Script, UnexpectedReplyError, text_of

# types of the items in replies of lua/permit.lua
_GRANT = (int, int, bytes)
_REFUSAL = (*REFUSAL, bytes)


class PermitRound(AcquireRound):
    """The attempt to get one permit of a lock: each node grants the first free one from `first` on.

    The lock is granted if a quorum has granted the same permit. A node that has granted another one
    is asked for that permit instead, and then has our value there alone. No release is sent to it:
    that might be delayed, and run after the grant.
    request: makes the request for one permit, or for any (None). asked: the only permit that the
    nodes were asked for, or None. views: by node, a "0" for each permit that no other client has,
    else the first character of that client's token.
    """

    __slots__ = ("_chosen_permit", "_offers", "_redirected", "_request", "only_permit", "views")

    script: Script = PERMIT

    def __init__(
        self,
        lease: Lease,
        resend: Callable[[int, Command, float | None], None],
        marker: CompletionMarker | None,
        request: Callable[[int | None], bytes],
        only_permit: int | None = None,
    ) -> None:
        super().__init__(lease, resend, marker)
        self._is_plain = False
        self._request = request
        self.only_permit = only_permit
        self._chosen_permit: int | None = None  # the permit that a quorum has granted
        self._offers: dict[int, tuple[int, float, str]] = {}  # by node: its permit, sent, run id
        # nodes that were asked for the chosen permit, because they granted another one
        self._redirected: set[int] = set()
        self.views: dict[int, str] = {}

    def command(self, permit: int | None) -> Command:
        return Command(self._request(permit), self, self.script, suffixed=True)

    def on_reply(self, node: int, sent_at: float, reply: Any, run_id: str) -> None:
        """Count one node's vote, for the permit that it granted. Raises UnexpectedReplyError."""
        vote = self._vote(node, sent_at, reply)
        if vote is None:
            self.completed = True
            self.decide()
            return
        if vote is GRANTED:
            self._offers[node] = (reply[1], sent_at, run_id)
            self.views[node] = text_of(reply[2])
        if not self.decided:
            self._count(node, vote)
        elif self._chosen_permit is not None and vote is GRANTED:
            self._settle_on(self._chosen_permit, node)

    def _parsed(self, node: int, reply: Any) -> tuple[Vote, list[Any]]:
        """Return a vote and the items of a reply of lua/permit.lua; raises UnexpectedReplyError."""
        items: list[Any] = reply if type(reply) is list else []
        item_types = tuple(map(type, items))
        if self._marker is not None:
            item_types = item_types[:-1] if item_types[-1:] == (int,) else ()
        if item_types == _GRANT and items[0] == 1 and self._is_asked(items):
            return GRANTED, items
        if item_types == _REFUSAL and items[0] == 0 and len(items[4]) == self._lease.key.limit:
            self.views[node] = text_of(items[4])
            return REFUSED, items
        if item_types == INT_PAIR and items[0] == -1:
            return ABSTAINED, items
        raise UnexpectedReplyError(reply)

    def _is_asked(self, items: Sequence[Any]) -> bool:
        """Return whether a grant is of a permit that was asked for, with a view of all."""
        _, permit, view, *_ = items
        limit = self._lease.key.limit
        return 0 <= permit < limit == len(view) and self.only_permit in (None, permit)

    def _count(self, node: int, vote: Vote) -> None:
        """Count the votes so far; decide once those still due cannot change what to do next.

        It counts all of them each time, as an exception may have cut the count of an earlier one.
        """
        tally = self.tally
        permits = [permit for permit, _, _ in self._offers.values()]
        leading_permit = max(permits, key=permits.count, default=0)
        granted = permits.count(leading_permit)
        voters = self._voted
        withheld = {*self.abstaining, *self.errors} - voters
        pending = tally.nodes - len(voters) - len(withheld)
        is_enough = granted >= tally.quorum and not self._is_doubted(leading_permit, pending)
        if is_enough and self._chosen_permit is None:
            self._lease.key.choose(leading_permit)
            self._chosen_permit = leading_permit
        if self._chosen_permit is not None:
            for other_node in list(self._offers):
                self._settle_on(self._chosen_permit, other_node)
        # after that: a caller that sees a quorum here begins the lease
        is_chosen = self._chosen_permit is not None
        tally.granted = granted if is_chosen else min(granted, tally.quorum - 1)
        tally.refused = len(voters) - tally.granted
        tally.withheld = len(withheld)
        if tally.reached or not pending or (tally.impossible and self._is_known(pending)):
            self.decide()

    def _is_doubted(self, permit: int, pending: int) -> bool:
        """Return whether a quorum's grant of a permit does not count. pending: replies to come."""
        return False

    def _is_known(self, pending: int) -> bool:
        """Return whether the next step is known before the replies that are still due."""
        most_free = max(self.free(), default=0)
        return most_free >= self.tally.quorum or most_free + pending < self.tally.quorum

    def free(self) -> list[int]:
        """Return, for each permit, how many of the nodes that replied have it free or as ours."""
        return [column.count("0") for column in self._columns()]

    def _settle_on(self, permit: int, node: int) -> None:
        offered_permit, sent_at, run_id = self._offers[node]
        if offered_permit == permit:
            self._lease.granted.add(node)
            self._lease.confirm(node, sent_at, run_id)
        elif self.wanted and node not in self._redirected:
            self._resend(node, self.command(permit), None)
            # last: after an exception before this, the request is sent again, without effect
            self._redirected.add(node)

    @property
    def is_free_somewhere(self) -> bool:
        """Whether a node has a permit free that no quorum has given to another client.

        Then rivals, or late requests, share the nodes.
        """
        return any("0" in column and not self._is_held(column) for column in self._columns())

    def _is_held(self, column: Sequence[str]) -> bool:
        """Return whether a quorum names one holder of a permit, by the start of its token.

        A holder that raced has its permit on a bare majority. On the other nodes it is free, but it
        is no permit that anybody can get.
        """
        holders = [holder for holder in column if holder != "0"]
        return max(map(holders.count, holders), default=0) >= self.tally.quorum

    def _columns(self) -> list[tuple[str, ...]]:
        """Return, for each permit, what the nodes that replied say of it."""
        return list(zip(*self.views.copy().values(), strict=True))

    def takable(self) -> int | None:
        """Return a permit that a quorum of nodes has free or as ours; None if there is none.

        It is the one that most nodes have granted, else a random one: rivals ask for others.
        """
        quorum = self.tally.quorum
        free_permits = [permit for permit, nodes in enumerate(self.free()) if nodes >= quorum]
        permits = [permit for permit, _, _ in self._offers.copy().values()]
        leading_permit = max(permits, key=permits.count, default=None)
        if leading_permit in free_permits or not free_permits:
            return leading_permit if free_permits else None
        return random.choice(free_permits)  # noqa: S311 - no secret

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """As for one key. A node that has granted a permit may keep our value there."""
        if node not in self._offers:
            super().on_error(node, command, error)
        elif error.lost:
            self._lease.asked_again.add(node)

    @property
    def _voted(self) -> set[int]:
        return {*self._offers.copy(), *self._held_by.copy()}
