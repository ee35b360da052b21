"""What is wrong with a PostgreSQL node is said early, with the way out, and without a password."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from celery_redlock import QuorumUnreachable, Redlock
from celery_redlock.errors import SettingsError
from celery_redlock.lock.node_status import read_nodes
from celery_redlock.lock.postgres.schema import VERSION
from celery_redlock.operate.cli.views import summary_line
from celery_redlock.testing.servers import claim_port
from tests import fork_server
from tests.conftest import NODE_TIMEOUT, eventually
from tests.postgres import PostgresNode, pooler, standby, standing_node

pytestmark = pytest.mark.postgresql

SECRET = "sekret"
SETUP = "celery -A shop redlock setup"
A_STANDBY = "a standby: name its primary, or all hosts with target_session_attrs=read-write"
OTHER_VERSION = (
    "CREATE OR REPLACE FUNCTION redlock.version() RETURNS int LANGUAGE sql IMMUTABLE RETURN 99"
)


@pytest.fixture
def node(postgres_template: Path) -> Iterator[PostgresNode]:
    with standing_node(postgres_template) as made:
        yield made


@contextmanager
def without_schema(node: PostgresNode) -> Iterator[None]:
    """Let a node have no schema, or that of a test, meanwhile."""
    node.query("DROP SCHEMA redlock CASCADE")
    try:
        yield
    finally:
        node.query("DROP SCHEMA IF EXISTS redlock CASCADE")
        node.setup()


def refused(url: str) -> tuple[str, str]:
    """Return why a new client gets no lock, and what its status says."""
    with Redlock([url], node_timeout=NODE_TIMEOUT) as redlock:
        with pytest.raises(QuorumUnreachable) as caught:
            redlock.lock("r").acquire()
        return str(caught.value), read_nodes(redlock.session).nodes[0].error


def see(url: str, words: str, hint: str) -> None:
    """See that a client's error and its status have these words, and the hint."""
    for text in refused(url):
        assert words in text
        assert f"({hint}" in text


def see_lock(url: str) -> None:
    """See that a new client gets a lock, and leave none."""
    with Redlock([url], node_timeout=NODE_TIMEOUT) as redlock, redlock.lock("r", wait=60) as lock:
        assert lock.held


def grant_rights(node: PostgresNode) -> None:
    """Grant the role "locks" what the hint says."""
    node.query("GRANT USAGE ON SCHEMA redlock TO locks")
    node.query("GRANT ALL ON ALL TABLES IN SCHEMA redlock TO locks")


