"""Clients by which a program that a test starts looks at its nodes, whatever these are."""

from __future__ import annotations

from typing import Any

from redis import Redis

from celery_redlock import Redlock
from celery_redlock.lock.node_status import ask_nodes


def client_of(url: str, **options: Any) -> Redis:
    """Return a redis-py client of a node of either kind, for the life of this process."""
    if url.startswith("redis"):
        return Redis.from_url(url, **options)
    from tests.postgres_gateway import gateway_of  # late: few programs need psycopg

    return Redis(port=gateway_of(url).port, protocol=2, **options)


def see_executed(redlock: Redlock) -> None:
    """Return when every node has executed all that was written to it so far."""
    while ask_nodes(redlock.session).failing:
        pass
