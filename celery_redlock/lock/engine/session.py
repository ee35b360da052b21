"""Everything that one process keeps for all locks of one `Redlock`: builds the parts, ends them.

Each part gets here the other parts that it uses. No part uses the session.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import os
from asyncio.events import _get_running_loop
from collections.abc import Sequence
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.engine.acquirer import Acquirer
from celery_redlock.lock.engine.callers import Callers
from celery_redlock.lock.engine.events import Events
from celery_redlock.lock.engine.inbox import Inbox
from celery_redlock.lock.engine.releaser import OrphanedKey, Outbox, Releaser
from celery_redlock.lock.engine.renewer import Renewer
from celery_redlock.lock.engine.watchdog import Watchdog
from celery_redlock.lock.model.acquisition import Acquisition, Flow, Owner
from celery_redlock.lock.model.lease import LockKey
from celery_redlock.lock.model.options import ClientOptions, LockOptions
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.coroutines import ThreadPool
from celery_redlock.lock.server.guard import Core, NodeCallbacks, RestartGuard
from celery_redlock.lock.server.handshake import ServerInfo
from celery_redlock.lock.server.requests import Requests
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import encoded
from celery_redlock.lock.transport.connection import connect_budget
from celery_redlock.lock.transport.node import LONGEST_RECONNECT, Node

EXCHANGED_EVERY = 1 / 3  # of a grace period: how often nodes get the tenures of other nodes
IDLE = 30.0  # seconds after which an unused connection is checked by a PING


class Session:
    """Everything that one process keeps for all locks of one `Redlock`.

    client: the `Redlock`; neither the session nor its threads keep it alive. options: common to all
    its locks. warns: whether to warn if the `Redlock` is garbage collected without `close`.
    is_closed: whether it was closed. identity: 8 bytes that are the same in every process for these
    nodes and this prefix.
    """

    warns = True

    def __init__(
        self, client: Any, options: ClientOptions, addresses: Sequence[Address], platform: Platform
    ) -> None:
        self._level = type(client).__name__
        self.options, self.platform, self.clock = options, platform, platform.clock
        self.exchanged_every = options.guard.grace_period * EXCHANGED_EVERY  # seconds
        servers = sorted(address.server for address in addresses)
        text = encoded("\n".join((options.prefix, *servers)))
        self.identity = hashlib.blake2b(text, digest_size=8).digest()
        self._build(client, addresses)
        self._forget_own()

    def _build(self, client: Any, addresses: Sequence[Address]) -> None:
        """Make the parts. No connection is made and no thread starts yet."""
        platform, options = self.platform, self.options
        self.watchdog: Watchdog[Acquisition] = Watchdog(
            platform,
            lambda due: self.renew(due, native=True),
            self._run_maintenance,
            self._check_deadline,
        )
        self.events = Events(client, self.identity, self.clock, self.watchdog)
        told = NodeCallbacks(self.events.node_changed, self._node_connected, self._node_replaced)
        self.guard = RestartGuard(addresses, options.node_timeout, platform, options.guard, told)
        self.nodes = self.guard.nodes
        self.threads = ThreadPool(platform)
        self.outbox = Outbox(self.nodes)
        core = Core(self.nodes, self.guard, Requests(options.prefix), options)
        drain_by = self.watchdog.run_maintenance_by
        self.new_inbox = functools.partial(Inbox, core, self.threads, drain_by, platform)
        self.callers = Callers(self.new_inbox, platform)
        self.releaser = Releaser(core, self.events, self.outbox, self.watchdog)
        self.renewer = Renewer(core, self.events, self.watchdog.reschedule)
        self.acquirer = Acquirer(
            core,
            platform,
            self.events,
            self.watchdog,
            self.releaser,
            self.renewer,
            self.check_distinct,
        )

    @property
    def is_used(self) -> bool:
        is_used = any(node.is_used for node in self.nodes.all)
        return not self.is_closed and (is_used or self.watchdog.is_started)

    def forget(self) -> None:
        """Reset in a forked child, which uses and releases nothing of its parent."""
        self.guard.forget()
        self.watchdog.forget()
        self.events.forget()
        self.callers.forget()
        self.threads.forget()
        self.outbox.forget()
        self.releaser.forget()
        self._forget_own()

    def _forget_own(self) -> None:
        self._flows = self.platform.new_local(Flow)
        self._hurried_at = -math.inf
        self._is_ending = self.is_closed = False

    def end(self) -> None:
        """Release abandoned locks, and close once every reachable node has got the releases.

        Called after the `Redlock` is garbage collected, and with it every `Lock`.
        """
        for acquisition in self.watchdog.watched:
            self.releaser.release_if_abandoned(acquisition)
        self._is_ending = True  # last: the reports of these releases must still go out
        self.watchdog.run_maintenance_by(self.clock.now())

    def close(self) -> None:
        self.is_closed = True  # first: a caller that begins to wait later does not wait
        self.watchdog.stop()
        self.callers.close()
        self.threads.close()
        self.nodes.close()

    # called by a `Lock`

    def current_owner(self) -> Owner:
        task = None if _get_running_loop() is None else asyncio.current_task()
        return os.getpid(), self._flows.get(in_task=task is not None), task

    def renew(self, acquisitions: Sequence[Acquisition], *, native: bool = False) -> bool:
        """Renew in one batch for each node, wait, and return whether a quorum confirmed all.

        native: called in a thread of the watchdog.
        """
        kept = [one for one in acquisitions if not self.releaser.release_if_abandoned(one)]
        return not self.renewer.renew(kept, native=native)

    def release_orphans(
        self, options: LockOptions, orphans: Sequence[OrphanedKey], acquired_at: float
    ) -> Acquisition:
        """Release the keys of a dead process by their values; return them as an acquisition.

        If the options have a marker, the run of the dead process has ended. acquired_at: monotonic
        seconds.
        """
        prefix = self.options.prefix
        keys = [LockKey(prefix, one.resource, options.ttl, one.limit) for one in orphans]
        named = [key for key in keys if key.resource in options.resources]
        acquisition = Acquisition(options, named, self.current_owner())
        acquisition.acquired_at = acquired_at
        acquisition.leases = [
            self.acquirer.new_lease(options, key, one.value)
            for key, one in zip(keys, orphans, strict=True)
        ]
        if options.marker is not None:
            self.mark_ended(acquisition)
        self.releaser.release_orphans(acquisition)
        return acquisition

    def connect_soon(self) -> None:
        """Begin to connect to every node, and keep the connections alive. Never waits."""
        self.nodes.reconnect()
        budget = connect_budget(self.options.node_timeout)
        self.watchdog.run_maintenance_by(self.clock.now() + budget)

    def mark_ended(self, acquisition: Acquisition) -> None:
        """Let the release of an acquisition record that its run has ended, even if it is lost."""
        if acquisition.ended_at is None:
            acquisition.ended_at = self.clock.now()

    def check_distinct(self) -> None:
        """Raise SettingsError if two nodes are one server, which would vote twice."""
        pair = self.guard.same_server
        if pair is not None:
            raise one_server(self._level, pair)

    # called by the watchdog's threads

    def _check_deadline(self, acquisition: Acquisition, now: float) -> None:
        reason = acquisition.expire(now)
        if reason is not None:
            self.events.lost(acquisition, reason)
        elif acquisition.mark_risk_told(now):
            self.events.at_risk(acquisition, now)

    def _run_maintenance(self) -> float:
        """Read late replies and deliver pending commands; return when to run this again.

        Monotonic seconds.
        """
        now, timeout = self.clock.now(), self.options.node_timeout
        self.nodes.drain()
        self.releaser.run_maintenance(now)
        idle = min(IDLE, self.exchanged_every)
        self.guard.keep_alive(idle)
        gone = bool(self.watchdog.watched) and self.nodes.reconnect()
        again = min(self.nodes.pollers.drop_spare(now), self.releaser.repeats_at)
        # checked last: the reports of broken connections may have added work
        if gone or self.nodes.outstanding or self.releaser.is_writing:
            return min(again, now + timeout)
        if self._is_ending:
            if self.releaser.repeats_at < math.inf or self.watchdog.is_busy:
                return now + timeout
            self.close()
            return math.inf
        if any(node.connection for node in self.nodes.all):
            return min(again, now + idle)
        return again

    # called for events of the connections

    def _node_connected(self, node: Node, greeting: ServerInfo) -> None:
        # Renews soon, so that a key that a restarted node lost is reclaimed while the node's
        # promise is still true. At most once a second: if a renewal breaks the connection, each
        # reconnect would cause the next renewal.
        now = self.clock.now()
        if self._hurried_at <= now:  # otherwise the planned renewal serves this node, too
            self._hurried_at = max(now, self._hurried_at + LONGEST_RECONNECT)
        self.watchdog.renew_by(self._hurried_at)
        self.events.node_connected(node, greeting)

    def _node_replaced(self, node: int) -> None:
        # it is unknown since when the server was replaced, so its promises do not count
        for acquisition in self.watchdog.watched:
            for lease in acquisition.leases:
                lease.withdraw(node)
            self.watchdog.reschedule(acquisition)


def one_server(level: str, names: Sequence[str]) -> SettingsError:
    """Return the error for two nodes that are one server, which would vote twice."""
    hint = "these are one server (same run_id): name each server once"
    return SettingsError(level, "nodes", ", ".join(names), hint)
