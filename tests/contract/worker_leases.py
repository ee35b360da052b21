"""The worker leases of a broker as a test opens them, those of workers, and one taken for dead."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from celery import Celery
from redis import Redis

from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.tasks.recovery.keeper import Keeper
from celery_redlock.tasks.recovery.ledger import Ledger, ledger_beside
from celery_redlock.tasks.recovery.tags import DeliveryTag, new_lease
from celery_redlock.testing import EmbeddedNode
from tests.conftest import eventually

NOTED = json.dumps([{"body": "", "headers": {"id": "x"}, "properties": {}}, "", "celery"])


def open_ledger(url: str, **options: Any) -> Ledger:
    """Return the worker leases of a broker; options: of kombu's transport."""
    app = Celery("beside", broker=url, set_as_current=False)
    return ledger_beside(app.connection_for_read(transport_options=options), "redlock")


def declare_dead(
    ledger: Ledger, lease: str, joins_as: str = "w1@host", *, claims: bool = True
) -> None:
    """Let a worker lease join, and take it for dead; as of `Ledger.declare_dead`."""
    ledger.beat(lease, joins_as=joins_as)
    assert ledger.declare_dead(lease, claims=claims)


def keeper_of(worker: str, broker: EmbeddedNode) -> Keeper:
    connect = partial(open_ledger, broker.url)
    return Keeper(Platform(SystemClock()), connect, worker, object(), lambda _: None)


def note(ledger: Ledger, tag: str) -> None:
    ledger.client.hset(ledger.unacked, tag, NOTED)


def see_another(keeper: Keeper, before: str) -> str:
    eventually(lambda: keeper.lease not in (before, ""))
    return keeper.lease


def lose(ledger: Ledger, *, number: int = 0) -> str:
    """Let a worker with one message be dead, and return its lease."""
    lost = new_lease()
    note(ledger, str(DeliveryTag(lost, number, "celery")))
    declare_dead(ledger, lost, "w2@host", claims=False)
    return lost


def see_beats(client: Redis, ledger: Ledger, lease: str, count: int = 3) -> None:
    for _ in range(count):
        last = client.zscore(ledger.leases, lease)
        eventually(lambda last=last: client.zscore(ledger.leases, lease) > last)
