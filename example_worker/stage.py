"""The servers, workers and the database of a run: started before it, and ended after it."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from celery_redlock import Redlock
from celery_redlock.testing.servers import EmbeddedNode, WorkerProcess
from example_worker import shop
from example_worker.interruption import Interruption
from example_worker.ledger import Ledger
from example_worker.options import Options
from example_worker.watch import Watch, place

__all__ = ["Stage", "set_up"]

REPOSITORY = Path(__file__).resolve().parent.parent
LOCK_NODES = 3
SLOTS = 4


@dataclass
class Stage:
    """The broker, lock nodes, database and workers of a run.

    victim: the lock node that the run may kill; None if the nodes belong to the user.
    workers: the workers that the run has started.
    """

    watch: Watch
    ledger: Ledger
    victim: EmbeddedNode | None
    workers: list[WorkerProcess]

    def complaints(self, limit: int = 10) -> list[str]:
        """Return the last distinct error messages of the workers. limit: their number."""
        lines = [line for worker in self.workers for line in worker.output().splitlines()]
        errors = [line for line in lines if ": ERROR/" in line or ": CRITICAL/" in line]
        # without the time, so that a repeated message counts once
        return list(dict.fromkeys(line.partition("] ")[2] for line in errors))[-limit:]


@contextlib.contextmanager
def set_up(
    options: Options, interruption: Interruption, tell: Callable[[str], None]
) -> Iterator[Stage]:
    """Start the servers and workers that the options do not name, and end them at exit.

    After an error the workers are killed. tell: called with each line for the screen.
    """
    _forget_other_brokers()
    with contextlib.ExitStack() as stack:
        broker = options.broker or stack.enter_context(EmbeddedNode()).url
        nodes, victim = _lock_nodes(options, stack)
        shop.app.conf.update(broker_url=broker, redlock_nodes=list(nodes))
        watch = stack.enter_context(contextlib.closing(Watch(broker, nodes)))
        with interruption.allowed():
            watch.check()
        if options.broker:
            stack.callback(watch.clear)
        ledger, database = _open_ledger(options, stack)
        tell(f"broker {place(broker)}, lock nodes {', '.join(map(place, nodes))}")
        environment = shop.environment(broker, nodes, database)
        workers = _workers(environment) if options.workers else []
        stack.enter_context(_at_work(workers))
        with interruption.allowed():
            for worker in workers:
                worker.wait_ready()
            for worker in workers:
                tell(f"worker {worker.name} runs with {SLOTS} slots (process {worker.pid})")
        yield Stage(watch, ledger, victim, workers)


def _forget_other_brokers() -> None:
    """Remove Celery's environment variables for the broker: they override the app's setting."""
    for kind in ("", "READ_", "WRITE_"):
        os.environ.pop(f"CELERY_BROKER_{kind}URL", None)


def _lock_nodes(
    options: Options, stack: contextlib.ExitStack
) -> tuple[tuple[str, ...], EmbeddedNode | None]:
    """Return the URLs of the nodes, and the node that may be killed if the run starts them."""
    own_nodes = [] if options.nodes else [EmbeddedNode() for _ in range(LOCK_NODES)]
    urls = options.nodes or tuple(stack.enter_context(node).url for node in own_nodes)
    if own_nodes or options.trust:
        # A new node abstains, because it may have lost locks; these nodes never had any.
        with Redlock(list(urls)) as redlock:
            redlock.trust()
    return urls, own_nodes[1] if own_nodes else None


def _open_ledger(options: Options, stack: contextlib.ExitStack) -> tuple[Ledger, str]:
    """Return an empty ledger and its URL; its tables are dropped at exit."""
    database = options.database
    if database is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="redlock-shop-"))
        database = f"sqlite:///{folder}/shop.sqlite3"
    try:
        ledger = Ledger(database)
    except ImportError as error:
        raise RuntimeError(f"--database needs its driver: pip install {error.name}") from error
    stack.callback(ledger.close)
    ledger.create()
    stack.callback(ledger.drop)
    return ledger, database


def _workers(environment: dict[str, str]) -> list[WorkerProcess]:
    return [
        WorkerProcess(
            "example_worker.shop",
            pool=pool,
            concurrency=SLOTS,
            name=pool,
            env=environment,
            cwd=REPOSITORY,
        )
        for pool in ("prefork", "threads")
    ]


@contextlib.contextmanager
def _at_work(workers: list[WorkerProcess]) -> Iterator[None]:
    """Launch the workers; at exit shut them down warmly, or kill them after an error."""
    try:
        for worker in workers:
            worker.launch()
        yield
        for worker in workers:
            worker.signal(signal.SIGTERM)
        for worker in workers:
            worker.stop()
    finally:
        for worker in workers:
            worker.kill()
            worker.log.unlink(missing_ok=True)
