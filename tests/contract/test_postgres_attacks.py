"""What attacks on a PostgreSQL node found: no other client, role or setting takes a lock away."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.lock.postgres.address import address_of
from celery_redlock.lock.server.requests import RENEW
from tests.conftest import eventually
from tests.contract.postgres_calls import (
    COUNTER,
    LOCK,
    ONE,
    TTL,
    Call,
    Session,
    done,
    grant,
    permit,
    postgres,
)
from tests.contract.servers import Command
from tests.postgres import PostgresNode, standing_node

pytestmark = pytest.mark.postgresql

LONGER = str(2 * int(TTL))
EVIL = """
CREATE FUNCTION public.evil(bigint, int) RETURNS bigint LANGUAGE plpgsql AS
  'BEGIN DELETE FROM redlock.key; RETURN 0; END';
CREATE OPERATOR public.% (LEFTARG = bigint, RIGHTARG = int, FUNCTION = public.evil)
"""


@pytest.fixture
def node(postgres_template: Path) -> Iterator[PostgresNode]:
    """Give a node whose settings a test may change."""
    with standing_node(postgres_template) as made:
        yield made


def ask(command: Command, call: Call) -> Any:
    script, keys, arguments = call
    return command("EVAL", script.source.decode(), str(len(keys)), *keys, *arguments)


@pytest.mark.parametrize("again", [grant(ONE), permit(ONE)])
def test_a_grant_that_is_sent_twice_does_not_shorten_a_renewed_lease(
    sessions: list[Session], pool: ThreadPoolExecutor, command: Command, again: Call
) -> None:
    """The second one has read the clock before the renewal, and comes after it."""
    sessions[0].call(again)
    sessions[0].commit()
    (renewed,) = sessions[0].call((RENEW, (LOCK, COUNTER), (ONE, LONGER, "")))
    late = pool.submit(sessions[1].call, again)
    try:
        eventually(lambda: late.done() or sessions[1].waits())
    finally:
        sessions[0].commit()
    late.result()
    sessions[1].commit()
    assert renewed == 1
    assert command("PTTL", LOCK) > int(TTL) * 1.5


def test_a_locked_row_costs_its_own_lock_alone(node: PostgresNode, command: Command) -> None:
    names = [LOCK, f"{LOCK}-two", f"{LOCK}-three"]
    for name in names:
        command("SET", name, ONE, "PX", TTL)
    words = (RENEW, (*names, COUNTER), (ONE, LONGER, "") * 3)
    with closing(node.connect()) as other:
        other.autocommit = False
        other.execute("SELECT FROM redlock.key WHERE name = %s FOR UPDATE", [names[1].encode()])
        assert ask(command, words) == [1, None, 1]
        other.rollback()
    assert ask(command, words) == [1, 1, 1]


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_an_error_costs_one_call_at_any_isolation(
    node: PostgresNode, sessions: list[Session], level: str
) -> None:
    node.query(f"ALTER DATABASE postgres SET default_transaction_isolation = '{level}'")
    command = postgres(address_of(node.url), 1.0)
    sessions[0].call(grant(ONE))  # has the turn until it commits
    reply = ask(command, grant(ONE))
    assert isinstance(reply, redis.ResponseError)
    assert "TRYAGAIN" in str(reply)
    sessions[0].commit()
    assert ask(command, grant(ONE)) == 1


SWEPT = "UPDATE redlock.swept SET at = at - interval '2 minutes'"
ADDED = (
    "INSERT INTO redlock.key SELECT sha256(n), n, 'v', now() - %s::text::interval"
    " FROM (SELECT ({} || i)::bytea AS n FROM generate_series(1, %s) AS i) AS names"
    " ON CONFLICT DO NOTHING"
)
READ = (
    "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables"
    " WHERE schemaname = 'redlock' AND relname = 'key'"
)


def test_a_sweep_goes_on_at_each_call_until_it_has_seen_all_rows(node: PostgresNode) -> None:
    node.empty()
    node.query(ADDED.format("'x'"), "5 minutes", 1200)
    node.query("INSERT INTO redlock.item SELECT id, 'field', 1 FROM redlock.key")
    node.query(SWEPT)
    left = []
    for _ in range(4):
        node.query("SELECT redlock.sweep()")
        left += node.query(
            "SELECT count(*), (SELECT count(*) FROM redlock.item) FROM redlock.key"
            " WHERE value = 'v'"
        )
    node.query(ADDED.format("'y'"), "5 minutes", 1)
    node.query("SELECT redlock.sweep()")  # the next one begins after a minute
    assert left == [(700, 700), (200, 200), (0, 0), (0, 0)]
    assert node.query("SELECT count(*) FROM redlock.key WHERE value = 'v'") == [(1,)]


def test_a_ping_sweeps_for_a_part_of_the_node_timeout(node: PostgresNode) -> None:
    node.empty()
    node.query(ADDED.format("'x'"), "5 minutes", 1200)
    node.query(SWEPT)
    assert postgres(address_of(node.url))("PING") == "PONG"
    assert node.query("SELECT count(*) FROM redlock.key WHERE value = 'v'") == [(0,)]


def test_a_part_of_a_sweep_reads_no_more_rows_if_there_are_more(node: PostgresNode) -> None:
    node.empty()
    node.query(ADDED.format("'x'"), "-1 hour", 5000)
    node.query("ANALYZE redlock.key")
    node.query(SWEPT)
    with closing(node.connect()) as session, session.transaction():
        session.execute("SELECT redlock.sweep()")
        row = session.execute(READ).fetchone()
    assert row is not None
    assert 500 <= row[0] < 2500


def test_a_lock_that_a_sweep_could_delete_is_granted(
    node: PostgresNode, sessions: list[Session]
) -> None:
    node.query(ADDED.format(f"'{LOCK}'"), "5 minutes", 1)
    node.query(ADDED.format(f"'{LOCK}'"), "2 hours", 2)
    node.query(SWEPT)
    sweeping = sessions[1].connection
    sweeping.execute("SELECT redlock.sweep()")
    left = sweeping.execute("SELECT convert_from(name, 'UTF8') FROM redlock.key").fetchall()
    assert left == [(f"{LOCK}1",)]
    assert done(sessions[0], grant(ONE, f"{LOCK}1")) == 1
    sweeping.rollback()


def test_an_operator_of_another_role_is_not_run(node: PostgresNode, command: Command) -> None:
    node.query("CREATE ROLE locks LOGIN")
    node.query("GRANT USAGE ON SCHEMA redlock TO locks")
    node.query("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA redlock TO locks")
    command("SET", f"{LOCK}-other", ONE)
    node.query(EVIL)
    url = node.url.replace("postgres@", "locks@")
    with psycopg.connect(url) as session:  # who looks in public finds it
        assert session.execute("SELECT 5::bigint % 3").fetchone() == (0,)
    command("SET", f"{LOCK}-other", ONE)
    as_locks = postgres(address_of(url))
    assert ask(as_locks, permit(ONE))[0] == 1
    assert command("GET", f"{LOCK}-other") == ONE


@pytest.mark.parametrize(
    ("setting", "value"), [("standard_conforming_strings", "off"), ("client_min_messages", "error")]
)
def test_a_setting_that_changes_what_a_call_means_is_refused(
    node: PostgresNode, setting: str, value: str
) -> None:
    node.query(f"ALTER ROLE postgres SET {setting} TO {value}")
    with Redlock([node.url]) as made:
        (status,) = made.status().nodes
    assert f"{setting} is {value}" in status.error
    assert "standard_conforming_strings = on" in status.error
