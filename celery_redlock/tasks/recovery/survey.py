"""What lies unacknowledged on a broker: of which worker leases, and when it is back.

For operators. Nothing here writes. Not here: what a worker observes and moves (`keeper.py`).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from celery_redlock.lock.platform.clock import Clock
from celery_redlock.tasks.delivery.route import Route, has_way_back
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.recovery.ledger import (
    KOMBU_REDIS,
    SCAN_COUNT,
    TIME_LIMITS,
    Ledger,
    bytes_of,
    decoded,
    is_kombus,
)
from celery_redlock.tasks.recovery.observer import (
    BEAT_INTERVAL,
    DETECTION_TIME,
    PROOF,
    QUIET,
    Observer,
)
from celery_redlock.tasks.recovery.tags import PREFIX, DeliveryTag, lease_of, moves_of

# states: the lease beats; it does not, and is not proved dead; it is dead; its name is unknown
ALIVE = "alive"
SILENT = "silent"
DEAD = "dead"
ORPHANED = "left"
MAX_PROOF_TIME = 3 * PROOF  # s: an observer that is late begins anew


@dataclass(frozen=True)
class LeaseReport:
    """A worker lease as its broker has it, or what is tagged with others that are no longer there.

    worker: its name, "" if unknown. state: ALIVE, SILENT, DEAD or ORPHANED. silent_for: seconds
    since its last beat, None if unknown. messages: how many are unacknowledged. back_in: s
    until they are in their queues; None if they come back after the visibility timeout, or no
    worker is there to move them. beat: what it last wrote.
    """

    lease: str = field(repr=False)
    worker: str
    state: str
    silent_for: float | None
    messages: int
    back_in: float | None
    beat: str = field(default="", repr=False)


@dataclass(frozen=True)
class Unacknowledged:
    """A message that a worker has taken and not acknowledged.

    task: its name, "" if none is known. eta: of the message, in ISO 8601; "" for none. taken: when,
    as kombu noted it. taken_for: s. moves: how often it was moved in a row. entry: what kombu
    noted.
    """

    tag: str
    task: str
    task_id: str
    eta: str
    taken: float
    taken_for: float
    moves: int
    entry: str = field(repr=False)

    @classmethod
    def of(cls, tag: str, entry: str, taken: float, now: float) -> Unacknowledged:
        """Read what kombu noted; without a task if another program wrote it."""
        try:
            raw = json.loads(entry)[0]
            headers = raw.get("headers") or {}
            moves = moves_of(raw["properties"])
            task, task_id, eta = (str(headers.get(name) or "") for name in ("task", "id", "eta"))
        except (ValueError, LookupError, TypeError, AttributeError):
            task = task_id = eta = ""
            moves = 0
        return cls(tag, task, task_id, eta, taken, max(0.0, now - taken), moves, entry)


@dataclass(frozen=True)
class Survey:
    """Queries of one broker; they raise redis-py's errors. channel: of kombu's Redis transport."""

    app: Any = field(repr=False)
    channel: Any = field(repr=False)
    ledger: Ledger

    def now(self) -> float:
        """Return the server's wall clock, in s."""
        seconds, microseconds = self.ledger.client.time()
        return float(seconds) + float(microseconds) / 1e6

    def leases(self) -> list[LeaseReport]:
        """Return the worker leases with their messages; last what is tagged with none of them."""
        return self.census()[0]

    def census(self) -> tuple[list[LeaseReport], int]:
        """Return what `leases` does, and how many messages are tagged with no worker lease.

        Workers with another `redlock_prefix` keep their own leases, and move these messages.
        """
        leases = self._leases()
        messages = Counter(map(lease_of, set(self.ledger.tags(match="*"))))
        untagged = messages.pop("", 0)
        reports = [replace(lease, messages=messages.pop(lease.lease, 0)) for lease in leases]
        own_start = self.ledger.lease_start
        orphans = sum(count for name, count in messages.items() if name.startswith(own_start))
        if orphans:
            reports.append(LeaseReport("", "", ORPHANED, None, orphans, None))
        return reports, untagged

    def _leases(self) -> list[LeaseReport]:
        """Return the worker leases without their messages."""
        ledger = self.ledger
        with ledger.client.pipeline(transaction=False) as pipe:
            pipe.time().zrange(ledger.leases, 0, -1, withscores=True)
            pipe.zrange(ledger.dead, 0, -1).hgetall(ledger.names)
            (seconds, microseconds), living, dead, names_reply = pipe.execute()
        names = {decoded(lease): decoded(name) for lease, name in names_reply.items()}
        now = seconds + microseconds / 1e6
        reports = []
        for key, beat in living:
            lease = decoded(key)
            silent_for = now - beat / 1000
            state = SILENT if abs(silent_for) > QUIET else ALIVE  # ahead: the clock was set back
            age = max(0.0, silent_for)
            report = LeaseReport(lease, names.get(lease, ""), state, age, 0, None, f"{beat:.0f}")
            reports.append(report)
        is_observed = any(report.state == ALIVE for report in reports)
        for index, report in enumerate(reports):
            if report.state == SILENT and is_observed:
                reports[index] = replace(
                    report, back_in=max(0.0, DETECTION_TIME - (report.silent_for or 0.0))
                )
        back_in = 0.0 if is_observed else None
        for lease in map(decoded, dead):
            reports.append(LeaseReport(lease, names.get(lease, ""), DEAD, None, 0, back_in))
        return reports

    def proved_dead(self, clock: Clock, leases: Collection[str]) -> dict[str, str]:
        """Return the last beats of those worker leases that are silent for the time of the proof.

        It waits for that proof as a worker does, by its own clock.
        """
        observer = Observer()
        dead = dict[str, str]()
        deadline = clock.now() + MAX_PROOF_TIME
        while True:
            sent = clock.now()
            silent_leases = [report for report in self._leases() if report.state == SILENT]
            quiet = {
                report.lease: report.beat for report in silent_leases if report.lease in leases
            }
            dead |= observer.look(sent, clock.now(), quiet)
            dead = {lease: beat for lease, beat in dead.items() if quiet.get(lease) == beat}
            if quiet.keys() == dead.keys() or clock.now() > deadline:
                return dead
            clock.sleep(BEAT_INTERVAL)

    def messages_of(self, leases: Iterable[str]) -> dict[str, list[Unacknowledged]]:
        """Return the messages that are tagged with some worker leases."""
        messages: dict[str, list[Unacknowledged]] = {lease: [] for lease in leases}
        if messages:
            for tag, entry in self.ledger.entries(f"{PREFIX}*"):
                if (lease := lease_of(tag)) in messages:
                    messages[lease].append(Unacknowledged.of(tag, entry, 0.0, 0.0))
        return messages

    def find(self, task_id: str) -> list[Unacknowledged]:
        """Return the messages of a task."""
        entries = [(tag, entry) for tag, entry in self.ledger.entries() if task_id in entry]
        taken_at = self.taken([tag for tag, _ in entries])
        now = self.now()
        messages = [
            Unacknowledged.of(tag, entry, taken_at.get(tag, now), now) for tag, entry in entries
        ]
        return [message for message in messages if message.task_id == task_id]

    def ids_beginning(self, start: str) -> set[str]:
        """Return the task ids that begin with a text, of all messages."""
        ids = {
            Unacknowledged.of(tag, entry, 0.0, 0.0).task_id
            for tag, entry in self.ledger.entries()
            if start in entry
        }
        return {task_id for task_id in ids if task_id.startswith(start)}

    def taken(self, tags: Iterable[str]) -> dict[str, float]:
        """Return when kombu noted messages, by delivery tag; without those that are not there."""
        taken_at: dict[str, float] = {}
        for chunk in _chunks(tags):
            with self.ledger.client.pipeline(transaction=False) as pipe:
                for tag in chunk:
                    pipe.zscore(self.ledger.index, bytes_of(tag))
                scores = pipe.execute()
            taken_at |= {tag: score for tag, score in zip(chunk, scores, strict=True) if score}
        return taken_at

    def older_than(self, seconds: float) -> Iterator[Unacknowledged]:
        """Yield the messages without a worker lease that were taken longer ago."""
        ledger = self.ledger
        now = self.now()
        known = {one.lease for one in self._leases()}
        index = ledger.client.zrangebyscore(
            ledger.index, "-inf", f"({now - seconds}", withscores=True
        )
        for some in _chunks(index):
            entries = ledger.client.hmget(ledger.unacked, [tag for tag, _ in some])
            for (tag, taken), entry in zip(some, entries, strict=True):
                of = DeliveryTag.of(decoded(tag))
                if entry is not None and (of is None or of.lease not in known):
                    yield Unacknowledged.of(decoded(tag), decoded(entry), taken, now)

    def list_of(self, message: Unacknowledged) -> str:
        """Return the list that a message goes back to, "" if the app does not know its one queue.

        By the tag, or by the exchange and the routing key that kombu noted.
        """
        try:
            return self._list_of(message)
        except (ValueError, LookupError, TypeError, AttributeError):  # another program wrote it
            return ""

    def _list_of(self, message: Unacknowledged) -> str:
        channel = self.channel
        queues = self.app.amqp.queues
        tag = DeliveryTag.of(message.tag)
        if tag is not None:
            steps = channel.priority_steps
            lists = {channel._q_for_pri(name, step) for name in queues for step in steps}
            return tag.list if tag.list in lists else ""
        raw, exchange, routing_key = json.loads(message.entry)
        route = Route(exchange or "", str(routing_key or ""))
        headers = raw.get("headers") or {}
        reached = [name for name, queue in queues.items() if route.reaches(queue, headers)]
        if len(reached) != 1 or not has_way_back(self.app, route):
            return ""
        priority = channel._get_message_priority(raw, reverse=False)
        return str(channel._q_for_pri(reached[0], priority))


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(items)
    while chunk := list(itertools.islice(remaining, SCAN_COUNT)):
        yield chunk


