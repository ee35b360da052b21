"""The Celery app of the project of `admin_site.py`: bodies go on until they are told to end."""

from __future__ import annotations

import os

from celery import Celery
from redis import Redis

from celery_redlock import LockedTask
from tests.conftest import NODE_TIMEOUT

LONGEST = 240  # s that a body waits for its end

app = Celery("shop", broker=os.environ.get("TEST_BROKER", "memory://"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    redlock_nodes=os.environ.get("TEST_NODES", "redis://nowhere").split(","),
    redlock_node_timeout=NODE_TIMEOUT,
    worker_direct=True,  # a queue for each worker, so that a picture shows the same each time
    worker_prefetch_multiplier=1,
)


def connected() -> Redis:
    """Return a client that waits for as long as it is told; newer ones go after 5 s."""
    return Redis.from_url(app.conf.broker_url, socket_timeout=None)


@app.task(base=LockedTask, lock_key="stock:{sku}", acks_late=True, name="shop.take", shared=False)
def take(sku: str) -> None:
    with connected() as client:
        client.rpush("begun", "now")
        client.blpop(["end"], timeout=LONGEST)


@app.task(
    base=LockedTask, lock_key="partner:{tenant}", lock_rate="1/h", name="shop.ask", shared=False
)
def ask(tenant: int) -> None:
    """Use a start."""


@app.task(
    base=LockedTask, lock_key="mail:{to}", lock_unique_for=600, name="shop.remind", shared=False
)
def remind(to: int) -> None:
    """Have a claim."""


def see_begun() -> None:
    with connected() as client:
        assert client.blpop(["begun"], timeout=LONGEST), "no body begins"


def let_end() -> None:
    with connected() as client:
        client.rpush("end", "now")
