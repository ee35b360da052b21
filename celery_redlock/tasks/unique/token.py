"""The token that a unique message carries, and how a worker releases its key."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import completion_key
from celery_redlock.lock.platform.interrupts import uninterruptible
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, Round
from celery_redlock.lock.transport.encoding import encode_command, text_of
from celery_redlock.lock.validation import LONGEST
from celery_redlock.tasks.delivery.delivery import RunId
from celery_redlock.tasks.delivery.header import is_moment
from celery_redlock.tasks.unique.rounds import UNIQUE, EarlierSend, UniqueKey, check_reply

logger = logging.getLogger(__name__)

DELIVER_FOR = 60.0  # seconds for which a release is repeated to a node that is away
MIN_MARKER_TTL = 60.0  # seconds
_ENDS = ("started", "finished", "expired")
_IS_A_TOKEN = re.compile(r"[0-9a-f]{32}")


class UniqueRelease(Round):
    """The release of a unique key on all nodes, also on a node that is away for a while.

    expires_in: seconds after which the key expires anyway. Decided once a quorum has executed it.
    """

    wanted = True

    def __init__(self, session: Session, request: bytes, expires_in: float = 0.0) -> None:
        super().__init__()
        self._session, self._request = session, request
        self._made_at, self._expires_in = session.clock.now(), expires_in
        self._executed: set[int] = set()

    @property
    def until(self) -> float:
        """The monotonic second after which the release is not repeated to any node.

        Until a quorum has executed the release, later sends would be dropped for a run that is
        over: then it is repeated until the key expires. A minority cannot make a send be dropped.
        """
        return self._made_at + (
            DELIVER_FOR if self._has_quorum else max(DELIVER_FOR, self._expires_in)
        )

    @property
    def _has_quorum(self) -> bool:
        return len(self._executed) >= self._session.node_set.size

    @uninterruptible
    def send(self, nodes: set[int] | None = None) -> None:
        """Write it to some nodes, or to all. Does not wait."""
        session, now = self._session, self._session.clock.now()
        command = self.command()
        if nodes is None:
            session.node_set.broadcast(command, now)
        else:
            for node in nodes:
                session.node_set.send_to(node, command, now)
        session.watchdog.run_maintenance_by(now + session.options.node_timeout)

    def wait(self) -> bool:
        """Wait one node timeout at most, and return whether a quorum has executed it."""
        session = self._session
        session.node_set.wait(self, session.clock.now() + session.options.node_timeout)
        return self._has_quorum

    def command(self) -> Command:
        """Return what to send; not kept, because it refers to this object."""
        return Command(self._request, self, UNIQUE)

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count the reply, or send it again if the node could not: loading, busy, no disk.

        Also send it again if another send is just replacing this one: if that send fails, it puts
        this one's value back. Raises UnexpectedReplyError.
        """
        session = self._session
        is_error = type(reply) is hiredis.ReplyError
        is_list = not is_error and type(check_reply(reply)) is list
        replaced = is_list and not EarlierSend.of(text_of(reply[1]), 0).is_sent
        if replaced or is_error:
            session.outbox.put(node, self)
            session.watchdog.run_maintenance_by(session.clock.now() + session.options.node_timeout)
            return
        self._executed.add(node)
        if not self.decided and self._has_quorum:
            self.decide()

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Send it again once the node is back."""
        if self._session.clock.now() < self.until:
            self._session.outbox.put(node, self)

    def settle(self, node: int) -> None:
        """Do nothing: the key expires by itself."""


def supersede(session: Session, run_id: str, kept_for: float) -> Command:
    """Return the command that marks a run as replaced by a later send.

    The marker is a completion marker below 0; a marker that is there already stays.
    """
    key, now = completion_key(session.options.prefix, run_id), session.clock.wall_us() // 1000
    words = ("SET", key, str(-now), "PX", str(math.ceil(kept_for * 1000)), "NX")
    return Command(encode_command(*words), IGNORE_REPLY)


@dataclass(frozen=True)
class UniqueToken:
    """What a message carries of its send's unique key.

    name: as of `unique_name`. token: the key's value begins with it. until: "started", "finished"
    or "expired". ends_at: seconds since 1970, when the key expires. replaces: the id of the run
    that this send replaces, or ""; kept_for: seconds that its marker stays.
    """

    name: str
    token: str
    until: str
    replaces: str = ""
    kept_for: float = MIN_MARKER_TTL
    ends_at: float = 0.0

    @classmethod
    def of(cls, carried: object) -> UniqueToken | None:
        """Read it from a message; None if it is not there, or another program wrote it."""
        if not isinstance(carried, Mapping):
            return None
        known = {name: carried[name] for name in cls.__dataclass_fields__ if name in carried}
        texts = [known.get(name, "") for name in ("name", "token", "until", "replaces")]
        if not all(isinstance(text, str) for text in texts) or not texts[0]:
            return None
        # a part of a token would begin the value of any send, and end its claim
        if not _IS_A_TOKEN.fullmatch(texts[1]) or texts[2] not in _ENDS:
            return None
        if not all(is_moment(known.get(name, 0.0)) for name in ("kept_for", "ends_at")):
            return None
        return cls(**known)

    def mark_superseded(self, redlock: Redlock, task_name: str) -> None:
        """Mark the run that this one replaces, in case its sender died before. Does not wait.

        Later commands on the same connections are executed after it: the grant of this run's lock.
        task_name: of this run; a message can replace a first try of the same task alone.
        """
        if self.replaces.endswith(str(RunId("", task_name))):
            session = redlock.session
            mark = supersede(session, self.replaces, min(self.kept_for, LONGEST))
            session.node_set.broadcast(mark, session.clock.now())

    def release_at_start(self, redlock: Redlock) -> None:
        """Release the key if that is due at the start, before the body reads anything.

        Waits for a quorum: a send from here on must not be dropped for what the body has read.
        """
        if self.until == "started" and not self.release(redlock).wait():
            text = "no quorum of nodes released unique key %r: later sends may count as duplicates"
            extra = {"event": "window_stays", "resource": self.name}
            logger.warning(text, self.name, extra=extra)

    def release_at_end(self, redlock: Redlock) -> None:
        """Release the key, unless it is to last until it expires. Does not wait."""
        if self.until != "expired":
            self.release(redlock)

    @uninterruptible
    def release(self, redlock: Redlock) -> UniqueRelease:
        """Release the key now, and return the round. Does not wait."""
        session = redlock.session
        key = UniqueKey(session.options.prefix, self.name)
        expires_in = min(self.ends_at - session.clock.wall_us() / 1e6, LONGEST)
        release = UniqueRelease(session, key.delete(self.token), expires_in)
        release.send()
        return release
