"""The app whose tasks are looked at in Flower: each body goes on until the test lets it end."""

from __future__ import annotations

import os
from collections.abc import Sequence

from celery import Celery
from redis import Redis

from celery_redlock import LockedTask
from tests.conftest import PATIENCE

LONGEST = 240  # s that a body waits for its end, and a test for a body


def connected(broker: str) -> Redis:
    """Return a client that waits for as long as it is told; newer ones go after 5 s."""
    return Redis.from_url(broker, socket_timeout=None)


def shop(broker: str, nodes: Sequence[str]) -> Celery:
    """Return the app over a broker's and the nodes' URLs."""
    app = Celery("shop", broker=broker, set_as_default=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        redlock_nodes=list(nodes),
        redlock_node_timeout=PATIENCE,
        worker_direct=True,  # a queue for each worker, so that a picture shows the same each time
        worker_prefetch_multiplier=1,
    )

    @app.task(base=LockedTask, lock_key="stock:{sku}", acks_late=True, name="shop.take",
              shared=False)  # fmt: skip
    def take(sku: str, pieces: int) -> str:
        with connected(broker) as client:
            client.rpush(f"begin of {pieces}", "now")
            client.blpop([f"end of {pieces}"], timeout=LONGEST)
        return f"took {pieces} of {sku}"

    return app


def see_begun(broker: str, pieces: int) -> None:
    """Return when the body that takes so many pieces has begun, and so holds its lock."""
    with connected(broker) as client:
        assert client.blpop([f"begin of {pieces}"], timeout=LONGEST), f"{pieces} does not begin"


def let_end(broker: str, pieces: int) -> None:
    """Let the body that takes so many pieces end."""
    with connected(broker) as client:
        client.rpush(f"end of {pieces}", "now")


app = shop(
    os.environ.get("TEST_BROKER", "memory://"),
    os.environ.get("TEST_NODES", "redis://nowhere").split(","),
)
