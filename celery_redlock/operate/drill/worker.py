"""A worker process of a drill: `python -m celery_redlock.operate.drill.worker JSON`.

It has the app's settings, but for what would touch something of the app's own: results, events,
remote control, other queues, and the broker's keys of unacknowledged messages.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import billiard
from celery import bootsteps
from celery.app.utils import find_app
from celery.signals import worker_process_init, worker_ready

from celery_redlock.errors import SettingsError
from celery_redlock.operate.drill.audit import READY
from celery_redlock.operate.drill.body import Journal, add_task, clock, watch_orders
from celery_redlock.operate.drill.own_queue import drill_queue, transport_options
from celery_redlock.tasks import per_app
from celery_redlock.tasks.settings.levels import find_nodes
from celery_redlock_entry import without_proxy

SLOTS = 2  # bodies that a worker runs at once
RESULTS = "CELERY_RESULT_BACKEND"  # what `celery --result-backend` sets, and what settings follow
ALONE = ("--without-gossip", "--without-mingle", "--without-heartbeat")


@dataclass(frozen=True)
class WorkerOrder:
    """What a worker process is told. app: as of `celery -A`. worker: with the number of its life.

    queue: its name. journal, cut: paths of files. ttl: seconds.
    """

    app: str
    worker: str
    pool: str
    queue: str
    journal: str
    cut: str
    ttl: float

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", __name__, json.dumps(asdict(self))]


def main(text: str) -> None:
    """Run the worker until it is told to end."""
    order = WorkerOrder(**json.loads(text))
    app = without_proxy(find_app(order.app))
    prepare(app, order)
    # a spawned child would import the app with its own settings, and without the task
    billiard.set_start_method("fork", force=True)
    app.worker_main(
        [
            *("worker", "--pool", order.pool, "--concurrency", str(SLOTS), "--loglevel", "INFO"),
            *("--hostname", f"{order.queue}-{order.worker}@%h", "--queues", order.queue, *ALONE),
        ]
    )


def prepare(app: Any, order: WorkerOrder) -> None:
    """Take the app for this process: set it to the queue of the drill, and add the task."""
    isolate(app, order.queue)
    journal = Journal(Path(order.journal), order.worker)
    add_task(app, journal, order.ttl)
    per_app.guests.add(app)
    app.steps["worker"].add(only_queue(order.queue))

    def ready(**_: Any) -> None:
        worker_ready.disconnect(ready)  # it is sent again after each reconnection
        watch_orders(Path(order.cut))
        journal.write(READY, clock.now())

    worker_ready.connect(ready, weak=False)
    worker_process_init.connect(lambda **_: watch_orders(Path(order.cut)), weak=False)


def isolate(app: Any, queue: str) -> None:
    """Change the settings of an app so that its worker touches nothing but a queue of its own."""
    nodes, _ = find_nodes(app.conf)  # first: the result backend may name them
    os.environ.pop(RESULTS, None)
    own = drill_queue(app, queue)
    app.conf.update(
        redlock_nodes=nodes,
        redlock_metrics=None,
        result_backend="disabled://",
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        worker_deduplicate_successful_tasks=False,
        worker_send_task_events=False,
        task_send_sent_event=False,  # a message that is deferred is sent
        worker_enable_remote_control=False,
        worker_state_db=None,
        worker_direct=False,
        worker_pool="prefork",  # which `--pool prefork` would give way to
        worker_pool_start_method="fork",
        broker_transport_options=transport_options(app, queue),
        task_queues=[own],
        task_default_queue=queue,
        task_default_exchange=queue,
        task_default_routing_key=queue,
        task_queue_max_priority=None,
        task_protocol=2,  # only its headers have the id of a message
        task_routes=None,
        task_annotations=None,
        task_always_eager=False,
    )
    app.amqp.__dict__.pop("queues", None)  # it may have been asked for


def only_queue(name: str) -> type[bootsteps.Step]:
    """Return a step that ends a worker which would read another queue, as a receiver may add."""

    class OnlyQueue(bootsteps.Step):
        def __init__(self, worker: Any, **options: Any) -> None:
            super().__init__(worker, **options)
            others = sorted({*worker.app.amqp.queues.consume_from} - {name})
            if others:
                hint = "the app adds these queues to each worker, and a drill reads none of yours"
                raise SettingsError("drill", "queues", ", ".join(others), hint)

    return OnlyQueue


if __name__ == "__main__":
    main(sys.argv[1])
