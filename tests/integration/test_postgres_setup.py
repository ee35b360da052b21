"""`celery redlock setup`: who may run it, and which rights the user of the workers needs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner, Result

from celery_redlock import Redlock
from celery_redlock.lock.postgres import address, schema
from tests.conftest import eventually
from tests.integration.conftest import ROOT, close_connections
from tests.pages import blocks
from tests.postgres import (
    PostgresNode,
    asked_of,
    may_go_to_a_standby,
    pooler,
    standby,
    standing_node,
)

pytestmark = pytest.mark.postgresql

SCHEMAS = json.loads((ROOT / "docs" / "command-line.schema.json").read_text())
PAGE = ROOT / "docs" / "how-to" / "postgresql.md"
ANEW = (
    "ALTER DATABASE postgres RESET ALL", "ALTER ROLE postgres RESET ALL",
    "DROP SCHEMA IF EXISTS redlock CASCADE", "REVOKE pg_monitor FROM locks",
)  # fmt: skip


@pytest.fixture(scope="module")
def standing_server(postgres_template: Path) -> Iterator[PostgresNode]:
    with PostgresNode(postgres_template, fsync=False) as made:
        made.query("CREATE ROLE locks LOGIN")
        yield made


@pytest.fixture
def server(standing_server: PostgresNode) -> Iterator[PostgresNode]:
    """Give a server without the schema, with a user `locks` who may only connect."""
    yield standing_server
    names = "SHOW synchronous_standby_names"
    standing_server.query("ALTER SYSTEM RESET ALL")  # else what follows waits for a standby
    standing_server.query("SELECT pg_reload_conf()")
    eventually(lambda: standing_server.query(names) == [("",)])
    for sql in ANEW:
        standing_server.query(sql)


def setup(url: str, *words: str) -> Result:
    """Run `celery redlock setup` in this process, of an app with this node."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = [url]
    module = ModuleType("shop")
    module.__dict__["app"] = app
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "shop", module)
        done = CliRunner().invoke(celery, ["-A", "shop", "redlock", "setup", *words])
    close_connections(app)
    app.close()
    return done


def as_locks(server: PostgresNode) -> str:
    return server.url.replace("postgres@", "locks@")


def cause(url: str) -> str:
    """Return why a node cannot vote; "" if it does."""
    with Redlock([url]) as made:
        (node,) = made.status().nodes
        assert bool(node.error) != node.votes
        return node.error


def test_a_user_without_the_right_to_create_a_schema_is_told_what_to_do(
    server: PostgresNode,
) -> None:
    done = setup(as_locks(server))
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert "permission denied for database postgres (run it as a user with the right" in line
    assert "`redlock setup --sql`" in line


def test_setup_creates_the_schema_once(server: PostgresNode) -> None:
    assert cause(server.url).endswith(
        "(run `celery -A shop redlock setup` once, with the right to create a schema)"
    )
    shown = []
    for _ in range(2):
        shown.append(json.loads(setup(server.url, "--json").stdout))
        jsonschema.validate(shown[-1], {**SCHEMAS, "$ref": "#/$defs/setup"})
    assert [one["created"] for one in shown] == [True, False]
    assert cause(server.url) == ""


@pytest.mark.parametrize("way", ["by setup", "by its statements"])
def test_setup_works_whatever_the_default_isolation_is(server: PostgresNode, way: str) -> None:
    server.query("ALTER DATABASE postgres SET default_transaction_isolation = 'serializable'")
    if way == "by setup":
        assert setup(server.url).exit_code == 0
    else:
        server.query(setup(server.url, "--sql").stdout)
    assert cause(server.url) == ""


def test_setup_leaves_the_schema_of_a_newer_release_alone(server: PostgresNode) -> None:
    server.setup()
    server.query("CREATE OR REPLACE FUNCTION redlock.version() RETURNS int RETURN 99")
    done = setup(server.url)
    assert done.exit_code == 1
    assert "NEWERSCHEMA version 99" in done.output
    assert "install that newer release" in done.output
    assert server.query("SELECT redlock.version()") == [(99,)]


@pytest.mark.parametrize("way", ["by setup", "by its statements"])
@pytest.mark.parametrize("version", [1, 2])
def test_setup_moves_the_schema_of_an_earlier_release(
    server: PostgresNode, way: str, version: int
) -> None:
    server.setup()
    server.query("GRANT USAGE ON SCHEMA redlock TO locks")
    server.query(f"CREATE OR REPLACE FUNCTION redlock.version() RETURNS int RETURN {version}")
    assert "which moves the schema in place" in cause(server.url)
    if way == "by setup":
        shown = json.loads(setup(server.url, "--json").stdout)
        jsonschema.validate(shown, {**SCHEMAS, "$ref": "#/$defs/setup"})
        assert (shown["created"], shown["moved"]) == (False, True)
    else:
        server.query(setup(server.url, "--sql").stdout)
    assert cause(server.url) == ""
    assert "already" in setup(server.url).output


def test_setup_says_that_clients_may_hold_locks_of_a_schema_that_was_dropped(
    server: PostgresNode,
) -> None:
    server.setup()
    with Redlock([server.url]) as made, made.lock("r", ttl=60, wait=60):
        server.query("DROP SCHEMA redlock CASCADE")
        assert "it grants locks after a grace period" in setup(server.url).output
        server.query("DROP SCHEMA redlock CASCADE")
        shown = json.loads(setup(server.url, "--json").stdout)
        jsonschema.validate(shown, {**SCHEMAS, "$ref": "#/$defs/setup"})
        assert (shown["created"], shown["trusted"]) == (True, False)


