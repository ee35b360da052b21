"""A lock in PostgreSQL is confirmed in the transaction of its body: no write of that is late."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import sqlalchemy
from celery import Celery
from psycopg import IsolationLevel

from celery_redlock import (
    Lock,
    LockedTask,
    LockLost,
    LockTaken,
    Redlock,
    RedlockError,
    SettingsError,
    current_lock,
)
from celery_redlock.testing import fake_nodes, locking_off, use_nodes
from tests import fork_server
from tests.conftest import NODE_TIMEOUT, TTL, eventually, settle
from tests.contract import cursors
from tests.contract.contention import PROCESSES
from tests.contract.renewals import renew_now
from tests.integration.conftest import ROOT
from tests.pages import blocks
from tests.postgres import PostgresNode, asked_of, may_go_to_a_standby

pytestmark = pytest.mark.postgresql

SHORT_TIMEOUT, SHORT_TTL = 1.0, 4.0  # s: of locks that expire in a test
FREE = "SELECT FROM redlock.key WHERE name LIKE %s FOR UPDATE SKIP LOCKED"
EXPIRED = "SELECT FROM redlock.key WHERE name LIKE '%lock:r' AND expires_at < clock_timestamp()"
END = "UPDATE redlock.key SET expires_at = clock_timestamp() WHERE name LIKE '%lock:r'"
GROWN = "SELECT expires_at FROM redlock.key WHERE name LIKE '%lock:r'"
TAKEN_BY_OTHERS = "UPDATE redlock.key SET value = 'another' WHERE name LIKE '%lock:r'"


@pytest.fixture(scope="module")
def server(postgres_template: Path) -> Iterator[PostgresNode]:
    with PostgresNode(postgres_template, fsync=False) as made:
        made.setup()
        made.query("CREATE TABLE mark (name text)")
        made.query("CREATE DATABASE bare")
        made.query("CREATE DATABASE twin TEMPLATE postgres")
        yield made


@pytest.fixture
def node(server: PostgresNode) -> PostgresNode:
    server.empty()
    server.query("DELETE FROM mark")
    return server


@contextlib.contextmanager
def client(url: str, node_timeout: float = NODE_TIMEOUT) -> Iterator[Redlock]:
    with Redlock([url], node_timeout=node_timeout) as made:
        made.trust()
        yield made


@pytest.fixture
def redlock(node: PostgresNode) -> Iterator[Redlock]:
    with client(node.url) as made:
        yield made


@pytest.fixture
def rival(node: PostgresNode) -> Iterator[Redlock]:
    with client(node.url, SHORT_TIMEOUT) as made:
        yield made


def free(node: PostgresNode, name: str = "%lock:r") -> int:
    """Return how many rows of locks nobody has confirmed in an open transaction."""
    with contextlib.closing(node.connect()) as connection:
        return connection.execute(FREE, (name,)).rowcount


def marks(node: PostgresNode) -> list[str]:
    return [name for (name,) in node.query("SELECT name FROM mark ORDER BY name")]


def of_other(node: PostgresNode, database: str) -> str:
    return node.url.removesuffix("postgres") + database


@pytest.mark.parametrize("kind", cursors.KINDS)
def test_a_transaction_keeps_its_lock_until_its_end(
    node: PostgresNode, redlock: Redlock, kind: Callable[..., Any]
) -> None:
    with redlock.lock("r", ttl=TTL) as lock, kind(node.url) as writer:
        lock.confirm_in(writer.given)
        writer.run("INSERT INTO mark VALUES ('rolled back')")
        assert free(node) == 0
        writer.rollback()
        assert free(node) == 1
        lock.confirm_in(writer.given)
        writer.run("INSERT INTO mark VALUES ('committed')")
        assert free(node) == 0
        writer.commit()
        assert free(node) == 1
        assert marks(node) == ["committed"]


@pytest.mark.parametrize("kind", cursors.KINDS)
def test_a_lock_that_is_taken_away_is_lost(
    node: PostgresNode, redlock: Redlock, kind: Callable[..., Any]
) -> None:
    with redlock.lock("r", ttl=60, renew=False) as lock, kind(node.url) as writer:
        node.query(TAKEN_BY_OTHERS)
        with pytest.raises(LockLost, match="does not see its row") as raised:
            lock.confirm_in(writer.given)
        assert str(raised.value).endswith("See `celery redlock explain locklost`")
        assert lock.held


@pytest.mark.parametrize("kind", cursors.ASYNC_KINDS)
def test_a_coroutine_keeps_its_lock_until_the_commit(
    node: PostgresNode, redlock: Redlock, kind: Callable[..., Any]
) -> None:
    async def body() -> None:
        async with redlock.lock("r", ttl=60, renew=False) as lock, kind(node.url) as writer:
            await lock.confirm_in_async(writer.given)
            await writer.run("INSERT INTO mark VALUES ('committed')")
            assert free(node) == 0
            await writer.commit()
            assert free(node) == 1
            node.query(TAKEN_BY_OTHERS)
            with pytest.raises(LockLost):
                await lock.confirm_in_async(writer.given)
            await writer.rollback()

    asyncio.run(body())
    assert marks(node) == ["committed"]


def test_djangos_cursor_is_one_of_its_transaction(node: PostgresNode) -> None:
    urls = [node.url, of_other(node, "bare")]
    command = [sys.executable, "-m", "tests.contract.confirm_django", *urls]
    ended = fork_server.run(command, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert "(autocommit)" in found["autocommit"]
    assert "has no schema redlock" in found["no_schema"]
    assert (found["locks"], found["locks_after"]) == (0, 1)
    assert marks(node) == ["django"]


# A holder that is paused

Paused = tuple[Connection, psutil.Process]


@contextlib.contextmanager
def holder(act: Callable[..., None], *args: object) -> Iterator[Paused]:
    """Run a function in a process of its own; it gets one end of a line."""
    line, other = PROCESSES.Pipe()
    process = PROCESSES.Process(target=act, args=(other, *args), daemon=True)
    process.start()
    other.close()
    try:
        yield line, psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()
        line.close()


def told(line: Connection) -> object:
    assert line.poll(60), "the holder says nothing"
    return line.recv()


def is_paused(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


STOPPED = 40.0  # s, longer than a lease


def write_when_told(line: Connection, url: str) -> None:
    """Confirm, and write after what the line says, as if much time had passed meanwhile."""
    with (
        client(url) as redlock,
        redlock.lock("r", wait=60) as lock,
        psycopg.connect(url) as connection,
    ):
        lock.confirm_in(connection)
        renew_now(redlock, lock)  # which passes by a row that is confirmed
        line.send("confirmed")
        line.recv()
        clock = redlock.session.clock
        now = clock.now
        clock.now = lambda: now() + STOPPED  # type: ignore[method-assign]
        connection.execute("INSERT INTO mark VALUES ('1 late')")
        connection.commit()
        line.send("committed")
        line.recv()


def test_a_paused_holder_renews_first_and_keeps_the_lock_until_its_commit(
    node: PostgresNode, rival: Redlock
) -> None:
    with holder(write_when_told, node.url) as (line, process):
        assert told(line) == "confirmed"
        process.suspend()
        node.query(END)
        for _ in range(2):
            with pytest.raises(LockTaken):
                rival.lock("r").acquire(wait=0.2)
        process.resume()
        line.send("write")
        with rival.lock("r", wait=60):
            assert told(line) == "committed"
            node.query("INSERT INTO mark VALUES ('2 next')")
    assert marks(node) == ["1 late", "2 next"]


class StopsHere:
    """A cursor that stops its process when it is asked for its connection: the lock was held."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @property
    def connection(self) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return self._connection


