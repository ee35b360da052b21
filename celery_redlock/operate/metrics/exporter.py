"""The exporter of one worker's main process."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from billiard.process import current_process

from celery_redlock.operate.metrics.counters import Metrics
from celery_redlock.operate.metrics.gauges import Present
from celery_redlock.tasks.children.forks import forks_children
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.startup import locked_tasks

logger = logging.getLogger(__name__)


DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


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


def prepare_metrics(sender: Any = None, **_: Any) -> None:
    """Count from now on, where the setting says so; before the pool forks.

    Where the library is missing the lints say so: an error raised here, before there is a log,
    would be seen by nobody.
    """
    global _exporter
    address = settings_of(sender.app).metrics
    if address is not None and _exporter is None and find_spec("prometheus_client"):
        _exporter = Exporter(address, forks=forks_children(sender))


def serve_metrics(sender: Any = None, **_: Any) -> None:
    """Answer scrapes from now on; the pool is there, so no fork copies the thread."""
    if _exporter is not None:
        _exporter.serve(sender)


def close_metrics(**_: Any) -> None:
    """Answer no more."""
    global _exporter
    exporter, _exporter = _exporter, None
    if exporter is not None:
        exporter.close()
