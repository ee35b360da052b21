"""Deduplication when sending: the first send opens a window, in which a second one is a duplicate.

The window is a key on the lock nodes, of which a majority decides. It is taken before the message
is published, for a moment only, and confirmed once that is done: so nobody is turned away for a
message that was never sent, however its sender ended. A send is dropped only where a quorum names
one earlier send that was published; in any other doubt it goes out, since the lock orders the runs.

A window may be replaced: the new send takes the key over, and once it is published the earlier one
is marked as superseded, which its own run reads with its lock (see lock/server/lua/grant.lua).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import hiredis

from celery_redlock.errors import NodeError, QuorumUnreachable
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import completion_key, name_of_all, unique_key
from celery_redlock.lock.server.error_hints import causes_of
from celery_redlock.lock.server.restart_guard import GuardedNodeSet
from celery_redlock.lock.server.scripts import load_script
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, Round
from celery_redlock.lock.transport.encoding import (
    UnexpectedReplyError,
    encode_bulk,
    encode_command,
    encode_text,
    text_of,
)

logger = logging.getLogger(__name__)

SENDING = 5.0  # s: until which nobody can tell a slow sender from a dead one
ROUNDS_WHILE_SENDING = 4  # node timeouts that this leaves time for at least
OWED = 60.0  # s: for which a node that is away is still told that a window is over; and while no
# quorum has heard of it, as long as the window: else later sends were dropped for what is done
SHORTEST_MARK = 60.0  # s
LONGEST_WINDOW = 366 * 86_400.0  # s: of a key that a stranger left without an end
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25  # s: between tries while another one is sending
PUBLISHING = 1.0  # s: what a publish takes at most for what was packed before it to be true
SENDS, SENT = "sending", "sent"
AWAITED = ("task_id", "link", "link_error", "chord", "group_id")

UNIQUE = load_script("unique")

T = TypeVar("T")


def is_awaited(options: Mapping[str, Any]) -> bool:
    """Tell whether something waits for this very message, so that it must be sent.

    options: of the send. Who chose its id may wait for it: a canvas for its members and their
    body, a caller for what it has replaced itself by; and a retry or a deferral is no new send.
    Source: celery.canvas freezes ids; celery.app.trace passes `chain`, empty with the last step.
    """
    if not options:
        return False
    return options.get("chain") is not None or any(map(options.get, AWAITED))


def name_of(task_name: str, resources: tuple[str, ...]) -> str:
    """Return what of a task is sent once: tasks that share a lock are not each other's duplicates.

    resources: those of its lock.
    """
    task = task_name.replace("%", "%25").replace(":", "%3A")  # so that the first ":" parts the two
    return f"{task}:{name_of_all(resources)}"


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


def _ttl(seconds: float) -> bytes:
    """Return how long a value is good for, as the last argument of a request."""
    return encode_bulk(b"%d" % max(1, math.ceil(seconds * 1000)))


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


def send_once(
    redlock: Redlock, send: UniqueSend, publish: Callable[[Mapping[str, Any] | None], T]
) -> T | EarlierSend:
    """Publish a message unless it is a duplicate; returns the earlier send where it is one.

    publish: takes what the message is to carry of its window, None where it has none. What it
    raises ends the window. Raises QuorumUnreachable where on_unreachable="fail", SettingsError.
    """
    window = UniqueClaim(redlock.session, send)
    try:
        try:
            earlier = window.open()
        except QuorumUnreachable as error:
            if send.on_unreachable == "fail":
                raise
            told = {"event": "sent_without_check", "resource": send.name}
            logger.warning("sending %s without deduplication: %s", send.run, error, extra=told)
            return publish(None)
        if earlier is not None:
            return earlier
        if not window.is_open:
            logger.warning(
                "sending %s without deduplication: no quorum of nodes agrees on an earlier send "
                "of %r", send.run, send.name,
                extra={"event": "sent_without_check", "resource": send.name},
            )  # fmt: skip
            return publish(None)
        result = publish(window.to_message())
    except BaseException:
        window.give_up()
        raise
    window.confirm()
    return result


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
