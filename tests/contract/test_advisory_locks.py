"""The table of advisory locks behind a transaction pooler, and of ours: each row is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from select import select
from typing import Any

import psycopg
import pytest

from celery_redlock import LockTaken, Redlock
from tests.conftest import NODE_TIMEOUT, TTL, eventually, settle
from tests.contract.conftest import in_child
from tests.contract.renewals import renew_now
from tests.pages import ROOT, RunTable, blocks
from tests.postgres import Pooler, PostgresNode, pooler, standing_node

pytestmark = pytest.mark.postgresql

TABLE = RunTable(ROOT / "docs" / "explanation" / "pgbouncer-and-advisory-locks.md")
[SQL] = [block.code for block in blocks(TABLE.page, "sql")]
SESSION, IN_TRANSACTION = 42, 43  # what is locked
TAKE = f"SELECT pg_try_advisory_lock({SESSION})"
FREE = f"SELECT pg_advisory_unlock({SESSION})"
TAKE_IN_TRANSACTION = f"SELECT pg_try_advisory_xact_lock({IN_TRANSACTION})"
HELD = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s"
PID = "SELECT pg_backend_pid()"
NOW = "SELECT extract(epoch FROM clock_timestamp())::float"
OURS = "SELECT count(*) FROM redlock.key WHERE name = '{redlock}:lock:r'"
LONG = 600.0  # s: of a lease that ends by its release alone


@pytest.fixture
def node(postgres_template: Path) -> Iterator[PostgresNode]:
    with standing_node(postgres_template) as made:
        yield made


@contextmanager
def pool_of(node: PostgresNode, size: int) -> Iterator[Pooler]:
    """Give a pgbouncer in transaction mode, with so many connections to the node at most."""
    with pooler(node, pool_size=size) as made:
        yield made


@contextmanager
def over(pool: Pooler) -> Iterator[Redlock]:
    with Redlock([pool.url], node_timeout=NODE_TIMEOUT, max_ttl=LONG) as made:
        settle(made)
        yield made


def first_of(connection: psycopg.Connection[Any], sql: str) -> Any:
    return connection.execute(sql.encode()).fetchall()[0][0]


def held(node: PostgresNode, lock: int) -> int:
    """Return how many sessions of the server have an advisory lock."""
    [(count,)] = node.query(HELD, lock)
    return int(count)


def granted(answer: object) -> str:
    return "granted" if answer else "refused"


def state(count: int) -> str:
    return "held" if count else "free"


ASKED = "another client asks for it"
RELEASED = "the holder releases it"
KILLED = "the holder's process is killed"
TWO = "two are held, and the pool has one connection"


@TABLE.row(ASKED)
def test_another_client_of_the_pool_gets_a_sessions_lock_too(node: PostgresNode) -> None:
    with pool_of(node, 2) as pool, closing(pool.connect()) as first, closing(pool.connect()) as two:
        assert first_of(first, TAKE)
        of_session = first_of(two, TAKE)  # by the same session, which may take its own lock twice
        assert held(node, SESSION) == 1
        with first.transaction():
            assert first_of(first, TAKE_IN_TRANSACTION)
            of_transaction = first_of(two, TAKE_IN_TRANSACTION)
        with over(pool) as redlock, over(pool) as rival, redlock.lock("r", ttl=LONG, wait=60):
            ours = rival.lock("r", ttl=TTL).try_acquire()
    TABLE.see(ASKED, granted(of_session), granted(of_transaction), granted(ours))


@TABLE.row(RELEASED)
def test_a_holder_that_meets_another_session_releases_nothing(node: PostgresNode) -> None:
    warned: list[str | None] = []
    find, end = (sql.replace(":pid", "%s") for sql in SQL.split(";")[:2])  # as the page says it
    with pool_of(node, 2) as pool, closing(pool.connect()) as first, closing(pool.connect()) as two:
        with over(pool) as redlock:
            lock = redlock.lock("r", ttl=LONG, wait=60).acquire()
            first.add_notice_handler(lambda notice: warned.append(notice.severity))
            assert first_of(first, TAKE)
            [(holder, _)] = node.query(find)
            eventually(lambda: keeps(two, holder))
            assert not first_of(first, FREE)
            lock.release()
            eventually(lambda: node.query(OURS) == [(0,)])
            two.execute("COMMIT")
        with first.transaction():
            assert first_of(first, TAKE_IN_TRANSACTION)
        assert warned == ["WARNING"]
        seen = state(held(node, SESSION)), state(held(node, IN_TRANSACTION)), "free"
        TABLE.see(RELEASED, *seen)
        node.query(end, holder)
        eventually(lambda: held(node, SESSION) == 0)


def keeps(client: psycopg.Connection[Any], session: int) -> bool:
    """Return whether a client's transaction has met a session, which it then keeps."""
    client.execute("BEGIN")
    if first_of(client, PID) == session:
        return True
    client.execute("ROLLBACK")
    return False


