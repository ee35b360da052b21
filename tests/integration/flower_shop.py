"""The app of test_flower.py: each body goes on until `let_end` ends it, through the broker."""

from __future__ import annotations

import os

from celery import Celery
from redis import Redis

from celery_redlock import LockedTask
from tests.conftest import PATIENCE

LONGEST = 240  # s that a body waits for its end, and a test for a body

app = Celery("shop", broker=os.environ.get("TEST_BROKER", "memory://"), set_as_default=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    redlock_nodes=os.environ.get("TEST_NODES", "redis://nowhere").split(","),
    redlock_node_timeout=PATIENCE,
    worker_direct=True,  # a queue for each worker, so that a picture shows the same each time
    worker_prefetch_multiplier=1,
)


def connected() -> Redis:
    """Return a client that waits for as long as it is told; newer ones go after 5 s."""
    return Redis.from_url(app.conf.broker_url, socket_timeout=None)


@app.task(base=LockedTask, lock_key="stock:{sku}", acks_late=True, name="shop.take", shared=False)
def take(sku: str, pieces: int) -> str:
    with connected() as client:
        client.rpush(f"begin of {pieces}", "now")
        client.blpop([f"end of {pieces}"], timeout=LONGEST)
    return f"took {pieces} of {sku}"


@app.task(base=LockedTask, lock_key="partner:{tenant}", lock_rate="1/h", shared=False)
def ask(tenant: int) -> None:
    """Use a start."""


def see_begun(pieces: int) -> None:
    with connected() as client:
        assert client.blpop([f"begin of {pieces}"], timeout=LONGEST), f"{pieces} does not begin"


def let_end(pieces: int) -> None:
    with connected() as client:
        client.rpush(f"end of {pieces}", "now")
