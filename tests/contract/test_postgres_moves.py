"""Another cluster, database or schema than at the connect may lack locks: it abstains for a while.

Behind a pooler, clients stay connected meanwhile. `setup` moves the schema of an earlier release.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest

from celery_redlock import Lock, Redlock
from celery_redlock.lock.postgres.schema import VERSION, create_schema, doubts_of
from tests.conftest import NODE_TIMEOUT, TTL, eventually, made_once
from tests.contract.postgres_calls import ONE, TWO, Session, grant
from tests.contract.renewals import renew_now
from tests.contract.test_postgres_failures import (
    END_OF_QUIET,
    QUIET,
    RUN,
    VALUE,
    is_refused,
    over,
)
from tests.postgres import Pooler, PostgresNode, dump, make_template, pooler, standing_node

pytestmark = pytest.mark.postgresql

TENURE = "SELECT convert_from(value, 'UTF8') FROM redlock.key WHERE name = '{redlock}:tenure'"
ROWS = (
    "SELECT name, value, expires_at FROM redlock.key"
    " WHERE encode(name, 'escape') !~ ':(run|tenure)$' ORDER BY id"
)
FUNCTIONS = (
    "SELECT p.oid::regprocedure::text, pg_get_functiondef(p.oid) FROM pg_proc p"
    " WHERE p.pronamespace = 'redlock'::regnamespace ORDER BY 1"
)
# What version 4 has changed in version 3.
VERSION_3 = """
CREATE OR REPLACE FUNCTION redlock.version() RETURNS int LANGUAGE sql STABLE RETURN 3;
DO $$ BEGIN
  EXECUTE replace(pg_get_functiondef('redlock.newest'::regproc),
    'integer(-replaced)', 'integer(replaced)');
END $$;
"""
# What version 4 has changed in version 3, but for the function of an order.
VERSION_3 = """
CREATE OR REPLACE FUNCTION redlock.version() RETURNS int LANGUAGE sql STABLE RETURN 3;
"""
# What version 3 has added to version 2, and changed in it.
VERSION_2 = """
CREATE OR REPLACE FUNCTION redlock.version() RETURNS int LANGUAGE sql STABLE RETURN 2;
DROP FUNCTION redlock."newest", redlock.keep_order;
CREATE OR REPLACE FUNCTION redlock.ended_for(marker bytea, at timestamptz) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE kept bigint := coalesce(redlock.number(redlock.get(marker, at)), 0);
BEGIN
  RETURN CASE WHEN kept > 0 THEN greatest(1, kept - redlock.pttl(marker, at)) ELSE kept END;
END $$;
"""
# What version 2 has changed in version 1.
VERSION_1 = f"""
{VERSION_2}
CREATE OR REPLACE FUNCTION redlock.version() RETURNS int LANGUAGE sql STABLE RETURN 1;
CREATE OR REPLACE FUNCTION redlock.run_id() RETURNS text LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  RETURN (SELECT system_identifier::text FROM pg_control_system())
    || '-' || left(pg_walfile_name(pg_current_wal_lsn()), 8);
END $$;
CREATE OR REPLACE FUNCTION redlock.run_id(known text) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  RETURN CASE WHEN right(known, 8) = left(pg_walfile_name(pg_current_wal_lsn()), 8) THEN known
    ELSE redlock.run_id() END;
