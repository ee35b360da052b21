"""Stands for your own code: a session of your database."""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

session: ContextVar[str] = ContextVar("session")


@contextlib.contextmanager
def open_session() -> Iterator[None]:
    """Open a session; commit it at the end."""
    token = session.set("a session")
    try:
        yield
    finally:
        session.reset(token)


def write_order(sku: str, pieces: int) -> str:
    """Write an order in the open session."""
    time.sleep(10)
    return f"{pieces} of {sku} in {session.get()}"
