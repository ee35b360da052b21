"""The claim of a unique send on its key, and the token of it that the message carries.

Not here: what the nodes are asked and reply (`rounds.py`), and how the token gets into the message
(`send.py`). The claim ends with the run (`tasks/execution/end.py`), or here, if a message starts no
run.
"""

from __future__ import annotations

import logging
import math
import random
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from celery.app.task import Context

from celery_redlock.errors import QuorumUnreachable
from celery_redlock.label import RunId
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import SENDING, SENT, completion_key, resources_of
from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, encode_command
from celery_redlock.lock.validation import LONGEST
from celery_redlock.tasks.delivery.delivery import header_of
from celery_redlock.tasks.delivery.header import HEADER, LockHeader, is_moment
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.unique.rounds import ClaimRelease, ClaimRound, EarlierSend, change

logger = logging.getLogger(__name__)
T = TypeVar("T")

SENDING_TTL = 5.0  # seconds for which others wait for an unconfirmed send: it may be slow, or dead
MIN_ROUNDS = 4  # node timeouts that SENDING_TTL leaves time for at least
MOST_WAIT = 1.0  # seconds for which a debounced send waits for a rival: then both run
# seconds between tries while another send is unconfirmed
_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.25
MIN_MARKER_TTL = 60.0  # seconds
_ENDS = ("started", "finished", "expired")
_IS_A_TOKEN = re.compile(r"[0-9a-f]{32}")


