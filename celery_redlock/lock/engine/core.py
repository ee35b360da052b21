"""What every part of a `Redlock` uses: nodes and their guard, options, threads, events.

Not here: the parts, and who builds them (`session.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.engine.events import Events
from celery_redlock.lock.engine.watchdog import Renew, Watchdog
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.options import ClientOptions
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.coroutines import ThreadPool
from celery_redlock.lock.server.handshake import ServerInfo
from celery_redlock.lock.server.requests import Requests
from celery_redlock.lock.server.restart_guard import RestartGuard
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import encoded
from celery_redlock.lock.transport.node import Node


class Core:
    """What every part of one `Redlock` uses. Makes no connection and starts no thread.

    client: the `Redlock`, which nothing here keeps alive. options: common to all its locks. renew,
    run_maintenance: as of the `Watchdog`. identity: 8 bytes that are the same in every process for
    these nodes and this prefix.
    """

    def __init__(
        self,
        client: Any,
        options: ClientOptions,
        addresses: Sequence[Address],
        platform: Platform,
        renew: Renew,
        run_maintenance: Callable[[], float],
    ) -> None:
        self._level = type(client).__name__
        self.options = options
        self.platform = platform
        self.clock = platform.clock
        self.requests = Requests(options.prefix, options.clock_drift)
        servers = sorted(address.server for address in addresses)
        text = encoded("\n".join((options.prefix, *servers)))
        self.identity = hashlib.blake2b(text, digest_size=8).digest()
        self.threads = ThreadPool(platform)
        self.watchdog = Watchdog(platform, renew, run_maintenance, self._check_deadline)
        self.events = Events(client, self.identity, self.clock, self.watchdog)
        callbacks = self.events.node_changed, self._node_connected, self._node_replaced
        self.guard = RestartGuard(
            addresses, options.node_timeout, platform, options.guard, *callbacks
        )
        self.nodes = self.guard.nodes

    def check_distinct(self) -> None:
        """Raise SettingsError if two nodes are one server, which would vote twice."""
        pair = self.guard.same_server
        if pair is not None:
            raise one_server(self._level, pair)

    # called by the watchdog's second thread

    def _check_deadline(self, acquisition: Acquisition, now: float) -> None:
        reason = acquisition.expire(now)
        if reason is not None:
            self.events.lost(acquisition, reason)
        elif acquisition.mark_risk_reported(now):
            self.events.at_risk(acquisition, now)

    # called for events of the connections

    def _node_connected(self, node: Node, info: ServerInfo) -> None:
        self.watchdog.renew_soon()
        self.events.node_connected(node, info)

    def _node_replaced(self, node: int) -> None:
        # it is unknown since when the server was replaced, so its promises do not count
        for acquisition in self.watchdog.watched:
            for lease in (*acquisition.leases, *acquisition.starts):
                lease.withdraw(node)
            self.watchdog.reschedule(acquisition)


def one_server(level: str, names: Sequence[str]) -> SettingsError:
    """Return the error for two nodes that are one server, which would vote twice."""
    hint = "these are one server (same run_id): name each server once"
    return SettingsError(level, "nodes", ", ".join(names), hint)