def write_late(line: Connection, url: str, isolation: IsolationLevel) -> None:
    """Look at the lock, be stopped, confirm and write. Send what confirming has raised."""
    with (
        client(url, SHORT_TIMEOUT) as redlock,
        redlock.lock("r", wait=60) as lock,
        psycopg.connect(url) as connection,
    ):
        connection.isolation_level = isolation
        connection.execute("INSERT INTO mark VALUES ('late')")  # its snapshot has our row
        raised = ""
        try:
            lock.confirm_in(StopsHere(connection))
            connection.execute("INSERT INTO mark VALUES ('later')")
            connection.commit()
        except (LockLost, psycopg.errors.SerializationFailure) as error:
            raised = f"{type(error).__name__}: {error}"
            connection.rollback()
        line.send(raised)
        line.recv()


@pytest.mark.parametrize(
    ("isolation", "error"),
    [
        (IsolationLevel.READ_COMMITTED, "LockLost: the lock on 'r' is lost (the transaction does"),
        (IsolationLevel.REPEATABLE_READ, "SerializationFailure: could not serialize access"),
        (IsolationLevel.SERIALIZABLE, "SerializationFailure: could not serialize access"),
    ],
)
def test_a_holder_that_is_paused_before_it_confirms_writes_nothing(
    node: PostgresNode, rival: Redlock, isolation: IsolationLevel, error: str
) -> None:
    with holder(write_late, node.url, isolation) as (line, process):
        eventually(lambda: is_paused(process))
        node.query(END)
        with rival.lock("r", wait=60):
            node.query("INSERT INTO mark VALUES ('next')")
            process.resume()
            assert str(told(line)).startswith(error)
    assert marks(node) == ["next"]