END $$;
"""


@pytest.fixture
def node(postgres_template: Path) -> Iterator[PostgresNode]:
    with standing_node(postgres_template) as made:
        yield made


@contextmanager
def two_over(url: str) -> Iterator[tuple[Redlock, Redlock]]:
    """Give two clients, connected to their node."""
    with over(url, max_ttl=600) as one, over(url, max_ttl=600) as other:
        yield one, other


def held(redlock: Redlock) -> Lock:
    """Return the lock that a client holds in a `with` block, for longer than a test takes."""
    return redlock.lock("r", ttl=600, wait=60)


@pytest.fixture
def other(node: PostgresNode) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """Give a connection to a second database of the node, with a new schema of its own."""
    node.query("CREATE DATABASE other")
    try:
        url = f"{node.url.rpartition('/')[0]}/other"
        with closing(psycopg.connect(url, autocommit=True)) as connection:
            assert create_schema(connection) == "trusted"
            yield connection
    finally:
        node.query("DROP DATABASE other WITH (FORCE)")


def test_the_run_id_names_cluster_database_schema_and_timeline(
    node: PostgresNode, other: psycopg.Connection[tuple[object, ...]]
) -> None:
    ask = "SELECT redlock.run_id()"
    [(cluster,)] = node.query("SELECT system_identifier::text FROM pg_control_system()")
    [(run,)] = node.query(ask)
    [(elsewhere,)] = other.execute(ask).fetchall()
    assert run != elsewhere
    for one in (run, elsewhere):
        assert one.startswith(f"{cluster}-")
        assert one.endswith("-00000001")
    node.query("DROP SCHEMA redlock CASCADE")
    node.setup()
    assert node.query(ask) != [(run,)]


class TestAPoolerThatMoves:
    @pytest.fixture
    def pool_of(self, node: PostgresNode) -> Iterator[Pooler]:
        with pooler(node) as made:
            yield made

    def test_nobody_gets_the_lock_of_another_database(
        self, pool_of: Pooler, other: psycopg.Connection[tuple[object, ...]]
    ) -> None:
        with two_over(pool_of.url) as (redlock, rival), held(redlock) as lock:
            pool_of.move("postgres", "other")
            assert is_refused(rival)
            eventually(lambda: other.execute(QUIET).fetchall())
            assert is_refused(rival)
            assert lock.held

    def test_nobody_gets_it_after_a_restart_either(
        self, pool_of: Pooler, other: psycopg.Connection[tuple[object, ...]]
    ) -> None:
        with two_over(pool_of.url) as (redlock, rival), held(redlock) as lock:
            pool_of.move("postgres", "other")
            pool_of.restart()
            eventually(lambda: other.execute(QUIET).fetchall() or not is_refused(rival))
            assert is_refused(rival)
            assert lock.held

    def test_a_move_that_is_undone_begins_a_grace_period(
        self,
        pool_of: Pooler,
        node: PostgresNode,
        other: psycopg.Connection[tuple[object, ...]],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with two_over(pool_of.url) as (redlock, rival):
            pool_of.move("postgres", "other")
            assert is_refused(redlock)
            eventually(lambda: other.execute(QUIET).fetchall())
            other.execute(END_OF_QUIET.encode())
            with held(redlock) as lock:
                pool_of.move("other", "postgres")
                renew_now(redlock, lock)
                eventually(lambda: node.query(QUIET))
                assert is_refused(rival)
                assert lock.held
            assert "another server, database or schema" in caplog.text


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresNode]:
    """Give a second server, whose data is no copy of the node's, without a schema."""
    template = made_once(tmp_path_factory, "postgres-other-template", make_template)
    with PostgresNode(template, fsync=False) as made:
        yield made


class TestAPoolerThatMovesToAnotherCluster:
    """One of a dump, of pg_upgrade or of logical replication is on the same timeline."""

    @pytest.fixture
    def pool_of(self, node: PostgresNode) -> Iterator[Pooler]:
        with pooler(node) as made:
            yield made

    @pytest.mark.parametrize("has_rows", [False, True], ids=["new schema", "restored dump"])
    @pytest.mark.parametrize("restarts", [False, True], ids=["reload", "restart"])
    def test_nobody_gets_a_lock_that_is_not_there(
        self, pool_of: Pooler, node: PostgresNode, cluster: PostgresNode,
        has_rows: bool, restarts: bool,
    ) -> None:  # fmt: skip
        with two_over(pool_of.url) as (redlock, rival):
            if has_rows:
                dump(node, cluster)
            else:
                cluster.setup()
            with held(redlock) as lock:
                pool_of.move("postgres", "postgres", cluster)
                if restarts:
                    pool_of.restart()
                assert is_refused(rival)
                eventually(lambda: cluster.query(QUIET) or not is_refused(rival))
                assert is_refused(rival)
                assert lock.held

    def test_nor_after_the_move_is_undone(
        self, pool_of: Pooler, node: PostgresNode, cluster: PostgresNode
    ) -> None:
        with two_over(pool_of.url) as (redlock, rival):
            dump(node, cluster)
            pool_of.move("postgres", "postgres", cluster)
            assert is_refused(redlock)
            eventually(lambda: cluster.query(QUIET))
            cluster.query(END_OF_QUIET)
            with held(redlock) as lock:
                assert cluster.query(VALUE)
                pool_of.move("postgres", "postgres", node)
                renew_now(redlock, lock)
                eventually(lambda: node.query(QUIET))
                assert is_refused(rival)
                assert lock.held


