"""Releases acquisitions: writes to every node, and delivers to nodes that did not answer later.

`Releaser` decides what to release, `KeyRelease` is the release of one key, and the `Outbox` keeps
commands until their nodes are back. A release is written without waiting. Once begun, it cannot be
lost: if an exception interrupts it, the watchdog's thread continues it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Protocol

from hiredis import ReplyError

from celery_redlock.errors import NodeError
from celery_redlock.lock.engine.core import Core
from celery_redlock.lock.model.acquisition import Acquisition, Hold
from celery_redlock.lock.model.lease import HELD, Lease
from celery_redlock.lock.model.rate import Start
from celery_redlock.lock.platform.clock import Clock
from celery_redlock.lock.platform.threads import uninterruptible
from celery_redlock.lock.server.requests import CANCEL, RECORD, RELEASE
from celery_redlock.lock.transport.command import Command, Script, UnexpectedReplyError
from celery_redlock.lock.transport.node import Node
from celery_redlock.lock.transport.nodes import Nodes

CONFIRMED_REPLY = 2  # reply: a transaction has confirmed the lock, and has to end first
DELIVERY_TTLS = 1.5  # ttls: by then every node has dropped our key, with or without a release


class OutboxItem(Protocol):
    """A command that is still to be sent to a node."""

    @property
    def until(self) -> float:
        """The monotonic second after which the item is dropped."""

    def command(self) -> Command:
        """Return the command to send."""

    def settle(self, node: int) -> None:
        """Take note that a node does not need the item any more."""


class Outbox:
    """Delivers items to nodes once the nodes are connected."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._items: list[dict[Any, OutboxItem]] = [{} for _ in nodes.all]
        # What a thread is about to send, by the send. The thread may be interrupted, or stop as its
        # process ends. Then another flush sends the item: a second release changes nothing.
        self._sending: list[dict[Any, OutboxItem]] = [{} for _ in nodes.all]

    def put(self, node: int, item: OutboxItem) -> None:
        """Keep an item for a node. A second call with the same item has no effect."""
        self._items[node][id(item)] = item

    @property
    def is_empty(self) -> bool:
        return not any(self._items) and not any(self._sending)

    @property
    def nodes(self) -> list[int]:
        """The nodes that an item waits for."""
        waiting = {node for node, items in enumerate(self._items) if items}
        sending = {node for node, items in enumerate(self._sending) if items}
        return sorted(waiting | sending)

    def flush(self, now: float) -> None:
        """Send the items of connected nodes, drop those that are too late, connect to the others.

        now: monotonic seconds. An exception leaves an item in `_sending`, to be sent again.
        """
        for node in self._nodes.all:
            waiting = self._items[node.index]
            sending = self._sending[node.index]
            if not waiting and not sending:
                continue
            self._flush_items(node, sending, now)
            self._flush_items(node, waiting, now)
            if waiting or sending:
                node.connect()

    def _flush_items(self, node: Node, items: dict[Any, OutboxItem], now: float) -> None:
        """Send or drop items of a node. items: those that wait, or those of an interrupted send."""
        sending = self._sending[node.index]
        for key, item in list(items.items()):
            if item.until <= now:
                items.pop(key, None)
                item.settle(node.index)
            elif node.connection is not None:
                send_id = object()
                sending[send_id] = item
                items.pop(key, None)  # before it is sent: what is put after that stays
                self._nodes.send_to(node.index, item.command())
                sending.pop(send_id, None)


class StartNote:
    """A record or a cancellation of a start, sent once to each node. An outbox item and a handler.

    request: returns the encoded request. max_seconds: after this time a node does not need it any
    more. never_asked: nodes that never need it, because they were not asked for the start.
    """

    __slots__ = ("_clock", "_made_at", "_never_asked", "_outbox", "_request", "_script", "until")
    wanted = True

    def __init__(
        self,
        request: Callable[[], bytes],
        script: Script,
        max_seconds: float,
        never_asked: Collection[int],
        clock: Clock,
        outbox: Outbox,
    ) -> None:
        self._request = request
        self._script = script
        self._made_at = clock.now()
        self._never_asked = never_asked
        self._clock = clock
        self._outbox = outbox
        self.until = self._made_at + max_seconds

    def command(self) -> Command:
        return Command(self._request(), self, self._script)

    def on_reply(self, node: int, sent_at: float, reply: Any, run_id: str) -> None:
        if type(reply) is ReplyError and self._clock.now() < self._made_at + RECORD_LIFETIME:
            self.on_error(node)  # the node is loading, busy, or full: not for long

    def on_error(self, node: int, *_: object) -> None:
        """Keep it until the node is back."""
        if node not in self._never_asked and self._clock.now() < self.until:
            self._outbox.put(node, self)

    def settle(self, node: int) -> None: ...


