"""What observers and the log are told of locks and nodes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import ref

from celery_redlock.errors import NodeError, abstention_cause
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.key_lease import KeyLease
from celery_redlock.lock.server.error_hints import with_hint
from celery_redlock.lock.server.handshake import ServerInfo
from celery_redlock.lock.transport.node_client import NodeClient

logger = logging.getLogger(__name__)


class Observer:
    """What is told of locks and nodes as it happens; this one ignores it.

    `claiming`, `acquired` and `released` are called in the caller's thread, `settled` in any, the
    others in the watchdog's, apart from all I/O. They tell, and never decide. redlock: the
    `Redlock` of the lock.
    """

    def claiming(self, redlock: Any, acquisition: Acquisition, key_lease: KeyLease) -> None:
        """Take note that the acquire request for one key is about to be written."""

    def settled(self, key_lease: KeyLease) -> None:
        """Take note that no node keeps a key any more, or needs to be told of its end."""

    def acquired(self, redlock: Any, acquisition: Acquisition) -> None:
        """Take note that a lock is held."""

    def released(self, redlock: Any, acquisition: Acquisition) -> None:
        """Take note that a lock is released."""

    def extended(self, redlock: Any, acquisition: Acquisition) -> None:
        """Take note that a quorum renewed a lock."""

    @property
    def hears_extensions(self) -> bool:
        """Whether `extended` is to be called: often, with many locks."""
        return False

    def lost(self, redlock: Any, acquisition: Acquisition, reason: str) -> None:
        """Take note that a lock is lost; reason: in words."""

    def node_failed(self, redlock: Any, node: str, cause: str) -> None:
        """Take note that a node stopped answering; cause: in words."""

    def node_recovered(self, redlock: Any, node: str) -> None:
        """Take note that a node answers again."""


class Teller(Protocol):
    """Calls users' code in the watchdog, so that it delays neither I/O nor renewals."""

    def tell(self, news: Callable[[], None]) -> None:
        """Call a function soon, in another thread."""

    def say(self, do: Callable[[], None]) -> None:
        """Call a function now, whatever it raises."""

    def unwatch(self, acquisition: Acquisition) -> None:
        """Leave an acquisition alone."""


class Events:
    """Tells the observer and the log of what happens to the locks and nodes of one `Redlock`.

    client: the `Redlock`, kept weakly. dropped: what stands for it once it is gone.
    tells_of_new_nodes: a node that abstains is worth a warning at its first contact, too, for
    nobody else says it.
    """

    tells_of_new_nodes = True

    def __init__(self, client: Any, dropped: Any, teller: Teller) -> None:
        self._client, self._dropped, self._teller = ref(client), dropped, teller
        self.forget()

    def forget(self) -> None:
        """Start anew in a forked child."""
        self._greeted: set[int] = set()  # nodes that this process has been connected to

    def settled(self, key_lease: KeyLease) -> None:
        """Tell that no node keeps a key any more, or needs to be told of its end."""
        (self._client() or self._dropped).observer.settled(key_lease)

    def claiming(self, acquisition: Acquisition, key_lease: KeyLease) -> None:
        """Tell that the request for a key is about to be written."""
        client = self._client() or self._dropped
        client.observer.claiming(client, acquisition, key_lease)

    def acquired(self, acquisition: Acquisition) -> None:
        """Tell that a lock is held."""
        client = self._client() or self._dropped
        client.observer.acquired(client, acquisition)

    def released(self, acquisition: Acquisition) -> None:
        """Tell that a lock is released."""
        client = self._client() or self._dropped
        client.observer.released(client, acquisition)

    def extended(self, acquisitions: Iterable[Acquisition]) -> None:
        """Tell that a quorum renewed some locks."""
        client = self._client() or self._dropped
        observer = client.observer
        for acquisition in acquisitions if observer.hears_extensions else ():
            self._teller.tell(functools.partial(observer.extended, client, acquisition))

    def abandoned(self, acquisition: Acquisition) -> None:
        """Tell that a lock was released because nobody kept its `Lock`."""
        text = "released %r: nobody keeps its Lock any more"
        extra = {"event": "lock_abandoned", "resource": acquisition.resource}
        log = functools.partial(logger.warning, text, acquisition.resource, extra=extra)
        self._teller.tell(log)

    def at_risk(self, acquisition: Acquisition, now: float) -> None:
        """Tell that a lock was not renewed for two thirds of its ttl."""
        left = min(one.lease.remaining(now) for one in acquisition.key_leases)
        text = "%r is at risk: not renewed, lost in %.1f s"
        extra = {"event": "lock_at_risk", "resource": acquisition.resource, "remaining": left}
        self._teller.say(
            functools.partial(logger.warning, text, acquisition.resource, left, extra=extra)
        )

    def lost(self, acquisition: Acquisition, reason: str) -> None:
        """Tell that a lock is lost, once; called in the watchdog's second thread alone."""
        if acquisition.mark_loss_told():
            self._teller.unwatch(acquisition)
            self._teller.say(functools.partial(self._tell_lost, acquisition, reason))

    def lost_soon(self, acquisition: Acquisition, reason: str) -> None:
        """Tell that a lock is lost, in the watchdog's second thread."""
        self._teller.tell(functools.partial(self.lost, acquisition, reason))

    def _tell_lost(self, acquisition: Acquisition, reason: str) -> None:
        extra = {"event": "lock_lost", "resource": acquisition.resource, "reason": reason}
        logger.error("lost %r: %s", acquisition.resource, reason, extra=extra)
        client = self._client() or self._dropped
        client.observer.lost(client, acquisition, reason)

    def node_changed(self, node: NodeClient, error: NodeError | None) -> None:
        """Tell that a node stopped answering, or, without an error, that it answers again."""
        self._teller.tell(functools.partial(self._tell_of_node, node.name, error))

    def _tell_of_node(self, name: str, error: NodeError | None) -> None:
        client = self._client() or self._dropped
        if error is None:
            extra = {"event": "node_recovered", "node": name}
            logger.info("node %s answers again", name, extra=extra)
            client.observer.node_recovered(client, name)
        else:
            extra = {"event": "node_failed", "node": name}
            logger.error("node %s gives no vote: %s", name, with_hint(error.cause), extra=extra)
            client.observer.node_failed(client, name, error.cause)

    def node_connected(self, node: NodeClient, greeting: ServerInfo) -> None:
        """Warn of a node that abstains, or that may evict keys."""
        abstains_for = 0.0 if greeting.notes is None else greeting.notes.abstains_for
        if abstains_for > 0:
            is_new = node.index not in self._greeted and not self.tells_of_new_nodes
            level = logging.DEBUG if is_new else logging.WARNING
            self._log("node_silent", level, abstention_cause(abstains_for), node)
        self._greeted.add(node.index)
        if greeting.evicts:
            hint = "under pressure it forgets locks that are held; set it to noeviction"
            text = f"has maxmemory-policy {greeting.evicts}: {hint}"
            self._log("node_evicts", logging.ERROR, text, node)

    def _log(self, event: str, level: int, text: str, node: NodeClient) -> None:
        extra = {"event": event, "node": node.name}
        log = functools.partial(logger.log, level, "node %s %s", node.name, text, extra=extra)
        self._teller.tell(log)
