"""Stands for your own code: a transaction of your database."""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

transaction: ContextVar[str] = ContextVar("transaction")


@contextlib.contextmanager
def open_transaction() -> Iterator[None]:
    """Open a transaction; commit it at the end."""
    token = transaction.set("a transaction")
    try:
        yield
    finally:
        transaction.reset(token)


def write_order(sku: str, pieces: int) -> str:
    """Write an order in the open transaction."""
    time.sleep(10)
    return f"{pieces} of {sku} in {transaction.get()}"
