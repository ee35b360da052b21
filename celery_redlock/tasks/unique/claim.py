"""One send's claim, from the first request until it is confirmed or given up."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import QuorumUnreachable
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import unique_key
from celery_redlock.lock.server.error_hints import causes_of
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command
from celery_redlock.lock.transport.encoding import encode_text
from celery_redlock.tasks.unique.rounds import (
    SENDS,
    SENT,
    UNIQUE,
    CompareAndSetRound,
    EarlierSend,
    _ttl,
)
from celery_redlock.tasks.unique.token import (
    LONGEST_WINDOW,
    SHORTEST_MARK,
    UniqueRelease,
    supersede,
)

SENDING = 5.0  # s: until which nobody can tell a slow sender from a dead one
ROUNDS_WHILE_SENDING = 4  # node timeouts that this leaves time for at least
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25  # s: between tries while another one is sending
PUBLISHING = 1.0  # s: what a publish takes at most for what was packed before it to be true


@dataclass(frozen=True)
class UniqueSend:
    """A send that is to be deduplicated. Times in s.

    name: as of `name_of`. run: the name of the run that it leads to. window: how long it is good.
    on_duplicate, until, on_unreachable: the options of these names. later: its countdown. lateness:
    for how much longer than that and the window it may still be on its way.
    """

    name: str
    task_id: str
    run: str
    window: float
    until: str
    on_duplicate: str
    on_unreachable: str
    later: float
    lateness: float


class UniqueClaim:
    """One send's window, from the first request for it until it is confirmed or given up.

    is_open: a quorum knows of it. replaced: the earlier send whose place it takes.
    """

    def __init__(self, session: Session, send: UniqueSend) -> None:
        self._session, self._send = session, send
        self._call = UNIQUE.begin([unique_key(session.options.prefix, send.name)], 3)
        self._token, self.is_open = "", False
        self._confirmation = b""  # all of it but how long it is good for
        self.replaced: EarlierSend | None = None
        self._opened_at = 0.0
        self._lease = min(
            send.window, max(SENDING, ROUNDS_WHILE_SENDING * session.options.node_timeout)
        )
        # of the token in use: what was asked, and what it may have replaced
        self._ballots: list[CompareAndSetRound] = []
        self._before: dict[int, EarlierSend] = {}

    def open(self) -> EarlierSend | None:
        """Take it, or return the earlier send that this one is a duplicate of.

        Returns None and is not open where nobody can say: then the message is to be sent. While
        another one is sending, waits for it to be done. Raises QuorumUnreachable, SettingsError.
        """
        clock = self._session.clock
        until, tries = clock.now() + self._lease, 0
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
        """Try once; True where another one is sending just now, so that it is to be tried again."""
        # a token of its own each time: after its release nothing is sent for one any more
        self._token, self._ballots, self._before = self._session.platform.new_token(), [], {}
        self._opened_at = self._session.clock.now()
        ballot = self._ask("")
        earlier = ballot.agreed
        if not ballot.reached and earlier is not None and earlier.is_sent:
            if self._send.on_duplicate != "replace":
                self.give_up()
                return earlier
            others = set(range(len(self._session.node_set.nodes))) - ballot.changed
            self._before = {node: ballot.standing.get(node, earlier) for node in others}
            second = self._ask(earlier.token)
            if second.reached:
                self.replaced = earlier
                ballot = second
        if ballot.reached:
            self.is_open = True
            return False
        self.give_up()
        quorum = self._session.node_set
        if ballot.voted < quorum.size:
            causes = causes_of(quorum.nodes)
            raise QuorumUnreachable(self._send.name, causes, quorum.size)
        sending = any(not standing.is_sent for standing in ballot.standing.values())
        return sending or earlier is not None

    def _ask(self, believed: str) -> CompareAndSetRound:
        """Have every node note this send, where what it knows begins like this ('': nothing)."""
        session = self._session
        ballot, sent = CompareAndSetRound(session.node_set), session.clock.now()
        self._ballots.append(ballot)
        request = self._request(believed, self._value(SENDS), self._lease)
        session.node_set.broadcast(Command(request, ballot, UNIQUE), sent)
        # packed while the nodes think
        self._confirmation = self._change(self._token, self._value(SENT, PUBLISHING))
        session.node_set.wait(ballot, sent + session.options.node_timeout)
        ballot.decided = True
        session.check_distinct()
        return ballot

    def _value(self, state: str, later: float = 0.0) -> str:
        """Return what a node keeps of it; later: s until which it may still be published."""
        send = self._send
        now = self._session.clock.wall_us() / 1e6
        gone_by = math.ceil(now + later + send.later + send.window + send.lateness)
        return f"{self._token}:{state}:{gone_by}:{send.run}"

    def _change(self, believed: str, value: str) -> bytes:
        """Return a request, all but its ttl."""
        return b"%b%b%b" % (self._call, encode_text(believed), encode_text(value))

    def _request(self, believed: str, value: str, seconds: float = 0.0) -> bytes:
        return self._change(believed, value) + _ttl(seconds)

    def to_message(self) -> dict[str, Any]:
        """Return what its message carries, from which a worker makes a `UniqueToken`."""
        send, earlier = self._send, self.replaced
        clock = self._session.clock
        ends_at = clock.wall_us() / 1e6 + self._opened_at + send.window - clock.now()
        ticket: dict[str, Any] = {
            "name": send.name,
            "token": self._token,
            "until": send.until,
            "ends_at": ends_at,
        }
        if earlier is not None:
            ticket |= {"replaces": earlier.run, "kept_for": self._kept_for(earlier)}
        return ticket

    def _kept_for(self, earlier: EarlierSend) -> float:
        return max(SHORTEST_MARK, earlier.gone_by - self._session.clock.wall_us() / 1e6)

    def confirm(self) -> None:
        """Say that the message is published. Does not wait.

        A node that has not answered yet is told to forget it: else what it had still to read might
        come after the end of the run.
        """
        session = self._session
        quorum, every = session.node_set, len(session.node_set.nodes)
        changed = self._changed
        if len(changed) < every:
            quorum.read_from(set(range(every)) - changed)  # what has come meanwhile
            changed = self._changed
        now = session.clock.now()
        left = self._opened_at + self._send.window - now
        if now > self._opened_at + PUBLISHING:
            self._confirmation = self._change(self._token, self._value(SENT))
        confirmed = Command(self._confirmation + _ttl(left), IGNORE_REPLY, UNIQUE)
        if left > 0 and len(changed) == every:
            quorum.broadcast(confirmed, now)
        else:
            forgotten = Command(self._request(self._token, ""), IGNORE_REPLY, UNIQUE)
            for node in range(every):
                is_known = left > 0 and node in changed
                quorum.send_to(node, confirmed if is_known else forgotten, now)
        if self.replaced is not None:
            kept_for = self._kept_for(self.replaced)
            quorum.broadcast(supersede(session, self.replaced.run, kept_for), now)
        session.watchdog.run_maintenance_by(now + session.options.node_timeout)

    @property
    def _changed(self) -> set[int]:
        """The nodes that know of it by now."""
        if len(self._ballots) == 1:
            return self._ballots[0].changed
        return set[int]().union(*(ballot.changed for ballot in self._ballots))

    def give_up(self) -> None:
        """Let every node forget it, and know again what stood there before. Does not wait."""
        session, now = self._session, self._session.clock.now()
        if not self._ballots:
            return
        for ballot in self._ballots:
            ballot.wanted = False
        # not where nothing stood, as a node said that came late: a quorum may know that it is over
        fresh = self._ballots[0].changed
        before = {node: one for node, one in self._before.items() if node not in fresh}
        for node, earlier in before.items():
            seconds = min(earlier.expires_in, LONGEST_WINDOW)
            request = self._request(self._token, earlier.value, seconds)
            session.node_set.send_to(node, Command(request, IGNORE_REPLY, UNIQUE), now)
        elsewhere = set(self._ballots[-1].standing) | set(before)
        nodes = set(range(len(session.node_set.nodes))) - elsewhere
        UniqueRelease(session, self._request(self._token, "")).send(nodes)
        self.is_open, self._ballots = False, []
