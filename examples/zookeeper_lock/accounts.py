"""An app whose task holds a lock of ZooKeeper, by kazoo's recipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from celery import Celery
from kazoo.client import KazooClient
from kazoo.exceptions import LockTimeout

from bookings import add_up
from statements import write_statement

ENSEMBLE = "127.0.0.1:2181"
SESSION_TIMEOUT = 10  # s
WAIT = 30  # s

app = Celery(
    "shop", broker="redis://localhost", backend="redis://localhost"
)
app.conf.task_acks_late = True


class LateWriteError(Exception):
    """A newer holder of the lock has written."""


@cache
def session() -> KazooClient:
    """Open the session of this process: in the child, not before a fork."""
    zk = KazooClient(ENSEMBLE, timeout=SESSION_TIMEOUT)
    zk.start()
    return zk


@contextmanager
def locked(path: str) -> Iterator[int]:
    """Hold a lock, and give the fencing token of this holder."""
    zk = session()
    lock = zk.Lock(path)
    if not lock.acquire(timeout=WAIT):
        raise LockTimeout(path)
    try:
        _, stat = zk.retry(zk.get, f"{path}/{lock.node}")
        yield stat.czxid
    finally:
        lock.release()


@app.task(
    name="shop.close_month",
    autoretry_for=(LockTimeout,),
    max_retries=None,
    retry_backoff=True,
)
def close_month(account: str) -> int:
    """Write the statement of an account: one run at a time for each."""
    with locked(f"/locks/account-{account}") as token:
        total = add_up(account)
        if not write_statement(account, total, token):
            raise LateWriteError(f"token {token} is too old")
    return total