# What else a transaction sees


@pytest.mark.parametrize("isolation", IsolationLevel)
def test_a_lock_that_is_renewed_is_confirmed_by_an_old_snapshot(
    node: PostgresNode, rival: Redlock, isolation: IsolationLevel
) -> None:
    with rival.lock("r") as lock, psycopg.connect(node.url) as connection:
        connection.isolation_level = isolation
        node.query(END)  # as it is for whoever looked a ttl ago
        (first,) = connection.execute(GROWN).fetchone() or ()
        node.query(END.replace("()", "() + interval '30 s'"))
        renew_now(rival, lock)
        assert node.query(f"SELECT 1 WHERE clock_timestamp() > '{first}'")
        lock.confirm_in(connection)
        assert free(node) == 0


def test_a_snapshot_from_before_the_acquire_does_not_confirm(
    node: PostgresNode, redlock: Redlock
) -> None:
    with psycopg.connect(node.url) as connection:
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        assert marks(node) == connection.execute("SELECT name FROM mark").fetchall() == []
        with redlock.lock("r", ttl=TTL) as lock:
            with pytest.raises(LockLost, match="the snapshot is older than the lock"):
                lock.confirm_in(connection)
            connection.rollback()
            lock.confirm_in(connection)
            connection.commit()


def test_a_release_before_the_commit_is_repeated_after_it(
    node: PostgresNode, redlock: Redlock, rival: Redlock, caplog: pytest.LogCaptureFixture
) -> None:
    before = node.log().count("lock timeout")
    with psycopg.connect(node.url) as connection:
        lock = redlock.lock("r", ttl=60).acquire()
        lock.confirm_in(connection)
        lock.release()
        settle(redlock)
        assert not rival.lock("r", ttl=SHORT_TTL).try_acquire(wait=0.2)
        connection.commit()
        with rival.lock("r", wait=45):  # before its lease would end
            settle(redlock)
    assert node.log().count("lock timeout") == before  # no other call has waited behind it
    assert "gives no vote" not in caplog.text


def test_a_release_before_the_commit_waits_for_it_beyond_the_ttl(
    node: PostgresNode, rival: Redlock
) -> None:
    with client(node.url, SHORT_TIMEOUT) as redlock, psycopg.connect(node.url) as connection:
        lock = redlock.lock("r", ttl=SHORT_TTL).acquire()
        lock.confirm_in(connection)
        lock.release()
        settle(redlock)
        node.query(END)
        assert node.query("SELECT 1 " + EXPIRED.removeprefix("SELECT"))
        assert not rival.lock("r", ttl=SHORT_TTL).try_acquire(wait=0.2)
        connection.commit()
        rival.lock("r", ttl=SHORT_TTL).acquire(wait=60).release()
        settle(rival)