def test_the_statements_of_setup_and_the_rights_of_the_page_are_enough(
    server: PostgresNode,
) -> None:
    printed = json.loads(setup(as_locks(server), "--sql", "--json").stdout)
    jsonschema.validate(printed, {**SCHEMAS, "$ref": "#/$defs/setup"})
    assert setup(as_locks(server), "--sql").stdout.strip() == printed["sql"].strip()
    server.query(printed["sql"])
    assert "needs USAGE of the schema redlock" in cause(as_locks(server))
    code = "\n".join(block.code for block in blocks(PAGE, "postgresql"))
    for right in re.findall(r"GRANT [^;]+", code):
        server.query(right)
    with Redlock([as_locks(server)]) as made:
        assert made.status().has_quorum  # without a grace period: the schema is new
        with made.lock("a", fencing=True, wait=5) as one, made.lock("b", limit=2, wait=5) as other:
            assert one.held
            assert other.held
        assert made.locks().locks == ()


def doubts(url: str) -> list[tuple[str, str]]:
    """Return settings and values that `doctor` reports, but for fsync, which is off here."""
    with Redlock([url]) as made:
        found = made.session.nodes.all[0].address.doubts(5)
    return [(setting, value) for setting, value, _ in found if setting != "fsync"]


def test_the_doctor_says_if_no_message_arrives_through_a_pooler(server: PostgresNode) -> None:
    server.setup()
    with pooler(server) as between:
        listens = f"{between.url}?listen_host=127.0.0.1&listen_port="
        assert doubts(server.url) == doubts(f"{listens}{server.port}") == []
        unheard = [("messages", "a pooler stands between")]
        assert doubts(between.url) == doubts(f"{listens}{between.port}") == unheard
        with pooler(server, pool_mode="session") as session:
            assert doubts(f"{listens}{session.port}") == []
        [(setting, cause)] = doubts(f"{listens}{session.port}")
        assert setting == "messages"
        assert "Connection refused" in cause


def test_the_doctor_says_if_messages_of_other_connections_do_not_arrive(
    server: PostgresNode, postgres_template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.setup()
    with standing_node(postgres_template) as other:
        monkeypatch.setattr(address, "MESSAGE_TIMEOUT", 0.5)
        elsewhere = f"{server.url}?listen_host=127.0.0.1&listen_port={other.port}"
        [(setting, cause)] = doubts(elsewhere)
    assert (setting, cause) == (
        "messages",
        "no message of another connection came within 0.5 s",
    )


def test_the_doctor_says_which_settings_of_the_server_cost_locks_or_time(
    server: PostgresNode,
) -> None:
    server.setup()
    server.query("ALTER ROLE postgres SET default_transaction_isolation TO serializable")
    server.query("ALTER ROLE postgres SET statement_timeout TO '30s'")
    server.query("ALTER ROLE postgres SET idle_session_timeout TO '1h'")
    assert doubts(server.url) == [
        ("default_transaction_isolation", "serializable"),
        ("statement_timeout", "30s"),
        ("idle_session_timeout", "1h"),
    ]
    server.query("ALTER ROLE postgres RESET ALL")
    server.query("ALTER SYSTEM SET synchronous_standby_names TO 'away'")
    server.query("SELECT pg_reload_conf()")
    eventually(lambda: doubts(server.url) == [("synchronous_standby_names", "away")])


def test_the_doctor_says_that_a_promoted_standby_may_lack_locks(server: PostgresNode) -> None:
    server.setup()
    with standby(server):
        assert doubts(server.url) == [("synchronous_standby_names", "''")]


def test_the_doctor_says_what_a_user_without_pg_monitor_cannot_see(server: PostgresNode) -> None:
    server.setup()
    server.query("GRANT USAGE ON SCHEMA redlock TO locks")
    with standby(server, synchronous=True), ExitStack() as stack:
        assert doubts(as_locks(server)) == [("rights", "locks")]
        for _ in range(33):  # of 40, of another user
            stack.enter_context(closing(server.connect()))
        used, rights = doubts(as_locks(server))
        assert (used[0], rights[0]) == ("connections", "rights")
        server.query("GRANT pg_monitor TO locks")
        assert [setting for setting, _ in doubts(as_locks(server))] == ["connections"]


def test_the_doctor_counts_connections_and_long_transactions(
    server: PostgresNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.setup()
    monkeypatch.setattr(schema, "LONG_TRANSACTION", "0 seconds")
    with ExitStack() as stack:
        for _ in range(33):  # of 40
            connection = stack.enter_context(closing(server.connect()))
        connection.autocommit = False
        connection.execute("SELECT 1")
        (used, open_for) = doubts(server.url)
    assert used[0] == "connections"
    assert used[1].endswith(" of 40")
    assert open_for[0] == "transactions"
    assert open_for[1].endswith(" older than 0 seconds")


def test_what_setup_and_doctor_ask_is_not_for_a_standby_that_lags(server: PostgresNode) -> None:
    with asked_of(server) as asked:
        assert setup(server.url).exit_code == 0
        assert setup(server.url).exit_code == 0
        doubts(server.url)
    assert sum(one.startswith("BEGIN") for one in asked) == 3
    assert [one for one in asked if may_go_to_a_standby(server, one)] == []
