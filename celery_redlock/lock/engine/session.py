"""What one process has for all locks of one `Redlock`: it builds the parts, and ends them.

The parts know each other by what they are handed here, and none of them knows the session.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

from celery_redlock.errors import SettingsError
from celery_redlock.lock.engine.acquirer import Acquirer, Failure
from celery_redlock.lock.engine.events import Events, Observer
from celery_redlock.lock.engine.outbox import Outbox
from celery_redlock.lock.engine.reentrancy import Reentrancy
from celery_redlock.lock.engine.releaser import OrphanedKey, Releaser
from celery_redlock.lock.engine.renewer import Renewer
from celery_redlock.lock.engine.wait_queue import WaitQueue
from celery_redlock.lock.engine.watchdog import Watchdog
from celery_redlock.lock.model.acquisition import Acquisition, Owner
from celery_redlock.lock.model.key_lease import LockKey
from celery_redlock.lock.model.options import ClientOptions, LockOptions
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.coroutines import ThreadPool
from celery_redlock.lock.server.handshake import ServerInfo
from celery_redlock.lock.server.key_requests import KeyRequests, Servers
from celery_redlock.lock.server.restart_guard import GuardedNodeSet, NodeEvents
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.encoding import encoded
from celery_redlock.lock.transport.node_client import LONGEST_RECONNECT, NodeClient

EXCHANGED_EVERY = 1 / 3  # of a grace period: notes about which server serves where
IDLE = 30.0  # seconds after which an unused connection is asked whether it still stands


class Client(Protocol):
    """The `Redlock` that a session works for."""

    @property
    def observer(self) -> Observer:
        """What is told of its locks and nodes."""


class DroppedClient:
    """Stands for a `Redlock` that is gone while what it began is brought to an end."""

    def __init__(self, made: type[Any], session: Session) -> None:
        self._made, self.session = made, session

    @property
    def observer(self) -> Observer:
        """What is told of its locks and nodes."""
        observer: Observer = self._made.observer
        return observer


class Session:
    """What one process keeps up for all locks of one `Redlock`.

    client: the `Redlock`; neither the session nor its threads keep it alive. options: what its
    locks share. warns: if the `Redlock` is dropped without `close`.
    """

    warns = True

    def __init__(
        self,
        client: Client,
        options: ClientOptions,
        addresses: Sequence[Address],
        platform: Platform,
    ) -> None:
        self._client, self._level = ref(client), type(client).__name__
        self._dropped = DroppedClient(type(client), self)
        self.options, self.platform, self.clock = options, platform, platform.clock
        self.exchanged_every = options.guard.grace_period * EXCHANGED_EVERY  # seconds
        self._build(client, addresses)
        self._forget_own()

    def _build(self, client: Client, addresses: Sequence[Address]) -> None:
        """Make the parts; no connection is made and no thread starts yet."""
        platform, options = self.platform, self.options
        self.watchdog: Watchdog[Acquisition] = Watchdog(
            platform, self._renew_due, self._run_maintenance, self._check_deadline
        )
        self.events = Events(client, self._dropped, self.watchdog)
        told = NodeEvents(self.events.node_changed, self._node_connected, self._node_replaced)
        self.node_set = GuardedNodeSet(
            addresses, options.node_timeout, platform, options.guard, told
        )
        self.wait_queue = WaitQueue(addresses, options.node_timeout, platform)
        self.threads = ThreadPool(platform)
        self.reentrancy = Reentrancy(platform)
        self.outbox = Outbox(self.node_set)
        servers = Servers(self.node_set, KeyRequests(options.prefix), options)
        self.releaser = Releaser(servers, self.events, self.outbox, self.watchdog, self.reentrancy)
        self.renewer = Renewer(servers, self.events, self.watchdog.reschedule)
        self.acquirer = Acquirer(
            servers, platform, self.events, self.releaser, self.renewer, self.check_distinct
        )

    def client(self) -> Any:
        """Return the `Redlock`, or what stands for it once it is gone."""
        return self._client() or self._dropped

    @property
    def is_used(self) -> bool:
        """Whether it has connections or threads."""
        is_used = any(node.is_used for node in self.node_set.nodes)
        return not self._closed and (is_used or self.watchdog.is_started)

    @functools.cached_property
    def identity(self) -> bytes:
        """8 bytes that are the same in each process for these nodes and this prefix."""
        servers = sorted(node.address.server for node in self.node_set.nodes)
        text = "\n".join((self.options.prefix, *servers))
        return hashlib.blake2b(encoded(text), digest_size=8).digest()

    def forget(self) -> None:
        """Start anew in a forked child: nothing of the parent's is used or released there."""
        self.node_set.forget()
        self.watchdog.forget()
        self.events.forget()
        self.wait_queue.forget()
        self.threads.forget()
        self.reentrancy.forget()
        self.outbox.forget()
        self.releaser.forget()
        self._forget_own()

    def _forget_own(self) -> None:
        self._hurried_at = -math.inf
        self._is_ending = self._closed = False

    def end(self) -> None:
        """Release what nobody can any more, and close once every node that answers was told.

        Called once the `Redlock` is gone, and with it each `Lock`.
        """
        for acquisition in self.watchdog.watched:
            self.releaser.release_if_abandoned(acquisition)
        self._is_ending = True  # not before: what is said of them is to be heard
        self.watchdog.run_maintenance_by(self.clock.now())

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._closed = True
        self.watchdog.stop()
        self.wait_queue.close()
        self.threads.close()
        self.node_set.close()

    # what a `Lock` asks for

    def new_acquisition(
        self, options: LockOptions, keys: Sequence[LockKey], owner: Owner
    ) -> Acquisition:
        """Return an acquisition that nothing was asked for yet."""
        return Acquisition(options, keys, owner)

    def try_acquire(self, acquisition: Acquisition) -> Failure | None:
        """Acquire without waiting; return None on success, else why not.

        Raises what `Acquirer.try_acquire` raises.
        """
        started = self.clock.now()
        failure = self.acquirer.try_acquire(acquisition)
        if failure is None:
            self._begin(acquisition, started)
        return failure

    def _begin(self, acquisition: Acquisition, started: float) -> None:
        acquisition.acquired_at = started
        acquisition.plan_renewals(started)
        self.watchdog.watch(acquisition)
        replaced_at = self.node_set.replaced_at
        if replaced_at:  # between the grant of the first key and now
            for one in acquisition.key_leases:
                for node in one.replaced(replaced_at):
                    one.withdraw(node)
        self.reentrancy.enter(acquisition)
        self.events.acquired(acquisition)

    def renew(self, acquisitions: Sequence[Acquisition], *, native: bool = False) -> bool:
        """Renew in one batch a node, and wait for the replies; False if a quorum lacks one.

        native: called in a thread of the watchdog's.
        """
        kept = [one for one in acquisitions if not self.releaser.release_if_abandoned(one)]
        return not self.renewer.renew(kept, native=native)

    def release_orphans(
        self, options: LockOptions, orphans: Sequence[OrphanedKey], acquired_at: float
    ) -> Acquisition:
        """Release, by its own values, what a dead process held; return what that was.

        A marker among the options says that its run has ended. acquired_at: monotonic seconds.
        """
        prefix = self.options.prefix
        keys = [LockKey(prefix, one.resource, one.permit, options.ttl) for one in orphans]
        named = [key for key in keys if key.resource in options.resources]
        acquisition = Acquisition(options, named, self.reentrancy.current_owner())
        acquisition.acquired_at = acquired_at
        acquisition.key_leases = [
            self.acquirer.new_key_lease(options, key, one.value)
            for key, one in zip(keys, orphans, strict=True)
        ]
        if options.marker is not None:
            self.mark_ended(acquisition)
        self.releaser.release_orphans(acquisition)
        return acquisition

    def mark_ended(self, acquisition: Acquisition) -> None:
        """Let the release of an acquisition note that its run has ended, also if it is lost."""
        if not acquisition.ended_at:
            acquisition.ended_at = self.clock.wall_us() / 1e6

    def check_distinct(self) -> None:
        """Raise SettingsError if two of the nodes are one server, which then would vote twice."""
        pair = self.node_set.same_server
        if pair is not None:
            raise one_server(self._level, pair)

    # what the watchdog's threads do

    def _renew_due(self, acquisitions: Sequence[Acquisition]) -> None:
        self.node_set.recover_turn()
        self.renew(acquisitions, native=True)

    def _check_deadline(self, acquisition: Acquisition, now: float) -> None:
        reason = acquisition.expire(now)
        if reason is not None:
            self.events.lost(acquisition, reason)
        elif acquisition.mark_risk_told(now):
            self.events.at_risk(acquisition, now)

    def _run_maintenance(self) -> float:
        """Read late replies and deliver what is left; return when to look again.

        Monotonic seconds.
        """
        now, timeout = self.clock.now(), self.options.node_timeout
        self.node_set.recover_turn()
        self.node_set.drain()
        self.releaser.run_maintenance(now)
        idle = min(IDLE, self.exchanged_every)
        self.node_set.keep_alive(idle)
        gone = self.watchdog.watches and self.node_set.reconnect()
        again = min(self.node_set.drop_spare_pollers(), self.releaser.repeats_at)
        # asked last: what broken connections carried may have added to it
        if gone or self.node_set.outstanding or self.releaser.is_writing:
            return min(again, now + timeout)
        if self._is_ending:
            return self._close_when_done(now + timeout)
        if any(node.connection for node in self.node_set.nodes):
            return min(again, now + idle)
        return again

    def _close_when_done(self, again: float) -> float:
        """Close unless something is left to do; return when to look again."""
        if self.releaser.repeats_at < math.inf or self.watchdog.is_busy:
            return again
        self.close()
        return math.inf

    # what the connections tell

    def _node_connected(self, node: NodeClient, greeting: ServerInfo) -> None:
        # a key that a restarted node lost is reclaimed while the promise is still true; no more
        # often than once a second: a connection that each renewal breaks would else be its own
        # cause
        now = self.clock.now()
        if self._hurried_at <= now:  # else it lies ahead, and is for this node, too
            self._hurried_at = max(now, self._hurried_at + LONGEST_RECONNECT)
        self.watchdog.renew_by(self._hurried_at)
        self.events.node_connected(node, greeting)

    def _node_replaced(self, node: int) -> None:
        # what its server promised may be true; but nobody knows since when it was away
        for acquisition in self.watchdog.watched:
            for key_lease in acquisition.key_leases:
                key_lease.lease.withdraw(node)
            self.watchdog.reschedule(acquisition)


def one_server(level: str, names: Sequence[str]) -> SettingsError:
    """Return the error for two nodes that are one server, which then would vote twice."""
    hint = "these are one server (same run_id): name each server once"
    return SettingsError(level, "nodes", ", ".join(names), hint)