def test_an_operator_breaks_no_lock_that_an_open_transaction_has_confirmed(
    node: PostgresNode, redlock: Redlock, rival: Redlock
) -> None:
    with redlock.lock("r", ttl=60, renew=False) as lock, psycopg.connect(node.url) as connection:
        lock.confirm_in(connection)
        (broken,) = rival.break_lock("r").locks
        assert (broken.gone_from, len(broken.failing)) == ((), 1)
        connection.commit()
        (broken,) = rival.break_lock("r").locks
        assert len(broken.gone_from) == 1
        with pytest.raises(LockLost):
            lock.confirm_in(connection)


def test_a_savepoint_that_is_rolled_back_ends_what_it_has_confirmed(
    node: PostgresNode, redlock: Redlock
) -> None:
    with redlock.lock("r", ttl=TTL) as lock, psycopg.connect(node.url) as connection:
        connection.execute("INSERT INTO mark VALUES ('outside')")
        with connection.transaction() as inner:
            lock.confirm_in(connection)
            assert free(node) == 0
            raise psycopg.Rollback(inner)
        assert free(node) == 1


# Which keys


def test_each_of_several_resources_is_confirmed(node: PostgresNode, redlock: Redlock) -> None:
    with (
        redlock.lock(["r", "s"], ttl=60, renew=False) as lock,
        psycopg.connect(node.url) as connection,
    ):
        lock.confirm_in(connection)
        assert free(node, "%lock:%") == 0
        connection.commit()
        node.query(TAKEN_BY_OTHERS)
        with pytest.raises(LockLost, match="the lock on 'r, s' is lost"):
            lock.confirm_in(connection)


def test_of_permits_the_own_one_is_confirmed(node: PostgresNode, redlock: Redlock) -> None:
    with client(node.url) as other, psycopg.connect(node.url) as connection:
        first = redlock.lock("r", ttl=60, renew=False, limit=2).acquire()
        second = other.lock("r", ttl=60, renew=False, limit=2).acquire()
        for lock, own, others in ((first, "%#1", "%lock:r"), (second, "%lock:r", "%#1")):
            lock.confirm_in(connection)
            if free(node, own):
                own, others = others, own
            assert (free(node, own), free(node, others)) == (0, 1)
            connection.commit()
        node.query("DELETE FROM redlock.key WHERE name LIKE '%#1'")
        lost = [isinstance(error_of(lock, connection), LockLost) for lock in (first, second)]
        assert sorted(lost) == [False, True]


def test_a_nested_lock_confirms_the_outer_one(node: PostgresNode, redlock: Redlock) -> None:
    with (
        redlock.lock("r", ttl=TTL),
        redlock.lock(["q", "r"], ttl=TTL) as inner,
        psycopg.connect(node.url) as connection,
    ):
        inner.confirm_in(connection)
        assert free(node, "%lock:%") == 0


def test_a_task_confirms_its_lock(node: PostgresNode) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)

    @app.task(bind=True, base=LockedTask, lock_key="r")
    def take(self: Any) -> list[int]:
        with psycopg.connect(node.url) as connection:
            found = []
            for lock in (self.lock, current_lock()):
                lock.confirm_in(connection)
                found.append(free(node))
                connection.rollback()
            return [*found, free(node)]

    with use_nodes(app, [node]):
        assert take.apply().get() == [0, 0, 1]


PAGE = ROOT / "docs" / "how-to" / "confirm-in-a-transaction.md"


