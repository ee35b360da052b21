"""One compare-and-set on all nodes, and what they know of an earlier send."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.server.restart_guard import GuardedNodeSet
from celery_redlock.lock.server.scripts import load_script
from celery_redlock.lock.transport.command import Command, Round
from celery_redlock.lock.transport.encoding import UnexpectedReplyError, encode_bulk, text_of

SENDS, SENT = "sending", "sent"

UNIQUE = load_script("unique")


@dataclass(frozen=True)
class EarlierSend:
    """What a node knows of an earlier send.

    is_sent: it was published, for certain. gone_by: s since 1970 after which it does not come any
    more. expires_in: s.
    """

    token: str
    is_sent: bool
    gone_by: float
    run: str
    value: str
    expires_in: float

    @property
    def task_id(self) -> str:
        """The id of its task."""
        return self.run.partition(":")[0]

    @classmethod
    def of(cls, value: str, expires_in: float) -> EarlierSend:
        """Read what stands there; a stranger's value is a send of which nobody knows anything."""
        token, _, rest = value.partition(":")
        state, _, rest = rest.partition(":")
        moment, _, run = rest.partition(":")
        gone_by = float(moment) if moment.isdecimal() else 0.0
        return cls(token, state == SENT and bool(run), gone_by, run, value, expires_in)


def _check(reply: Any) -> Any:
    """Return a reply that is as in lua/unique.lua; raises UnexpectedReplyError."""
    if type(reply) is list and [type(word) for word in reply] == [int, bytes]:
        return reply
    if type(reply) is int and reply in (0, 1):
        return reply
    raise UnexpectedReplyError(reply)


class CompareAndSetRound(Round):
    """One compare-and-set on all nodes, and what they said to it.

    changed: nodes that did it. empty: nodes with nothing there.
    """

    __slots__ = ("_again", "_quorum", "_standing", "changed", "empty", "errors", "wanted")

    def __init__(self, quorum: GuardedNodeSet) -> None:
        self.decided, self.wake = False, None
        self.wanted = True
        self.changed: set[int] = set()
        self.empty: set[int] = set()
        self._standing: dict[int, EarlierSend] = {}
        self.errors: dict[int, NodeError] = {}
        self._quorum, self._again = quorum, set[int]()

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Take down what a node says. Raises UnexpectedReplyError."""
        if type(reply) is hiredis.ReplyError:
            self.errors[node] = NodeError("", str(reply))
        elif _check(reply) == 1:
            self.changed.add(node)
        elif reply == 0:
            self.empty.add(node)
        else:
            value = text_of(reply[1])
            expires_in = reply[0] / 1000 if reply[0] >= 0 else math.inf
            self._standing[node] = EarlierSend.of(value, expires_in)
        if not self.decided:
            self._look()

    @property
    def standing(self) -> dict[int, EarlierSend]:
        """What stands on which node, as of now: any thread may bring in a late answer."""
        return self._standing.copy()

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Ask once more on a new connection where one broke: asking twice does no harm."""
        if error.lost and not self.decided and node not in self._again:
            self._again.add(node)
            self._quorum.send_to(node, command)
            return
        self.errors[node] = error
        if not self.decided:
            self._look()

    def _look(self) -> None:
        if self.reached:
            self.decide()
            return
        nodes, size = len(self._quorum.nodes), self._quorum.size
        hopeless = len(self.errors) > nodes - size
        all_heard = self.voted + len(self.errors) >= nodes
        if all_heard or hopeless or self._is_known:
            self.decide()

    @property
    def _is_known(self) -> bool:
        """Whether a quorum names one earlier send, and who is still to be heard says no more."""
        earlier = self.agreed
        if earlier is None or earlier.is_sent:
            return earlier is not None
        sent = sum(standing.is_sent for standing in self.standing.values())
        unheard = len(self._quorum.nodes) - self.voted - len(self.errors)
        return sent + unheard < self._quorum.size

    @property
    def voted(self) -> int:
        """How many nodes gave an answer that says something."""
        return len(self.changed) + len(self.empty) + len(self._standing)

    @property
    def reached(self) -> bool:
        """Whether a quorum did it."""
        return len(self.changed) >= self._quorum.size

    @property
    def agreed(self) -> EarlierSend | None:
        """The earlier send that a quorum names; as sent where a quorum knows that.

        One node alone may not have heard yet that its window is over, and another may have heard
        of it after that, from a request that was long on its way; but such a one never hears that
        it was sent.
        """
        if len(self._standing) < self._quorum.size:
            return None
        tokens = [standing.token for standing in self.standing.values()]
        token = max(tokens, key=tokens.count)
        if tokens.count(token) < self._quorum.size:
            return None
        own = [standing for standing in self.standing.values() if standing.token == token]
        sent = [standing for standing in own if standing.is_sent]
        if len(sent) >= self._quorum.size:
            return sent[0]
        return next(standing for standing in own if not standing.is_sent)


def _ttl(seconds: float) -> bytes:
    """Return how long a value is good for, as the last argument of a request."""
    return encode_bulk(b"%d" % max(1, math.ceil(seconds * 1000)))
