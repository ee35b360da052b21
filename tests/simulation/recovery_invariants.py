"""What must be true of messages and worker leases, whatever befell.

A `Witness` sees the broker from outside: what it executes, for whom, and what bodies begin.

- `one_place`: a message that was noted is in one list, or in `unacked` once, until it is
  acknowledged by the delivery that has it, or taken anew
- `own_entries`: an acknowledgement or a restore strikes out the entry of its own delivery alone,
  and no tag is noted twice
- `dead_by_proof`: nobody is declared dead whose beat the broker executed within 4.8 s of the
  observer's clock, or while the observer was late for more than two beats
- `begun_by_its_owner`: no body begins after its message was moved, but in a worker that has no
  worker lease and got the message back from kombu, with its tag
- `dead_until_empty`: a dead worker lease stays among the dead until nothing is left that was noted
  before it was dead, but what was moved too often; a message under a tag of a worker lease has it
  among the living or the dead
- `claims_stand`: nobody gets a dead worker lease within 2 s of a sign of its mover
- `in_order`: of one worker lease and one list the newest message is moved first
- `all_back`: some time after the last fault each message is in a list, or with a worker that
  lives; one of which no worker knows is so some time after the next start of a worker
- `nothing_stays`: and no worker lease is known but those of workers that live
- `no_inner_error`: the keeper's thread meets no error but those of the broker
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from celery_redlock.tasks.delivery.republish import MOVES
from celery_redlock.tasks.recovery.ledger import BEAT_SCRIPT, DECLARE_DEAD, MOVE, RECALL
from celery_redlock.tasks.recovery.tags import MAX_MOVES, DeliveryTag
from tests.simulation.broker import UNACKED, Question
from tests.simulation.invariants import Violation
from tests.simulation.world import running

if TYPE_CHECKING:
    from tests.simulation.recovery import Delivery, Recovery, Worker

LEASES, DEAD, NAMES = "leases", "dead", "names"
PROOF, LATE = 4.8, 2.0  # s, as they are promised: neither is the shipped name
CLAIM = 2.0  # s for which a claim stands at the least: it is noted in whole s
JUST = 2.0  # s that a reply takes at the most, where nothing is wrong
A_LITTLE = 0.001  # s: what clocks of a server show


class Witness:
    """What is known of one schedule. Times are real s, where nothing else is said."""

    def __init__(self, schedule: Recovery) -> None:
        self._schedule, self.world = schedule, schedule.world
        self.violation: Violation | None = None
        self._noted: set[str] = set()  # messages that must be in one place
        self._tags: set[str] = set()  # that were noted
        self._moved: set[str] = set()  # tags
        self._by_kombu: set[str] = set()  # tags that kombu gave back, and which it keeps
        self.entries: dict[str, Delivery | None] = {}  # of what is unacknowledged, by tag
        self._beats: dict[str, float] = {}  # by worker lease: when the last was executed
        self._dead_at: dict[str, float] = {}
        self._late: set[str] = set()  # tags that were noted after their worker lease was dead
        self._claims: dict[str, tuple[float, Worker | None]] = {}
        self._clock_set_at = -math.inf
        self._last: dict[tuple[str, str], int] = {}  # number that was moved last, by lease and list
        self._refusing = set[str]()  # lists that have taken nothing for a while
        self._looks: dict[Worker, tuple[float, float, float]] = {}  # since, sent, answered

    def check(self) -> None:
        """Raise the violation that was seen, if any."""
        if self.violation is not None:
            raise self.violation

    def broken(self, name: str, text: str) -> None:
        """Note what does not hold; the first one counts."""
        self.world.note("%s is broken: %s", name, text)
        self.violation = self.violation or Violation(name, text)

    def clock_was_set(self) -> None:
        """Take note that the broker's clock was set."""
        self._clock_set_at = self.world.now

    # what the broker does

    def executed(self, question: Question | None, words: tuple[Any, ...], reply: Any) -> None:
        """See what the broker has just done. question: of a worker, None for a restore by time."""
        about = None if question is None else question.about
        if words[0] == "EVAL":
            self._ran(question, words[1], words[3], reply)
        elif words[0] == "RESTORE":
            self._struck_out(words[1], about)
            if reply:
                self._by_kombu.add(words[1])
        elif words[0] == "MULTI" and not isinstance(reply, Exception):
            names = [command[:2] for command in words[1:]]
            if ("ZREM", DEAD) in names:
                self._forgotten(words[1][2])
            elif about is not None and ("HSET", UNACKED) in names:
                self._was_noted(about)
            elif about is not None:
                self._struck_out(words[1][2], about)
                if reply[1]:
                    self._noted.discard(about.uid)
        else:
            return
        if words[0] != "EVAL" or words[1] == MOVE:
            self._look_for_all()

    def _ran(self, question: Question | None, script: bytes, words: list[str], reply: Any) -> None:
        now = self.world.now
        if isinstance(reply, Exception):
            return
        assert question is not None
        worker = question.worker
        if script == MOVE:
            self._were_moved(worker, words)
        elif script == DECLARE_DEAD and reply:
            lease, beat, claims = words
            self._dead_at[lease] = now
            self._claims[lease] = (now if claims == "1" else -math.inf), worker
            self.world.note("%s declares %s dead", worker.name, lease[-4:])
            if beat:
                self._was_proved(question, lease)
        elif script == RECALL and words[0] == "1":
            self._were_recalled(reply)
        elif script == BEAT_SCRIPT and reply[0]:
            self._beats[words[0]] = now
            claimed = reply[1]
            if claimed:
                at, by = self._claims.get(claimed, (-math.inf, None))
                if by is not worker and at > max(self._clock_set_at, now - CLAIM):
                    self.broken("claims_stand", f"{claimed} is claimed twice")
                self._claims[claimed] = now, worker

    def _were_recalled(self, leases: list[str]) -> None:
        self.world.counts["recalled"] += len(leases)
        for lease in leases:
            self.world.note("%s is among the dead again", lease[-4:])
            if lease not in self._dead_at:
                self.broken("dead_by_proof", f"{lease} is recalled, and was never dead")

    def _was_proved(self, question: Question, lease: str) -> None:
        worker = question.worker
        self.world.counts["proofs"] += 1
        since, sent, _ = question.look
        quiet = (sent - max(since, self._beats.get(lease, -math.inf))) * worker.clock.rate
        if quiet < PROOF - A_LITTLE:
            self.broken("dead_by_proof", f"{worker.name} saw {lease} quiet for {quiet:.3f} s")

    def _were_moved(self, worker: Worker | None, words: list[str]) -> None:
        there = self._schedule.broker.hashes.get(UNACKED, {})
        self._claims[words[0]] = self.world.now, worker
        for tag in words[1::2]:
            if tag not in there and tag in self.entries:
                self.world.counts["moved"] += 1
                self.world.note("%s moves %s", worker and worker.name, tag[-12:])
                self._moved.add(tag)
                about = self.entries.pop(tag)
                was_kept = about is not None and moved_too_often(about.entry)
                found = DeliveryTag.of(tag)
                assert found is not None
                which = found.lease, found.list
                before = self._last.get(which, math.inf)
                is_late = was_kept or tag in self._late or found.list in self._refusing
                if found.number > before and not is_late:
                    self.broken("in_order", f"{tag} after {before}")
                self._last[which] = found.number

    def refused(self, name: str) -> None:
        """Take note that a list takes nothing for a while: order is not kept there from now on.

        What was refused is moved later than the older messages that came after it in one move.
        """
        self._refusing.add(name)

    def _was_noted(self, about: Delivery) -> None:
        tag = about.tag
        if tag in self._tags and tag not in self._by_kombu:
            self.broken("own_entries", f"{tag} is noted twice")
        self._tags.add(tag)
        self._noted.add(about.uid)
        self.entries[tag], about.noted_at = about, self.world.now
        found = DeliveryTag.of(tag)
        if found is not None and found.lease in self._dead_at:
            self._late.add(tag)
            self.world.counts["noted late"] += 1
        self.world.note("%s is noted as %s", about.uid, tag[-12:])

    def _struck_out(self, tag: str, about: Delivery | None) -> None:
        if tag in self._schedule.broker.hashes.get(UNACKED, {}):
            return
        entry = self.entries.pop(tag, None)
        if about is not None and entry not in (None, about) and tag not in self._by_kombu:
            self.broken("own_entries", f"{tag} is struck out by an earlier delivery")

    def _forgotten(self, lease: str) -> None:
        self._claims.pop(lease, None)
        there = self._schedule.broker.hashes.get(UNACKED, {})
        for tag, entry in there.items():
            if tag.startswith(lease) and tag not in self._late and not moved_too_often(entry):
                self.broken("dead_until_empty", f"{tag} is left")

    def taken(self, item: str) -> None:
        """See a message leave its list for a worker: if that is killed now, it is lost."""
        self._noted.discard(uid_of(item))
        self.world.counts["taken"] += 1

    def _look_for_all(self) -> None:
        broker = self._schedule.broker
        there = Counter(uid_of(item) for items in broker.lists.values() for item in items)
        there.update(uid_of(entry) for entry in broker.hashes.get(UNACKED, {}).values())
        for uid in self._noted:
            if there[uid] != 1:
                self.broken("one_place", f"{uid} is in {there[uid]} places")
        living, dead = broker.sets.get(LEASES, {}), broker.sets.get(DEAD, {})
        for tag in broker.hashes.get(UNACKED, {}):
            found = DeliveryTag.of(tag)
            if found is not None and found.lease not in living and found.lease not in dead:
                entry = broker.hashes[UNACKED][tag]
                if not (tag in self._late | self._by_kombu or moved_too_often(entry)):
                    self.broken("dead_until_empty", f"{tag} has no worker lease")

    # what workers do

    def answered(self, question: Question) -> None:
        """See the reply to a command: a beat of the keeper's thread that claims is a look."""
        worker, now = question.worker, self.world.now
        words = question.words
        if running() in worker.threads and words[:2] == ("EVAL", BEAT_SCRIPT) and words[3][3]:
            since, _, before = self._looks.get(worker, (now, 0.0, -math.inf))
            if (now - before) * worker.clock.rate > LATE:
                since = now
            self._looks[worker] = since, question.sent, now

    def look_of(self, worker: Worker) -> tuple[float, float, float]:
        """Return since when a worker has looked without a gap, and its last look's two moments."""
        return self._looks.get(worker, (math.inf, -math.inf, 0.0))

    def failed(self, worker: Worker, words: tuple[Any, ...]) -> None:
        """See that a beat of the keeper's thread had no answer."""
        if running() in worker.threads and words[:2] == ("EVAL", BEAT_SCRIPT):
            self._looks.pop(worker, None)

    def begins(self, worker: Worker, one: Delivery) -> None:
        """See a body begin."""
        self.world.counts["begun"] += 1
        self.world.note("%s begins %s", worker.name, one.uid)
        if one.tag in self._moved and worker.recovers:
            self.broken("begun_by_its_owner", f"{worker.name} begins {one.uid}, that was moved")

    def _leases(self) -> set[str]:
        living = [one for one in self._schedule.workers if not one.dead and not one.is_over]
        return {worker.keeper.lease for worker in living if worker.recovers}

    def stays(self) -> dict[str, set[str]]:
        """Return the worker leases that are known and are none of a worker that lives, by key."""
        broker, leases = self._schedule.broker, self._leases()
        found = {
            name: {*(broker.sets.get(name) or broker.hashes.get(name) or {})} - leases
            for name in (LEASES, DEAD, NAMES)
        }
        return found if any(found.values()) else {}

    def settled(self) -> list[str]:
        """See that all is back, some time after the last fault. Raises Violation.

        Return the tags of what was noted late, and of which no worker knows.
        """
        strays = list[str]()
        broker = self._schedule.broker
        living = [one for one in self._schedule.workers if not one.dead and not one.is_over]
        held = {one.tag for worker in living for one in worker.books}
        for tag, entry in broker.hashes.get(UNACKED, {}).items():
            about = self.entries.get(tag)
            is_tagged = DeliveryTag.of(tag) is not None and tag not in self._by_kombu
            if not is_tagged or tag in held or moved_too_often(entry):
                continue
            if about is not None and about.noted_at > self.world.now - JUST:
                continue  # its worker does not know yet
            if tag in self._late and about is not None and not about.came_through:
                strays.append(tag)
                continue
            self.broken("all_back", f"{tag} of {about and about.worker.name} lies there")
        if stays := self.stays():
            self.broken("nothing_stays", str(stays))
        if missing := self._leases() - {*broker.sets.get(LEASES, {})}:
            self.broken("nothing_stays", f"{missing} are lost")
        self.check()
        self.world.counts["strays"] += len(strays)
        return strays


def uid_of(text: str) -> str:
    """Return the id of a message, as it is in a list or in `unacked`."""
    start = text.index('"id": "') + 7
    return text[start : text.index('"', start)]


def moved_too_often(entry: str) -> bool:
    """Return whether a message stays where it is, as it was moved so often."""
    return int(json.loads(entry)[0]["properties"].get(MOVES, 0)) >= MAX_MOVES
