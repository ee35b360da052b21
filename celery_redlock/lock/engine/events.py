"""Reports what happens to locks and nodes: to the log, as public records, and to a journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

from celery_redlock import anchors
from celery_redlock.errors import LockLost, NodeError, abstention_cause
from celery_redlock.lock.engine.watchdog import Watchdog
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.platform.clock import Clock
from celery_redlock.lock.server.error_hints import hint_of, passage_of, strip_args, with_hint
from celery_redlock.lock.server.handshake import ServerInfo
from celery_redlock.lock.transport.node import Node

logger = logging.getLogger(__name__)

EVICTS_LOCKS = "with a full memory the node deletes held locks; set it to noeviction"
LEAVES_WITH_SLOT = "once the slot of its locks moves, it grants none; name a standalone server"


@dataclass(frozen=True)
class LockAcquiredEvent:
    """A lock was acquired. ttl: seconds. fencing_token: 0 without the option `fencing`."""

    resource: str
    ttl: float
    fencing_token: int = 0


@dataclass(frozen=True)
class LockReleasedEvent:
    """A lock was released. held_for: seconds. by: "holder", or "parent" of a killed holder."""

    resource: str
    held_for: float
    by: str = "holder"


@dataclass(frozen=True)
class LockLostEvent:
    """A lock was lost. reason: for people."""

    resource: str
    reason: str


@dataclass(frozen=True)
class LockExtendedEvent:
    """A quorum renewed a lock. remaining: seconds for which it is valid from now on."""

    resource: str
    remaining: float


@dataclass(frozen=True)
class NodeFailedEvent:
    """A node stopped replying. node: its address. cause: the server's or the system's message."""

    node: str
    cause: str


@dataclass(frozen=True)
class NodeRecoveredEvent:
    """A node replies again."""

    node: str


class Events:
    """Writes the log, and sends a record of each event that somebody wants to hear of.

    client: the `Redlock`, the sender of records that no task sends; kept as a weak reference.
    identity: `Session.identity`. Records of the caller's own acquire and release are sent in its
    thread, the others in the watchdog's second thread, which does no I/O. None influences the lock.
    tells_of_new_nodes: whether an abstaining node is a warning already at the first connection to
    it; False if the caller reports such nodes itself.

    What is above the lock sets these, for all sessions of the process:
    - wants: return whether records of a class are heard. Asked first, so that a record without
      receivers costs only this call.
    - send: send a record. sender: the task, or the `Redlock`; None once that is garbage collected.
    - on_loss: called in the watchdog when a lock is lost, before its record is sent.
    - journal: in a forked child its `JournalSlot`, which hears of each key until no node keeps it.
    - sending: held while the watchdog sends. A process that forks has a mutex here.
    """

    wants: Callable[[type[Any]], bool] = staticmethod(lambda kind: False)
    send: Callable[[Any, Any], object] = staticmethod(lambda sender, record: None)
    on_loss: Callable[[], object] = staticmethod(lambda: None)
    journal: Any = None
    sending: AbstractContextManager[Any] = nullcontext()
    tells_of_new_nodes = True

    def __init__(self, client: Any, identity: bytes, clock: Clock, watchdog: Watchdog) -> None:
        self._client = ref(client)
        self._identity = identity
        self._clock = clock
        self._watchdog = watchdog
        self.forget()

    def forget(self) -> None:
        self._connected_before: set[int] = set()  # nodes that this process has connected to before
        # node and hint of each refusal to send messages that was reported
        self._reported_hints: set[tuple[int, str]] = set()

    def claiming(self, acquisition: Acquisition, lease: Lease) -> None:
        """Report that the acquire request for a key is about to be written."""
        if self.journal is not None:
            self.journal.claiming(self._identity, self._clock.now(), acquisition, lease)

    def acquired(self, acquisition: Acquisition) -> None:
        if self.journal is not None:
            self.journal.held(acquisition)
        if self.wants(LockAcquiredEvent):
            ttl = acquisition.options.ttl
            token = acquisition.fencing_token
            self._send(acquisition, LockAcquiredEvent(acquisition.resource, ttl, token))

    def released(self, acquisition: Acquisition, by: str = "holder") -> None:
        if self.journal is not None:
            self.journal.released(acquisition)
        if self.wants(LockReleasedEvent):
            held_for = self._clock.now() - acquisition.acquired_at
            self._send(acquisition, LockReleasedEvent(acquisition.resource, held_for, by))

    def _send(self, acquisition: Acquisition, record: Any) -> None:
        sender = acquisition.options.sender
        self.send(self._client() if sender is None else sender, record)

    def extended(self, acquisitions: Iterable[Acquisition]) -> None:
        for acquisition in acquisitions if self.wants(LockExtendedEvent) else ():
            self._watchdog.call_soon(self._send_extended, acquisition)

    def _send_extended(self, acquisition: Acquisition) -> None:
        remaining = acquisition.remaining(self._clock.now())
        with self.sending:
            self._send(acquisition, LockExtendedEvent(acquisition.resource, remaining))

    def abandoned(self, acquisition: Acquisition) -> None:
        text = "released %r: its Lock was garbage collected without a release"
        extra = {"event": "lock_abandoned", "resource": acquisition.resource}
        self._watchdog.call_soon(logger.warning, text, acquisition.resource, extra=extra)

    def at_risk(self, acquisition: Acquisition, now: float) -> None:
        """Report that a lock was not renewed for two thirds of its ttl; called as `lost`."""
        remaining = min(lease.remaining(now) for lease in acquisition.leases)
        text = "%r is at risk: not renewed, lost in %.1f s"
        extra = {"event": "lock_at_risk", "resource": acquisition.resource, "remaining": remaining}
        logger.warning(text, acquisition.resource, remaining, extra=extra)

    def lost(self, acquisition: Acquisition, reason: str) -> None:
        """Report once that a lock is lost. Called only in the watchdog's second thread."""
        if not acquisition.mark_loss_reported():
            return
        self._watchdog.unwatch(acquisition)
        extra = {"event": "lock_lost", "resource": acquisition.resource, "reason": reason}
        text = "lost %r: %s. See %s"
        see = anchors.LOCK_LOST
        logger.error(text, acquisition.resource, reason, see, extra=extra)
        self.on_loss()  # first: a receiver may take its time
        with self.sending:
            if self.wants(LockLostEvent):
                self._send(acquisition, LockLostEvent(acquisition.resource, reason))
            self._call_back(acquisition, reason)

    def _call_back(self, acquisition: Acquisition, reason: str) -> None:
        on_lost = acquisition.options.on_lost
        resource = acquisition.resource
        if on_lost is None:
            return
        try:
            on_lost(LockLost(resource, reason))
        except Exception:
            extra = {"event": "on_lost_failed", "resource": resource}
            text = "on_lost of %r has raised. See %s"
            see = anchors.LOCK_LOST
            logger.exception(text, resource, see, extra=extra)

    def lost_soon(self, acquisition: Acquisition, reason: str) -> None:
        """Report that a lock is lost, in the watchdog's second thread."""
        self._watchdog.call_soon(self.lost, acquisition, reason)

    def node_changed(self, node: Node, error: NodeError | None) -> None:
        """Report that a node stopped answering; without an error, that the node answers again."""
        self._watchdog.call_soon(self._report_node, node.name, error)
        if error is not None:  # the maintenance connects again, and so hears that it is back
            self._watchdog.run_maintenance_by(self._clock.now())

    def _report_node(self, name: str, error: NodeError | None) -> None:
        record: Any
        if error is None:
            extra = {"event": "node_recovered", "node": name}
            logger.info("node %s answers again", name, extra=extra)
            record = NodeRecoveredEvent(name)
        else:
            extra = {"event": "node_failed", "node": name}
            text = "node %s gives no vote: %s. See %s"
            see = passage_of(error.cause)
            logger.error(text, name, with_hint(error.cause), see, extra=extra)
            record = NodeFailedEvent(name, error.cause)
        with self.sending:
            if self.wants(type(record)):
                self.send(self._client(), record)

    def node_connected(self, node: Node, info: ServerInfo) -> None:
        if info.abstains_for > 0:
            is_new = node.index not in self._connected_before and not self.tells_of_new_nodes
            level = logging.DEBUG if is_new else logging.WARNING
            keeps_locks = node.address.keeps_locks
            text = abstention_cause(info.abstains_for, keeps_locks=keeps_locks)
            self._log("node_silent", level, text, node, anchors.NODE_RESTARTED)
        if info.in_cluster and node.index not in self._connected_before:
            text = f"is a cluster member: {LEAVES_WITH_SLOT}"
            self._log("node_in_cluster", logging.WARNING, text, node, anchors.NODE_FAILS)
        self._connected_before.add(node.index)
        if info.evicts:
            text = f"has maxmemory-policy {info.evicts}: {EVICTS_LOCKS}"
            self._log("node_evicts", logging.ERROR, text, node, anchors.NODE_EVICTS)

    def node_unheard(self, node: Node, cause: str) -> None:
        """Report once that a node refuses to send messages, unless that ends by itself."""
        hint = hint_of(cause)
        if hint and (node.index, hint) not in self._reported_hints:
            self._reported_hints.add((node.index, hint))
            text = f"sends no message, so waiters poll: {with_hint(strip_args(cause))}"
            self._log("messages_refused", logging.WARNING, text, node, passage_of(cause))

    def _log(self, event: str, level: int, text: str, node: Node, see: str) -> None:
        extra = {"event": event, "node": node.name}
        line = "node %s %s. See %s"
        self._watchdog.call_soon(logger.log, level, line, node.name, text, see, extra=extra)