def has_leases(app: Any) -> bool:
    """Return whether an app's broker can have worker leases; it is not connected to."""
    try:
        channel = app.connection_for_read().transport.Channel
    except Exception:  # each transport that cannot be imported or made has its own
        return False
    options = app.conf.broker_transport_options or {}
    return channel.__module__ == KOMBU_REDIS and bool(options.get("ack_emulation", True))


@contextmanager
def open_survey(app: Any) -> Iterator[Survey | None]:
    """Give a survey of an app's broker, None if it is not kombu's own Redis transport."""
    with app.connection_for_read(transport_options=TIME_LIMITS) as connection:
        channel = connection.channel() if has_leases(app) else None
        if channel is None or not is_kombus(channel):
            yield None
        else:
            yield Survey(app, channel, Ledger.of(channel, settings_of(app).prefix))


def sweep_of(app: Any) -> tuple[float, str]:
    """Return the seconds by which kombu may restore a message late, and the settings of that.

    Source: kombu.transport.redis: QoS.restore_visible looks at some of the ticks of an interval.
    Before kombu 5.7 both are 10.
    """
    options = app.conf.broker_transport_options or {}
    channel = app.connection_for_read().transport.Channel
    settings = "unacked_restore_interval", "unacked_restore_throttle"
    if not all(hasattr(channel, name) for name in settings):
        return 100.0, ""
    interval, throttle = (options.get(name, getattr(channel, name)) for name in settings)
    interval = interval if interval > 0 else 10
    throttle = throttle or 1
    return float(interval * throttle), f"{settings[0]}={interval:g}, {settings[1]}={throttle:g}"
