"""The claim of one unique send, from its first request until it is confirmed or given up."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import QuorumUnreachable
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.platform.interrupts import uninterruptible
from celery_redlock.lock.server.error_hints import causes_of
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command
from celery_redlock.lock.validation import LONGEST
from celery_redlock.tasks.unique.rounds import (
    SENDING,
    SENT,
    UNIQUE,
    CompareAndSetRound,
    EarlierSend,
    UniqueKey,
    encode_ttl,
)
from celery_redlock.tasks.unique.token import MIN_MARKER_TTL, UniqueRelease, supersede

SENDING_TTL = 5.0  # seconds for which others wait for an unconfirmed send: it may be slow, or dead
MIN_ROUNDS = 4  # node timeouts that SENDING_TTL leaves time for at least
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25  # seconds between tries while another send is unconfirmed
MAX_PUBLISH = 1.0  # seconds; after a publish that took longer the confirmation is encoded anew


@dataclass(frozen=True)
class UniqueSend:
    """A send that is to be deduplicated. Times in seconds.

    name: as of `unique_name`. run_id: of the run that its message leads to. unique_for: how long
    the claim lasts. unique_until, on_duplicate, on_unreachable: the options of these names.
    countdown: of the message. max_delay: how long after countdown and unique_for the message may
    still be delivered.
    """

    name: str
    run_id: str
    unique_for: float
    unique_until: str
    on_duplicate: str
    on_unreachable: str
    countdown: float
    max_delay: float


class UniqueClaim:
    """The claim of one send, from its first request until it is confirmed or given up.

    is_open: a quorum has it, and it was not given up. replaced: the earlier send whose value it has
    replaced.
    """

    def __init__(self, session: Session, send: UniqueSend) -> None:
        self._session, self._send = session, send
        self._key = UniqueKey(session.options.prefix, send.name)
        self._token, self.is_open = "", False
        self._confirmation = b""  # a request without its ttl
        self.replaced: EarlierSend | None = None
        self._opened_at = 0.0
        min_ttl = max(SENDING_TTL, MIN_ROUNDS * session.options.node_timeout)
        self._sending_ttl = min(send.unique_for, min_ttl)
        # of the token in use: its rounds, and what it may have replaced, by node
        self._rounds: list[CompareAndSetRound] = []
        self._before: dict[int, EarlierSend] = {}

    def open(self) -> EarlierSend | None:
        """Claim the key, or return the earlier send that this one is a duplicate of.

        Waits while another send of the name is unconfirmed. If no quorum agrees within that time,
        returns None with the claim not open: then the message is to be sent. Raises
        QuorumUnreachable, SettingsError.
        """
        clock = self._session.clock
        until, tries = clock.now() + self._sending_ttl, 0
        while True:
            rival = self._attempt()
            if isinstance(rival, EarlierSend):
                return rival
            if self.is_open or not rival or clock.now() > until:
                return None
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(tries, 16))
            clock.sleep(random.uniform(0.001, pause))  # noqa: S311 - no secret
            tries += 1

    def _attempt(self) -> EarlierSend | bool:
        """Try once: return the earlier send, or whether to try again as a rival is unconfirmed."""
        session = self._session
        # a new token for each try: the release of an old one, delivered late, cannot end this one
        self._token, self._rounds, self._before = session.platform.new_token(), [], {}
        self._opened_at = session.clock.now()
        first = self._ask("")
        earlier = first.agreed
        if not first.reached and earlier is not None and earlier.is_sent:
            if self._send.on_duplicate != "replace":
                self.give_up()
                return earlier
            self._take_over(earlier, first)
        if first.reached or self.replaced is not None:
            self.is_open = True
            return False
        self.give_up()
        node_set = session.node_set
        if first.voted < node_set.size:
            raise QuorumUnreachable(self._send.name, causes_of(node_set.nodes), node_set.size)
        has_unconfirmed = any(not one.is_sent for one in first.earlier.values())
        return has_unconfirmed or earlier is not None

    def _take_over(self, earlier: EarlierSend, first: CompareAndSetRound) -> None:
        """Replace an earlier send on the nodes that have it."""
        others = set(range(len(self._session.node_set.nodes))) - first.changed
        known = first.earlier
        self._before = {node: known.get(node, earlier) for node in others}
        if self._ask(earlier.token).reached:
            self.replaced = earlier

    def _ask(self, expected: str) -> CompareAndSetRound:
        """Set this send on every node whose value begins with `expected`; "": that has none."""
        session = self._session
        round_, sent = CompareAndSetRound(session.node_set), session.clock.now()
        self._rounds.append(round_)
        gone_by = self._gone_by
        request = self._key.set(expected, self._value(SENDING, gone_by), self._sending_ttl)
        session.node_set.broadcast(Command(request, round_, UNIQUE), sent)
        # encoded while the nodes execute the request
        value = self._value(SENT, gone_by + MAX_PUBLISH)
        self._confirmation = self._key.begin(self._token, value)
        session.node_set.wait(round_, sent + session.options.node_timeout)
        session.node_set.wait_for_connects(round_, sent)
        round_.decided = True
        session.check_distinct()
        return round_

    @property
    def _gone_by(self) -> float:
        """The second since 1970 after which a message published now is not delivered any more."""
        send = self._send
        lasts = send.countdown + send.unique_for + send.max_delay
        return self._session.clock.wall_us() / 1e6 + lasts

    def _value(self, state: str, gone_by: float) -> str:
        """Return the value of this send."""
        return f"{self._token}:{state}:{math.ceil(gone_by)}:{self._send.run_id}"

    def to_message(self) -> dict[str, Any]:
        """Return what its message carries, from which a worker makes a `UniqueToken`."""
        send, earlier = self._send, self.replaced
        clock = self._session.clock
        ends_at = clock.wall_us() / 1e6 + self._opened_at + send.unique_for - clock.now()
        token: dict[str, Any] = {
            "name": send.name,
            "token": self._token,
            "until": send.unique_until,
            "ends_at": ends_at,
        }
        if earlier is not None:
            token |= {"replaces": earlier.run_id, "kept_for": self._kept_for(earlier)}
        return token

    def _kept_for(self, earlier: EarlierSend) -> float:
        return max(MIN_MARKER_TTL, earlier.gone_by - self._session.clock.wall_us() / 1e6)

    @uninterruptible
    def confirm(self) -> bool:
        """Set the value to "sent" on the nodes: the message is published. Does not wait.

        A node that has not replied yet is told to delete the value instead. Otherwise it could
        execute both requests after the release of the key, and name a run that is over.
        Return False if the claim expired before, so that the nodes do not remember the send. It is
        not made anew: its run may be over, and later sends would be dropped for that run.
        """
        session = self._session
        node_set, every = session.node_set, len(session.node_set.nodes)
        changed = self._changed
        if len(changed) < every:
            node_set.read_from(set(range(every)) - changed)  # replies that came meanwhile
            changed = self._changed
        now = session.clock.now()
        left = self._opened_at + self._send.unique_for - now
        if now > self._opened_at + MAX_PUBLISH:
            self._confirmation = self._key.begin(self._token, self._value(SENT, self._gone_by))
        confirmed = Command(self._confirmation + encode_ttl(left), IGNORE_REPLY, UNIQUE)
        if left > 0 and len(changed) == every:
            node_set.broadcast(confirmed, now)
        else:
            deleted = Command(self._key.delete(self._token), IGNORE_REPLY, UNIQUE)
            for node in range(every):
                has_replied = left > 0 and node in changed
                node_set.send_to(node, confirmed if has_replied else deleted, now)
        if self.replaced is not None:
            kept_for = self._kept_for(self.replaced)
            node_set.broadcast(supersede(session, self.replaced.run_id, kept_for), now)
        session.watchdog.run_maintenance_by(now + session.options.node_timeout)
        return now < self._opened_at + self._sending_ttl or left <= 0

    @property
    def _changed(self) -> set[int]:
        """The nodes that have this send's value by now."""
        if len(self._rounds) == 1:
            return self._rounds[0].changed
        return set[int]().union(*(round_.changed for round_ in self._rounds))

    @uninterruptible
    def give_up(self) -> None:
        """Delete the claim on every node, or restore the value that it replaced. Does not wait."""
        session, now = self._session, self._session.clock.now()
        if not self._rounds:
            return
        for round_ in self._rounds:
            round_.wanted = False
        # not on a node whose late reply said that it had no value: the earlier run may be over
        fresh = self._rounds[0].changed
        before = {node: one for node, one in self._before.items() if node not in fresh}
        for node, earlier in before.items():
            request = self._key.set(self._token, earlier.value, min(earlier.expires_in, LONGEST))
            session.node_set.send_to(node, Command(request, IGNORE_REPLY, UNIQUE), now)
        elsewhere = set(self._rounds[-1].earlier) | set(before)
        nodes = set(range(len(session.node_set.nodes))) - elsewhere
        UniqueRelease(session, self._key.delete(self._token)).send(nodes)
        self.is_open, self._rounds = False, []
