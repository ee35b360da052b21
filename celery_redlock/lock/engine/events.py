"""Notifies observers and writes the log about events of locks and nodes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import ref

from celery_redlock import anchors
from celery_redlock.errors import NodeError, abstention_cause
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.key_lease import KeyLease
from celery_redlock.lock.server.error_hints import with_hint
from celery_redlock.lock.server.handshake import ServerInfo
from celery_redlock.lock.transport.node_client import NodeClient

logger = logging.getLogger(__name__)


class Observer:
    """Receives events of locks and nodes. This class ignores them.

    `claiming`, `acquired` and `released` are called in the caller's thread, `settled` in any
    thread. The other methods are called in the watchdog's second thread, which does no I/O. No
    method influences the lock. redlock: the `Redlock` of the lock.
    """

    def claiming(self, redlock: Any, acquisition: Acquisition, key_lease: KeyLease) -> None:
        """Take note that the acquire request for one key is about to be written."""

    def settled(self, key_lease: KeyLease) -> None:
        """Take note that no node keeps a key any more, so that no release is due."""

    def acquired(self, redlock: Any, acquisition: Acquisition) -> None:
        """Take note that a lock is acquired."""

    def released(self, redlock: Any, acquisition: Acquisition) -> None:
        """Take note that a lock is released."""

    def extended(self, redlock: Any, acquisition: Acquisition) -> None:
        """Take note that a quorum renewed a lock."""

    @property
    def hears_extensions(self) -> bool:
        """Whether `extended` is to be called. With many locks it is called often."""
        return False

    def lost(self, redlock: Any, acquisition: Acquisition, reason: str) -> None:
        """Take note that a lock is lost. reason: for people."""

    def node_failed(self, redlock: Any, node: str, cause: str) -> None:
        """Take note that a node stopped answering. cause: for people."""

    def node_recovered(self, redlock: Any, node: str) -> None:
        """Take note that a node answers again."""


class Teller(Protocol):
    """Calls users' code in the watchdog, so that the code delays neither I/O nor renewals."""

    def tell(self, news: Callable[[], None]) -> None:
        """Call a function soon, in another thread."""

    def say(self, do: Callable[[], None]) -> None:
        """Call a function now, and log any exception."""

    def unwatch(self, acquisition: Acquisition) -> None:
        """Stop watching an acquisition."""


class Events:
    """Passes events of one `Redlock` to its observer and to the log.

    client: the `Redlock`, as a weak reference. dropped: its substitute once it is garbage
    collected. tells_of_new_nodes: whether an abstaining node is a warning already at the first
    connection to it; False if the caller reports such nodes itself.
    """

    tells_of_new_nodes = True

    def __init__(self, client: Any, dropped: Any, teller: Teller) -> None:
        self._client, self._dropped, self._teller = ref(client), dropped, teller
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child."""
        self._greeted: set[int] = set()  # nodes that this process has connected to before

    def settled(self, key_lease: KeyLease) -> None:
        """Report that no node keeps a key any more, so that no release is due."""
        (self._client() or self._dropped).observer.settled(key_lease)

    def claiming(self, acquisition: Acquisition, key_lease: KeyLease) -> None:
        """Report that the request for a key is about to be written."""
        client = self._client() or self._dropped
        client.observer.claiming(client, acquisition, key_lease)

    def acquired(self, acquisition: Acquisition) -> None:
        """Report that a lock is acquired."""
        client = self._client() or self._dropped
        client.observer.acquired(client, acquisition)

    def released(self, acquisition: Acquisition) -> None:
        """Report that a lock is released."""
        client = self._client() or self._dropped
        client.observer.released(client, acquisition)

    def extended(self, acquisitions: Iterable[Acquisition]) -> None:
        """Report that a quorum renewed some locks."""
        client = self._client() or self._dropped
        observer = client.observer
        for acquisition in acquisitions if observer.hears_extensions else ():
            self._teller.tell(functools.partial(observer.extended, client, acquisition))

    def abandoned(self, acquisition: Acquisition) -> None:
        """Report that a lock was released because its `Lock` was garbage collected."""
        text = "released %r: its Lock was garbage collected without a release"
        extra = {"event": "lock_abandoned", "resource": acquisition.resource}
        log = functools.partial(logger.warning, text, acquisition.resource, extra=extra)
        self._teller.tell(log)

    def at_risk(self, acquisition: Acquisition, now: float) -> None:
        """Report that a lock was not renewed for two thirds of its ttl."""
        left = min(one.lease.remaining(now) for one in acquisition.key_leases)
        text = "%r is at risk: not renewed, lost in %.1f s"
        extra = {"event": "lock_at_risk", "resource": acquisition.resource, "remaining": left}
        self._teller.say(
            functools.partial(logger.warning, text, acquisition.resource, left, extra=extra)
        )

    def lost(self, acquisition: Acquisition, reason: str) -> None:
        """Report once that a lock is lost. Called only in the watchdog's second thread."""
        if acquisition.mark_loss_told():
            self._teller.unwatch(acquisition)
            self._teller.say(functools.partial(self._tell_lost, acquisition, reason))

    def lost_soon(self, acquisition: Acquisition, reason: str) -> None:
        """Report that a lock is lost, in the watchdog's second thread."""
        self._teller.tell(functools.partial(self.lost, acquisition, reason))

    def _tell_lost(self, acquisition: Acquisition, reason: str) -> None:
        extra = {"event": "lock_lost", "resource": acquisition.resource, "reason": reason}
        text, see = "lost %r: %s. See %s", anchors.LOCK_LOST
        logger.error(text, acquisition.resource, reason, see, extra=extra)
        client = self._client() or self._dropped
        client.observer.lost(client, acquisition, reason)

    def node_changed(self, node: NodeClient, error: NodeError | None) -> None:
        """Report that a node stopped answering; without an error, that the node answers again."""
        self._teller.tell(functools.partial(self._tell_of_node, node.name, error))

    def _tell_of_node(self, name: str, error: NodeError | None) -> None:
        client = self._client() or self._dropped
        if error is None:
            extra = {"event": "node_recovered", "node": name}
            logger.info("node %s answers again", name, extra=extra)
            client.observer.node_recovered(client, name)
        else:
            extra = {"event": "node_failed", "node": name}
            text, see = "node %s gives no vote: %s. See %s", anchors.NODE_FAILS
            logger.error(text, name, with_hint(error.cause), see, extra=extra)
            client.observer.node_failed(client, name, error.cause)

    def node_connected(self, node: NodeClient, greeting: ServerInfo) -> None:
        """Log a node that abstains, or that may evict keys."""
        if greeting.abstains_for > 0:
            is_new = node.index not in self._greeted and not self.tells_of_new_nodes
            level = logging.DEBUG if is_new else logging.WARNING
            text, see = abstention_cause(greeting.abstains_for), anchors.NODE_RESTARTED
            self._log("node_silent", level, text, node, see)
        self._greeted.add(node.index)
        if greeting.evicts:
            hint = "with a full memory the node deletes held locks; set it to noeviction"
            text = f"has maxmemory-policy {greeting.evicts}: {hint}"
            self._log("node_evicts", logging.ERROR, text, node, anchors.NODE_EVICTS)

    def _log(self, event: str, level: int, text: str, node: NodeClient, see: str) -> None:
        extra, line = {"event": event, "node": node.name}, "node %s %s. See %s"
        self._teller.tell(
            functools.partial(logger.log, level, line, node.name, text, see, extra=extra)
        )
