"""The shop's Celery app: three ways of losing an update, each registered without and with a lock.

Configured by the environment: SHOP_BROKER (URL), SHOP_NODES (URLs with commas between them; the
broker where unset) and SHOP_DATABASE (SQLAlchemy URL).
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery
from redis import Redis

from celery_redlock import Backoff, LockedTask
from celery_redlock.signals import lock_deferred
from example_worker.ledger import Ledger

__all__ = ["DEFERRALS", "LOCKED", "PREFIX", "QUEUE", "UNLOCKED", "app", "environment"]

# the prefix of the shop's keys on a broker that others may use, too
PREFIX = "redlock_shop:"
QUEUE = "orders"
DEFERRALS = f"{PREFIX}deferrals"

app = Celery("example_worker")
app.conf.update(
    broker_url=os.environ.get("SHOP_BROKER", "redis://127.0.0.1:6379/0"),
    broker_transport_options={"global_keyprefix": PREFIX},
    broker_connection_retry_on_startup=True,
    redlock_nodes=os.environ["SHOP_NODES"].split(",") if os.environ.get("SHOP_NODES") else None,
    task_default_queue=QUEUE,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
)


def environment(broker: str, nodes: tuple[str, ...], database: str) -> dict[str, str]:
    """Return what a worker of this app needs in its environment."""
    return {"SHOP_BROKER": broker, "SHOP_NODES": ",".join(nodes), "SHOP_DATABASE": database}


@functools.cache
def _ledger() -> Ledger:
    """Return this process's ledger: connections must not be shared with a forked child."""
    return Ledger(os.environ.get("SHOP_DATABASE", "sqlite:///shop.sqlite3"))


def _think() -> None:
    """Wait 2 to 8 ms, as for the work of a shop between reading and writing."""
    time.sleep(random.uniform(0.002, 0.008))


def take_from_stock(phase: str, order_id: int, sku: str) -> None:
    """Take one piece of a product from the stock."""
    product = _ledger().read(phase, "stock", sku)
    _think()
    _ledger().write(order_id, product, product.value - 1)


def issue_coupon(phase: str, order_id: int, campaign: str) -> None:
    """Issue the campaign's next coupon, as long as there are any left."""
    coupons = _ledger().read(phase, "coupon", campaign)
    _think()
    if coupons.limit is not None and coupons.value >= coupons.limit:
        _ledger().write(order_id, coupons, coupons.value)
    else:
        serial = coupons.value + 1
        _ledger().write(order_id, coupons, serial, serial)


def credit_points(phase: str, order_id: int, customer: str) -> None:
    """Credit a customer with the ten points of an order."""
    points = _ledger().read(phase, "points", customer)
    _think()
    _ledger().write(order_id, points, points.value + 10)


def _register(order: Callable[..., None], name: str, **options: Any) -> Any:
    # with both options an order survives the death of its worker or child
    options |= {"acks_late": True, "reject_on_worker_lost": True}
    return app.task(order, name=f"shop.{name}", **options)


# Many orders compete for few keys, and bodies are short, so a deferred order runs again soon.
_LOCK: Mapping[str, Any] = {"base": LockedTask, "lock_backoff": Backoff(first=0.05, cap=1.0)}

UNLOCKED: Mapping[str, Any] = {
    "stock": _register(take_from_stock, "take_from_stock"),
    "coupon": _register(issue_coupon, "issue_coupon"),
    "points": _register(credit_points, "credit_points"),
}
LOCKED: Mapping[str, Any] = {
    "stock": _register(take_from_stock, "locked.take", lock_key="stock:{sku}", **_LOCK),
    "coupon": _register(issue_coupon, "locked.issue", lock_key="coupon:{campaign}", **_LOCK),
    "points": _register(credit_points, "locked.credit", lock_key="points:{customer}", **_LOCK),
}


@functools.cache
def _broker() -> Redis:
    return Redis.from_url(app.conf.broker_url)


def _count_deferral(**_: object) -> None:
    _broker().incr(DEFERRALS)


lock_deferred.connect(_count_deferral)
