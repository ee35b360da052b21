"""What must be true of the starts of a rate: a part of what a `Witness` sees (`invariants.py`).

A start is flagged when its client decides that the body begins now: `Start.started_at`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import hiredis

from celery_redlock.lock.model.keys import rate_keys
from celery_redlock.lock.model.lease import State
from celery_redlock.lock.model.rate import Rate, Start
from celery_redlock.lock.server.requests import CANCEL, RECORD, TAKE
from tests.simulation.nodes import Node

if TYPE_CHECKING:
    from tests.simulation.clients import Process
    from tests.simulation.network import Link
    from tests.simulation.world import World

SCRIPTS = {script.digest: script.name for script in (TAKE, CANCEL, RECORD)}
SCRIPTS |= {script.source: script.name for script in (TAKE, CANCEL, RECORD)}
ROUNDING = 1e-9  # s
ARRIVED = 1.0  # s after its body began by which all nodes know of a start, where nothing is slow


@dataclass(eq=False)
class StartRecord:
    """What is known of one start. flagged_at: real s. forgotten: the promise leaves it out.

    cancelled: on which nodes.
    """

    start: Start
    process: Process
    value: bytes
    flagged_at: float | None = None
    cancelled: set[str] = field(default_factory=set)
    forgotten: bool = False

    @property
    def permit(self) -> int:
        return self.start.key.permit


@dataclass
class Rates:
    """What one node keeps of one rate: the ms at which each permit was taken, and its token."""

    taken: dict[bytes, float] = field(default_factory=dict)
    tokens: dict[bytes, bytes] = field(default_factory=dict)

    def count(self, token: bytes) -> int:
        """Return how many permits a token has."""
        return list(self.tokens.values()).count(token)


class StartWitness:
    """Sees the starts. drift, violated: as of the `Witness`."""

    def __init__(self, world: World, drift: float, violated: Callable[..., None]) -> None:
        self._world, self._drift, self._violated = world, drift, violated
        self._records: dict[bytes, StartRecord] = {}
        self._flagged: dict[str, list[StartRecord]] = {}  # by resource, in order of time
        self._kept: dict[tuple[str, str], Rates] = {}  # by run id of a node and resource

    # what a client does

    def asked(self, start: Start, process: Process) -> None:
        """See a start begin: its first request is about to leave."""
        value = start.value.encode()
        self._records[value] = StartRecord(start, process, value)
        self._world.counts["starts asked"] += 1

    def flagged(self, start: Start) -> None:
        """See the body begin of a start."""
        record, now = self._records[start.value.encode()], self._world.now
        rate, before = start.key.rate, self._flagged.setdefault(start.key.resource, [])
        record.flagged_at = now
        self._world.counts["starts"] += 1
        self._world.note("%s starts with permit %d", _name(record), record.permit)
        lately = [
            one
            for one in before
            if one.flagged_at is not None
            and not one.forgotten
            and now - one.flagged_at < rate.period - ROUNDING
        ]
        same = [one for one in lately if one.permit == record.permit]
        if same:
            text = "%s at %.4f, %s at %.4f"
            before_it = _name(same[-1]), same[-1].flagged_at
            self._violated("starts_apart", text, _name(record), now, *before_it)
        if len(lately) >= rate.starts:
            what = len(lately) + 1, start.key.resource, rate, now
            self._violated("rate_kept", "%d starts of %s in a period of %s at %.4f", *what)
        before.append(record)

    def unflagged(self, process: Process) -> list[StartRecord]:
        """Return the starts of a process that it has neither used nor given back."""
        return [
            record
            for record in self._records.values()
            if record.process is process
            and record.flagged_at is None
            and record.start.state in (State.ACQUIRING, State.HELD)
        ]

    def refused(self, process: Process) -> None:
        """See an acquire fail: it must have given back all its starts."""
        for record in self.unflagged(process):
            self._violated("refusals_leave_no_start", "%s", _name(record))

    def wiped(self, node: Node) -> None:
        """See a node lose its memory, as often as the promise allows for.

        The promise leaves out starts of which not all nodes knew by then.
        """
        now = self._world.now
        for record in self._records.values():
            if record.flagged_at is None or now < record.flagged_at + ARRIVED:
                record.forgotten = True

    # what is written and executed

    def written(self, link: Link, words: list[bytes]) -> list[StartRecord]:
        """See a command handed to a socket; returns of which start, none of an operator's."""
        script, value = SCRIPTS[words[1]], words[3 + int(words[2])]
        record = self._records.get(value)
        if record is None:
            return []
        self._world.note("%s > %s %s %s", link.process.name, link.node.name, script, _name(record))
        if script == "cancel":
            record.cancelled.add(link.node.name)
            if record.flagged_at is not None:
                self._violated("no_cancel_after_the_start", "%s", _name(record))
        elif link.node.name in record.cancelled:
            what = script, _name(record), link.node.name
            self._violated("nothing_after_cancel", "%s of %s to %s", *what)
        return [record]

    def executed(self, record: StartRecord, node: Node, words: list[bytes], reply: bytes) -> None:
        """See a node execute a command of a start."""
        script, key = SCRIPTS[words[1]], record.start.key
        if self._world.lines is not None:
            self._world.note("%s: %s %s -> %r", node.name, script, _name(record), _answer(reply))
        found = _read(node, key.resource)
        known = self._kept.get((node.run_id, key.resource), Rates())
        now = node.wall_ms
        for permit, moment in known.taken.items():
            token, before = known.tokens.get(permit, b""), min(moment, now)
            if now - before >= self._kept_ms(key.rate):
                continue
            is_own = token == record.value
            is_moved = script != "cancel" and is_own and permit != b"%d" % record.permit
            is_given_back = script == "cancel" and is_own
            is_gone = found.taken.get(permit, -1.0) < before
            if is_gone and not ((is_moved and not self._stands(token, permit)) or is_given_back):
                what = script, _name(record), permit.decode(), key.resource, node.name
                self._violated("stamps_stand", "%s of %s frees %s of %s on %s", *what)
        self._kept[node.run_id, key.resource] = found
        if script == "take":
            self._check_take(record, node, words, known, found, _answer(reply))

    def _check_take(
        self,
        record: StartRecord,
        node: Node,
        words: list[bytes],
        known: Rates,
        found: Rates,
        answer: Any,
    ) -> None:
        if node.is_silent and answer[0] == 1:
            self._violated("silent_nodes_grant_nothing", "%s to %s", node.name, _name(record))
        asked, is_repeated = words[3 + int(words[2]) + 4], words[3 + int(words[2]) + 5] == b"1"
        was, count = known.count(record.value), found.count(record.value)
        # a request of a lost connection comes late, and does not look for the start
        if count > max(was, 1) and (is_repeated or asked):
            self._violated("one_start_a_node", "%s on %s", _name(record), node.name)

    def _kept_ms(self, rate: Rate) -> float:
        """Return the least ms for which a node must count a start."""
        return (rate.period + rate.slack) * (1 + self._drift) * 1000

    def _stands(self, token: bytes, permit: bytes) -> bool:
        """Return whether a body has begun with this permit of a token."""
        record = self._records.get(token)
        is_flagged = record is not None and record.flagged_at is not None
        return is_flagged and record is not None and b"%d" % record.permit == permit


def _name(record: StartRecord) -> str:
    return record.start.value[:8]


def _read(node: Node, resource: str) -> Rates:
    """Return what a node keeps of a rate."""
    taken, tokens = (name.encode() for name in rate_keys("redlock", resource))
    scores = _pairs(node.execute([b"ZRANGE", taken, b"0", b"-1", b"WITHSCORES"])[1])
    moments = {permit: float(score) for permit, score in scores.items()}
    return Rates(moments, _pairs(node.execute([b"HGETALL", tokens])[1]))


def _answer(reply: bytes) -> Any:
    reader = hiredis.Reader()
    reader.feed(reply)
    return reader.gets()


def _pairs(reply: bytes) -> dict[bytes, Any]:
    words = _answer(reply)
    return dict(zip(words[::2], words[1::2], strict=True))
