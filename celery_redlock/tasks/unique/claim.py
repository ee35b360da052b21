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
from celery_redlock.lock.validation import MAX_SECONDS
from celery_redlock.tasks.delivery.delivery import header_of
from celery_redlock.tasks.delivery.header import HEADER, LockHeader, is_moment
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.settings.options import NEWEST, TaskLockOptions
from celery_redlock.tasks.unique.rounds import (
    NO_PREDECESSORS,
    ClaimRelease,
    ClaimRequests,
    ClaimRound,
    EarlierSend,
    KeptMessage,
    PlainRequests,
    Predecessors,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

SENDING_TTL = 5.0  # seconds for which others wait for an unconfirmed send: it may be slow, or dead
MIN_ROUNDS = 4  # node timeouts that SENDING_TTL leaves time for at least
DEBOUNCE_PATIENCE = 1.0  # s for which a debounced send waits for an unconfirmed one; then both run
REPLACED_FOR = 60.0  # s from the first send of a burst, for which later ones replace its message
# seconds between tries while another send is unconfirmed
_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.25
MIN_MARKER_TTL = 60.0  # seconds
NUMBER_TRIES = 3  # rounds for a number, of a send that has no place in its order
LARGEST_NUMBER = 2**52  # of a send: a node counts on from there
_CLAIM_ENDS = ("started", "finished", "expired")
_TOKEN = re.compile(r"[0-9a-f]{32}")


class Claim:
    """The claim of one send, from its first request until it is confirmed or given up.

    name: of the unique key. run_id: of the run that the message leads to. options: of the send.
    unique_for: seconds that the claim lasts, unless the send is debounced. late_delivery: seconds
    after its due time for which a debounced message may still be delivered. message_token: for the
    message; None unless a quorum has the claim. duration: seconds of the claim; of a debounced
    send, until its run is due.
    """

    def __init__(
        self, session: Session, name: str, run_id: RunId, options: TaskLockOptions,
        unique_for: float, late_delivery: float = 0.0,
    ) -> None:  # fmt: skip
        self._session = session
        self.name = name
        self.run_id = run_id
        self._run_text = str(run_id)
        self._options = options
        self._late_delivery = late_delivery
        self._debounce = options.debounce
        self.duration = unique_for if self._debounce is None else self._until_due(0.0)
        self.message_token: ClaimToken | None = None
        self._token = ""  # the value on the nodes begins with it
        self._attempt_began_at = 0.0
        self._rounds: list[ClaimRound] = []  # of the token in use
        self._predecessors = NO_PREDECESSORS
        self._is_ordered = options.on_duplicate == NEWEST
        self._requests: ClaimRequests
        if self._is_ordered:
            from celery_redlock.tasks.unique.newest import OrderRequests

            self._requests = OrderRequests(session, name, unique_for + late_delivery)
        else:
            waits_for_ages = options.debounce_max is not None
            self._requests = PlainRequests(session, name, waits_for_ages=waits_for_ages)

    def _until_due(self, age: float) -> float:
        """Return the seconds until a debounced run is due. age: seconds, of the burst."""
        debounce_max = self._options.debounce_max
        remaining = math.inf if debounce_max is None else max(0.0, debounce_max - age)
        return min(self._debounce or 0.0, remaining)

    @property
    def _sending_ttl(self) -> float:
        """The seconds for which the nodes keep the claim before it is confirmed."""
        return min(self.duration, max(SENDING_TTL, MIN_ROUNDS * self._session.options.node_timeout))

    @property
    def replaced_id(self) -> str:
        """The id of the task whose message this send has replaced; "" if it has replaced none."""
        token = self.message_token
        return "" if token is None else token.replaces.partition(":")[0]

    def send(self, publish: Callable[[ClaimToken | None], T]) -> T | EarlierSend:
        """Publish the message, or return the earlier send that this one is a duplicate of.

        publish: takes the token for the message, None without a claim. If it raises, the claim is
        given up. Raises QuorumUnreachable if on_unreachable="fail", and SettingsError.
        """
        earlier = None
        reason = f"no quorum of nodes agrees on an earlier send of {self.name!r}"
        can_ask = True
        try:
            try:
                earlier = self.open()
            except QuorumUnreachable as error:
                if self._options.on_unreachable == "fail":
                    raise
                reason = str(error)
                can_ask = False
            if earlier is not None:
                return earlier
            if self.message_token is None:
                self._warn("sent_without_check", "sending %s without deduplication: %s", reason)
                return publish(self._number_alone() if can_ask else None)
            result = publish(self.message_token)
        except BaseException:  # also if it was interrupted in `open`: the key must not stay claimed
            self.give_up()
            raise
        if not self.confirm():
            self._warn(
                "send_not_remembered",
                "%s took too long to publish: a later call is not recognized as its duplicate",
            )
        return result

    def _number_alone(self) -> ClaimToken | None:
        """Return the token of a send in an order that has no place; None if no quorum takes it.

        Its run keeps the order, though it replaces no message, and none replaces it.
        """
        for _ in range(NUMBER_TRIES if self._is_ordered else 0):
            self._begin_attempt()
            if self._ask(value="").has_quorum:
                return self._message_token(None)
        return None

    def _warn(self, event: str, text: str, *why: str) -> None:
        label = f"{self.run_id.name}[{self.run_id.task_id}]"
        logger.warning(text, label, *why, extra={"event": event, "resource": self.name})

    def open(self) -> EarlierSend | None:
        """Claim the key, or return the earlier send that this one is a duplicate of.

        Waits while another send of the name is unconfirmed. If no quorum agrees within that time,
        returns None without a token. Raises QuorumUnreachable, SettingsError.
        """
        clock = self._session.clock
        attempt = 0
        replaces = self._is_ordered or self._debounce is not None
        patience = DEBOUNCE_PATIENCE if replaces else self._sending_ttl
        started = clock.now()
        while True:
            outcome = self._attempt(started)
            if isinstance(outcome, EarlierSend):
                return outcome
            if not outcome or clock.now() > started + patience:
                return None
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt, 16))
            clock.sleep(random.uniform(0.001, pause))  # noqa: S311 - no secret
            attempt += 1

    def _attempt(self, since: float) -> EarlierSend | bool:
        """Try once: return the earlier send, or whether to try again after an unconfirmed one.

        since: monotonic second of the first try.
        """
        session = self._session
        replaced = None
        self._begin_attempt()
        round_ = self._ask()
        if self._debounce is None and round_.has_quorum:  # most sends
            self.message_token = self._message_token(None)
            return False
        earlier = round_.agreed_send
        if self._debounce is not None:
            self.duration = self._until_due(0.0 if earlier is None else earlier.age)
        if not round_.has_quorum and earlier is not None and earlier.is_sent:
            if self._debounce is None and not self._is_ordered:
                self.give_up()
                return earlier
            if self._ask(earlier).has_quorum:
                replaced = earlier
        if round_.has_quorum or replaced is not None:
            self.message_token = self._message_token(replaced)
            return False
        self.give_up()
        if round_.voted < session.nodes.quorum:
            waited = session.clock.now() - since
            raise QuorumUnreachable(
                resource_text(self.name), round_.causes(), session.nodes.quorum, waited
            )
        is_unconfirmed = any(not send.is_sent for send in round_.earlier_sends.values())
        # of an order also if some nodes had the start of a run in between, or a larger number
        return earlier is not None or is_unconfirmed or self._is_ordered

    def _begin_attempt(self) -> None:
        # a new one for each try: the release of an old one, delivered late, cannot end this one
        self._token = self._session.platform.new_token()
        self._rounds = []
        self._attempt_began_at = self._session.clock.now()
        self._predecessors = NO_PREDECESSORS
        self._requests.begin(self._token)

    def _message_token(self, replaced: EarlierSend | None) -> ClaimToken:
        if self._debounce is not None:  # the nodes end the claim
            token = ClaimToken(self.name, self._token, "expired")
            if replaced is None:
                return token
            kept_for = min(replaced.expires_in, MAX_SECONDS) + self._late_delivery
            return replace(token, replaces=replaced.run_id, kept_for=kept_for)
        clock = self._session.clock
        ends_at = clock.wall_us() / 1e6 + self._attempt_began_at + self.duration - clock.now()
        token = ClaimToken(self.name, self._token, self._options.unique_until, ends_at)
        if not self._is_ordered:
            return token
        kept_for = self.duration + self._late_delivery
        token = replace(token, number=self._requests.number, kept_for=kept_for)
        if replaced is None:
            return token
        if replaced.age >= min(REPLACED_FOR, self.duration):
            kept = KeptMessage(replaced.number, replaced.token)
            self._predecessors = Predecessors(kept=kept)
            return token
        self._predecessors = Predecessors(replaced, replaced.kept)
        return replace(token, replaces=replaced.run_id)

    def _ask(self, earlier: EarlierSend | None = None, value: str | None = None) -> ClaimRound:
        """Set this send on each node that has an earlier one, or on those that have none.

        value: "" if the send is to have a number alone.
        """
        session = self._session
        round_ = self._requests.new_round(earlier)
        sent = session.clock.now()
        self._rounds.append(round_)
        value = self._value(SENDING) if value is None else value
        times = self.duration, self._sending_ttl
        nodes = session.nodes
        nodes.broadcast(self._requests.claim(earlier, value, times, round_), sent)
        nodes.wait(round_, sent + nodes.timeout)
        if not round_.decided:
            nodes.wait_for_connects(round_, sent)
            round_.decided = True
        session.check_distinct()
        return round_

    def _value(self, state: str) -> str:
        return f"{self._token}:{state}:{self._run_text}"

    @uninterruptible
    def confirm(self) -> bool:
        """Set the value to "sent" on the nodes: the message is published. Does not wait.

        Not put off until those of other sends are written, because this process may be killed once
        the send has returned. Its message is there, and later sends are duplicates of it.

        A node that has not replied yet is told to delete the value instead. Otherwise it could
        execute both requests after the release of the key, and name a run that is over.
        Return False if the claim expired before, so that the nodes do not remember the send. It is
        not made anew: its run may be over, and later sends would be dropped for that run.
        """
        session = self._session
        nodes = session.nodes
        changed = self._changed
        if len(changed) < len(nodes.all):
            nodes.read([node for node in nodes.all if node.index not in changed])
            changed = self._changed  # with the replies that came meanwhile
        now = session.clock.now()
        confirmed = self._requests.sent(self._value(SENT), self.duration, self._predecessors)
        if len(changed) == len(nodes.all):
            nodes.broadcast(confirmed, now)
        else:
            deleted = self._requests.release(restores_earlier=False).command(IGNORE_REPLY)
            for index in range(len(nodes.all)):
                nodes.send_to(index, confirmed if index in changed else deleted, now)
        if self.message_token is not None:
            self.message_token.mark_superseded(session, self.run_id.name, self.run_id.task_id)
        session.watchdog.run_maintenance_by(now + nodes.timeout)
        ttl = self._sending_ttl
        return now < self._attempt_began_at + ttl or ttl == self.duration

    @property
    def _changed(self) -> set[int]:
        """The nodes that have this send's value by now."""
        return set[int]().union(*(round_.changed_nodes for round_ in self._rounds))

    @uninterruptible
    def give_up(self) -> None:
        """Delete the claim on every node, or restore the value that it replaced. Does not wait."""
        session = self._session
        if not self._rounds:
            return
        for round_ in self._rounds:
            round_.wanted = False
        nodes = set(range(len(session.nodes.all))) - set(self._rounds[-1].earlier_sends)
        self._requests.release(restores_earlier=True).send(nodes)
        self.message_token = None
        self._rounds = []


