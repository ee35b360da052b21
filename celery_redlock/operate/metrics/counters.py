"""What is counted: Prometheus counters and histograms, fed by the signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from celery_redlock.tasks import signals
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.delivery.header import LockHeader

# s: from what a round trip takes to what a backoff comes to, and to long jobs
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)


class Metrics:
    """What is counted. registry: where it stands; None where each process writes to a file."""

    def __init__(self, registry: Any) -> None:
        from prometheus_client import Counter, Histogram

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"redlock_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Any:
            return Histogram(
                f"redlock_{name}_seconds", text, ("task",), registry=registry, buckets=BUCKETS
            )

        self.acquired = counter("acquired", "Locks that were taken.", "task")
        self.deferred = counter("deferred", "Messages that were put back.", "task")
        self.skipped = counter("skipped", "Runs that were skipped.", "task")
        self.released = counter("released", "Locks that were given back.", "task", "by")
        self.lost = counter("lost", "Locks that were lost in use.", "task")
        self.extended = counter("extended", "Renewals that a quorum confirmed.", "task")
        self.node_failed = counter("node_failed", "Times that a node stopped answering.", "node")
        self.waited = histogram("wait", "From a message's first try to its lock.")
        self.held = histogram("hold", "From a lock's grant to its release.")
        self._connections = (
            (signals.lock_acquired, self._on_acquired),
            (signals.lock_deferred, _counting(self.deferred)),
            (signals.lock_skipped, _counting(self.skipped)),
            (signals.lock_released, self._on_released),
            (signals.lock_lost, _counting(self.lost)),
            (signals.lock_extended, _counting(self.extended)),
            (signals.node_failed, self._on_node_failed),
        )
        for signal, count in self._connections:
            signal.connect(count, weak=False)

    def begin(self, tasks: Iterable[str], nodes: Iterable[str]) -> None:
        """Show counts as 0: to Prometheus a count that begins with 1 has not increased."""
        for task in tasks:
            for count in (self.acquired, self.deferred, self.skipped, self.lost, self.extended):
                count.labels(task)
            for by in ("holder", "parent"):
                self.released.labels(task, by)
        for node in nodes:
            self.node_failed.labels(node)

    def close(self) -> None:
        """Count no more."""
        for signal, count in self._connections:
            signal.disconnect(count)

    def _on_acquired(self, sender: Any = None, **_: Any) -> None:
        self.acquired.labels(_task(sender)).inc()
        request = getattr(sender, "request", None)
        if request is not None and not request.called_directly:
            deferral = LockHeader.of(request).deferral
            self.waited.labels(_task(sender)).observe(deferral.waited(utc_now()))

    def _on_released(self, sender: Any = None, event: Any = None, **_: Any) -> None:
        self.released.labels(_task(sender), event.by).inc()
        self.held.labels(_task(sender)).observe(event.held_for)

    def _on_node_failed(self, event: Any = None, **_: Any) -> None:
        self.node_failed.labels(event.node).inc()


def _counting(counter: Any) -> Callable[..., None]:
    """Return a receiver that counts a signal by its task."""

    def count(sender: Any = None, **_: Any) -> None:
        counter.labels(_task(sender)).inc()

    return count


def _task(sender: Any) -> str:
    return str(getattr(sender, "name", ""))  # a Redlock has none
