"""The gauges of Prometheus; each scrape reads them anew from the worker and the nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from celery_redlock.lock.node_status import look_at_nodes
from celery_redlock.operate.control import held_locks_of
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.waiting.room import waiters_of


def _gauge(name: str, text: str, label: str) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"redlock_{name}", text, labels=[label])


def _task_gauge(name: str, text: str, counts: Mapping[str, int]) -> Any:
    gauge = _gauge(name, text, "task")
    for task, number in counts.items():
        gauge.add_metric([task], number)
    return gauge


class StateCollector:
    """A collector of prometheus_client: locks held, messages waiting, and the nodes' status."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def collect(self) -> Iterator[Any]:
        """Yield the gauges."""
        app = self._consumer.app
        held = Counter(lock.holder.task for lock in held_locks_of(app))
        yield _task_gauge("held", "Locks that this worker holds.", held)
        waiting = Counter(waiter.request.name for waiter in waiters_of(self._consumer))
        yield _task_gauge("waiting", "Messages that wait here for a lock.", waiting)
        yield from self._node_gauges(redlock_of(app))

    def _node_gauges(self, redlock: Any) -> Iterator[Any]:
        votes = _gauge("node_votes", "Whether a node votes: 1 or 0.", "node")
        latency = _gauge("node_latency_seconds", "A round trip to a node.", "node")
        text = "By how much a node's clock is ahead of the worker's."
        ahead = _gauge("node_clock_seconds", text, "node")
        for node in look_at_nodes(redlock):
            votes.add_metric([node.node], float(node.votes))
            if not node.error:
                latency.add_metric([node.node], node.latency)
                ahead.add_metric([node.node], node.clock)
        yield from (votes, latency, ahead)