def test_the_page_is_right_on_a_server(node: PostgresNode) -> None:
    node.query("CREATE TABLE price (sku text, cents int)")
    node.query("CREATE ROLE shop LOGIN")
    node.query("GRANT SELECT, UPDATE ON price TO shop")
    node.query("INSERT INTO price VALUES ('sku-7', 1999)")
    (code,), (grants,) = ([one.code for one in blocks(PAGE, word)] for word in ("python", "sql"))
    url = "postgresql://shop@localhost/shop"
    assert url in code
    names: dict[str, Any] = {"__name__": "shop"}
    exec(code.replace(url, node.url).replace("redis://localhost", "memory://"), names)
    app, body_url = names["app"], node.url.replace("postgres@", "shop@")
    names["DATABASE"] = body_url  # the nodes have another user
    try:
        with use_nodes(app, [node]):
            refused = names["set_price"].apply(("sku-7", 999)).result
            assert isinstance(refused, psycopg.errors.InsufficientPrivilege)
            for statement in grants.split(";")[:-1]:
                node.query(statement)
            assert names["set_price"].apply(("sku-7", 999)).get() == 999
    finally:
        app.close()
    assert node.query("SELECT cents FROM price") == [(999,)]


def test_while_locking_is_off_nothing_is_confirmed(redlock: Redlock) -> None:
    with (
        locking_off(),
        redlock.lock("r") as lock,
        contextlib.closing(sqlite3.connect(":memory:")) as db,
    ):
        lock.confirm_in(db)
        asyncio.run(lock.confirm_in_async(db))


# Errors


def error_of(lock: Lock, given: object) -> RedlockError | None:
    """Return what confirming raises."""
    try:
        lock.confirm_in(given)
    except RedlockError as error:
        return error
    return None


AUTOCOMMIT = [
    functools.partial(cursors.psycopg_cursor, autocommit=True),
    functools.partial(cursors.sqlalchemy_connection, isolation_level="AUTOCOMMIT"),
    functools.partial(
        cursors.sqlalchemy_connection, driver="psycopg2", isolation_level="AUTOCOMMIT"
    ),
]


@pytest.mark.parametrize("kind", AUTOCOMMIT)
def test_without_a_transaction_nothing_is_confirmed(
    node: PostgresNode, redlock: Redlock, kind: Callable[..., Any]
) -> None:
    with redlock.lock("r", ttl=TTL) as lock, kind(node.url) as writer:
        assert "needs a transaction" in str(error_of(lock, writer.given))
        writer.run("BEGIN")
        assert error_of(lock, writer.given) is None
        assert free(node) == 0
        writer.run("COMMIT")


def test_a_coroutine_without_a_transaction_confirms_nothing(
    node: PostgresNode, redlock: Redlock
) -> None:
    async def body() -> None:
        async with (
            redlock.lock("r", ttl=TTL) as lock,
            await psycopg.AsyncConnection.connect(node.url, autocommit=True) as connection,
        ):
            with pytest.raises(RedlockError, match="needs a transaction"):
                await lock.confirm_in_async(connection)
            async with connection.transaction():
                await lock.confirm_in_async(connection)

    asyncio.run(body())


def test_in_a_pipeline_with_autocommit_the_transaction_ends_at_the_sync(
    node: PostgresNode, redlock: Redlock
) -> None:
    with (
        redlock.lock("r", ttl=TTL) as lock,
        psycopg.connect(node.url, autocommit=True) as connection,
        connection.pipeline() as pipeline,
    ):
        lock.confirm_in(connection)
        assert free(node) == 0
        pipeline.sync()
        eventually(lambda: free(node) == 1)


def test_what_it_asks_is_not_for_a_standby_that_lags(node: PostgresNode, redlock: Redlock) -> None:
    with (
        asked_of(node) as asked,
        redlock.lock("r", ttl=TTL) as lock,
        cursors.psycopg_cursor(node.url) as writer,
    ):
        lock.confirm_in(writer.given)
    assert len(asked) >= 3  # BEGIN, and two questions
    assert [one for one in asked if may_go_to_a_standby(node, one)] == []


OF_EACH_ERROR = [cursors.psycopg_cursor, cursors.psycopg2_cursor, cursors.sqlalchemy_connection]


