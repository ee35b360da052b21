"""What nodes that did not answer are still to be told, until it does not matter any more."""

from __future__ import annotations

from typing import Protocol

from celery_redlock.lock.server.restart_guard import GuardedNodeSet
from celery_redlock.lock.transport.command import Command

DELIVERED_FOR = 1.5  # ttls: for so long a node that cannot be told may keep a key of ours


class OutboxItem(Protocol):
    """What a node is still to be told. until: monotonic seconds, after which it is dropped."""

    @property
    def until(self) -> float:
        """When it does not matter any more."""

    def command(self) -> Command:
        """Return what to send."""

    def settle(self, node: int) -> None:
        """Take note that a node needs to be told no more."""


class Outbox:
    """Delivers items to nodes once these are connected. One dictionary a node."""

    def __init__(self, node_set: GuardedNodeSet) -> None:
        self._node_set = node_set
        self.forget()

    def forget(self) -> None:
        """Start anew in a forked child: what the parent has to tell stays with it."""
        self._items: list[dict[int, OutboxItem]] = [{} for _ in self._node_set.nodes]

    def put(self, node: int, item: OutboxItem) -> None:
        """Keep an item for a node; putting it twice does no harm."""
        self._items[node][id(item)] = item

    @property
    def is_empty(self) -> bool:
        """Whether no node is to be told anything."""
        return not any(self._items)

    def flush(self, now: float) -> None:
        """Send what nodes can be told now, drop what is over, and connect to the other nodes."""
        for node, items in zip(self._node_set.nodes, self._items, strict=True):
            for key, item in list(items.items()):
                if item.until <= now:
                    items.pop(key, None)
                    item.settle(node.index)
                elif node.connection is not None:
                    items.pop(key, None)
                    self._node_set.send_to(node.index, item.command())
            if items:
                node.connect()