def refused_at_once(*urls: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        Redlock(urls)
    return str(caught.value)


class TestTheSetting:
    def test_nodes_of_two_kinds(self) -> None:
        text = refused_at_once("redis://127.0.0.1:1/0", "postgresql://u:sekret@h/db")
        assert "nodes of two kinds have no common majority: name Redis nodes, or one" in text
        assert SECRET not in text

    def test_two_of_them(self) -> None:
        text = refused_at_once("postgresql://u:sekret@h/db", "postgresql://h2/db?password=sekret")
        assert "name one PostgreSQL: its durability replaces the majority" in text
        assert SECRET not in text

    def test_no_psycopg(self) -> None:
        story = """
import sys
class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "psycopg":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocks())
from celery_redlock import Redlock
Redlock(["redis://127.0.0.1:1/0"]).close()
try:
    Redlock(["postgresql://u:sekret@h/db"])
except Exception as error:
    print(type(error).__name__, error)
"""
        command = [sys.executable, "-c", story]
        done = fork_server.run(command, timeout=120, check=True)
        assert done.stdout.startswith("SettingsError")
        assert 'needs psycopg: pip install "psycopg[binary]>=3.2.4"' in done.stdout
        assert SECRET not in done.stdout + done.stderr

    def test_a_psycopg_without_libpq(self) -> None:
        story = """
from celery_redlock import Redlock
try:
    Redlock(["postgresql://u:sekret@h/db"])
except Exception as error:
    print(type(error).__name__, error)
"""
        done = fork_server.run(
            [sys.executable, "-c", story], timeout=120, check=True,
            env={**os.environ, "PSYCOPG_IMPL": "other"},
        )  # fmt: skip
        assert done.stdout.startswith("SettingsError")
        assert 'pip install "psycopg[binary]>=3.2.4", and unset PSYCOPG_IMPL: ' in done.stdout
        assert "'other'" in done.stdout
        assert SECRET not in done.stdout + done.stderr

    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://u:se%zzkret@h/db",  # libpq refuses the percent sign
            "postgresql://u:x@sekret@h:1/db",  # libpq: host "sekret@h"
            "postgresql://u:se/kret@127.0.0.1:1/db",  # libpq: port "se"
            "postgresql://u:12/sekret@127.0.0.1:1/db",  # libpq: port 12
            "postgresql://u/x:sekret@127.0.0.1:1/db",
            "postgresql://u:sekret@h:abc/db",
            "postgresql://u:sekret@h:123456/db",
            "postgresql://u:sekret@h,i,j/db?port=1,2",
            "postgresql://u:se?sekret@h/db?listen_host=x",
        ],
    )
    def test_what_is_no_url_of_libpq_is_refused_without_its_password(self, url: str) -> None:
        text = refused_at_once(url)
        assert "is not a URL of a PostgreSQL server; in user and password, write special" in text
        assert not any(part in text for part in ("sekret", "kret", "se/", "se?"))

    def test_a_misspelt_parameter_is_named_without_its_value(self) -> None:
        text = refused_at_once("postgresql://u:sekret@h/db?listen_hosts=sekret")
        assert "names 'listen_hosts', which is not an option of libpq; did you mean" in text
        assert "'listen_host'" in text
        for wrong in ("listen_host=", "listen_port=abc", "listen_port="):
            text = refused_at_once(f"postgresql://u:sekret@h/db?{wrong}")
            assert f"its query names {wrong.partition('=')[0]!r} without a right value" in text
        assert SECRET not in text


def connected(url: str) -> list[psycopg.Connection]:
    """Return a new connection; none while the server has none left."""
    try:
        return [psycopg.connect(url)]
    except psycopg.OperationalError as error:
        if "connection slots" not in str(error):
            raise
        return []


