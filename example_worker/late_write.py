"""A write that comes too late, without and with a fence: `python3 -m example_worker.late_write`.

Two clerks set the price of tea, each under the lock. The first clerk checks that it holds the lock,
and is stopped right before its write. A garbage collector, an overloaded machine or a paused
virtual machine stops a program like that. Its lock expires, and the second clerk gets the lock and
sets a new price. Then the first clerk continues, and its write arrives too late. No lock can
prevent that. The database can, if each write carries the lock's fencing token, and the row stores
the greatest token so far. The third part leaves that to `fenced_update`, which raises LockLost.

If REDLOCK_SHOP_POSTGRESQL is the URL of a PostgreSQL database, a fourth part keeps the lock there.
The first clerk confirms it in the transaction that writes, and is stopped. The second clerk does
not get the lock before the end of that transaction, so the write is not late.
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
from collections.abc import Callable, Iterator, Sequence

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from celery_redlock import Lock, LockLost, LockTaken, Redlock, RedlockError
from celery_redlock.sqlalchemy import fenced_update
from celery_redlock.testing import embedded_nodes
from example_worker.interruption import Interruption

__all__ = ["main"]

POSTGRESQL = "REDLOCK_SHOP_POSTGRESQL"
TABLE = "redlock_shop_prices"
PRICES = Table(
    TABLE,
    MetaData(),
    Column("name", String(40), primary_key=True),
    Column("price", Integer, nullable=False),
    Column("fence", BigInteger, nullable=False, server_default="0"),
)
WITHOUT_A_FENCE = f"UPDATE {TABLE} SET price = :price WHERE name = :name"
WITH_A_FENCE = f"""\
UPDATE {TABLE} SET price = :price, fence = :token WHERE name = :name AND fence < :token"""
FENCED = "fenced_update(connection, update, lock)"

NAME = "tea"
OLD_PRICE = 10
FIRST_PRICE = 20
SECOND_PRICE = 25
TTL = 4.0  # s: how long the lock of a holder that is stopped stays
BLOCKED_WAIT = 1.5 * TTL  # s that the second clerk tries while the first has a confirmed lock
PATIENCE = 60.0  # s: what a busy machine may take for anything here


def main(arguments: Sequence[str]) -> int:
    """Run all parts; return 0 if only the fence, or the confirmed lock, refused the late write."""
    parser = argparse.ArgumentParser(prog="python3 -m example_worker.late_write")
    parser.add_argument("--database", help="SQLAlchemy URL (default: a temporary SQLite file)")
    database = parser.parse_args(arguments).database
    interruption = Interruption()
    interruption.install()
    try:
        with interruption.allowed(), tempfile.TemporaryDirectory(prefix="redlock-") as folder:
            won, *refused = _show(database or f"sqlite:///{folder}/prices.sqlite3")
            confirmed = _show_confirmed(os.environ.get(POSTGRESQL, ""))
    except (ImportError, OSError, RedlockError, RuntimeError, SQLAlchemyError) as error:
        print(f"FAILED: {error}", flush=True)
        return 1
    if (won, refused) != (FIRST_PRICE, [SECOND_PRICE, SECOND_PRICE]):
        print(f"FAILED: the prices should be {FIRST_PRICE}, then twice {SECOND_PRICE}")
        return 1
    if confirmed not in (None, SECOND_PRICE):
        print(f"FAILED: the price should be {SECOND_PRICE}, and the second clerk last")
        return 1
    print("PASSED: without the fence the late write won; with it the database refused it")
    if confirmed:
        print("PASSED: the lock that was confirmed stayed until the commit, so no write was late")
    return 0


def _show(database: str) -> tuple[int, ...]:
    """Return the price of tea after both writes: without a fence, with one, by fenced_update."""
    with embedded_nodes(3) as servers, _shelf(database):
        nodes = [server.url for server in servers]
        with Redlock(nodes) as redlock:
            redlock.trust()  # nodes that are new could have lost the locks of a moment ago
        return (
            _race(nodes, database, "without a fence", WITHOUT_A_FENCE),
            _race(nodes, database, "with a fence", WITH_A_FENCE),
            _race(nodes, database, "by fenced_update", FENCED),
        )


def _race(nodes: list[str], database: str, title: str, write: str) -> int:
    print(f"{title}: {write}", flush=True)
    _execute(database, f"UPDATE {TABLE} SET price = :price, fence = 0", price=OLD_PRICE)
    with _first_clerk(_be_first, nodes, database, write) as first:
        _wait_until_stopped(first)
        with _lock(nodes) as lock:
            _say("second", f"gets the lock: token {lock.fencing_token}")
            _say("second", f"writes {SECOND_PRICE}: {_write(database, write, lock, SECOND_PRICE)}")
        os.kill(first, signal.SIGCONT)
    price = _price(database)
    print(f"  the price is {price}\n", flush=True)
    return price


def _be_first(nodes: list[str], database: str, write: str) -> None:
    """Take the lock, be stopped between the look at it and the write, then write."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the show, which ends us
    logging.getLogger("celery_redlock").addHandler(logging.NullHandler())  # we say it ourselves
    with _lock(nodes) as lock:
        lock.ensure()
        token = f"token {lock.fencing_token}"
        _say("first", f"has the lock: {token}, held is {lock.held}; stopped before its write")
        os.kill(os.getpid(), signal.SIGSTOP)
        # for a stopped process no time passes: it has checked the lock just now
        written = _write(database, write, lock, FIRST_PRICE)
        _say("first", f"goes on, writes {FIRST_PRICE}: {written}; now it looks: held {lock.held}")


