"""What Prometheus gets: counters and histograms, which receivers of the public signals increment.

And gauges, which each scrape reads anew from the worker and the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from celery_redlock import signals
from celery_redlock.lock.node_status import look_at_nodes
from celery_redlock.operate.control import held_locks_of
from celery_redlock.tasks.delivery.delivery import Delivery, LockHeader, utc_now
from celery_redlock.tasks.per_app import redlock_of, time_of_nodes
from celery_redlock.tasks.waiting.room import waiters_of

# seconds: from one round trip, over backoffs, to long jobs
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)


class Metrics:
    """All counters and histograms. registry: theirs; None if each process writes to files."""

    def __init__(self, registry: Any) -> None:
        from prometheus_client import Counter, Histogram

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"redlock_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Any:
            return Histogram(
                f"redlock_{name}_seconds", text, ("task",), registry=registry, buckets=BUCKETS
            )

        self.acquired = counter("acquired", "Locks that were acquired.", "task")
        self.deferred = counter("deferred", "Messages that were deferred.", "task")
        self.skipped = counter("skipped", "Runs that were skipped.", "task")
        self.released = counter("released", "Locks that were released.", "task", "by")
        self.lost = counter("lost", "Locks that were lost in use.", "task")
        self.extended = counter("extended", "Renewals that a quorum confirmed.", "task")
        self.handoffs = counter("handoffs", "Steps of hand-offs in this worker.", "task", "step")
        self.node_failed = counter("node_failed", "Times that a node stopped answering.", "node")
        self.waited = histogram("wait", "Seconds from a message's first try to its lock.")
        self.held = histogram("hold", "Seconds from a lock's grant to its release.")
        self.handoff = histogram("handoff", "Seconds from a release's message to the next lock.")
        self._connections = (
            (signals.lock_acquired, self._on_acquired),
            (signals.lock_deferred, _incrementing(self.deferred)),
            (signals.lock_handed_off, _incrementing(self.handoffs, "step")),
            (signals.lock_skipped, _incrementing(self.skipped)),
            (signals.lock_released, self._on_released),
            (signals.lock_lost, _incrementing(self.lost)),
            (signals.lock_extended, _incrementing(self.extended)),
            (signals.node_failed, self._on_node_failed),
        )
        for signal, receiver in self._connections:
            signal.connect(receiver, weak=False)

    def initialize(self, tasks: Iterable[str], nodes: Iterable[str]) -> None:
        """Export all counters as 0: Prometheus sees no increase if a counter first appears as 1."""
        for task in tasks:
            for counter in (self.acquired, self.deferred, self.skipped, self.lost, self.extended):
                counter.labels(task)
            for by in ("holder", "parent"):
                self.released.labels(task, by)
            for step in signals.HANDOFF_STEPS:
                self.handoffs.labels(task, step)
        for node in nodes:
            self.node_failed.labels(node)

    def close(self) -> None:
        """Disconnect the receivers."""
        for signal, receiver in self._connections:
            signal.disconnect(receiver)

    def _on_acquired(self, sender: Any = None, event: Any = None, **_: Any) -> None:
        self.acquired.labels(_task(sender)).inc()
        request = getattr(sender, "request", None)
        if request is not None and not request.called_directly:
            deferral = LockHeader.of(request).deferral
            self.waited.labels(_task(sender)).observe(deferral.waited(time_of_nodes(sender.app)))
            self._observe_handoff(sender, event.resource)

    def _observe_handoff(self, task: Any, resource: str) -> None:
        named_at = Delivery(task, task.request).named_at
        # a body may take other locks in its task's name, long after the release
        if named_at is not None and task.lock is not None and task.lock.resource == resource:
            self.handoff.labels(task.name).observe(max(0.0, utc_now().timestamp() - named_at))

    def _on_released(self, sender: Any = None, event: Any = None, **_: Any) -> None:
        self.released.labels(_task(sender), event.by).inc()
        self.held.labels(_task(sender)).observe(event.held_for)

    def _on_node_failed(self, event: Any = None, **_: Any) -> None:
        self.node_failed.labels(event.node).inc()


def _incrementing(counter: Any, *fields: str) -> Callable[..., None]:
    """Return a receiver that increments a counter for the task that sends the signal.

    fields: of the event, as more labels.
    """

    def increment(sender: Any = None, event: Any = None, **_: Any) -> None:
        counter.labels(_task(sender), *(getattr(event, field) for field in fields)).inc()

    return increment


def _task(sender: Any) -> str:
    return str(getattr(sender, "name", ""))  # the sender of a lock without a task is its Redlock


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
        votes = _gauge("node_votes", "Whether a node votes: 1 or 0.", "node")
        latency = _gauge("node_latency_seconds", "A round trip to a node.", "node")
        text = "By how much a node's clock is ahead of the worker's."
        ahead = _gauge("node_clock_seconds", text, "node")
        for node in look_at_nodes(redlock_of(app)):
            votes.add_metric([node.node], float(node.votes))
            if not node.error:
                latency.add_metric([node.node], node.latency)
                ahead.add_metric([node.node], node.clock)
        yield from (votes, latency, ahead)
