"""What is now: gauges that are asked at each scrape."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator
from typing import Any

from celery_redlock.lock.node_status import look_at_nodes
from celery_redlock.operate.control import holds_of
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.waiting.room import waiters_of


def _gauge(name: str, text: str, label: str) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"redlock_{name}", text, labels=[label])


class Present:
    """What is now: a collector of prometheus_client's, asked at each scrape."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def collect(self) -> Iterator[Any]:
        """Yield the gauges."""
        app = self._consumer.app
        held = _gauge("held", "Locks that this worker holds.", "task")
        for task, number in Count(h.holder.task for h in holds_of(app)).items():
            held.add_metric([task], number)
        yield held
        waiting = _gauge("waiting", "Messages that wait here for a lock.", "task")
        names = Count(waiting.request.name for waiting in waiters_of(self._consumer))
        for task, number in names.items():
            waiting.add_metric([task], number)
        yield waiting
        yield from self._nodes(redlock_of(app))

    def _nodes(self, redlock: Any) -> Iterator[Any]:
        votes = _gauge("node_votes", "Whether a node votes: 1 or 0.", "node")
        latency = _gauge("node_latency_seconds", "A round trip to a node.", "node")
        text = "By how much a node's clock is ahead of the worker's."
        ahead = _gauge("node_clock_seconds", text, "node")
        guard = redlock.session.options.guard.word
        for node in look_at_nodes(redlock):
            votes.add_metric([node.node], float(node.votes(guard)))
            if not node.error:
                latency.add_metric([node.node], node.latency)
                ahead.add_metric([node.node], node.clock)
        yield from (votes, latency, ahead)
