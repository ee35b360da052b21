"""The compare-and-set of a unique key on all nodes: its requests, its round, and its release.

Not here: the steps of one send, which begin these rounds and find a duplicate (`claim.py`).
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, NamedTuple, Protocol

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
    encode_bulk,
    encode_text,
    text_of,
)
from celery_redlock.lock.transport.nodes import Nodes

_NUMBER = re.compile(r" \d+\Z")
RELEASE_RETRY_TIME = 60.0  # seconds for which a release is repeated to a node that is away
# the requests of most sends, as `change_command` makes them: of key, value and two times; of key,
# token and value
_PACKED_EMPTY = encode_bulk(b"")
_SCRIPT = b"*8\r\n" + UNIQUE.by_digest + encode_bulk(b"1")
_CLAIM = _SCRIPT + b"%b" + _PACKED_EMPTY + b"%b%b%b"
_CONFIRM = _SCRIPT + b"%b%b%b" + _PACKED_EMPTY + _PACKED_EMPTY


def change_command(
    session: Session, name: str, expected: str, value: str = "", *script_args: str,
    handler: Handler = IGNORE_REPLY,
) -> Command:  # fmt: skip
    """Return the command that changes a unique key.

    name: as of `unique_name`. expected: what the current value must begin with; "": there must be
    none. value: the new one; "": none. script_args: the last arguments of lua/unique.lua.
    """
    request = UNIQUE.call([unique_key(session.options.prefix, name)], expected, value, *script_args)
    return Command(request, handler, UNIQUE)


class KeptMessage(NamedTuple):
    """A message that keeps its place in an order while others replace each other beside it."""

    number: int = 0
    token: str = ""


NONE_KEPT = KeptMessage()


@dataclass(frozen=True)
class EarlierSend:
    """What a node knows of an earlier send.

    is_sent: its sender has confirmed that it was published. expires_in: seconds, inf if it does not
    expire. age: seconds since the first send of its burst. number: of a send in an order, else 0.
    kept: the message that keeps its place beside it.
    """

    token: str
    is_sent: bool
    run_id: str
    expires_in: float
    age: float = 0.0
    number: int = 0
    kept: KeptMessage = NONE_KEPT

    @property
    def task_id(self) -> str:
        return self.run_id.partition(":")[0]

    @classmethod
    def of(cls, value: str, expires_in: float, age: float = 0.0) -> EarlierSend:
        """Parse a value; one that another program wrote is a send that was never confirmed."""
        value = _NUMBER.sub("", value)  # lua/unique.lua takes that of an order for its end
        return cls(*parts_of_claim(value), expires_in, age)


@dataclass(frozen=True)
class Predecessors:
    """What is queued of a resource before a send in an order.

    replaced: the send whose place this one takes. kept: the message that keeps its place beside it.
    """

    replaced: EarlierSend | None = None
    kept: KeptMessage = NONE_KEPT


NO_PREDECESSORS = Predecessors()


def read_reply(reply: Any) -> EarlierSend | bool:
    """Return whether a node has changed the key, or the earlier send that it has instead."""
    if type(reply) is int and reply in (0, 1):
        return bool(reply)
    if type(reply) is list and [type(part) for part in reply] == [int, bytes, int]:
        return earlier_send(*reply)
    raise UnexpectedReplyError(reply)


def earlier_send(pttl_ms: int, value: bytes, age_ms: int) -> EarlierSend:
    expires_in = pttl_ms / 1000 if pttl_ms >= 0 else math.inf
    return EarlierSend.of(text_of(value), expires_in, age_ms / 1000)


class ClaimRound(Round):
    """One compare-and-set of a claim on all nodes, and their replies.

    wanted: False once the claim is given up, so that no request for it is written any more.
    waits_for_ages: the round waits for all nodes that have a burst, so that a quorum outvotes a
    node whose clock was set.
    """

    __slots__ = (
        "_changed_nodes",
        "_errors_by_node",
        "_nodes",
        "_repeated_nodes",
        "_replies",
        "_waits_for_ages",
        "wanted",
    )

    def __init__(self, nodes: Nodes, *, waits_for_ages: bool = False) -> None:
        self._waits_for_ages = waits_for_ages
        self.decided = False
        self.wake = None
        self.wanted = True
        self._nodes = nodes
        self._repeated_nodes: set[int] = set()
        self._errors_by_node: dict[int, NodeError] = {}
        self._changed_nodes: set[int] = set()
        # by node, as of `read_reply`; None: it failed. Another thread may add a late reply
        self._replies: dict[int, EarlierSend | bool | None] = {}

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count the reply of a node. Raises UnexpectedReplyError."""
        if type(reply) is hiredis.ReplyError:
            self._fail(node, NodeError("", strip_args(str(reply))))
        elif reply == 1 and type(reply) is int:  # most replies
            self._replies[node] = True
            self._changed_nodes.add(node)
            self._decide_if_clear()
        else:
            self._replies[node] = self.read_reply(reply)
            self._decide_if_clear()

    def read_reply(self, reply: Any) -> EarlierSend | bool:
        return read_reply(reply)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Repeat the request once on a new connection: a second execution changes nothing."""
        if error.lost and not self.decided and node not in self._repeated_nodes:
            self._repeated_nodes.add(node)
            self._nodes.send_to(node, command)
        else:
            self._fail(node, error)

    def _fail(self, node: int, error: NodeError) -> None:
        self._errors_by_node[node] = error
        self._replies[node] = None
        self._decide_if_clear()

    def _decide_if_clear(self) -> None:
        """Decide once no missing reply can change whether a quorum agrees, and on what."""
        if self.decided:
            return
        if self.has_quorum:
            self.decide()
            return
        count = len(self._nodes.all)
        reply_count = len(self._replies)
        missing_count = count - reply_count
        if missing_count and reply_count == len(self._changed_nodes):
            return  # so far they agree
        quorum = self._nodes.quorum
        failed_count = reply_count - self.voted
        is_clear = not missing_count or failed_count > count - quorum
        if not (is_clear or self._waits_for_ages) and (agreed := self.agreed_send) is not None:
            sent_count = sum(send.is_sent for send in self.earlier_sends.values())
            is_clear = agreed.is_sent or sent_count + missing_count < quorum
        if is_clear:
            self.decide()

    @property
    def changed_nodes(self) -> set[int]:
        """A copy of the nodes that have the new value: another thread may add one."""
        return self._changed_nodes.copy()

    @property
    def earlier_sends(self) -> dict[int, EarlierSend]:
        """The sends that nodes have instead, by node."""
        replies = self._replies.copy().items()
        return {node: reply for node, reply in replies if isinstance(reply, EarlierSend)}

    @property
    def voted(self) -> int:
        """How many nodes gave a valid reply."""
        return sum(reply is not None for reply in self._replies.copy().values())

    def causes(self) -> list[str]:
        """Return one text for each node that gave no valid reply in time."""
        nodes = self._nodes
        errors = self._errors_by_node.copy()
        replies = self._replies.copy()
        has_failed = len(errors) > len(nodes.all) - nodes.quorum  # before the time was up
        return causes_of(nodes.all, errors, voters=None if has_failed else {*replies} - {*errors})

    @property
    def has_quorum(self) -> bool:
        return len(self._changed_nodes) >= self._nodes.quorum

    @property
    def agreed_send(self) -> EarlierSend | None:
        """The earlier send that a quorum names; `is_sent` if a quorum has its confirmation.

        A single node proves nothing, because it may have missed the release of the key. Another
        node may have executed a delayed request after the release, which no confirmation follows.
        """
        sends = list(self.earlier_sends.values())
        quorum = self._nodes.quorum
        if len(sends) < quorum:
            return None
        tokens = [send.token for send in sends]
        token = max(tokens, key=tokens.count)
        if tokens.count(token) < quorum:
            return None
        copies = [send for send in sends if send.token == token]
        is_sent = sum(send.is_sent for send in copies) >= quorum
        agreed = next(send for send in copies if send.is_sent == is_sent)
        age = median_low(send.age for send in copies)  # outvotes a node whose clock was set
        expires_in = validity([send.expires_in for send in copies], quorum)
        # one node is enough: it ends the place when it hears of the start. Where the send is not
        # confirmed, what it has replaced is named instead
        kept = max(send.kept if send.is_sent else NONE_KEPT for send in copies)
        return replace(agreed, expires_in=expires_in, age=age, kept=kept)


class ClaimRelease(Round):
    """The release of a unique key on all nodes, also on a node that is away for a while.

    expires_in: seconds after which the key expires anyway. restores_earlier: the send has failed,
    so the earlier send that it had replaced is valid again. Decided once a quorum has executed it.
    """

    wanted = True

    def __init__(
        self, session: Session, name: str, token: str, expires_in: float = 0.0, *,
        restores_earlier: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._script_args = ("back", "") if restores_earlier else ("", "")
        self._session = session
        self._name = name
        self._token = token
        self._created_at = session.clock.now()
        self._expires_in = expires_in
        self._executed_nodes: set[int] = set()

    @property
    def until(self) -> float:
        """The monotonic second after which the release is not repeated to any node.

        Before a quorum has executed the release, later sends are dropped for a run that is over, so
        it is repeated until the key expires. A minority cannot cause a drop.
        """
        expires_in = 0.0 if self.decided else self._expires_in
        return self._created_at + max(RELEASE_RETRY_TIME, expires_in)

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

    def command(self, handler: Handler | None = None) -> Command:
        """Return what to send; not kept, because it refers to this object. handler: of replies."""
        return change_command(
            self._session, self._name, self._token, "", *self._script_args, handler=handler or self
        )

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
        self._executed_nodes.add(node)
        if not self.decided and len(self._executed_nodes) >= session.nodes.quorum:
            self.decide()

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Send it again once the node is back."""
        if self._session.clock.now() < self.until:
            self._session.releaser.outbox.put(node, self)

    def settle(self, node: int) -> None:
        """Do nothing: the key expires by itself."""


