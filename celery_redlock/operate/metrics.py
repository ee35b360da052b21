"""Metrics for Prometheus: counters, histograms and gauges, and the server for scrapes.

They are connected only if `redlock_metrics` is set. Receivers of the public signals update counters
and histograms. Gauges are computed at each scrape. A worker's main process answers the scrapes for
all its children.

Not here: spans (`operate/tracing.py`), and the queries behind the gauges (`operate/control.py`,
`lock/node_status.py`).
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from celery_redlock import signals
from celery_redlock.compatibility import find
from celery_redlock.operate.control import held_locks_of
from celery_redlock.tasks.children.reaper import forks_children
from celery_redlock.tasks.delivery.delivery import header_of, seen_of, utc_now
from celery_redlock.tasks.per_app import redlock_of, settings_of, time_of_nodes
from celery_redlock.tasks.startup import locked_tasks
from celery_redlock.tasks.waiting.room import waiters_of

logger = logging.getLogger(__name__)

# if this name is missing, the files of children are named by their pid
_current_process = find("billiard.process:current_process", lambda: None)

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# seconds, for round trips, backoffs and long jobs
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)


class Metrics:
    """All counters and histograms. registry: where they are registered; None for files."""

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
        text = "Messages that were deferred or skipped because a rate was used up."
        self.rate_refused = counter("rate_refused", text, "task")
        self.released = counter("released", "Locks that were released.", "task", "by")
        self.lost = counter("lost", "Locks that were lost in use.", "task")
        self.extended = counter("extended", "Renewals that a quorum confirmed.", "task")
        self.handoffs = counter("handoffs", "Steps of hand-offs in this worker.", "task", "step")
        self.node_failed = counter("node_failed", "Times that a node stopped answering.", "node")
        text = "Messages of dead workers that this worker moved back to their queues."
        self.recovered = counter("recovered", text)
        text = "Messages of dead workers that stay unacknowledged, as they were moved too often."
        self.stranded = counter("stranded", text)
        text = 'Runs without their lock, by on_unreachable="run".'
        self.unlocked = counter("unlocked", text, "task")
        text = "Sends that were dropped, or took the place of an earlier message."
        self.deduplicated = counter("deduplicated", text, "task", "how")
        self.waited = histogram("wait", "Seconds from a message's first try to its lock.")
        self.held = histogram("hold", "Seconds from a lock's grant to its release.")
        self.handoff = histogram("handoff", "Seconds from a release's message to the next lock.")
        self._connections = (
            (signals.lock_acquired, self._on_acquired),
            (signals.lock_deferred, _incrementing(self.deferred)),
            (signals.lock_deferred, self._on_refused),
            (signals.lock_skipped, self._on_refused),
            (signals.lock_handed_off, _incrementing(self.handoffs, "step")),
            (signals.lock_skipped, _incrementing(self.skipped)),
            (signals.lock_released, self._on_released),
            (signals.lock_lost, _incrementing(self.lost)),
            (signals.lock_extended, _incrementing(self.extended)),
            (signals.node_failed, self._on_node_failed),
            (signals.messages_recovered, self._on_recovered),
            (signals.run_unlocked, _incrementing(self.unlocked)),
            (signals.send_deduplicated, self._on_deduplicated),
        )
        for signal, receiver in self._connections:
            signal.connect(receiver, weak=False)

    def initialize(self, tasks: Iterable[str], nodes: Iterable[str]) -> None:
        """Export all counters as 0: Prometheus sees no increase if a counter first appears as 1."""
        for task in tasks:
            for counter in (self.acquired, self.deferred, self.skipped, self.rate_refused):
                counter.labels(task)
            for counter in (self.lost, self.extended, self.unlocked):
                counter.labels(task)
            for releaser in ("holder", "parent"):
                self.released.labels(task, releaser)
            for step in signals.HANDOFF_STEPS:
                self.handoffs.labels(task, step)
            for how in signals.DEDUPLICATIONS:
                self.deduplicated.labels(task, how)
        for node in nodes:
            self.node_failed.labels(node)

    def close(self) -> None:
        for signal, receiver in self._connections:
            signal.disconnect(receiver)

    def _on_acquired(self, sender: Any = None, event: Any = None, **_: Any) -> None:
        self.acquired.labels(_task(sender)).inc()
        request = getattr(sender, "request", None)
        if request is None or request.called_directly:
            return
        deferral = header_of(request).deferral
        self.waited.labels(sender.name).observe(deferral.waited(time_of_nodes(sender.app)))
        named_at = seen_of(request.properties).get("named_at")
        # only the run's own lock counts: a body may acquire others long after the release
        lock = getattr(sender, "lock", None)  # a plain task has none
        if named_at is None or lock is None or lock.resource != event.resource:
            return
        self.handoff.labels(sender.name).observe(max(0.0, utc_now().timestamp() - named_at))

    def _on_released(self, sender: Any = None, event: Any = None, **_: Any) -> None:
        self.released.labels(_task(sender), event.by).inc()
        self.held.labels(_task(sender)).observe(event.held_for)

    def _on_refused(self, sender: Any = None, event: Any = None, **_: Any) -> None:
        if event.rate:
            self.rate_refused.labels(_task(sender)).inc()

    def _on_node_failed(self, event: Any = None, **_: Any) -> None:
        self.node_failed.labels(event.node).inc()

    def _on_deduplicated(self, event: Any = None, **_: Any) -> None:
        self.deduplicated.labels(event.task, event.how).inc()

    def _on_recovered(self, event: Any = None, **_: Any) -> None:
        self.recovered.inc(event.messages)
        self.stranded.inc(event.kept)


def _incrementing(counter: Any, *fields: str) -> Callable[..., None]:
    """Return a receiver that counts for the task. fields: of the event, as further labels."""

    def increment(sender: Any = None, event: Any = None, **_: Any) -> None:
        counter.labels(_task(sender), *(getattr(event, field) for field in fields)).inc()

    return increment


def _task(sender: Any) -> str:
    return str(getattr(sender, "name", ""))  # without a task the sender is a Redlock


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    gauge = GaugeMetricFamily(f"redlock_{name}", text, labels=[label])
    for label_value, value in values.items():
        gauge.add_metric([label_value], value)
    return gauge


class StateCollector:
    """A collector of prometheus_client: locks held, messages waiting, and the nodes' status."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def collect(self) -> Iterator[Any]:
        app = self._consumer.app
        held = Counter(lock["holder"]["task"] for lock in held_locks_of(app))
        yield _gauge("held", "Locks that this worker holds.", "task", held)
        waiting = Counter(waiter.request.name for waiter in waiters_of(self._consumer))
        yield _gauge("waiting", "Messages that wait here for a lock.", "task", waiting)
        nodes = redlock_of(app).status().nodes
        votes = {node.node: float(node.votes) for node in nodes}
        yield _gauge("node_votes", "Whether a node votes: 1 or 0.", "node", votes)
        evicts = {node.node: float(node.evicts) for node in nodes if not node.error}
        text = "Whether a node deletes held locks once its memory is full: 1 or 0."
        yield _gauge("node_evicts", text, "node", evicts)
        latency = {node.node: node.latency for node in nodes if not node.error}
        yield _gauge("node_latency_seconds", "A round trip to a node.", "node", latency)
        ahead = {node.node: node.clock for node in nodes if not node.error}
        text = "By how much a node's clock is ahead of the worker's."
        yield _gauge("node_clock_seconds", text, "node", ahead)