class Claim:
    """The claim of one send, from its first request until it is confirmed or given up.

    name: of the unique key. run_id: of the run that the message leads to. options: those of the
    send. unique_for: seconds that the claim lasts; that of a debounced send lasts until its run is
    due. late: seconds after that for which a debounced message may still be delivered. carried:
    what the message carries; None unless a quorum has the claim. lasts: seconds; of a debounced
    send, until its run is due.
    """

    def __init__(
        self, session: Session, name: str, run_id: RunId, options: TaskLockOptions,
        unique_for: float, late: float = 0.0,
    ) -> None:  # fmt: skip
        self._session = session
        self.name = name
        self.run_id = run_id
        self._options = options
        self._late = late
        self._debounce = options.debounce
        self.lasts = unique_for if self._debounce is None else self._until_due(0.0)
        self.carried: ClaimToken | None = None
        self._token = ""  # with which the value on the nodes begins
        self._opened_at = 0.0
        self._rounds: list[ClaimRound] = []  # of the token in use

    def _until_due(self, age: float) -> float:
        """Return the seconds until a debounced run is due. age: seconds, of the burst."""
        longest = self._options.debounce_max
        left = math.inf if longest is None else max(0.0, longest - age)
        return min(self._debounce or 0.0, left)

    @property
    def _sending_ttl(self) -> float:
        """The seconds for which the nodes keep the claim before it is confirmed."""
        return min(self.lasts, max(SENDING_TTL, MIN_ROUNDS * self._session.options.node_timeout))

    def send(self, publish: Callable[[ClaimToken | None], T]) -> T | EarlierSend:
        """Publish the message, or return the earlier send that this one is a duplicate of.

        publish: takes the token for the message, None without a claim. If it raises, the claim is
        given up. Raises QuorumUnreachable if on_unreachable="fail", and SettingsError.
        """
        earlier = None
        why = f"no quorum of nodes agrees on an earlier send of {self.name!r}"
        try:
            try:
                earlier = self.open()
            except QuorumUnreachable as error:
                if self._options.on_unreachable == "fail":
                    raise
                why = str(error)
            if earlier is not None:
                return earlier
            if self.carried is None:
                self._warn("sent_without_check", "sending %s without deduplication: %s", why)
                return publish(None)
            result = publish(self.carried)
        except BaseException:  # also if it was interrupted in `open`: the key must not stay claimed
            self.give_up()
            raise
        if not self.confirm():
            self._warn(
                "send_not_remembered",
                "%s took too long to publish: a later call is not recognized as its duplicate",
            )
        return result

    def _warn(self, event: str, text: str, *why: str) -> None:
        sent = f"{self.run_id.name}[{self.run_id.task_id}]"
        logger.warning(text, sent, *why, extra={"event": event, "resource": self.name})

    def open(self) -> EarlierSend | None:
        """Claim the key, or return the earlier send that this one is a duplicate of.

        Waits while another send of the name is unconfirmed. If no quorum agrees within that time,
        returns None without a token. Raises QuorumUnreachable, SettingsError.
        """
        clock = self._session.clock
        tries = 0
        patience = self._sending_ttl if self._debounce is None else MOST_WAIT
        started = clock.now()
        while True:
            rival = self._attempt(started)
            if isinstance(rival, EarlierSend):
                return rival
            if not rival or clock.now() > started + patience:
                return None
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(tries, 16))
            clock.sleep(random.uniform(0.001, pause))  # noqa: S311 - no secret
            tries += 1

    def _attempt(self, since: float) -> EarlierSend | bool:
        """Try once: return the earlier send, or whether to try again as a rival is unconfirmed.

        since: the monotonic second of the first try.
        """
        session = self._session
        replaced = None
        # a new one for each try: the release of an old one, delivered late, cannot end this one
        self._token = session.platform.new_token()
        self._rounds = []
        self._opened_at = session.clock.now()
        first = self._ask("")
        earlier = first.agreed
        if self._debounce is not None:
            self.lasts = self._until_due(0.0 if earlier is None else earlier.age)
        if not first.reached and earlier is not None and earlier.is_sent:
            if self._debounce is None:
                self.give_up()
                return earlier
            if self._ask(earlier.token, earlier.age).reached:
                replaced = earlier
        if first.reached or replaced is not None:
            self.carried = self._message_token(replaced)
            return False
        self.give_up()
        if first.voted < session.nodes.quorum:
            resource = ", ".join(resources_of(self.name.partition(":")[2]))
            waited = session.clock.now() - since
            raise QuorumUnreachable(resource, first.causes(), session.nodes.quorum, waited)
        return earlier is not None or any(not one.is_sent for one in first.earlier.values())

    def _message_token(self, replaced: EarlierSend | None) -> ClaimToken:
        if self._debounce is not None:  # the nodes end the claim
            token = ClaimToken(self.name, self._token, "expired")
            if replaced is None:
                return token
            kept_for = min(replaced.expires_in, LONGEST) + self._late
            return replace(token, replaces=replaced.run_id, kept_for=kept_for)
        clock = self._session.clock
        ends_at = clock.wall_us() / 1e6 + self._opened_at + self.lasts - clock.now()
        return ClaimToken(self.name, self._token, self._options.unique_until, ends_at)

    def _ask(self, expected: str, age: float = 0.0) -> ClaimRound:
        """Set this send on every node whose value begins with `expected`; "": that has none.

        age: seconds, of the burst that it joins. So a node that missed calls of it learns that.
        """
        session = self._session
        asks_age = self._options.debounce_max is not None and not expected
        round_ = ClaimRound(session.nodes, asks_age=asks_age)
        sent = session.clock.now()
        self._rounds.append(round_)
        joined = (age,) if expected else ()
        terms = [str(max(1, int(one * 1000))) for one in (self.lasts, self._sending_ttl, *joined)]
        value = self._value(SENDING)
        command = change(session, self.name, expected, value, *terms, handler=round_)
        session.nodes.broadcast(command, sent)
        session.nodes.wait(round_, sent + session.options.node_timeout)
        session.nodes.wait_for_connects(round_, sent)
        round_.decided = True
        session.check_distinct()
        return round_

    def _value(self, state: str) -> str:
        return f"{self._token}:{state}:{self.run_id}"

    @uninterruptible
    def confirm(self) -> bool:
        """Set the value to "sent" on the nodes: the message is published. Does not wait.

        A node that has not replied yet is told to delete the value instead. Otherwise it could
        execute both requests after the release of the key, and name a run that is over.
        Return False if the claim expired before, so that the nodes do not remember the send. It is
        not made anew: its run may be over, and later sends would be dropped for that run.
        """
        session = self._session
        nodes = self._session.nodes
        every = set(range(len(nodes.all)))
        unchanged = every - self._changed
        if unchanged:
            nodes.read([nodes.all[node] for node in unchanged])  # replies that came meanwhile
            unchanged = every - self._changed
        now = session.clock.now()
        confirmed = change(session, self.name, self._token, self._value(SENT), "", "")
        deleted = change(session, self.name, self._token, "", "", "")
        for node in every:
            nodes.send_to(node, deleted if node in unchanged else confirmed, now)
        if self.carried is not None:
            self.carried.mark_superseded(session, self.run_id.name)
        session.watchdog.run_maintenance_by(now + session.options.node_timeout)
        return now < self._opened_at + self._sending_ttl or self._sending_ttl == self.lasts

    @property
    def _changed(self) -> set[int]:
        """The nodes that have this send's value by now."""
        return set[int]().union(*(round_.changed for round_ in self._rounds))

    @uninterruptible
    def give_up(self) -> None:
        """Delete the claim on every node, or restore the value that it replaced. Does not wait."""
        session = self._session
        if not self._rounds:
            return
        for round_ in self._rounds:
            round_.wanted = False
        nodes = set(range(len(session.nodes.all))) - set(self._rounds[-1].earlier)
        ClaimRelease(session, self.name, self._token, puts_back=True).send(nodes)
        self.carried = None
        self._rounds = []


