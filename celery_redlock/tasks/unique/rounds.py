"""One compare-and-set on all nodes, and what they know of an earlier send."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.model.keys import unique_key
from celery_redlock.lock.server.requests import load_script
from celery_redlock.lock.server.restart_guard import GuardedNodeSet
from celery_redlock.lock.transport.command import Command, Round
from celery_redlock.lock.transport.encoding import (
    UnexpectedReplyError,
    encode_bulk,
    encode_text,
    text_of,
)

SENDING, SENT = "sending", "sent"  # the state of a send, as its value on the nodes names it

UNIQUE = load_script("unique")
# what each request begins with, up to its key; made once, because every unique send waits for it
_HEAD = UNIQUE.begin([""], 3).removesuffix(encode_text(""))


class UniqueKey:
    """The requests that change one unique key. name: as of `unique_name`."""

    __slots__ = ("_head",)

    def __init__(self, prefix: str, name: str) -> None:
        self._head = _HEAD + encode_text(unique_key(prefix, name))

    def begin(self, expected: str, value: str) -> bytes:
        """Return a request without its last argument, which `encode_ttl` returns.

        expected: what the current value must begin with; "": there must be none. value: the new
        one; "": none.
        """
        return b"%b%b%b" % (self._head, encode_text(expected), encode_text(value))

    def set(self, expected: str, value: str, ttl: float) -> bytes:
        """Return the request that sets a value for this many seconds."""
        return self.begin(expected, value) + encode_ttl(ttl)

    def delete(self, token: str) -> bytes:
        """Return the request that deletes the value of this token."""
        return self.begin(token, "") + encode_ttl(0.0)


def encode_ttl(seconds: float) -> bytes:
    """Return a ttl as the last argument of a request."""
    return encode_bulk(b"%d" % max(1, math.ceil(seconds * 1000)))


@dataclass(frozen=True)
class EarlierSend:
    """What a node knows of an earlier send.

    is_sent: its sender has confirmed that it was published. gone_by: seconds since 1970, after
    which its message is not delivered any more. expires_in: seconds.
    """

    token: str
    is_sent: bool
    gone_by: float
    run_id: str
    value: str
    expires_in: float

    @property
    def task_id(self) -> str:
        """The id of its task."""
        return self.run_id.partition(":")[0]

    @classmethod
    def of(cls, value: str, expires_in: float) -> EarlierSend:
        """Parse a value; one that another program wrote is a send that was never confirmed."""
        token, _, rest = value.partition(":")
        state, _, rest = rest.partition(":")
        moment, _, run_id = rest.partition(":")
        gone_by = float(moment) if moment.isdecimal() else 0.0
        return cls(token, state == SENT and bool(run_id), gone_by, run_id, value, expires_in)


def check_reply(reply: Any) -> Any:
    """Return a reply that is as in lua/unique.lua; raises UnexpectedReplyError."""
    if type(reply) is int and reply in (0, 1):
        return reply
    if type(reply) is list and [type(word) for word in reply] == [int, bytes]:
        return reply
    raise UnexpectedReplyError(reply)


class CompareAndSetRound(Round):
    """One compare-and-set on all nodes, and their replies.

    changed: the nodes that have the new value. empty: those that had no value and expected one.
    wanted: False once the claim is given up, so that no request for it is written any more.
    """

    __slots__ = ("_earlier", "_node_set", "_repeated", "changed", "empty", "errors", "wanted")

    def __init__(self, node_set: GuardedNodeSet) -> None:
        self.decided, self.wake = False, None
        self.wanted = True
        self.changed: set[int] = set()
        self.empty: set[int] = set()
        self._earlier: dict[int, EarlierSend] = {}
        self.errors: dict[int, NodeError] = {}
        self._node_set, self._repeated = node_set, set[int]()

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count the reply of a node. Raises UnexpectedReplyError."""
        if type(reply) is hiredis.ReplyError:
            self.errors[node] = NodeError("", str(reply))
        elif check_reply(reply) == 1:
            self.changed.add(node)
        elif reply == 0:
            self.empty.add(node)
        else:
            value = text_of(reply[1])
            expires_in = reply[0] / 1000 if reply[0] >= 0 else math.inf
            self._earlier[node] = EarlierSend.of(value, expires_in)
        if not self.decided:
            self._decide_if_clear()

    @property
    def earlier(self) -> dict[int, EarlierSend]:
        """A copy of the earlier sends by node: another thread may add a late one."""
        return self._earlier.copy()

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Repeat the request once on a new connection: a second execution changes nothing."""
        if error.lost and not self.decided and node not in self._repeated:
            self._repeated.add(node)
            self._node_set.send_to(node, command)
            return
        self.errors[node] = error
        if not self.decided:
            self._decide_if_clear()

    def _decide_if_clear(self) -> None:
        if self.reached:
            self.decide()
            return
        nodes, size = len(self._node_set.nodes), self._node_set.size
        hopeless = len(self.errors) > nodes - size
        all_heard = self.voted + len(self.errors) >= nodes
        if all_heard or hopeless or self._is_known:
            self.decide()

    @property
    def _is_known(self) -> bool:
        """Whether a quorum names one earlier send, and the missing replies cannot change that."""
        earlier = self.agreed
        if earlier is None or earlier.is_sent:
            return earlier is not None
        sent = sum(one.is_sent for one in self.earlier.values())
        unheard = len(self._node_set.nodes) - self.voted - len(self.errors)
        return sent + unheard < self._node_set.size

    @property
    def voted(self) -> int:
        """How many nodes gave a valid reply."""
        return len(self.changed) + len(self.empty) + len(self._earlier)

    @property
    def reached(self) -> bool:
        """Whether a quorum has the new value."""
        return len(self.changed) >= self._node_set.size

    @property
    def agreed(self) -> EarlierSend | None:
        """The earlier send that a quorum names; as confirmed if a quorum has the confirmation.

        A single node proves nothing: it may have missed the release of the key. Another one may
        have executed a delayed request after the release; no confirmation follows such a request.
        """
        if len(self._earlier) < self._node_set.size:
            return None
        tokens = [one.token for one in self.earlier.values()]
        token = max(tokens, key=tokens.count)
        if tokens.count(token) < self._node_set.size:
            return None
        own = [one for one in self.earlier.values() if one.token == token]
        sent = [one for one in own if one.is_sent]
        if len(sent) >= self._node_set.size:
            return sent[0]
        return next(one for one in own if not one.is_sent)