class TestAServer:
    def test_without_the_schema_or_with_that_of_another_version(self, node: PostgresNode) -> None:
        with without_schema(node):
            see(node.url, 'schema "redlock" does not exist', f"run `{SETUP}` once")
            node.setup()
            node.query(OTHER_VERSION)
            see(
                node.url,
                f"version 99, and this release needs {VERSION}",
                "install that newer release",
            )

    def test_whose_lines_and_doctor_lead_to_the_passage_of_a_postgresql(
        self, node: PostgresNode, caplog: pytest.LogCaptureFixture
    ) -> None:
        with without_schema(node):
            refused(node.url)
            eventually(lambda: "gives no vote" in caplog.text)
            with Redlock([node.url]) as redlock:
                told = summary_line(read_nodes(redlock.session), [])
        (line,) = {line for line in caplog.messages if "gives no vote" in line}
        for text in (line, told):
            assert text.endswith("See `celery redlock explain a-postgresql-gives-no-vote`")

    @pytest.mark.parametrize(
        ("reply", "words", "hint"),
        [
            (":1", f"version 1, and this release needs {VERSION}", f"run `{SETUP}`, which moves"),
            (":99", f"version 99, and this release needs {VERSION}", "install that newer release"),
            (f":{VERSION}", "its function redlock.command has an unexpected answer", ""),
            ("*0", "its function redlock.command has an unexpected answer", ""),
            ("+OK", "its function redlock.command has an unexpected answer", ""),
        ],
    )
    def test_whose_greeting_is_not_that_of_this_release(
        self, node: PostgresNode, reply: str, words: str, hint: str
    ) -> None:
        command = "redlock.command(w bytea[]) RETURNS bytea LANGUAGE sql"
        with without_schema(node):
            node.setup()
            node.query(
                f"CREATE OR REPLACE FUNCTION {command} RETURN convert_to(E'{reply}\\r\\n', 'UTF8')"
            )
            for text in refused(node.url):
                assert words in text
                assert f"({hint}" in text if hint else "unpack" not in text

    def test_a_standby(self, node: PostgresNode) -> None:
        with standby(node) as other:
            see(other.url, "session is read-only", A_STANDBY)
            attributes = f"{other.url}?target_session_attrs="
            see(f"{attributes}read-write", "session is read-only", A_STANDBY)
            see(f"{attributes}any", "recovery is in progress", A_STANDBY)
            for text in refused(f"{attributes}any"):
                assert "INFO" not in text

    def test_a_user_whose_transactions_only_read(self, node: PostgresNode) -> None:
        node.query("ALTER DATABASE postgres SET default_transaction_read_only = on")
        for text in refused(node.url):
            assert f"({A_STANDBY}, in its URL; or its default_transaction_read_only is on" in text

    def test_a_pgbouncer_that_takes_no_more_clients(self, node: PostgresNode) -> None:
        with pooler(node, max_client_conn=1) as between, psycopg.connect(between.url):
            hint = "raise max_client_conn of its pgbouncer"
            see(between.url, "no more connections allowed", hint)

    def test_whose_strings_have_escapes_has_the_schema_as_everywhere(
        self, node: PostgresNode
    ) -> None:
        off = "ALTER DATABASE postgres SET standard_conforming_strings"
        with without_schema(node):
            node.query(f"{off} = off")
            node.setup()
            node.query(f"{off} = on")
            see_lock(node.url)

    def test_a_database_or_a_role_that_is_not_there(self, node: PostgresNode) -> None:
        place = f"127.0.0.1:{node.port}"
        see(f"postgresql://postgres@{place}/nope", 'database "nope" does', "correct the database")
        see(f"postgresql://nobody@{place}/postgres", 'role "nobody" does', "correct the user in")

    def test_a_role_without_rights_and_then_with_those_of_the_hint(
        self, node: PostgresNode
    ) -> None:
        node.query("CREATE ROLE locks LOGIN")
        url = node.url.replace("postgres@", "locks@")
        rights = (
            "its user needs USAGE of the schema redlock; SELECT, INSERT, UPDATE, DELETE on its "
            "tables"
        )
        see(url, "permission denied for schema redlock", rights)
        grant_rights(node)
        with Redlock([url], node_timeout=NODE_TIMEOUT) as redlock:
            with redlock.lock("r", wait=60, fencing=True) as lock:
                assert lock.held
            assert [one.votes for one in redlock.status().nodes] == [True]

    def test_no_connection_is_left(self, postgres_template: Path) -> None:
        few = PostgresNode(postgres_template, fsync=False, max_connections=5)
        with few as server, ExitStack() as others:
            server.setup()
            server.query("CREATE ROLE locks LOGIN")
            grant_rights(server)
            server.disconnect()
            url = server.url.replace("postgres@", "locks@")
            for _ in range(2):  # three more are for superusers
                # the server may not have ended the connection above yet
                (made,) = eventually(lambda: connected(url))
                others.enter_context(closing(made))
            see(url, "onnection slots", "raise its max_connections, or put pgbouncer between")
            others.close()
            see_lock(url)

    def test_no_connection_is_left_to_a_role_or_a_database(self, node: PostgresNode) -> None:
        node.query("CREATE ROLE one LOGIN CONNECTION LIMIT 1")
        url = node.url.replace("postgres@", "one@")
        hint = "raise its CONNECTION LIMIT, or put pgbouncer between"
        with closing(psycopg.connect(url)):
            see(url, 'too many connections for role "one"', hint)
        node.query("CREATE DATABASE small CONNECTION LIMIT 0")
        # a role of its own: the server may not have ended the connection above yet
        node.query("CREATE ROLE another LOGIN")
        url = f"{url.replace('one@', 'another@').rpartition('/')[0]}/small"
        see(url, 'too many connections for database "small"', hint)

    @pytest.mark.parametrize(
        ("query", "words"),
        [
            ("sslmode=bogus", 'invalid sslmode value: "bogus"'),
            ("target_session_attrs=bogus", 'invalid target_session_attrs value: "bogus"'),
            ("sslmode=require", "server does not support SSL, but SSL was required"),
        ],
    )
    def test_a_wrong_option(self, node: PostgresNode, query: str, words: str) -> None:
        for text in refused(f"{node.url}?{query}"):
            assert words in text
            assert " in its URL" in text or "of its URL" in text

    def test_a_host_that_no_name_server_knows(self) -> None:
        for text in refused("postgresql://u@nohost.invalid/db"):
            assert "nohost.invalid: " in text
            assert "connection is lost" not in text

    def test_one_that_is_down(self) -> None:
        with closing(claim_port()) as claim:
            for text in refused(f"postgresql://u@127.0.0.1:{claim.getsockname()[1]}/db"):
                assert "Connection refused" in text
                assert "Is the server running" not in text