# Seconds for which the outbox keeps the record of a start, and the cancellation of one, for a node
# that is away. It keeps each record, but only the cancellations that a broken connection left.
RECORD_LIFETIME = 60.0
CANCEL_LIFETIME = 3600.0
ORPHAN_RELEASE_DELAYS = (0.25, 1.0, 4.0)  # seconds after which an orphan is released once more


class Releaser:
    """Releases acquisitions of one `Redlock`, even if exceptions interrupt their owners."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.outbox = Outbox(core.nodes)
        self._unwritten: dict[int, KeyRelease] = {}
        self._late_grants: dict[str, KeyRelease] = {}  # by value: its grant may still run later
        self._orphans: list[tuple[float, Acquisition]] = []  # monotonic seconds of the repetition

    @uninterruptible
    def release(self, acquisition: Acquisition, *, publish: bool = True) -> None:
        """Write the release of an acquisition to every node. A second call has no effect.

        publish: whether to notify the waiters.
        """
        _, flow, task = acquisition.owner
        for key in acquisition.keys:
            name = task, key.resource
            if flow.held.get(name) is acquisition:
                flow.held.pop(name, None)
        if acquisition.starts:
            self.cancel_starts(acquisition)
        releases = acquisition.releases
        if not releases:
            releases = []  # a new list: kept once it has all of them
            for lease in acquisition.leases:
                releases.append(KeyRelease(self, acquisition, lease, publish))
        acquisition.releases = releases  # kept: after an exception, the next call writes them again
        self._write_all(releases)
        acquisition.releases = []  # breaks the reference cycle

    @uninterruptible
    def cancel_starts(self, acquisition: Acquisition) -> None:
        """Give back the starts whose bodies have not begun. A second call has no effect."""
        for start in list(acquisition.starts):
            if start.started_at is None:
                self.cancel(start)
            with suppress(ValueError):  # the watchdog releases the same acquisition
                acquisition.starts.remove(start)  # last: after an exception, it is done again

    @uninterruptible
    def cancel(self, start: Start) -> None:
        """Tell all nodes that a start whose body has not begun is free."""
        start.end()  # first: no request for it leaves after that
        nodes = [node for node in range(len(start.ends)) if node not in start.never_asked]
        # after this time no node counts the start
        kept_seconds = start.key.rate.kept_ms(self.core.options.clock_drift) / 1000
        max_seconds = min(kept_seconds, CANCEL_LIFETIME)
        request = functools.partial(self.core.requests.cancel, start)
        self._note(nodes, request, CANCEL, max_seconds, start.never_asked)

    def cancel_last(self, acquisition: Acquisition) -> None:
        """Give back the start that was asked for last, which other clients have."""
        self.cancel(acquisition.starts[-1])
        acquisition.starts.pop()

    @uninterruptible
    def record(self, start: Start, started_at: float) -> None:
        """Tell the nodes that did not grant a start that its body has begun."""
        clock = self.core.clock
        nodes = [node for node in range(len(start.ends)) if node not in start.granted]

        def request() -> bytes:
            return self.core.requests.record(start, clock.now() - started_at)

        self._note(nodes, request, RECORD, RECORD_LIFETIME)

    def _note(
        self,
        nodes: Sequence[int],
        request: Callable[[], bytes],
        script: Script,
        max_seconds: float,
        never_asked: Collection[int] = (),
    ) -> None:
        core = self.core
        now = self.core.clock.now()
        note = StartNote(request, script, max_seconds, never_asked, core.clock, self.outbox)
        for node in nodes:
            core.nodes.send_to(node, note.command())
        core.watchdog.run_maintenance_by(now + core.nodes.timeout)

    @uninterruptible
    def roll_back(self, acquisition: Acquisition) -> None:
        """Release the keys of a failed acquire.

        Notifies only the waiters of keys that were held: other clients may have been refused there.
        For the other keys it would wake rivals for nothing.
        """
        acquisition.releases = [
            KeyRelease(self, acquisition, lease, lease.state is HELD)
            for lease in acquisition.leases
        ]
        self.release(acquisition)

    @uninterruptible
    def roll_back_last(self, acquisition: Acquisition) -> None:
        """Release the last key that was tried, which another client holds."""
        is_published = False
        self._write_all([KeyRelease(self, acquisition, acquisition.leases[-1], is_published)])
        acquisition.leases.pop()

    @uninterruptible
    def release_if_abandoned(self, acquisition: Acquisition) -> bool:
        """Release an acquisition that has no user any more; return whether it was released."""
        # one that is not watched any more was released by its last user
        if acquisition.users or not self.core.watchdog.is_watching(acquisition):
            return False
        if not acquisition.abandon():
            return False
        self.release(acquisition)
        self.core.events.abandoned(acquisition)
        return True

    @uninterruptible
    def release_hold(self, hold: Hold, *, in_any_thread: bool = False) -> None:
        """End a wait, and release what no other hold relies on. A second call has no effect.

        in_any_thread: in any thread, even while the owner may acquire the same lock again.
        """
        try:
            if hold.end_wait is not None:
                hold.end_wait()
        finally:
            for acquisition in hold.acquisitions:
                # before it leaves: else the watchdog would take it for one that nobody keeps
                is_first = not in_any_thread and not hold.has_others(acquisition)
                try:
                    if is_first:
                        self.release(acquisition)
                finally:
                    hold.leave(acquisition)
                is_left = not is_first and not acquisition.users
                if is_left and (not in_any_thread or acquisition.abandon()):
                    self.release(acquisition)

    def release_orphans(self, acquisition: Acquisition) -> None:
        """Release what a dead process held, and again later: its requests may still arrive."""
        now = self.core.clock.now()
        self._orphans += [(now + seconds, acquisition) for seconds in ORPHAN_RELEASE_DELAYS]
        self.release(acquisition)

    def release_late_grant(self, node: int, value: str) -> None:
        """Release a key once more on a node: a delayed acquire request ran after its release."""
        release = self._late_grants.get(value)
        if release is not None:
            self.outbox.put(node, release)
            self.core.watchdog.run_maintenance_by(self.core.clock.now())

    def expect_late_grant(self, release: KeyRelease) -> None:
        """Keep a release, because a grant of its key may run after it."""
        self._late_grants[release.lease.value] = release

    @uninterruptible
    def _write_all(self, releases: Sequence[KeyRelease]) -> None:
        """Write releases to all nodes; if an exception cuts that, the watchdog continues."""
        if not releases:  # no key was requested: do not start the watchdog's thread
            return
        for release in releases:
            self._unwritten[id(release)] = release
        try:
            for release in releases:
                self._write(release)
        finally:
            # the next round of this process reads the replies, or the watchdog a little later
            read_by = self.core.clock.now() + self.core.nodes.timeout
            self.core.watchdog.run_maintenance_by(read_by)

    def _write(self, release: KeyRelease) -> None:
        nodes = self.core.nodes
        release.lease.end()  # before the first byte leaves: from here on nothing is held
        self.core.watchdog.unwatch(release.acquisition)
        nodes.broadcast(release.command(), self.core.clock.now())
        if nodes.mail:  # a connection may have broken with a grant in flight
            nodes.report_broken()
        if release.lease.asked_again:
            self.expect_late_grant(release)
        self._unwritten.pop(id(release), None)

    def run_maintenance(self, now: float) -> None:
        """Continue interrupted releases, and repeat or drop what is due."""
        for release in list(self._unwritten.values()):
            # before the node timeout, the owner may still be writing it
            if now - release.made_at > self.core.nodes.timeout:
                self._write(release)
        for orphan in [orphan for orphan in self._orphans if orphan[0] <= now]:
            self._orphans.remove(orphan)
            self.release(orphan[1])
        self.outbox.flush(now)
        for value, release in list(self._late_grants.items()):
            if release.until <= now:
                self._late_grants.pop(value, None)

    @property
    def is_writing(self) -> bool:
        """Whether a release is not written yet, or not delivered to a node yet."""
        return bool(self._unwritten) or not self.outbox.is_empty

    @property
    def repeats_at(self) -> float:
        """The monotonic second at which an orphan is released once more; inf if there is none."""
        return min((due for due, _ in self._orphans), default=math.inf)


class KeyRelease:
    """One release of one key, for every node. An outbox item and a reply handler.

    made_at: monotonic seconds. publish: whether to notify the waiters. If the run has ended, the
    command also writes the completion marker. So the marker precedes the release on every node.
    """

    __slots__ = ("_core", "_deadlines", "_ended_at", "_missing_count", "_publish", "_releaser",
                 "_replied_nodes", "_unsettled_nodes", "_was_held", "_was_taken", "acquisition",
                 "lease", "made_at", "until")  # fmt: skip
    wanted = True

    def __init__(
        self, releaser: Releaser, acquisition: Acquisition, lease: Lease, publish: bool
    ) -> None:
        self._releaser = releaser
        self._core = releaser.core
        self.acquisition = acquisition
        self.lease = lease
        self._publish = publish
        self.made_at = self._core.clock.now()
        self.until = self.made_at + DELIVERY_TTLS * acquisition.options.ttl
        self._ended_at = acquisition.ended_at
        self._was_held = lease.state is HELD
        self._deadlines = lease.ends  # the present deadlines: `Lease.end` makes a new list
        self._replied_nodes: set[int] = set()  # nodes whose first reply or error has come
        self._missing_count = 0  # number of nodes that do not have the key
        self._was_taken = False  # whether one of these nodes had promised to keep the key
        # nodes that still need the release, as bits
        self._unsettled_nodes = (1 << len(lease.ends)) - 1

    def command(self) -> Command:
        """Return the command to send. Not kept, because it refers to this object."""
        core = self._core
        marker = self.acquisition.options.marker
        request = self.lease.packed_release
        if not (request and self._publish and (marker is None or self._ended_at is None)):
            ended_for = None if self._ended_at is None else core.clock.now() - self._ended_at
            request = core.requests.release(self.lease, marker, ended_for, publish=self._publish)
        return Command(request, self, RELEASE)

    def on_reply(self, node: int, sent_at: float, reply: Any, run_id: str) -> None:
        """Record whether the node still had the key. Raises UnexpectedReplyError."""
        if reply == 1 and type(reply) is int and not self.lease.asked_again:  # most had it
            self._replied_nodes.add(node)
            self.settle(node)
            return
        is_error = type(reply) is ReplyError
        if not is_error and (type(reply) is not int or reply not in (0, 1, CONFIRMED_REPLY)):
            raise UnexpectedReplyError(reply)
        is_first_reply = node not in self._replied_nodes
        self._replied_nodes.add(node)
        if self.lease.asked_again:  # a lost acquire request may still run
            self._releaser.expect_late_grant(self)
        if (is_error or reply == CONFIRMED_REPLY) and self._core.clock.now() < self.until:
            self._releaser.outbox.put(node, self)  # for later: the node is loading, busy, or full
        else:
            self.settle(node)
        if is_first_reply and self._was_held and not is_error and reply == 0:
            self._check_loss(node, run_id)

    def _check_loss(self, node: int, run_id: str) -> None:
        """Report a loss if fewer than a quorum of nodes kept the lock until its release."""
        nodes = self._core.nodes
        end = self._deadlines[node]
        if end > self.made_at:
            keeps = self.lease.keeps_its_promise(node, run_id)
            if keeps or end <= self._core.clock.now():
                return  # the node restarted and abstains, or its lease ended before the release
            self._was_taken = True
        self._missing_count += 1
        if self._was_taken and self._missing_count > len(nodes.all) - nodes.quorum:
            reason = "at its release its key was no longer ours"
            self._core.events.lost_soon(self.acquisition, reason)

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Queue the release until the node is back, if the node may keep our key."""
        self._replied_nodes.add(node)
        if error.lost:
            self._releaser.expect_late_grant(self)  # the connection may have lost the grant, too
        if node not in self.lease.never_asked and self._core.clock.now() < self.until:
            self._releaser.outbox.put(node, self)
        else:
            self.settle(node)

    def settle(self, node: int) -> None:
        """Record that a node needs no release any more; after the last node, report that."""
        self._unsettled_nodes &= ~(1 << node)
        if not self._unsettled_nodes:
            journal = self._core.events.journal
            if journal is not None:  # in a forked child: no node keeps the key any more
                journal.settled(self.lease)