class TestASetup:
    def test_a_schema_that_is_dropped_beside_clients_is_not_trusted(
        self, node: PostgresNode
    ) -> None:
        with two_over(node.url) as (redlock, rival), held(redlock) as lock:
            node.query("DROP SCHEMA redlock CASCADE")
            with closing(node.connect()) as connection:
                assert create_schema(connection) == "new"
            with Redlock([node.url], node_timeout=NODE_TIMEOUT, max_ttl=600) as fresh:
                assert is_refused(fresh)
            assert is_refused(rival)
            assert lock.held

    def test_a_client_finds_out_by_itself_that_the_schema_is_another(
        self, node: PostgresNode
    ) -> None:
        with two_over(node.url) as (redlock, rival), held(redlock) as lock:
            node.query("DROP SCHEMA redlock CASCADE")
            with closing(node.connect()) as connection:  # of clients with another name
                assert create_schema(connection, applications=["shop"]) == "trusted"
            assert is_refused(rival)
            eventually(lambda: node.query(QUIET))
            assert lock.held


@contextmanager
def earlier(node: PostgresNode, version: str) -> Iterator[PostgresNode]:
    """Give a node with an earlier schema; other tests have the node after this one."""
    node.query(version)
    try:
        yield node
    finally:
        node.query("DROP SCHEMA redlock CASCADE")
        node.setup()


def see_moved(node: PostgresNode) -> None:
    """Move a schema; a second time nothing is to be done."""
    with closing(node.connect()) as connection:
        assert create_schema(connection) == "moved"
        assert create_schema(connection) == "there"


def see_in_service(node: PostgresNode, free: str = "free") -> None:
    """Return if a new client is refused what is held and takes what is free: no grace period."""
    with over(node.url) as fresh:
        assert is_refused(fresh)
        assert fresh.lock(free, ttl=TTL).try_acquire()
    assert node.query(QUIET) == []


class TestVersion3:
    """Clients of version 3 and of this one are served by both schemas."""

    def hello(self, node: PostgresNode, *words: str) -> bytes:
        """Return what a client hears as it connects. words: after the first one."""
        text = ",".join(f"'{word}'" for word in ("HELLO", *words))
        [(reply,)] = node.query(f"SELECT redlock.command(array[{text}]::bytea[])")
        return bytes(reply)

    def test_its_clients_are_told_of_their_own_version(self, node: PostgresNode) -> None:
        assert self.hello(node).startswith(b"*6\r\n$1\r\n3\r\n")
        assert self.hello(node, str(VERSION)).startswith(b"*6\r\n$1\r\n%d\r\n" % VERSION)

    def test_its_schema_serves_this_release_before_the_move_and_after_it(
        self, node: PostgresNode
    ) -> None:
        with (
            earlier(node, VERSION_3) as old,
            over(old.url, max_ttl=600) as redlock,
            held(redlock) as lock,
        ):
            see_in_service(old)
            [status] = redlock.status().nodes
            assert (status.error, status.votes) == ("", True)
            see_moved(old)
            see_in_service(old, "also free")
            renew_now(redlock, lock)


class TestAMoveFromVersion2:
    """`setup` moves the schema of version 2 in place; no client has to be stopped."""

    @pytest.fixture
    def old(self, node: PostgresNode) -> Iterator[PostgresNode]:
        with earlier(node, VERSION_2) as made:
            yield made

    def test_no_record_changes_and_no_client_notices(self, old: PostgresNode) -> None:
        every = "SELECT name, value, expires_at FROM redlock.key ORDER BY id"
        [(known,)] = old.query(RUN)
        session = Session(old)
        with closing(session.connection):  # a client of version 2
            assert session.call(grant(ONE, run=known)) == 1
            session.commit()
            rows = old.query(every)
            assert len(rows) > len(old.query(ROWS))
            see_moved(old)
            assert old.query(every) == rows
            assert session.call(grant(ONE, run=known)) == 1
            assert session.call(grant(TWO, run=known))[:1] == [0]
            session.commit()
        see_in_service(old)

    def test_a_client_of_this_release_names_the_command(self, old: PostgresNode) -> None:
        with Redlock([old.url], node_timeout=NODE_TIMEOUT, max_ttl=TTL) as redlock:
            [status] = redlock.status().nodes
            assert f"OLDERSCHEMA version 2, and this release needs {VERSION}" in status.error
            assert "`celery -A shop redlock setup`, which moves the schema" in status.error
            old.setup()
            [status] = redlock.status().nodes
            assert status.error == ""

    def test_doctor_names_the_command(self, old: PostgresNode) -> None:
        with closing(old.connect()) as connection:
            [hint] = [hint for what, _, hint in doubts_of(connection) if what == "schema"]
            assert hint.startswith(f"version {VERSION} is needed: `celery -A shop redlock setup`")
            old.setup()
            assert "schema" not in [what for what, _, _ in doubts_of(connection)]


