"""Everything that one process keeps for all locks of one `Redlock`: builds the parts, ends them.

Each part gets the core, and the other parts that it uses. No part uses the session.
"""

from __future__ import annotations

import asyncio
import math
from asyncio.events import _get_running_loop
from collections.abc import Sequence
from typing import Any

from celery_redlock.lock.engine.acquirer import Acquirer
from celery_redlock.lock.engine.callers import Callers
from celery_redlock.lock.engine.core import Core
from celery_redlock.lock.engine.releaser import Releaser
from celery_redlock.lock.engine.renewer import Renewer
from celery_redlock.lock.model.acquisition import Acquisition, Flow, Owner
from celery_redlock.lock.model.lease import LockKey
from celery_redlock.lock.model.options import ClientOptions, LockOptions
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.forks import check_process
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.connection import connect_budget

TENURE_EXCHANGE_SHARE = 1 / 3  # of a grace period: how often nodes get the tenures of other nodes
# seconds, doubled each time, until an idle process tries lost nodes again
IDLE_RECONNECT_PAUSE = 1.0
# of a lost release: it is noticed, connected for, sent, and sent with its source
DELIVERY_ROUNDS = 4
PING_INTERVAL = 30.0  # seconds after which an unused connection is checked by a PING


class Session(Core):
    """The core of one `Redlock` and the parts that work on it, in one process.

    warns: whether to warn if the `Redlock` is garbage collected without `close`. is_closed: whether
    it was closed. exchanged_every: seconds after which nodes get the tenures of other nodes.
    """

    warns = True

    def __init__(
        self, client: Any, options: ClientOptions, addresses: Sequence[Address], platform: Platform
    ) -> None:
        super().__init__(
            client,
            options,
            addresses,
            platform,
            lambda due: self.renewer.renew(due, native=True),
            self._run_maintenance,
        )
        self.exchanged_every = options.guard.grace_period * TENURE_EXCHANGE_SHARE
        self._build()

    def _build(self) -> None:
        self.releaser = Releaser(self)
        self.renewer = Renewer(self, self.releaser)
        self.acquirer = Acquirer(self, self.releaser, self.renewer)
        self.callers = Callers(self)
        self._flows = self.platform.new_local(Flow)
        self._is_ending = self.is_closed = False
        self._reconnect_pause = IDLE_RECONNECT_PAUSE

    @property
    def is_used(self) -> bool:
        is_used = any(node.is_used for node in self.nodes.all)
        return not self.is_closed and (is_used or self.watchdog.is_started)

    def forget(self) -> None:
        """Reset in a forked child, which uses and releases nothing of its parent."""
        self.guard.forget()
        self.watchdog.forget()
        self.events.forget()
        self.threads.forget()
        self._build()

    def end(self) -> None:
        """Have abandoned locks released, and close once every reachable node has got the releases.

        Called after the `Redlock` is garbage collected, and with it every `Lock`.
        """
        for acquisition in self.watchdog.watched:
            # not here: two threads that release one lock at once would report it as lost
            self.watchdog.release_dropped(acquisition)
        self._is_ending = True  # last: the reports of these releases must still go out
        self.watchdog.run_maintenance_by(self.clock.now())

    def deliver(self) -> None:
        """Give what the nodes are still owed, as releases, one node timeout, with a reconnect."""
        clock = self.clock
        nodes = self.nodes
        releaser = self.releaser
        until = clock.now() + nodes.timeout
        for _ in range(DELIVERY_ROUNDS):
            releaser.outbox.flush(clock.now())
            due = {node.index for node in nodes.all if node.outstanding}
            due.update(releaser.outbox.nodes)
            # another thread may be about to tell of these that they are lost
            due.update(report.node for report in list(nodes.mail) if report.entries)
            if not (due or nodes.mail) or clock.now() >= until:
                return
            nodes.flush(sorted(due), until)

    def close(self) -> None:
        self.is_closed = True  # first: a caller that begins to wait later does not wait
        self.watchdog.stop()
        self.callers.close()
        self.deliver()
        self.threads.close()
        self.nodes.close()

    # called by a `Lock`

    def current_owner(self) -> Owner:
        task = None if _get_running_loop() is None else asyncio.current_task()
        return check_process(), self._flows.get(in_task=task is not None), task

    def release_orphans(
        self, options: LockOptions, orphans: Sequence[tuple[str, int, str]], acquired_at: float
    ) -> Acquisition:
        """Release the keys of a dead process by their values; return them as an acquisition.

        orphans: of each its resource, limit and value. If the options have a marker, the run of
        the dead process has ended. acquired_at: monotonic seconds.
        """
        prefix = self.options.prefix
        keys = [LockKey(prefix, resource, options.ttl, limit) for resource, limit, _ in orphans]
        resource_keys = [key for key in keys if key.resource in options.resources]
        acquisition = Acquisition(options, resource_keys, self.current_owner())
        acquisition.acquired_at = acquired_at
        acquisition.leases = [
            self.acquirer.new_lease(options, key, value)
            for key, (_, _, value) in zip(keys, orphans, strict=True)
        ]
        if options.marker is not None:
            acquisition.ended_at = self.clock.now()
        self.releaser.release_orphans(acquisition)
        return acquisition

    def connect_soon(self) -> None:
        """Begin to connect to every node, and keep the connections alive. Never waits."""
        self.nodes.reconnect()
        budget = connect_budget(self.options.node_timeout)
        self.watchdog.run_maintenance_by(self.clock.now() + budget)

    # called by the watchdog

    def _run_maintenance(self) -> float:
        """Read late replies and deliver pending commands; return when to run this again."""
        now = self.clock.now()
        timeout = self.options.node_timeout
        self.nodes.drain()
        self.releaser.run_maintenance(now)
        idle = min(PING_INTERVAL, self.exchanged_every)
        self.guard.keep_alive(idle)
        is_watching = bool(self.watchdog.watched)
        # also without a lock: otherwise nobody hears that a node is back
        is_reconnecting = (is_watching or not self._is_ending) and self.nodes.reconnect()
        next_run = min(self.nodes.pollers.drop_spare(now), self.releaser.repeats_at)
        # checked last: the reports of broken connections may have added work
        if (is_reconnecting and is_watching) or self.nodes.outstanding or self.releaser.is_writing:
            return min(next_run, now + timeout)
        if self._is_ending:
            if self.releaser.repeats_at < math.inf or self.watchdog.is_busy:
                return now + timeout
            self.close()
            return math.inf
        if not is_reconnecting:
            self._reconnect_pause = IDLE_RECONNECT_PAUSE
            return min(next_run, now + idle)
        self._reconnect_pause = min(PING_INTERVAL, 2 * self._reconnect_pause)
        return min(next_run, now + self._reconnect_pause)