def _write(database: str, write: str, lock: Lock, price: int) -> str:
    """Write a price of tea in a transaction of its own, and return what came of it."""
    if write != FENCED:
        values = {"price": price, "name": NAME, "token": lock.fencing_token}
        return _counted(_execute(database, write, **values))
    engine = create_engine(database)
    update = PRICES.update().where(PRICES.c.name == NAME).values(price=price)
    try:
        with engine.begin() as connection:
            return _counted(fenced_update(connection, update, lock))
    except LockLost as error:
        return error.reason
    finally:
        engine.dispose()


def _show_confirmed(url: str) -> int | None:
    """Return the price of tea after both writes, each of a confirmed lock; None without a URL.

    It is -1 if the second clerk got the lock while the first one had confirmed it.
    """
    if not url:
        return None
    database = url.replace("postgresql://", "postgresql+psycopg://", 1)
    print(f"with a confirmed lock: {WITHOUT_A_FENCE}", flush=True)
    with _schema(url), _shelf(database):
        with Redlock([url]) as redlock:
            redlock.trust()
        with _first_clerk(_confirm_and_be_stopped, [url], database) as first:
            _wait_until_stopped(first)
            is_free = _is_free([url])
            os.kill(first, signal.SIGCONT)
            if is_free:
                return -1
            with _lock([url]) as lock:
                _say("second", f"gets the lock: token {lock.fencing_token}")
                _write_confirmed("second", lock, database, SECOND_PRICE)
        price = _price(database)
    print(f"  the price is {price}\n", flush=True)
    return price


def _is_free(nodes: list[str]) -> bool:
    try:
        with _lock(nodes, BLOCKED_WAIT):
            return True
    except LockTaken:
        _say("second", f"does not get the lock within {BLOCKED_WAIT:g} s")
        return False


def _confirm_and_be_stopped(nodes: list[str], database: str) -> None:
    """Take the lock, confirm it, be stopped before the write, then write."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("celery_redlock").addHandler(logging.NullHandler())
    with _lock(nodes) as lock:
        _say("first", f"has the lock: token {lock.fencing_token}")
        _write_confirmed("first", lock, database, FIRST_PRICE, stops=True)


def _write_confirmed(
    clerk: str, lock: Lock, database: str, price: int, stops: bool = False
) -> None:
    """Write a price in a transaction that confirms the lock. stops: between the two."""
    engine = create_engine(database)
    with engine.begin() as connection:
        lock.confirm_in(connection)
        if stops:
            _say(clerk, "has confirmed its lock; stopped before its write")
            os.kill(os.getpid(), signal.SIGSTOP)
        values = {"price": price, "name": NAME}
        rows = connection.execute(text(WITHOUT_A_FENCE), values).rowcount
        _say(clerk, f"writes {price}: {_counted(rows)}")
    engine.dispose()


@contextlib.contextmanager
def _schema(url: str) -> Iterator[None]:
    """Have the schema of locks in the database; it goes at the end if it is made here."""
    try:
        import psycopg

        from celery_redlock.lock.postgres.schema import create_schema
    except ImportError as error:
        raise RuntimeError(f"{POSTGRESQL} needs psycopg: pip install psycopg[binary]") from error
    try:
        connected = psycopg.connect(url, autocommit=True)
    except psycopg.Error as error:
        raise RuntimeError(f"{POSTGRESQL}: {error}") from error
    with connected as connection:
        is_ours = create_schema(connection) in ("new", "trusted")
        try:
            yield
        finally:
            if is_ours:
                connection.execute("DROP SCHEMA redlock CASCADE")


@contextlib.contextmanager
def _lock(nodes: list[str], wait: float = PATIENCE) -> Iterator[Lock]:
    with (
        Redlock(nodes, node_timeout=TTL / 4) as redlock,
        redlock.lock(f"price:{NAME}", ttl=TTL, wait=wait, fencing=True) as lock,
    ):
        yield lock


@contextlib.contextmanager
def _first_clerk(act: Callable[..., None], *args: object) -> Iterator[int]:
    """Start the first clerk, in a process of its own; wait for its end, or end it by force."""
    clerk = multiprocessing.get_context("spawn").Process(target=act, args=args)
    clerk.start()
    try:
        yield clerk.pid or 0
        clerk.join(PATIENCE)
    finally:
        clerk.kill()
        clerk.join()


def _wait_until_stopped(clerk: int) -> None:
    _, status = os.waitpid(clerk, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise RuntimeError("the first clerk ended before it was stopped")


@contextlib.contextmanager
def _shelf(database: str) -> Iterator[None]:
    """Have a table with the price of tea, while it is needed."""
    _execute(database, f"DROP TABLE IF EXISTS {TABLE}")
    engine = create_engine(database)
    PRICES.create(engine)
    engine.dispose()
    try:
        _execute(
            database, f"INSERT INTO {TABLE} (name, price) VALUES (:n, :p)", n=NAME, p=OLD_PRICE
        )
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


def _say(clerk: str, event: str) -> None:
    print(f"  {clerk:<6} clerk {event}", flush=True)


def _counted(rows: int) -> str:
    return "1 row" if rows else "0 rows, refused"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