class ValueFactory:
    """Makes prometheus_client's values: those of this package in one file for each pool index.

    A child that replaces another one continues its file, so there are as many files as processes in
    the pool. other_factory: creates the values of all other metrics.
    Source: prometheus_client.metrics looks `values.ValueClass` up for each new set of labels.
    """

    def __init__(self, other_factory: Any) -> None:
        from prometheus_client.values import MultiProcessValue

        self._main = os.getpid()
        self._other_factory = other_factory
        self._package_factory = MultiProcessValue(self._process_identifier)

    def _process_identifier(self) -> str:
        """Return the part of the file's name that no other live process uses."""
        index = getattr(_current_process(), "index", None)
        process = str(os.getpid())
        # the child of a child has the index of its parent, and needs a file of its own
        if index is not None and os.getppid() == self._main:
            process = f"child-{index}"
        return f"redlock-{self._main}-{process}"

    def __call__(self, kind: str, metric: str, *args: Any, **options: Any) -> Any:
        make = self._package_factory if metric.startswith("redlock_") else self._other_factory
        return make(kind, metric, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other_factory, name)


class Exporter:
    """The metrics of one worker's main process, created before the pool forks.

    address: host and port to serve on. forks: whether the pool forks; then each process writes its
    values to files, and the main process reads all of them. stack: its exit ends the server, the
    receivers, and the directory if it was created here.
    """

    def __init__(self, address: tuple[str, int], *, forks: bool) -> None:
        self._address = address
        self._forks = forks
        self.stack = ExitStack()
        self._is_serving = False
        if forks and DIRECTORY_VARIABLE not in os.environ:
            directory = tempfile.mkdtemp(prefix="celery-redlock-metrics-")
            self.stack.callback(shutil.rmtree, directory, ignore_errors=True)
            self.stack.callback(os.environ.pop, DIRECTORY_VARIABLE, None)
            os.environ[DIRECTORY_VARIABLE] = directory
        from prometheus_client import CollectorRegistry, values  # reads the directory

        if forks:
            self.stack.callback(setattr, values, "ValueClass", values.ValueClass)
            values.ValueClass = ValueFactory(values.ValueClass)
        self.registry = CollectorRegistry()
        self._metrics = Metrics(None if forks else self.registry)
        self.stack.callback(self._metrics.close)

    def serve(self, consumer: Any) -> None:
        """Answer scrapes from now on. Called after the forks, which must not copy the thread."""
        from prometheus_client import start_http_server
        from prometheus_client.multiprocess import MultiProcessCollector

        if self._is_serving:  # a consumer that reconnects to its broker is ready again
            return
        self._is_serving = True
        app = consumer.app
        task_names = [task.name for task in locked_tasks(app)]
        node_names = [node.name for node in redlock_of(app).session.nodes.all]
        self._metrics.initialize(task_names, node_names)
        if self._forks:
            MultiProcessCollector(self.registry)
        self.registry.register(StateCollector(consumer))
        host, port = self._address
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            text = "cannot serve metrics on %s:%d: %s"
            fields = {"event": "metrics_not_served"}
            logger.warning(text, host, port, error, extra=fields)
            return
        self.stack.callback(thread.join)
        self.stack.callback(server.server_close)
        self.stack.callback(server.shutdown)
        text = "metrics are served on http://%s:%d/metrics"
        fields = {"event": "metrics_served"}
        logger.info(text, host, server.server_port, extra=fields)


_exporter: Exporter | None = None  # in a worker's main process


def prepare_metrics(sender: Any = None, **_: Any) -> None:
    """Count from now on if `redlock_metrics` is set; called before the pool forks."""
    global _exporter
    address = settings_of(sender.app).metrics
    # if the library is missing, a bootstep ends the worker later
    if address is not None and _exporter is None and find_spec("prometheus_client"):
        _exporter = Exporter(address, forks=forks_children(sender))


def serve_metrics(sender: Any = None, **_: Any) -> None:
    """Answer scrapes from now on; called after the pool has forked."""
    if _exporter is not None:
        _exporter.serve(sender)


def close_metrics(**_: Any) -> None:
    global _exporter
    exporter = _exporter
    _exporter = None
    if exporter is not None:
        exporter.stack.close()
