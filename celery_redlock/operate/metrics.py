"""Signals -> Prometheus: what a worker's locks come to, served by its main process; and -> spans.

Switched on by `redlock_metrics = 9808` (or "host:9808"), with the extra `celery_redlock[metrics]`.
Counts are made where they happen, in the children of a prefork pool too, and are added up when they
are scraped; what is held, who waits and how the nodes are is looked up then.
Source: prometheus_client's multiprocess mode: processes write to files in the directory that
PROMETHEUS_MULTIPROC_DIR names. The library chooses it when it is first imported, as Flower's
command does before any worker begins; so its values for our own metrics are made here (`Places`).

What happens to a lock is also noted on the span that OpenTelemetry records in this context.
Source: opentelemetry-instrumentation-celery makes a run's span current from task_prerun to
task_postrun, so the gate is within it.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from billiard.process import current_process
from celery.signals import worker_init, worker_ready, worker_shutdown

from celery_redlock.lock.node_status import look_at_nodes
from celery_redlock.operate.control import holds_of
from celery_redlock.tasks import signals
from celery_redlock.tasks.children import forks_children
from celery_redlock.tasks.deferral import LockHeader, utc_now
from celery_redlock.tasks.gate import run_of
from celery_redlock.tasks.runtime import redlock_of, settings_of
from celery_redlock.tasks.task import locked_tasks
from celery_redlock.tasks.waiting import waiters_of

logger = logging.getLogger(__name__)

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
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
            self.waited.labels(_task(sender)).observe(LockHeader.of(request).past(utc_now()).waited)

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


def _gauge(name: str, text: str, label: str) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"redlock_{name}", text, labels=[label])


def _task(sender: Any) -> str:
    return str(getattr(sender, "name", ""))  # a Redlock has none


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


class Places:
    """Makes prometheus_client's values: ours in one file for each place in the pool.

    So a child goes on with the file of the one before it, and there are no more than places. What
    other metrics write is left as it is. others: what makes their values.
    Source: prometheus_client.metrics looks `values.ValueClass` up for each new set of labels.
    """

    def __init__(self, others: Any) -> None:
        from prometheus_client.values import MultiProcessValue

        self._main, self._others = os.getpid(), others
        self._ours = MultiProcessValue(self._place)

    def _place(self) -> str:
        """Return what names the file of this process, and of no other one that lives."""
        index = getattr(current_process(), "index", None)
        is_own_child = index is not None and os.getppid() == self._main
        who = f"child-{index}" if is_own_child else str(os.getpid())  # a child's child has no place
        return f"redlock-{self._main}-{who}"

    def __call__(self, kind: str, metric: str, *rest: Any, **named: Any) -> Any:
        """Make one value of a metric."""
        make = self._ours if metric.startswith("redlock_") else self._others
        return make(kind, metric, *rest, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


class Exporter:
    """What one worker's main process has for its metrics, from before the fork to its end."""

    def __init__(self, address: tuple[str, int], *, forks: bool) -> None:
        self._address, self._forks = address, forks
        self._stack, self._serves = ExitStack(), False
        if forks and DIRECTORY not in os.environ:
            directory = tempfile.mkdtemp(prefix="celery-redlock-metrics-")
            self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
            self._stack.callback(os.environ.pop, DIRECTORY, None)
            os.environ[DIRECTORY] = directory
        from prometheus_client import CollectorRegistry, values

        if self._forks:
            self._stack.callback(setattr, values, "ValueClass", values.ValueClass)
            values.ValueClass = Places(values.ValueClass)
        self.registry = CollectorRegistry()
        self._metrics = Metrics(None if self._forks else self.registry)
        self._stack.callback(self._metrics.close)

    def serve(self, consumer: Any) -> None:
        """Begin to answer scrapes, once the pool is there: no thread is to be copied by a fork.

        Once: a consumer that connects to its broker anew is ready anew.
        """
        from prometheus_client import start_http_server
        from prometheus_client.multiprocess import MultiProcessCollector

        if self._serves:
            return
        self._serves = True
        app = consumer.app
        own = [task.name for task in locked_tasks(app)]
        self._metrics.begin(own, [node.name for node in redlock_of(app).session.node_set.nodes])
        if self._forks:
            MultiProcessCollector(self.registry)
        self.registry.register(Present(consumer))
        host, port = self._address
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            told = {"event": "metrics_not_served"}
            logger.warning("redlock_metrics: no port %d on %s: %s", port, host, error, extra=told)
            return
        self._stack.callback(thread.join)
        self._stack.callback(server.server_close)
        self._stack.callback(server.shutdown)
        told = {"event": "metrics_served"}
        text = "metrics are served on http://%s:%d/metrics"
        logger.info(text, host, server.server_port, extra=told)

    def close(self) -> None:
        """Answer no more."""
        self._stack.close()


