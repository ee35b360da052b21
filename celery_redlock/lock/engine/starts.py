"""Turns the nodes' replies into one start of a rate.

It shares with a lock's round the choice of a permit (`permits.py`). How many rounds a try has, and
when a body may begin: `acquirer.py`. What nodes are told of a start after that: `releaser.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_redlock.errors import NodeError
from celery_redlock.lock.engine.permits import PermitRound
from celery_redlock.lock.engine.rounds import INT_PAIR
from celery_redlock.lock.model.rate import Start
from celery_redlock.lock.model.votes import ABSTAINED, GRANTED, REFUSED, Vote
from celery_redlock.lock.server.requests import TAKE
from celery_redlock.lock.transport.command import Command, UnexpectedReplyError, text_of

_REPLY = (int, int, bytes, int)  # types of the items in a vote of lua/take.lua


class StartRound(PermitRound):
    """The attempt to get one permit of a rate.

    A node is young if it may have forgotten starts that count. If fewer than a quorum of old nodes
    grant a permit, the refusal of one old node is enough: it may be the last that remembers.
    request: makes the request for one permit, or for any (None); its second argument: whether the
    same start was asked for before.
    """

    __slots__ = ("_is_repeated", "_make_request", "_young_nodes", "is_later_round")
    script = TAKE
    is_released = False

    def __init__(
        self,
        start: Start,
        resend: Callable[[int, Command, float | None], None],
        make_request: Callable[[int | None, bool], bytes],
        only_permit: int | None = None,
        *,
        is_repeated: bool = False,
    ) -> None:
        super().__init__(start, resend, None, self._request_of, only_permit)
        self._make_request = make_request
        self._young_nodes = set[int]()
        self.is_later_round = self._is_repeated = is_repeated  # the latter also after an error

    def _request_of(self, permit: int | None) -> bytes:
        return self._make_request(permit, self._is_repeated)

    def _parsed(self, node: int, reply: Any) -> tuple[Vote, list[Any]]:
        """Return a vote and its numbers. Raises UnexpectedReplyError."""
        items: list[Any] = reply if type(reply) is list else []
        item_types = tuple(map(type, items))
        if item_types == INT_PAIR and items[0] == -1:
            return ABSTAINED, items
        if item_types != _REPLY or not (items[0] == 0 or (items[0] == 1 and self._is_asked(items))):
            raise UnexpectedReplyError(reply)
        _, number, view, is_young = items
        if items[0] == 0 and len(view) != self._lease.key.limit:
            raise UnexpectedReplyError(reply)
        if is_young:
            self._young_nodes.add(node)
        self.views[node] = text_of(view)
        return (GRANTED, items) if items[0] else (REFUSED, [0, number, b"", 0])

    def _is_doubted(self, permit: int, pending: int) -> bool:
        granting_nodes = [
            node for node, (offered_permit, *_) in self._offers.items() if offered_permit == permit
        ]
        if sum(node not in self._young_nodes for node in granting_nodes) >= self.tally.quorum:
            return False
        return pending > 0 or "1" in self._old_views(permit)

    def _old_views(self, permit: int) -> str:
        """Return what the old nodes say of a permit."""
        views = self.views.copy().items()
        return "".join(view[permit] for node, view in views if node not in self._young_nodes)

    def free(self) -> list[int]:
        """As for a lock; 0 for what an old node refuses, unless a quorum of old nodes has it."""
        quorum = self.tally.quorum
        free = super().free()
        for permit in range(len(free)):
            old_views = self._old_views(permit) if self._young_nodes else ""
            if "1" in old_views and old_views.count("0") < quorum:
                free[permit] = 0
        return free

    @property
    def is_free_somewhere(self) -> bool:
        """Whether a node has a permit free: its view names no holder."""
        return any("0" in view for view in self.views.copy().values())

    def expires_in(self) -> float | None:
        """As for a lock; None if nodes have permits free, but none that a quorum shares."""
        return None if self.is_free_somewhere and self.takable() is None else super().expires_in()

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """As for a lock; a request that is sent once more looks for the permit of the first."""
        self._is_repeated = True
        super().on_error(node, self.command(self.only_permit), error)