@TABLE.row(KILLED)
def test_a_killed_holder_leaves_a_sessions_lock_to_the_pool(node: PostgresNode) -> None:
    kept: list[Any] = []  # by the child: what is collected is released
    with pool_of(node, 2) as pool, over(pool) as rival:
        in_child(lambda: take_all(pool, kept))
        with pytest.raises(LockTaken):
            rival.lock("long", ttl=TTL).acquire()
        eventually(lambda: held(node, IN_TRANSACTION) == 0)
        with rival.lock("r", ttl=TTL, wait=60):
            TABLE.see(KILLED, state(held(node, SESSION)), "free", "free")
        pool.restart()
        eventually(lambda: held(node, SESSION) == 0)


def take_all(pool: Pooler, kept: list[Any]) -> bool:
    """Take a lock of each kind; the process then ends without a word to the pooler."""
    redlock = Redlock([pool.url], node_timeout=NODE_TIMEOUT, max_ttl=LONG)
    settle(redlock)
    ours = [redlock.lock("r", ttl=TTL), redlock.lock("long", ttl=LONG)]
    first, second = pool.connect(), pool.connect()
    second.execute("BEGIN")
    kept += [redlock, *ours, first, second]
    taken = [first_of(first, TAKE), first_of(second, TAKE_IN_TRANSACTION)]
    return all([*taken, *(lock.try_acquire(wait=60) for lock in ours)])


@TABLE.row(TWO)
def test_a_lock_of_a_transaction_keeps_a_connection_of_the_pool(node: PostgresNode) -> None:
    with pool_of(node, 1) as pool, closing(pool.connect()) as first, closing(pool.connect()) as two:
        with over(pool) as redlock, over(pool) as other:
            locks = redlock.lock("r", ttl=LONG), other.lock("s", ttl=LONG)
            ours = all(lock.try_acquire(wait=60) for lock in locks)
            renew_now(redlock, locks[0])
            renew_now(other, locks[1])
            for lock in locks:
                lock.release()
        assert first_of(first, TAKE)
        of_sessions = first_of(two, TAKE.replace(str(SESSION), "44"))
        with first.transaction():
            assert first_of(first, TAKE_IN_TRANSACTION)
            two.pgconn.send_query(NOW.encode())
            before = first_of(first, NOW)
            of_transactions = bool(select([two.fileno()], [], [], 0)[0])
        reply = two.pgconn.get_result()
        assert reply is not None
        assert float(reply.get_value(0, 0) or 0) > before  # it was not the slower one: it waited
    TABLE.see(TWO, granted(of_sessions), granted(of_transactions), granted(ours))


def test_a_pooler_in_session_mode_releases_a_sessions_lock_as_its_client_leaves(
    node: PostgresNode,
) -> None:
    with pooler(node, pool_mode="session") as pool:
        with closing(pool.connect()) as client:
            assert first_of(client, TAKE)
            assert held(node, SESSION) == 1
        eventually(lambda: held(node, SESSION) == 0)