def resource_text(name: str) -> str:
    """Return the resource of a unique key for people. name: as of `unique_name`."""
    return ", ".join(resources_of(name.partition(":")[2]))


@dataclass(frozen=True)
class ClaimToken:
    """What a message carries of its send's claim, by which a worker ends the claim.

    name: of the unique key. token: the key's value begins with it. until: "started", "finished" or
    "expired". ends_at: seconds since 1970, when the key expires. replaces: the id of the run that
    this send replaces, or ""; kept_for: seconds that its marker stays, `MIN_MARKER_TTL` at least.
    number: of a send in an order (`newest.py`), else 0; kept_for is then also of that order.
    """

    name: str = ""
    token: str = ""
    until: str = ""
    ends_at: float = 0.0
    replaces: str = ""
    kept_for: float = 0.0
    number: int = 0

    @classmethod
    def of(cls, carried: object) -> ClaimToken | None:
        """Return the token of a message; None without one, or if another program wrote it."""
        if not isinstance(carried, Mapping):
            return None
        token = cls(**{name: carried[name] for name in cls.__dataclass_fields__ if name in carried})
        texts = (token.name, token.token, token.until, token.replaces)
        if not all(isinstance(text, str) for text in texts) or not token.name:
            return None
        # a part of a token would begin the value of any send, and end its claim
        if not _TOKEN.fullmatch(token.token) or token.until not in _CLAIM_ENDS:
            return None
        if type(token.number) is not int or not 0 <= token.number <= LARGEST_NUMBER:
            return None
        return token if is_moment(token.kept_for) and is_moment(token.ends_at) else None

    def to_message(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value}

    def mark_superseded(self, session: Session, task_name: str, task_id: str = "") -> None:
        """Mark the run that this send replaces, if it replaces one. Does not wait.

        The sender does that, and the run again, in case the sender died before. Later commands on
        the same connections are executed after it: the grant of this run's lock. The marker is a
        completion marker below 0; a marker that is there already stays. task_name, task_id: of this
        send; it can replace a first try of the same task alone.
        """
        if self.replaces and self.replaces.endswith(str(RunId("", task_name))):
            key = completion_key(session.options.prefix, self.replaces)
            now = session.clock.now()
            since_ms = session.clock.wall_us() // 1000
            ttl_ms = math.ceil(min(max(self.kept_for, MIN_MARKER_TTL), MAX_SECONDS) * 1000)
            value = f"-{since_ms} {task_id}"
            request = encode_command("SET", key, value, "PX", str(ttl_ms), "NX")
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
        words = session, self.name, self.token, self.expires_in(session)
        release = ClaimRelease(*words)
        if self.number:
            from celery_redlock.tasks.unique.newest import PlaceRelease

            release = PlaceRelease(*words)
        release.send()
        return release

    def expires_in(self, session: Session) -> float:
        """Return the seconds until the key expires, by this process's clock."""
        return min(self.ends_at - session.clock.wall_us() / 1e6, MAX_SECONDS)


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


_claimed_requests: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def note_claim(request: Any = None, **_: Any) -> None:
    """Keep the request of a message that has a claim, for as long as Celery itself keeps it."""
    if HEADER in request.request_dict and header_of(request._context).unique is not None:
        _claimed_requests[request.id] = request


def end_claim_of_killed(sender: Any = None, task_id: Any = None, **_: Any) -> None:
    """End the claim of a run whose process is gone; its message does not come back."""
    # Source: celery.worker.request: Request.on_failure sends this in the worker's main process if
    # the child could not, and does not send it if it hands the message back
    request = _claimed_requests.get(task_id)
    if request is not None:
        end_claim(sender.app, header_of(request._context))
