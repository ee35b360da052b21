"""Serves the metrics of one worker: its main process answers the scrapes for all its children."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from billiard.process import current_process

from celery_redlock.operate.metrics.counters import Metrics, StateCollector
from celery_redlock.tasks.children.forks import forks_children
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.startup import locked_tasks

logger = logging.getLogger(__name__)

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


class ValueFactory:
    """Makes prometheus_client's values: those of this package in one file for each pool index.

    A child that replaces another one continues its file, so the number of files stays that of the
    pool's processes. others: the factory for the values of all other metrics.
    Source: prometheus_client.metrics looks `values.ValueClass` up for each new set of labels.
    """

    def __init__(self, others: Any) -> None:
        from prometheus_client.values import MultiProcessValue

        self._main, self._others = os.getpid(), others
        self._ours = MultiProcessValue(self._process_identifier)

    def _process_identifier(self) -> str:
        """Return the part of the file's name that no other live process uses."""
        index = getattr(current_process(), "index", None)
        is_own_child = index is not None and os.getppid() == self._main
        # the child of a child has its parent's index, but would overwrite its parent's file
        process = f"child-{index}" if is_own_child else str(os.getpid())
        return f"redlock-{self._main}-{process}"

    def __call__(self, kind: str, metric: str, *rest: Any, **named: Any) -> Any:
        """Make one value of a metric."""
        make = self._ours if metric.startswith("redlock_") else self._others
        return make(kind, metric, *rest, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


class Exporter:
    """The metrics of one worker's main process, from before the fork to its end.

    address: host and port to serve on. forks: whether the pool forks; then each process writes its
    values to files, and the main process reads all of them.
    """

    def __init__(self, address: tuple[str, int], *, forks: bool) -> None:
        self._address, self._forks = address, forks
        self._stack, self._is_serving = ExitStack(), False
        if forks and DIRECTORY not in os.environ:
            directory = tempfile.mkdtemp(prefix="celery-redlock-metrics-")
            self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
            self._stack.callback(os.environ.pop, DIRECTORY, None)
            os.environ[DIRECTORY] = directory
        from prometheus_client import CollectorRegistry, values

        if self._forks:
            self._stack.callback(setattr, values, "ValueClass", values.ValueClass)
            values.ValueClass = ValueFactory(values.ValueClass)
        self.registry = CollectorRegistry()
        self._metrics = Metrics(None if self._forks else self.registry)
        self._stack.callback(self._metrics.close)

    def serve(self, consumer: Any) -> None:
        """Begin to answer scrapes, after the pool has forked: no fork may copy the server's thread.

        A second call does nothing: a consumer that reconnects to its broker is ready again.
        """
        from prometheus_client import start_http_server
        from prometheus_client.multiprocess import MultiProcessCollector

        if self._is_serving:
            return
        self._is_serving = True
        app = consumer.app
        own = [task.name for task in locked_tasks(app)]
        nodes = [node.name for node in redlock_of(app).session.nodes.all]
        self._metrics.initialize(own, nodes)
        if self._forks:
            MultiProcessCollector(self.registry)
        self.registry.register(StateCollector(consumer))
        host, port = self._address
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            text, fields = "cannot serve metrics on %s:%d: %s", {"event": "metrics_not_served"}
            logger.warning(text, host, port, error, extra=fields)
            return
        self._stack.callback(thread.join)
        self._stack.callback(server.server_close)
        self._stack.callback(server.shutdown)
        text, fields = "metrics are served on http://%s:%d/metrics", {"event": "metrics_served"}
        logger.info(text, host, server.server_port, extra=fields)

    def close(self) -> None:
        """End the server, disconnect the receivers, and delete an own directory."""
        self._stack.close()


_exporter: Exporter | None = None  # in a worker's main process


def prepare_metrics(sender: Any = None, **_: Any) -> None:
    """Count from now on if `redlock_metrics` is set; called before the pool forks.

    A lint reports a missing prometheus_client: there is no log yet in which an error raised here
    could be seen.
    """
    global _exporter
    address = settings_of(sender.app).metrics
    if address is not None and _exporter is None and find_spec("prometheus_client"):
        _exporter = Exporter(address, forks=forks_children(sender))


def serve_metrics(sender: Any = None, **_: Any) -> None:
    """Answer scrapes from now on; called after the pool has forked."""
    if _exporter is not None:
        _exporter.serve(sender)


def close_metrics(**_: Any) -> None:
    """Answer no more scrapes."""
    global _exporter
    exporter, _exporter = _exporter, None
    if exporter is not None:
        exporter.close()
