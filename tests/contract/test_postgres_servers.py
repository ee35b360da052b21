"""The PostgreSQL servers that tests start behave as such servers do after a fault."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import psycopg
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.retry import Retry

from celery_redlock.lock.server.requests import RELEASE
from tests.conftest import eventually
from tests.postgres import PostgresNode, pooler, standby, standing_node

pytestmark = pytest.mark.postgresql

TIMELINE = "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"


@pytest.fixture
def node(postgres_template: Path) -> Iterator[PostgresNode]:
    with standing_node(postgres_template) as made:
        mark(made)
        yield made


@pytest.fixture
def mortal(postgres_template: Path) -> Iterator[PostgresNode]:
    """Give a node of the test's own."""
    with PostgresNode(postgres_template, fsync=False) as made:
        mark(made)
        yield made


def mark(server: PostgresNode) -> None:
    server.query("CREATE TABLE mark (at int)")
    server.query("INSERT INTO mark VALUES (%s)", 1)


def marks(server: PostgresNode) -> list[int]:
    return [at for (at,) in server.query("SELECT at FROM mark ORDER BY at")]


def test_a_crash_keeps_a_committed_row_and_no_other(mortal: PostgresNode) -> None:
    with psycopg.connect(mortal.url) as open_one, closing(mortal.connect()) as busy:
        open_one.execute("INSERT INTO mark VALUES (2)")
        busy.pgconn.send_query(b"DO $$ BEGIN LOOP PERFORM pg_sleep(0.01); END LOOP; END $$")
        children = psutil.Process(mortal.pid).children()
        mortal.kill()
        assert mortal.pid == 0
        assert len(children) > 1
        assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        with pytest.raises(psycopg.OperationalError):
            open_one.execute("SELECT 1")
    mortal.start()
    assert "was not properly shut down" in mortal.log()
    assert marks(mortal) == [1]


def test_a_paused_server_answers_when_it_goes_on(node: PostgresNode) -> None:
    with closing(node.connect()) as asked:
        node.pause()
        asked.pgconn.send_query(b"SELECT at FROM mark")
        asked.pgconn.flush()
        first = psutil.Process(node.pid)
        states = {process.status() for process in (first, *first.children())}
        # one that has just ended is not collected by a server that stands still
        assert states - {psutil.STATUS_ZOMBIE} == {psutil.STATUS_STOPPED}
        assert asked.pgconn.is_busy()
        node.resume()
        result = asked.pgconn.get_result()
        assert result is not None
        assert result.get_value(0, 0) == b"1"


def test_a_promoted_standby_has_the_rows_and_another_timeline(mortal: PostgresNode) -> None:
    with standby(mortal, synchronous=True) as other:
        mortal.query("INSERT INTO mark VALUES (2)")
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            other.query("INSERT INTO mark VALUES (3)")
        assert other.query("SHOW fsync") == [("off",)]
        timeline = mortal.query(TIMELINE)
        mortal.kill()
        other.promote()
        other.query("INSERT INTO mark VALUES (4)")
        assert marks(other) == [1, 2, 4]
        assert other.query(TIMELINE) > timeline


def test_a_commit_waits_for_its_synchronous_standby(node: PostgresNode) -> None:
    with standby(node, synchronous=True) as other:
        other.kill()
        with closing(node.connect()) as asked:
            asked.pgconn.send_query(b"INSERT INTO mark VALUES (2)")
            waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            eventually(lambda: node.query(waits))
            other.start()
            assert asked.pgconn.get_result() is not None
        eventually(lambda: marks(other) == [1, 2])


def test_pgbouncer_passes_a_query_after_its_restart(node: PostgresNode) -> None:
    with pooler(node) as pool:
        assert pool.query("SELECT at FROM mark") == [(1,)]
        with psycopg.connect(pool.url, autocommit=True) as old:
            pool.restart()
            with pytest.raises(psycopg.OperationalError):
                old.execute("SELECT 1")
        assert pool.query("SELECT at FROM mark") == [(1,)]
        assert "127.0.0.1" in pool.log()


def test_a_client_of_pgbouncer_changes_its_connection(node: PostgresNode) -> None:
    backend = "SELECT pg_backend_pid()"
    with pooler(node) as pool, psycopg.connect(pool.url) as one, psycopg.connect(pool.url) as two:
        first = one.execute(backend).fetchone()
        one.commit()
        assert two.execute(backend).fetchone() == first
        assert one.execute(backend).fetchone() != first


def client_of(node: PostgresNode) -> Redis:
    client = node.client()
    client.set_retry(Retry(NoBackoff(), 0))
    return client


def test_redis_py_asks_a_node(node: PostgresNode) -> None:
    client = client_of(node)
    assert client.keys("*:run")  # a new schema trusts its server
    assert client.flushall()
    name = "\0caf\u00e9\\"
    assert client.set(f"a:{name}:b", name)
    assert client.set("gone", "1", px=1)
    eventually(lambda: not client.exists("gone"))
    assert client.get(f"a:{name}:b") == name
    assert client.keys() == client.keys("*:b") == [f"a:{name}:b"]
    assert client.keys("*:c") == []
    pipeline = client.pipeline(transaction=False)
    pipeline.get("c")
    pipeline.exists(f"a:{name}:b")
    assert pipeline.execute() == [None, 1]
    with pytest.raises(ResponseError, match="unknown command 'LPUSH'"):
        client.lpush("c", "d")
    assert client.hset("hash", "field", name) == 1
    assert (client.hgetall("hash"), client.hlen("hash")) == ({"field": name}, 1)
    client.zadd("set", {name: 1_795_685_408_283})
    assert (client.zcard("set"), client.zscore("set", name)) == (1, 1_795_685_408_283)
    assert client.zscore("set", "other") is None
    assert client.flushall()
    assert (client.keys(), client.hlen("hash")) == ([], 0)
    assert node.query("SELECT * FROM redlock.item") == []


def test_redis_py_makes_a_ttl_endless(node: PostgresNode) -> None:
    client = client_of(node)
    for name in ("a", "b"):
        client.set(name, "1", px=100_000)
    assert client.persist("a")
    assert client.pttl("a") == -1
    assert client.pttl("b") > 0
    assert not client.persist("c")


def test_redis_py_runs_the_packages_scripts(node: PostgresNode) -> None:
    client = client_of(node)
    client.set("a", "mine")
    release = (2, "a", "waiters", "mine", "", "1")
    assert client.evalsha(client.script_load(RELEASE.source), *release) == 1
    assert client.eval(RELEASE.source.decode(), *release) == 0
    with pytest.raises(NoScriptError):
        client.evalsha("0" * 40, 0)


def test_redis_py_finds_a_node_that_is_down_and_back(
    mortal: PostgresNode, pool: ThreadPoolExecutor
) -> None:
    mortal.setup()
    client = client_of(mortal)
    client.set("a", "1")
    with closing(psycopg.connect(mortal.url)) as blocks:
        blocks.execute("LOCK TABLE redlock.key")
        waits = pool.submit(client_of(mortal).get, "a")
        blocked = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        eventually(lambda: mortal.query(blocked))
        mortal.kill()
        with pytest.raises(RedisConnectionError):
            waits.result()
        with pytest.raises(RedisConnectionError):
            client.get("a")
    for _ in range(2):
        mortal.start()
        assert client_of(mortal).get("a") == "1"
        mortal.kill()