class ClaimRequests(Protocol):
    """What one send asks of the nodes. number: of the try in an order; 0 without one.

    A try begins with `begin`, and asks by `claim` in a `new_round`. earlier: the send that it is to
    replace. times: the seconds of the claim, and those without a confirmation. The send is
    confirmed by `sent`, and given up by `release`.
    """

    number: int

    def begin(self, token: str) -> None: ...

    def new_round(self, earlier: EarlierSend | None) -> ClaimRound: ...

    def claim(
        self, earlier: EarlierSend | None, value: str, times: tuple[float, float],
        round_: ClaimRound,
    ) -> Command: ...  # fmt: skip

    def sent(self, value: str, duration: float, before: Predecessors) -> Command: ...

    def release(self, *, restores_earlier: bool) -> ClaimRelease: ...


class PlainRequests:
    """The requests of a send that is deduplicated, or debounced.

    waits_for_ages: as of `ClaimRound`, while the send expects nothing.
    """

    number = 0

    def __init__(self, session: Session, name: str, *, waits_for_ages: bool) -> None:
        self._session = session
        self._name = name
        self._packed_key = encode_text(unique_key(session.options.prefix, name))
        self._waits_for_ages = waits_for_ages
        self._token = ""

    def begin(self, token: str) -> None:
        self._token = token

    def new_round(self, earlier: EarlierSend | None) -> ClaimRound:
        waits_for_ages = self._waits_for_ages and earlier is None
        return ClaimRound(self._session.nodes, waits_for_ages=waits_for_ages)

    def claim(
        self, earlier: EarlierSend | None, value: str, times: tuple[float, float],
        round_: ClaimRound,
    ) -> Command:  # fmt: skip
        duration, sending_ttl = times
        if earlier is None:
            packed_times = _packed_milliseconds(duration), _packed_milliseconds(sending_ttl)
            request = _CLAIM % (self._packed_key, encode_text(value), *packed_times)
            return Command(request, round_, UNIQUE)
        words = map(milliseconds, (duration, sending_ttl, earlier.age))
        return change_command(
            self._session, self._name, earlier.token, value, *words, handler=round_
        )

    def sent(self, value: str, duration: float, before: Predecessors) -> Command:
        request = _CONFIRM % (self._packed_key, encode_text(self._token), encode_text(value))
        return Command(request, IGNORE_REPLY, UNIQUE)

    def release(self, *, restores_earlier: bool) -> ClaimRelease:
        return ClaimRelease(
            self._session, self._name, self._token, restores_earlier=restores_earlier
        )


def milliseconds(seconds: float) -> str:
    """Return a time as an argument of a script."""
    return str(max(1, int(seconds * 1000)))


@functools.lru_cache(maxsize=64)  # a program has few of them, and each send asks
def _packed_milliseconds(seconds: float) -> bytes:
    return encode_text(milliseconds(seconds))
