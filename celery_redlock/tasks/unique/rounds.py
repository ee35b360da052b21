"""The compare-and-set of a unique key on all nodes: its requests, its round, and its release.

Not here: the steps of one send, which begin these rounds and find a duplicate (`claim.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import parts_of_claim, unique_key
from celery_redlock.lock.model.lease import validity
from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.lock.server.error_hints import causes_of, strip_args
from celery_redlock.lock.server.requests import UNIQUE
from celery_redlock.lock.transport.command import (
    IGNORE_REPLY,
    Command,
    Handler,
    Round,
    UnexpectedReplyError,
    text_of,
)
from celery_redlock.lock.transport.nodes import Nodes

DELIVER_FOR = 60.0  # seconds for which a release is repeated to a node that is away


def change(
    session: Session, name: str, expected: str, value: str = "", *terms: str,
    handler: Handler = IGNORE_REPLY,
) -> Command:  # fmt: skip
    """Return the command that changes a unique key.

    name: as of `unique_name`. expected: what the current value must begin with; "": there must be
    none. value: the new one; "": none. terms: the last two arguments of lua/unique.lua.
    """
    words = UNIQUE.call([unique_key(session.options.prefix, name)], expected, value, *terms)
    return Command(words, handler, UNIQUE)


@dataclass(frozen=True)
class EarlierSend:
    """What a node knows of an earlier send.

    is_sent: its sender has confirmed that it was published. expires_in: seconds, inf if it does not
    expire. age: seconds since the first send of its burst.
    """

    token: str
    is_sent: bool
    run_id: str
    expires_in: float
    age: float = 0.0

    @property
    def task_id(self) -> str:
        return self.run_id.partition(":")[0]

    @classmethod
    def of(cls, value: str, expires_in: float, age: float = 0.0) -> EarlierSend:
        """Parse a value; one that another program wrote is a send that was never confirmed."""
        return cls(*parts_of_claim(value), expires_in, age)


def read_reply(reply: Any) -> EarlierSend | bool:
    """Return whether a node has changed the key, or the other send that it names."""
    if type(reply) is int and reply in (0, 1):
        return bool(reply)
    if type(reply) is list and [type(word) for word in reply] == [int, bytes, int]:
        expires_in = reply[0] / 1000 if reply[0] >= 0 else math.inf
        return EarlierSend.of(text_of(reply[1]), expires_in, reply[2] / 1000)
    raise UnexpectedReplyError(reply)


class ClaimRound(Round):
    """One compare-and-set of a claim on all nodes, and their replies.

    changed: the nodes that have the new value. earlier: the earlier sends, by node. wanted: False
    once the claim is given up, so that no request for it is written any more. asks_age: the round
    waits for all nodes that have a burst, since one whose clock was set is to be outvoted.
    """

    __slots__ = ("_asks_age", "_errors", "_found", "_nodes", "_repeated", "wanted")

    def __init__(self, nodes: Nodes, *, asks_age: bool = False) -> None:
        self._asks_age = asks_age
        self.decided = False
        self.wake = None
        self.wanted = True
        self._nodes = nodes
        self._repeated = set[int]()
        self._errors = dict[int, NodeError]()
        # by node, as of `read_reply`; None: it failed. Another thread may add a late reply
        self._found: dict[int, EarlierSend | bool | None] = {}

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count the reply of a node. Raises UnexpectedReplyError."""
        if type(reply) is hiredis.ReplyError:
            self._fail(node, NodeError("", strip_args(str(reply))))
        else:
            self._found[node] = read_reply(reply)
            self._decide_if_clear()

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Repeat the request once on a new connection: a second execution changes nothing."""
        if error.lost and not self.decided and node not in self._repeated:
            self._repeated.add(node)
            self._nodes.send_to(node, command)
        else:
            self._fail(node, error)

    def _fail(self, node: int, error: NodeError) -> None:
        self._errors[node] = error
        self._found[node] = None
        self._decide_if_clear()

    def _decide_if_clear(self) -> None:
        """Decide once no missing reply can change whether a quorum agrees, and on what."""
        if self.decided:
            return
        count = len(self._nodes.all)
        quorum = self._nodes.quorum
        heard = len(self._found)
        missing = count - heard
        failed = heard - self.voted
        is_clear = self.reached or not missing or failed > count - quorum
        if not (is_clear or self._asks_age) and (earlier := self.agreed) is not None:
            sent = sum(one.is_sent for one in self.earlier.values())
            is_clear = earlier.is_sent or sent + missing < quorum
        if is_clear:
            self.decide()

    @property
    def changed(self) -> set[int]:
        return {node for node, found in self._found.copy().items() if found is True}

    @property
    def earlier(self) -> dict[int, EarlierSend]:
        found = self._found.copy()
        return {node: one for node, one in found.items() if isinstance(one, EarlierSend)}

    @property
    def voted(self) -> int:
        """How many nodes gave a valid reply."""
        return sum(found is not None for found in self._found.copy().values())

    def causes(self) -> list[str]:
        """Return one text for each node that gave no valid reply in time."""
        nodes = self._nodes
        errors = self._errors.copy()
        found = self._found.copy()
        has_failed = len(errors) > len(nodes.all) - nodes.quorum  # before the time was up
        return causes_of(nodes.all, errors, voted=None if has_failed else {*found} - {*errors})

    @property
    def reached(self) -> bool:
        return len(self.changed) >= self._nodes.quorum

    @property
    def agreed(self) -> EarlierSend | None:
        """The earlier send that a quorum names; as confirmed if a quorum has the confirmation.

        A single node proves nothing: it may have missed the release of the key. Another one may
        have executed a delayed request after the release; no confirmation follows such a request.
        """
        sends = list(self.earlier.values())
        quorum = self._nodes.quorum
        if len(sends) < quorum:
            return None
        tokens = [one.token for one in sends]
        token = max(tokens, key=tokens.count)
        if tokens.count(token) < quorum:
            return None
        own = [one for one in sends if one.token == token]
        is_sent = sum(one.is_sent for one in own) >= quorum
        found = next(one for one in own if one.is_sent == is_sent)
        age = median_low(one.age for one in own)  # not that of a node whose clock was set
        return replace(found, expires_in=validity([one.expires_in for one in own], quorum), age=age)


class ClaimRelease(Round):
    """The release of a unique key on all nodes, also on a node that is away for a while.

    expires_in: seconds after which the key expires anyway. puts_back: the send has failed, and an
    earlier one that it has replaced is the valid one again. Decided once a quorum has executed it.
    """

    wanted = True

    def __init__(
        self, session: Session, name: str, token: str, expires_in: float = 0.0, *,
        puts_back: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._terms = ("back", "") if puts_back else ("", "")
        self._session = session
        self._name = name
        self._token = token
        self._made_at = session.clock.now()
        self._expires_in = expires_in
        self._executed: set[int] = set()

    @property
    def until(self) -> float:
        """The monotonic second after which the release is not repeated to any node.

        Until a quorum has executed the release, later sends would be dropped for a run that is
        over: then it is repeated until the key expires. A minority cannot make a send be dropped.
        """
        expires_in = 0.0 if self.decided else self._expires_in
        return self._made_at + max(DELIVER_FOR, expires_in)

    @uninterruptible
    def send(self, nodes: set[int] | None = None) -> None:
        """Write it to some nodes, or to all. Does not wait."""
        session = self._session
        command = self.command()
        now = self._session.clock.now()
        if nodes is None:
            session.nodes.broadcast(command, now)
        for node in nodes or ():
            session.nodes.send_to(node, command, now)
        session.watchdog.run_maintenance_by(now + session.options.node_timeout)

    def wait(self) -> bool:
        """Wait one node timeout at most, and return whether a quorum has executed it."""
        session = self._session
        session.nodes.wait(self, session.clock.now() + session.options.node_timeout)
        return self.decided

    def command(self) -> Command:
        """Return what to send; not kept, because it refers to this object."""
        return change(self._session, self._name, self._token, "", *self._terms, handler=self)

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count the reply, or send it again if the node could not: loading, busy, no disk.

        Raises UnexpectedReplyError.
        """
        session = self._session
        if type(reply) is hiredis.ReplyError:
            session.releaser.outbox.put(node, self)
            session.watchdog.run_maintenance_by(session.clock.now() + session.options.node_timeout)
            return
        read_reply(reply)
        self._executed.add(node)
        if not self.decided and len(self._executed) >= session.nodes.quorum:
            self.decide()

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Send it again once the node is back."""
        if self._session.clock.now() < self.until:
            self._session.releaser.outbox.put(node, self)

    def settle(self, node: int) -> None:
        """Do nothing: the key expires by itself."""