def test_a_name_is_looked_up_before_libpq_would_keep_the_gil_for_it(node: PostgresNode) -> None:
    """Only Python's resolver knows the name here."""
    story = f"""
import socket
known = socket.getaddrinfo
def found(host, *words, **options):
    names = {{"db.invalid": "127.0.0.1"}}
    return known(names.get(host, host), *words, **options)
socket.getaddrinfo = found
from celery_redlock import Redlock
url = "postgresql://postgres@nohost.invalid,db.invalid/postgres?port={node.port}"
with Redlock([url], node_timeout={NODE_TIMEOUT}) as redlock, redlock.lock("r", wait=60) as lock:
    print(lock.held)
"""
    command = [sys.executable, "-c", story]
    done = fork_server.run(command, timeout=120)
    assert done.stdout == "True\n", done.stderr


def is_asked(node: PostgresNode, role: str) -> bool:
    """Return whether the node asks a role for its password."""
    try:
        psycopg.connect(node.url.replace("postgres@", f"{role}@")).close()
    except psycopg.OperationalError as error:
        return "no password supplied" in str(error)
    return False


class TestThePassword:
    @pytest.fixture
    def guarded(self, node: PostgresNode) -> Iterator[PostgresNode]:
        """Give a node that asks the role "locks" for a password."""
        node.query("CREATE ROLE locks LOGIN PASSWORD 'ri/ght@'")
        grant_rights(node)
        rules = node.data / "pg_hba.conf"
        before = rules.read_text()
        rules.write_text(f"host all locks all scram-sha-256\n{before}")
        node.query("SELECT pg_reload_conf()")
        eventually(lambda: is_asked(node, "locks"))
        yield node
        rules.write_text(before)
        node.query("SELECT pg_reload_conf()")
        eventually(lambda: not is_asked(node, "locks"))

    def test_a_right_one_in_each_place(
        self, guarded: PostgresNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = f"127.0.0.1:{guarded.port}/postgres"
        see_lock(f"postgresql://locks:ri%2Fght%40@{place}")
        see_lock(f"postgresql://locks@{place}?password=ri%2Fght%40")
        monkeypatch.setenv("PGPASSWORD", "ri/ght@")
        see_lock(f"postgresql://locks@{place}")

    def test_none_and_a_wrong_one_say_so_and_no_text_shows_it(
        self, guarded: PostgresNode, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        place = f"127.0.0.1:{guarded.port}/postgres"
        hint = "correct user and password in its URL, or set PGPASSWORD"
        see(f"postgresql://locks@{place}", "no password supplied", hint)
        shown = []
        for url in (
            f"postgresql://locks:{SECRET}@{place}",
            f"postgresql://locks:%73ekret@{place}",
            f"postgresql://locks@{place}?password={SECRET}",
            f"postgres:///postgres?host=127.0.0.1&port={guarded.port}&user=locks&password={SECRET}",
            f"postgresql://locks:{SECRET}@{place}?listen_host=127.0.0.1",
        ):
            see(url, "password authentication failed", hint)
            with Redlock([url]) as redlock:
                [node] = redlock.session.nodes.all
                doubts = node.address.doubts(NODE_TIMEOUT)
                shown += map(repr, (redlock, node.address, redlock.status(), doubts))
                with pytest.raises(RedisConnectionError) as caught:
                    node.address.create_schema("redlock")
                shown.append(repr(caught.value))
            shown += refused(url)
        text = "\n".join([*shown, caplog.text])
        assert "password authentication failed" in text
        assert SECRET not in text
        assert "%73" not in text
