"""An app over lock nodes, and its worker in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from celery_redlock.tasks.per_app import redlock_of
from tests.conftest import PATIENCE

QUICK = {"first": 0.05, "cap": 0.5}


def over_nodes(app: Celery) -> Celery:
    """Give an app lock nodes, and a broker in this process."""
    app.conf.update(
        broker_url="memory://", result_backend="cache+memory://",
        redlock_nodes=os.environ["TEST_NODES"].split(","), redlock_node_timeout=PATIENCE,
        redlock_backoff=QUICK, worker_hijack_root_logger=False,
    )  # fmt: skip
    return app


@contextmanager
def working(app: Celery) -> Iterator[None]:
    """Let a worker run in a thread meanwhile."""
    # Sentry patches what the consumer's module imports, so it has to come first, as with `-A`
    from celery.contrib.testing.worker import start_worker

    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
        yield
    redlock_of(app).close()


def tell(**seen: Any) -> None:
    """Print what was seen."""
    print(json.dumps(seen), flush=True)