@dataclass(frozen=True)
class ClaimToken:
    """What a message carries of its send's claim, by which a worker ends the claim.

    name: of the unique key. token: the key's value begins with it. until: "started", "finished" or
    "expired". ends_at: seconds since 1970, when the key expires. replaces: the id of the run that
    this send replaces, or ""; kept_for: seconds that its marker stays, `MIN_MARKER_TTL` at least.
    """

    name: str = ""
    token: str = ""
    until: str = ""
    ends_at: float = 0.0
    replaces: str = ""
    kept_for: float = 0.0

    @classmethod
    def of(cls, carried: object) -> ClaimToken | None:
        """Read it from a message; None if it is not there, or another program wrote it."""
        if not isinstance(carried, Mapping):
            return None
        one = cls(**{name: carried[name] for name in cls.__dataclass_fields__ if name in carried})
        texts = (one.name, one.token, one.until, one.replaces)
        if not all(isinstance(text, str) for text in texts) or not one.name:
            return None
        # a part of a token would begin the value of any send, and end its claim
        if not _IS_A_TOKEN.fullmatch(one.token) or one.until not in _ENDS:
            return None
        return one if is_moment(one.kept_for) and is_moment(one.ends_at) else None

    def to_message(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value}

    def mark_superseded(self, session: Session, task_name: str) -> None:
        """Mark the run that this send replaces, if it replaces one. Does not wait.

        The sender does that, and the run again, in case the sender died before. Later commands on
        the same connections are executed after it: the grant of this run's lock. The marker is a
        completion marker below 0; a marker that is there already stays. task_name: of this send; it
        can replace a first try of the same task alone.
        """
        if self.replaces and self.replaces.endswith(str(RunId("", task_name))):
            key = completion_key(session.options.prefix, self.replaces)
            now = session.clock.now()
            since_ms = session.clock.wall_us() // 1000
            ttl_ms = math.ceil(min(max(self.kept_for, MIN_MARKER_TTL), LONGEST) * 1000)
            request = encode_command("SET", key, str(-since_ms), "PX", str(ttl_ms), "NX")
            session.nodes.broadcast(Command(request, IGNORE_REPLY), now)

    def release_at_start(self, session: Session) -> None:
        """Release the key if that is due at the start, before the body reads anything."""
        # wait for a quorum: a send from here on must not be dropped for what the body has read
        if self.until == "started" and not self.release(session).wait():
            text = "no quorum of nodes released unique key %r: later calls may count as duplicates"
            extra = {"event": "window_stays", "resource": self.name}
            logger.warning(text, self.name, extra=extra)

    def release_at_end(self, session: Session) -> None:
        """Release the key, unless it is to last until it expires. Does not wait."""
        if self.until != "expired":
            self.release(session)

    @uninterruptible
    def release(self, session: Session) -> ClaimRelease:
        """Release the key now, and return the round. Does not wait."""
        expires_in = min(self.ends_at - session.clock.wall_us() / 1e6, LONGEST)
        release = ClaimRelease(session, self.name, self.token, expires_in)
        release.send()
        return release


@uninterruptible
def end_claim(app: Any, header: LockHeader) -> None:
    """End the claim that a message's send has made; nothing happens if there is none."""
    token = ClaimToken.of(header.unique)
    if token is not None:
        token.release_at_end(redlock_of(app).session)


def end_claim_of_revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    """End the claim of a revoked or expired message, in the worker's main process."""
    if HEADER in request.__dict__:
        end_claim(sender.app, header_of(request))


def end_claim_of_unread(sender: Any = None, message: Any = None, **_: Any) -> None:
    """End the claim of a message that starts no run: its task is unknown, or its body is wrong."""
    # Source: celery.worker.consumer: on_unknown_task, on_invalid_task, on_unknown_message have
    # rejected it by then, each without requeue
    headers = message.headers
    if isinstance(headers, Mapping) and HEADER in headers:
        end_claim(sender.app, LockHeader.of(Context(headers)))


_received: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def note_claim(request: Any = None, **_: Any) -> None:
    """Keep the request of a message that has a claim, for as long as Celery itself keeps it."""
    if HEADER in request.request_dict and header_of(request._context).unique is not None:
        _received[request.id] = request


def end_claim_of_killed(sender: Any = None, task_id: Any = None, **_: Any) -> None:
    """End the claim of a run whose process is gone; its message does not come back."""
    # Source: celery.worker.request: Request.on_failure sends this in the worker's main process if
    # the child could not, and does not send it if it hands the message back
    request = _received.get(task_id)
    if request is not None:
        end_claim(sender.app, header_of(request._context))
