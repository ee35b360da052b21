"""Commands for nodes that did not answer, kept until they are delivered or expire."""

from __future__ import annotations

from typing import Protocol

from celery_redlock.lock.transport.command import Command
from celery_redlock.lock.transport.nodes import Nodes

DELIVERED_FOR = 1.5  # ttls: by then every node has dropped our key, with or without a release


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
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child: the items stay with the parent."""
        self._items: list[dict[int, OutboxItem]] = [{} for _ in self._nodes.all]

    def put(self, node: int, item: OutboxItem) -> None:
        """Keep an item for a node. A second call with the same item has no effect."""
        self._items[node][id(item)] = item

    @property
    def is_empty(self) -> bool:
        """Whether there is no item for any node."""
        return not any(self._items)

    def flush(self, now: float) -> None:
        """Send the items of connected nodes, drop expired items, and connect to the other nodes."""
        for node, items in zip(self._nodes.all, self._items, strict=True):
            for key, item in list(items.items()):
                if item.until <= now:
                    items.pop(key, None)
                    item.settle(node.index)
                elif node.connection is not None:
                    items.pop(key, None)
                    self._nodes.send_to(node.index, item.command())
            if items:
                node.connect()
