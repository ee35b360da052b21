"""The order of sends with `on_duplicate="newest"`: its requests and rounds, imported if it is used.

Of one resource one message runs, one is queued, and each later send takes the place of the queued
one for a while (`REPLACED_FOR`). Then that keeps its place, and one more is queued beside it, which
each later send replaces. A send has a number, by which the nodes know its place in the order of all
sends: see lua/newest.lua.

Not here: the steps of one send (`claim.py`), and the start of its run (`start.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import order_key, unique_key
from celery_redlock.lock.server.requests import NEWEST
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, Handler, text_of
from celery_redlock.lock.transport.nodes import Nodes
from celery_redlock.tasks.unique.rounds import (
    ClaimRelease,
    ClaimRound,
    EarlierSend,
    KeptMessage,
    Predecessors,
    earlier_send,
    milliseconds,
)

NEWEST_REPLY = [int, bytes, int, int, bytes, int]  # of lua/newest.lua: another message is queued


def newest_command(
    session: Session, name: str, what: str, *script_args: str, handler: Handler = IGNORE_REPLY
) -> Command:
    """Return the command that changes what is queued in an order: arguments of lua/newest.lua."""
    prefix = session.options.prefix
    request = NEWEST.call([unique_key(prefix, name), order_key(prefix, name)], what, *script_args)
    return Command(request, handler, NEWEST)


class OrderedRound(ClaimRound):
    """The round of a send with a number.

    hear_of: called with the number that a node had, if that is not less.
    """

    __slots__ = ("_hear_of",)

    def __init__(
        self, nodes: Nodes, hear_of: Callable[[int], object], *, waits_for_ages: bool
    ) -> None:
        super().__init__(nodes, waits_for_ages=waits_for_ages)
        self._hear_of = hear_of

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count the reply of a node. Raises UnexpectedReplyError."""
        if type(reply) is int and reply < 0:
            self._hear_of(-reply)
            reply = 0
        super().on_reply(node, sent, reply, run_id)

    def read_reply(self, reply: Any) -> EarlierSend | bool:
        if type(reply) is not list or [type(part) for part in reply] != NEWEST_REPLY:
            return super().read_reply(reply)
        *send, number, value, kept_number = reply
        token, _, _ = text_of(value).partition(":")
        return replace(earlier_send(*send), number=number, kept=KeptMessage(kept_number, token))


class PlaceRelease(ClaimRelease):
    """The release of a message's place in an order: it is given up, or ends without a start."""

    def command(self, handler: Handler | None = None) -> Command:
        return newest_command(
            self._session, self._name, "end", self._token, handler=handler or self
        )


class OrderRequests:
    """The requests of a send in an order.

    number: of the try, by the nodes' clocks, so that it counts on if they have forgotten the order.
    kept_for: seconds for which they are to remember it.
    """

    def __init__(self, session: Session, name: str, kept_for: float) -> None:
        self._session = session
        self._name = name
        self._kept_for = milliseconds(kept_for)
        self._token = ""
        self._largest = 0  # that a node has had
        self.number = 0

    def begin(self, token: str) -> None:
        self._token = token
        wall_ms = int(self._session.guard.wall() * 1000)
        self.number = max(wall_ms, self._largest + 1)

    def new_round(self, earlier: EarlierSend | None) -> ClaimRound:
        return OrderedRound(self._session.nodes, self._hear_of, waits_for_ages=earlier is None)

    def _hear_of(self, largest: int) -> None:
        self._largest = max(self._largest, largest)

    def claim(
        self, earlier: EarlierSend | None, value: str, times: tuple[float, float],
        round_: ClaimRound,
    ) -> Command:  # fmt: skip
        """Return the request for the place. value: "" to take the number alone."""
        expected, number = ("", 0) if earlier is None else (earlier.token, earlier.number)
        sending_ttl = milliseconds(times[1])
        words = "send", expected, value, str(self.number), sending_ttl, self._kept_for, str(number)
        return newest_command(self._session, self._name, *words, handler=round_)

    def sent(self, value: str, duration: float, before: Predecessors) -> Command:
        replaced = before.replaced
        burst = ("0", "", "0")
        if replaced is not None:
            burst = str(int(replaced.age * 1000)), replaced.token, str(replaced.number)
        kept = before.kept.token, str(before.kept.number), self._kept_for
        words = (
            "sent",
            self._token,
            value,
            milliseconds(duration),
            *burst,
            *kept,
            EarlierSend.of(value, 0.0).task_id,
        )
        return newest_command(self._session, self._name, *words)

    def release(self, *, restores_earlier: bool) -> ClaimRelease:
        return PlaceRelease(self._session, self._name, self._token)
