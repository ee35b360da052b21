"""What a message carries of its send's claim, and how the claim ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import completion_key, unique_key
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, Round
from celery_redlock.lock.transport.encoding import encode_command, text_of
from celery_redlock.tasks.unique.rounds import UNIQUE, EarlierSend, _check

logger = logging.getLogger(__name__)

OWED = 60.0  # s: for which a node that is away is still told that a window is over; and while no
# quorum has heard of it, as long as the window: else later sends were dropped for what is done
SHORTEST_MARK = 60.0  # s
LONGEST_WINDOW = 366 * 86_400.0  # s: of a key that a stranger left without an end


class UniqueRelease(Round):
    """The end of a window, on its way to every node, also to one that is away for a while.

    request: what ends it. left: s for which it would be open else. Decided once a quorum has heard
    of it.
    """

    wanted = True

    def __init__(self, session: Session, request: bytes, left: float = 0.0) -> None:
        super().__init__()
        self._session, self._request = session, request
        self._made_at, self._left = session.clock.now(), left
        self._heard: set[int] = set()

    @property
    def until(self) -> float:
        """When nobody needs to be told any more, monotonic s.

        A minority that knows of an earlier send drops nothing, so it is told for a while only.
        """
        is_known = len(self._heard) >= self._session.node_set.size
        return self._made_at + (OWED if is_known else max(OWED, self._left))

    def send(self, nodes: set[int] | None = None) -> None:
        """Write it to some nodes, or all. Does not wait."""
        session, now = self._session, self._session.clock.now()
        command = self.command()
        if nodes is None:
            session.node_set.broadcast(command, now)
        else:
            for node in nodes:
                session.node_set.send_to(node, command, now)
        session.watchdog.run_maintenance_by(now + session.options.node_timeout)

    def wait(self) -> bool:
        """Wait for a quorum to hear of it, no longer than a node may take; False where none did."""
        session = self._session
        session.node_set.wait(self, session.clock.now() + session.options.node_timeout)
        return len(self._heard) >= session.node_set.size

    def command(self) -> Command:
        """Return what to send; not kept, for it refers to this."""
        return Command(self._request, self, UNIQUE)

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Tell a node again that cannot just now: loading, busy, no disk.

        And one where another send is about to take the place of this one: if that fails, what
        stood there before comes back. Raises UnexpectedReplyError.
        """
        session = self._session
        is_error = type(reply) is hiredis.ReplyError
        is_list = not is_error and type(_check(reply)) is list
        replaced = is_list and not EarlierSend.of(text_of(reply[1]), 0).is_sent
        if replaced or is_error:
            session.outbox.put(node, self)
            session.watchdog.run_maintenance_by(session.clock.now() + session.options.node_timeout)
            return
        self._heard.add(node)
        if not self.decided and len(self._heard) >= self._session.node_set.size:
            self.decide()

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Tell it when the node is back."""
        if self._session.clock.now() < self.until:
            self._session.outbox.put(node, self)

    def settle(self, node: int) -> None:
        """Leave it at that: the key ends by itself."""


def supersede(session: Session, run: str, kept_for: float) -> Command:
    """Return what marks a run as one that a later send has taken the place of.

    The mark is a done mark below 0; one that is there already stays.
    """
    key, now = completion_key(session.options.prefix, run), session.clock.wall_us() // 1000
    words = ("SET", key, str(-now), "PX", str(math.ceil(kept_for * 1000)), "NX")
    return Command(encode_command(*words), IGNORE_REPLY)


@dataclass(frozen=True)
class UniqueToken:
    """What a message carries of the window that its send has opened.

    name, token: of the window. until: "started", "finished" or "expired". ends_at: s since 1970,
    when it ends by itself. replaces: the run whose place it takes, "" for none; kept_for: s for
    which that is to be known.
    """

    name: str
    token: str
    until: str
    replaces: str = ""
    kept_for: float = SHORTEST_MARK
    ends_at: float = 0.0

    @classmethod
    def of(cls, carried: object) -> UniqueToken | None:
        """Read it from a message; what a stranger wrote there counts as nothing."""
        if not isinstance(carried, Mapping):
            return None
        known = {name: carried[name] for name in cls.__dataclass_fields__ if name in carried}
        texts = [known.get(name, "") for name in ("name", "token", "until", "replaces")]
        if not all(isinstance(text, str) for text in texts) or not all(texts[:3]):
            return None
        numbers = [known.get(name, 0.0) for name in ("kept_for", "ends_at")]
        if not all(isinstance(number, (int, float)) for number in numbers):
            return None
        return cls(**known)

    def take_place(self, redlock: Redlock) -> None:
        """Mark the run that this one replaces, where its sender could not. Does not wait.

        What follows on the same connections comes after it: the grant of this run's lock.
        """
        if self.replaces:
            session = redlock.session
            mark = supersede(session, self.replaces, self.kept_for)
            session.node_set.broadcast(mark, session.clock.now())

    def start(self, redlock: Redlock) -> None:
        """End the window where that is at the start, before the body reads anything.

        A send from here on is a new one, so a quorum must know of it.
        """
        if self.until == "started" and not self._end(redlock).wait():
            text = "no quorum of nodes heard that the window of %r is over"
            logger.warning(text, self.name, extra={"event": "window_stays", "resource": self.name})

    def end(self, redlock: Redlock) -> None:
        """End the window, unless it is to last. Does not wait."""
        if self.until != "expired":
            self._end(redlock)

    def _end(self, redlock: Redlock) -> UniqueRelease:
        session = redlock.session
        key = unique_key(session.options.prefix, self.name)
        left = min(self.ends_at - session.clock.wall_us() / 1e6, LONGEST_WINDOW)
        ending = UniqueRelease(session, UNIQUE.call([key], self.token, "", "1"), left)
        ending.send()
        return ending
