"""`celery redlock setup`: who may run it, and which rights the user of the workers needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import jsonschema
import pytest

from celery_redlock import Redlock
from celery_redlock.lock.postgres import schema
from tests.conftest import eventually
from tests.integration.conftest import ROOT
from tests.pages import blocks
from tests.postgres import PostgresNode, pooler, standby

SCHEMAS = json.loads((ROOT / "docs" / "command-line.schema.json").read_text())
SHOP = """
from celery import Celery
app = Celery("shop", broker="memory://")
app.conf.redlock_nodes = [{url!r}]
"""
PAGE = ROOT / "docs" / "how-to" / "postgresql.md"


@pytest.fixture
def server(postgres_template: Path) -> Iterator[PostgresNode]:
    """Give a server without the schema, with a user `locks` who may only connect."""
    with PostgresNode(postgres_template, fsync=False) as made:
        made.query("CREATE ROLE locks LOGIN")
        yield made


def setup(folder: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "shop.py").write_text(SHOP.format(url=url))
    line = [sys.executable, "-m", "celery", "-A", "shop", "redlock", "setup", *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


def as_locks(server: PostgresNode) -> str:
    return server.url.replace("postgres@", "locks@")


def cause(url: str) -> str:
    """Return why a node cannot vote; "" if it does."""
    with Redlock([url]) as made:
        (node,) = made.status().nodes
        assert bool(node.error) != node.votes
        return node.error


def test_a_user_without_the_right_to_create_a_schema_is_told_what_to_do(
    server: PostgresNode, tmp_path: Path
) -> None:
    done = setup(tmp_path, as_locks(server))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "permission denied for database postgres (run it as a user with the right" in line
    assert "`redlock setup --sql`" in line


def test_setup_creates_the_schema_once(server: PostgresNode, tmp_path: Path) -> None:
    assert cause(server.url).endswith(
        "(run `celery -A shop redlock setup` once, with the right to create a schema)"
    )
    shown = []
    for _ in range(2):
        shown.append(json.loads(setup(tmp_path, server.url, "--json").stdout))
        jsonschema.validate(shown[-1], {**SCHEMAS, "$ref": "#/$defs/setup"})
    assert [one["created"] for one in shown] == [True, False]
    assert cause(server.url) == ""


@pytest.mark.parametrize("way", ["by setup", "by its statements"])
def test_setup_works_whatever_the_default_isolation_is(
    server: PostgresNode, tmp_path: Path, way: str
) -> None:
    server.query("ALTER DATABASE postgres SET default_transaction_isolation = 'serializable'")
    if way == "by setup":
        assert setup(tmp_path, server.url).returncode == 0
    else:
        server.query(setup(tmp_path, server.url, "--sql").stdout)
    assert cause(server.url) == ""


def test_setup_leaves_the_schema_of_another_release_alone(
    server: PostgresNode, tmp_path: Path
) -> None:
    server.setup()
    server.query("CREATE OR REPLACE FUNCTION redlock.version() RETURNS int RETURN 0")
    done = setup(tmp_path, server.url)
    assert done.returncode == 1
    assert "OTHERSCHEMA version 0" in done.stderr
    assert "DROP SCHEMA redlock CASCADE" in done.stderr
    assert server.query("SELECT redlock.version()") == [(0,)]


def test_the_statements_of_setup_and_the_rights_of_the_page_are_enough(
    server: PostgresNode, tmp_path: Path
) -> None:
    printed = json.loads(setup(tmp_path, as_locks(server), "--sql", "--json").stdout)
    jsonschema.validate(printed, {**SCHEMAS, "$ref": "#/$defs/setup"})
    assert setup(tmp_path, as_locks(server), "--sql").stdout.strip() == printed["sql"].strip()
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


def test_the_doctor_says_which_settings_of_the_server_cost_locks_or_time(
    server: PostgresNode,
) -> None:
    server.setup()
    server.query("ALTER ROLE postgres SET default_transaction_isolation TO serializable")
    server.query("ALTER ROLE postgres SET statement_timeout TO '30s'")
    assert doubts(server.url) == [
        ("default_transaction_isolation", "serializable"),
        ("statement_timeout", "30s"),
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
    monkeypatch.setattr(schema, "LONG", "0 seconds")
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