_exporter: Exporter | None = None  # in a worker's main process


@worker_init.connect(weak=False)
def _prepare(sender: Any = None, **_: Any) -> None:
    """Count from now on, where the setting says so; before the pool forks.

    Where the library is missing the lints say so: an error raised here, before there is a log,
    would be seen by nobody.
    """
    global _exporter
    address = settings_of(sender.app).metrics
    if address is not None and _exporter is None and find_spec("prometheus_client"):
        _exporter = Exporter(address, forks=forks_children(sender))


@worker_ready.connect(weak=False)
def _serve(sender: Any = None, **_: Any) -> None:
    if _exporter is not None:
        _exporter.serve(sender)


@worker_shutdown.connect(weak=False)
def _close(**_: Any) -> None:
    global _exporter
    exporter, _exporter = _exporter, None
    if exporter is not None:
        exporter.close()


def _on_span(sender: Any, event: Any, outcome: str) -> None:
    """Note what became of a run's own lock as attributes of its span, of others as events on it.

    A process that has not imported OpenTelemetry records nothing, so nothing is imported for it.
    """
    trace = sys.modules.get("opentelemetry.trace")
    span = None if trace is None else trace.get_current_span()
    if span is None or not span.is_recording():
        return
    wrap_hook = {f"redlock.{name}": value for name, value in vars(event).items()}
    if not _is_own(sender, event.resource):
        span.add_event(f"redlock.{outcome}", wrap_hook)
        return
    if outcome == "acquired":
        past = LockHeader.of(sender.request).past(utc_now())
        wrap_hook |= {"redlock.waited": past.waited, "redlock.deferrals": past.deferrals}
    span.set_attributes({**wrap_hook, "redlock.outcome": outcome})


def _is_own(sender: Any, resource: str) -> bool:
    """Tell whether a resource is what the running task's gate asks for, or was refused."""
    request = getattr(sender, "request", None)
    if request is None or request.called_directly:
        return False
    passage = run_of(request)
    return passage is None or bool(passage.lock.resource == resource)


def _acquired_on_span(sender: Any = None, event: Any = None, **_: Any) -> None:
    _on_span(sender, event, "acquired")


def _released_on_span(sender: Any = None, event: Any = None, **_: Any) -> None:
    if event.by == "holder":  # the parent's own spans are not of that run
        _on_span(sender, event, "released")


def _deferred_on_span(sender: Any = None, event: Any = None, **_: Any) -> None:
    _on_span(sender, event, "deferred")


def _skipped_on_span(sender: Any = None, event: Any = None, **_: Any) -> None:
    _on_span(sender, event, "skipped")


if find_spec("opentelemetry") is not None:  # else signals stay free where nobody listens
    signals.lock_acquired.connect(_acquired_on_span, weak=False)
    signals.lock_released.connect(_released_on_span, weak=False)
    signals.lock_deferred.connect(_deferred_on_span, weak=False)
    signals.lock_skipped.connect(_skipped_on_span, weak=False)