@pytest.mark.parametrize("kind", OF_EACH_ERROR)
def test_a_database_without_the_schema_says_so(
    node: PostgresNode, redlock: Redlock, kind: Callable[..., Any]
) -> None:
    with redlock.lock("r", ttl=TTL) as lock, kind(of_other(node, "bare")) as writer:
        error = error_of(lock, writer.given)
        assert type(error) is RedlockError
        assert "this database has no schema redlock" in str(error)


def test_another_database_with_the_schema_has_no_such_row(
    node: PostgresNode, redlock: Redlock
) -> None:
    with (
        redlock.lock("r", ttl=TTL) as lock,
        psycopg.connect(of_other(node, "twin")) as connection,
        pytest.raises(LockLost, match="or this is another database"),
    ):
        lock.confirm_in(connection)


@pytest.mark.parametrize("kind", OF_EACH_ERROR)
def test_errors_of_the_database_pass(
    node: PostgresNode, redlock: Redlock, kind: Callable[..., Any]
) -> None:
    with redlock.lock("r", ttl=TTL) as lock, kind(node.url) as writer:
        writer.run("SET TRANSACTION READ ONLY")
        with pytest.raises(Exception, match="in a read-only transaction") as raised:
            lock.confirm_in(writer.given)
        assert not isinstance(raised.value, RedlockError)
        writer.rollback()


def test_another_kind_of_cursor_is_refused(redlock: Redlock) -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with (
        redlock.lock("r", ttl=TTL) as lock,
        contextlib.closing(sqlite3.connect(":memory:")) as database,
        engine.connect() as connection,
    ):
        for given in (database, database.cursor(), connection, None, "a cursor"):
            error = error_of(lock, given)
            assert isinstance(error, SettingsError)
            assert "must be a cursor or a connection to PostgreSQL" in str(error)
        with pytest.raises(SettingsError, match=r"cursor=a sqlite3\.Connection: must be"):
            asyncio.run(lock.confirm_in_async(database))
    engine.dispose()


@pytest.mark.parametrize("kind", cursors.KINDS)
def test_a_cursor_that_blocks_is_refused_where_one_is_awaited(
    node: PostgresNode, redlock: Redlock, kind: Callable[..., Any]
) -> None:
    with (
        redlock.lock("r", ttl=TTL) as lock,
        kind(node.url) as writer,
        pytest.raises(SettingsError, match=r"give it to confirm_in\. See"),
    ):
        asyncio.run(lock.confirm_in_async(writer.given))


@pytest.mark.parametrize("kind", cursors.ASYNC_KINDS)
def test_a_cursor_that_is_awaited_is_refused_elsewhere(
    node: PostgresNode, redlock: Redlock, kind: Callable[..., Any]
) -> None:
    async def body(lock: Lock) -> None:
        async with kind(node.url) as writer:
            assert "give it to confirm_in_async" in str(error_of(lock, writer.given))

    with redlock.lock("r", ttl=TTL) as lock:
        asyncio.run(body(lock))


def test_a_lock_on_redis_nodes_is_not_confirmed(node: PostgresNode) -> None:
    with (
        fake_nodes(3) as nodes,
        Redlock([one.url for one in nodes]) as redlock,
        psycopg.connect(node.url) as connection,
    ):
        redlock.trust()
        with redlock.lock("r") as lock:
            error = error_of(lock, connection)
            assert type(error) is RedlockError
            assert "needs the lock in the database that the body writes" in str(error)


def test_a_lock_that_is_not_held_is_not_looked_for(redlock: Redlock) -> None:
    lock = redlock.lock("r", ttl=TTL)
    assert "it was never acquired" in str(error_of(lock, None))
    lock.acquire().release()
    assert "it was released" in str(error_of(lock, None))


def test_nothing_of_postgresql_is_imported_before_a_lock_is_confirmed() -> None:
    code = (
        "import sys, celery_redlock; names = ('psycopg', 'celery_redlock.lock.postgres'); "
        "print([name for name in sys.modules if name.startswith(names)])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
