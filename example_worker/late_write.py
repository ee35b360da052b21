"""A write that comes too late, without and with a fence: `python3 -m example_worker.late_write`.

Two clerks set the price of tea, each under the lock. The first one looks at the lock, sees that it
is held, and is stopped right there, before its write; so are programs by a garbage collector, a
full machine, a paused virtual one. Its lock runs out, the second clerk gets it and sets a new
price. Then the first one goes on, and its write arrives: no lock can call it back. What can is the
database, if each write carries the lock's fencing token and the row knows the greatest so far.
"""

from __future__ import annotations

from example_worker import bootstrap

if __name__ == "__main__":
    bootstrap.ensure("example")  # only then is there anything else to import

import argparse
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence

from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from celery_redlock import Lock, Redlock, RedlockError
from celery_redlock.testing import embedded_nodes
from example_worker.interruption import Interruption

__all__ = ["main"]

TABLE = "redlock_shop_prices"
CREATE = f"""CREATE TABLE {TABLE} (
    name VARCHAR(40) PRIMARY KEY, price INTEGER NOT NULL, fence BIGINT NOT NULL DEFAULT 0)"""
WITHOUT_A_FENCE = f"UPDATE {TABLE} SET price = :price WHERE name = :name"
WITH_A_FENCE = f"""\
UPDATE {TABLE} SET price = :price, fence = :token WHERE name = :name AND fence < :token"""

NAME, OLD, FIRST, SECOND = "tea", 10, 20, 25
TTL = 4.0  # s: how long the lock of a holder that is stopped stays
PATIENCE = 60.0  # s: what a busy machine may take for anything here


def main(arguments: Sequence[str]) -> int:
    """Show both and return the exit status: 0 where only the fence kept the late write out."""
    parser = argparse.ArgumentParser(prog="python3 -m example_worker.late_write")
    parser.add_argument("--database", help="SQLAlchemy URL (default: a temporary SQLite file)")
    database = parser.parse_args(arguments).database
    interruption = Interruption()
    interruption.install()
    try:
        with interruption.allowed(), tempfile.TemporaryDirectory(prefix="redlock-") as folder:
            won, refused = _show(database or f"sqlite:///{folder}/prices.sqlite3")
    except (ImportError, OSError, RedlockError, RuntimeError, SQLAlchemyError) as error:
        print(f"FAILED: {error}", flush=True)
        return 1
    if (won, refused) != (FIRST, SECOND):
        print(f"FAILED: the prices should be {FIRST} and {SECOND}")
        return 1
    print("PASSED: without the fence the late write won; with it the database refused it")
    return 0


def _show(database: str) -> tuple[int, int]:
    """Return the price of tea after both writes, without a fence and with one."""
    with embedded_nodes(3) as servers, _shelf(database):
        nodes = [server.url for server in servers]
        with Redlock(nodes) as redlock:
            redlock.trust()  # nodes that are new could have lost the locks of a moment ago
        return (
            _race(nodes, database, "without a fence", WITHOUT_A_FENCE),
            _race(nodes, database, "with a fence", WITH_A_FENCE),
        )


def _race(nodes: list[str], database: str, title: str, write: str) -> int:
    print(f"{title}: {write}", flush=True)
    _execute(database, f"UPDATE {TABLE} SET price = :price, fence = 0", price=OLD)
    with _first_clerk(nodes, database, write) as first:
        _, status = os.waitpid(first, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise RuntimeError("the first clerk ended before it was stopped")
        with _lock(nodes) as lock:
            _say("second", f"gets the lock: token {lock.fencing_token}")
            rows = _execute(database, write, price=SECOND, name=NAME, token=lock.fencing_token)
            _say("second", f"writes {SECOND}: {_counted(rows)}")
        os.kill(first, signal.SIGCONT)
    price = _price(database)
    print(f"  the price is {price}\n", flush=True)
    return price


def _be_first(nodes: list[str], database: str, write: str) -> None:
    """Take the lock, be stopped between the look at it and the write, then write."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the show, which ends us
    logging.getLogger("celery_redlock").addHandler(logging.NullHandler())  # we say it ourselves
    with _lock(nodes) as lock:
        token = lock.fencing_token
        lock.ensure()
        _say("first", f"has the lock: token {token}, held is {lock.held}; stopped before its write")
        os.kill(os.getpid(), signal.SIGSTOP)
        # it has only just looked: for whoever is stopped, no time passes
        rows = _execute(database, write, price=FIRST, name=NAME, token=token)
        _say("first", f"goes on, writes {FIRST}: {_counted(rows)}; now it looks: held {lock.held}")


@contextlib.contextmanager
def _lock(nodes: list[str]) -> Iterator[Lock]:
    with (
        Redlock(nodes, node_timeout=TTL / 4) as redlock,
        redlock.lock(f"price:{NAME}", ttl=TTL, wait=PATIENCE, fencing=True) as lock,
    ):
        yield lock


@contextlib.contextmanager
def _first_clerk(nodes: list[str], database: str, write: str) -> Iterator[int]:
    """Start the first clerk, in a process of its own; wait for its end, or end it by force."""
    clerk = multiprocessing.get_context("spawn").Process(
        target=_be_first, args=(nodes, database, write)
    )
    clerk.start()
    try:
        yield clerk.pid or 0
        clerk.join(PATIENCE)
    finally:
        clerk.kill()
        clerk.join()


@contextlib.contextmanager
def _shelf(database: str) -> Iterator[None]:
    """Have a table with the price of tea, while it is needed."""
    _execute(database, f"DROP TABLE IF EXISTS {TABLE}")
    _execute(database, CREATE)
    try:
        _execute(database, f"INSERT INTO {TABLE} (name, price) VALUES (:n, :p)", n=NAME, p=OLD)
        yield
    finally:
        _execute(database, f"DROP TABLE {TABLE}")


def _execute(database: str, statement: str, **values: object) -> int:
    """Run one statement in a transaction of its own, and return the number of rows it changed."""
    engine = create_engine(database)
    with engine.begin() as connection:
        rows = connection.execute(text(statement), values).rowcount
    engine.dispose()
    return rows


def _price(database: str) -> int:
    engine = create_engine(database)
    with engine.connect() as connection:
        query = text(f"SELECT price FROM {TABLE} WHERE name = :name")
        price = connection.execute(query, {"name": NAME}).scalar_one()
    engine.dispose()
    return int(price)


def _say(who: str, what: str) -> None:
    print(f"  {who:<6} clerk {what}", flush=True)


def _counted(rows: int) -> str:
    return "1 row" if rows else "0 rows, refused"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