@pytest.mark.parametrize(
    "version", [VERSION_1, VERSION_2, VERSION_3], ids=["from 1", "from 2", "from 3"]
)
def test_a_schema_that_was_moved_has_the_functions_of_a_new_one(
    node: PostgresNode, version: str
) -> None:
    functions = node.query(FUNCTIONS)
    assert "newest" in str(functions)
    with earlier(node, version) as old:
        assert old.query(FUNCTIONS) != functions
        old.setup()
        assert old.query(FUNCTIONS) == functions


def test_doctor_does_not_call_a_move_needed_that_is_not(node: PostgresNode) -> None:
    with earlier(node, VERSION_3) as old, closing(old.connect()) as connection:
        [hint] = [hint for what, _, hint in doubts_of(connection) if what == "schema"]
        assert "it serves this release, too" in hint
        assert "is needed" not in hint


class TestAMoveFromVersion1:
    """`setup` moves the schema of version 1 in place, and its records of the server."""

    @pytest.fixture
    def old(self, node: PostgresNode) -> Iterator[PostgresNode]:
        """Give a node with version 1, and its records."""
        with earlier(node, VERSION_1) as made:
            self.note_old_run_id(made)
            yield made

    def note_old_run_id(self, node: PostgresNode) -> None:
        run = "SELECT redlock.run_id()"
        node.query(f"UPDATE redlock.key SET value = ({run})::bytea WHERE name = '{{redlock}}:run'")
        node.query(
            f"UPDATE redlock.key SET value = ('5 ' || ({run}))::bytea"
            " WHERE name = '{redlock}:tenure'"
        )

    def test_no_row_goes_and_no_grace_period_begins(self, old: PostgresNode) -> None:
        [(known,)] = old.query(RUN)
        session = Session(old)
        with closing(session.connection):
            assert session.call(grant(ONE, least="7", run=known)) == [1, 7]
            session.commit()
            rows = old.query(ROWS)
            see_moved(old)
            assert old.query(ROWS) == rows
            assert old.query("SELECT redlock.version()") == [(VERSION,)]
            [(run,)] = old.query("SELECT redlock.run_id()")
            assert old.query(RUN) == [(run,)]
            assert old.query(TENURE) == [(f"6 {run}",)]
            # a client of version 1 that is still connected
            assert session.call(grant(ONE, run=known)) == 1
            assert session.call(grant(TWO, run=known))[:1] == [0]
            session.commit()
        see_in_service(old)

    def test_a_grant_that_runs_meanwhile_keeps_its_turn(self, old: PostgresNode) -> None:
        [(known,)] = old.query(RUN)
        one, two = Session(old), Session(old)
        with closing(one.connection), closing(two.connection), closing(old.connect()) as connection:
            assert one.call(grant(ONE, run=known)) == 1
            assert create_schema(connection) == "moved"
            two.connection.execute("SET lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                two.call(grant(TWO, run=known))
            two.connection.rollback()
            one.commit()
            assert two.call(grant(TWO, run=known))[:1] == [0]

    def test_a_server_that_has_changed_before_begins_a_grace_period(
        self, old: PostgresNode
    ) -> None:
        old.query("UPDATE redlock.key SET value = '7-00000001' WHERE name = '{redlock}:run'")
        old.setup()
        with over(old.url) as fresh:
            assert is_refused(fresh)
        assert old.query(QUIET)

    def test_a_client_says_which_of_the_two_is_newer(self, old: PostgresNode) -> None:
        with Redlock([old.url], node_timeout=NODE_TIMEOUT, max_ttl=TTL) as redlock:
            [status] = redlock.status().nodes
            assert f"OLDERSCHEMA version 1, and this release needs {VERSION}" in status.error
            assert "`celery -A shop redlock setup`, which moves the schema" in status.error
            old.setup()
            old.query("CREATE OR REPLACE FUNCTION redlock.version() RETURNS int RETURN 99")
            [status] = redlock.status().nodes
            assert f"NEWERSCHEMA version 99, and this release needs {VERSION}" in status.error
        with (
            closing(old.connect()) as connection,
            pytest.raises(psycopg.Error, match="NEWERSCHEMA"),
        ):
            create_schema(connection)
        assert old.query("SELECT redlock.version()") == [(99,)]
