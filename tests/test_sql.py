"""The SQL of the pages does what the text around it says, on PostgreSQL and on SQLite."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.pages import PAGES, blocks

TABLES = """
CREATE TEMPORARY TABLE account (id INTEGER, balance INTEGER, fence BIGINT);
INSERT INTO account VALUES (1, 10, 0);
CREATE TEMPORARY TABLE coupon (campaign TEXT, customer TEXT);
CREATE TEMPORARY TABLE stock (sku TEXT, pieces INTEGER);
INSERT INTO stock VALUES ('42', 1);
CREATE TEMPORARY TABLE article (id INTEGER, body TEXT, version INTEGER);
INSERT INTO article VALUES (1, '', 0);
CREATE TEMPORARY TABLE price (sku TEXT, cents INTEGER, fence BIGINT);
INSERT INTO price VALUES ('42', 1, 0)
"""
COUPON = {"campaign": "may", "customer": "ann"}
PRICE = {"sku": "42", "cents": 2}
# how a statement of the page begins and ends, what it is given, and how many rows it then touches
STORY: list[tuple[str, dict[str, Any], int | None]] = [
    ("UPDATE account SET fence ... fence < :token", {"token": 9}, 1),
    ("UPDATE account SET fence ... fence < :token", {"token": 8}, 0),
    ("SELECT balance ... id = :id", {}, None),
    ("UPDATE account SET balance ... fence = :token", {"token": 9, "balance": 11}, 1),
    ("UPDATE account SET balance ... fence = :token", {"token": 9, "balance": 12}, 1),
    ("UPDATE account SET balance ... fence = :token", {"token": 8, "balance": 13}, 0),
    ("UPDATE price ... fence <= :token", {"token": 8, **PRICE}, 1),
    ("UPDATE price ... fence <= :token", {"token": 9, **PRICE}, 1),
    ("UPDATE price ... fence <= :token", {"token": 9, **PRICE}, 1),
    ("UPDATE price ... fence <= :token", {"token": 8, **PRICE}, 0),
    ("CREATE UNIQUE INDEX ... (campaign, customer)", {}, None),
    ("INSERT INTO coupon ... DO NOTHING", COUPON, 1),
    ("INSERT INTO coupon ... DO NOTHING", COUPON, 0),
    ("UPDATE stock ... pieces > 0", {"sku": "42"}, 1),
    ("UPDATE stock ... pieces > 0", {"sku": "42"}, 0),
    ("SELECT balance ... FOR UPDATE", {}, None),
    ("SELECT pg_advisory_xact_lock ... ", {}, None),
    ("UPDATE article ... version = :version", {"body": "mine", "version": 0}, 1),
    ("UPDATE article ... version = :version", {"body": "lost", "version": 0}, 0),
]
# it looks for sessions behind a pooler: `tests/contract/test_advisory_locks.py` runs it there
OF_SESSIONS = "pgbouncer-and-advisory-locks.md"
NOT_SQLITE = ("FOR UPDATE", "pg_advisory_xact_lock")
Run = Callable[..., int]
pytestmark = pytest.mark.pages


def statements() -> list[str]:
    """Return the statements of all pages, without their comments."""
    pages = [page for page in PAGES if page.name != OF_SESSIONS]
    code = "\n".join(block.code for page in pages for block in blocks(page, "sql"))
    found = [part.strip() for part in re.sub(r"--.*", "", code).split(";")]
    return [one for one in found if one and not one.startswith("GRANT")]  # of the lock's own schema


def find(told: str) -> str:
    """Return the statement of the page that begins and ends so."""
    begin, _, end = told.partition(" ... ")
    found = [one for one in statements() if one.startswith(begin) and one.endswith(end)]
    assert len(found) == 1, f"{told}: {found}"
    return found[0]


def on_sqlite() -> Iterator[Run]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:

        def run(sql: str, **given: Any) -> int:
            knows = not any(word in sql for word in NOT_SQLITE)
            return connection.execute(sql, given).rowcount if knows else -1

        yield run


def on_postgresql() -> Iterator[Run]:
    psycopg = pytest.importorskip("psycopg")
    server = os.environ.get("CELERY_REDLOCK_POSTGRESQL", "postgresql://root@127.0.0.1:5432/test")
    try:
        connection = psycopg.connect(server, autocommit=True, connect_timeout=5)
    except psycopg.OperationalError as error:
        pytest.skip(f"no PostgreSQL answers on CELERY_REDLOCK_POSTGRESQL: {error}")
    with closing(connection):

        def run(sql: str, **given: Any) -> int:
            return int(connection.execute(re.sub(r":([a-z]+)", r"%(\1)s", sql), given).rowcount)

        yield run


@pytest.fixture(params=[on_sqlite, on_postgresql])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    for run in request.param():
        for statement in TABLES.split(";"):
            run(statement)
        yield run


def test_the_statements_touch_the_rows_that_the_page_says(run: Run) -> None:
    assert {find(told) for told, _, _ in STORY} == set(statements())
    for told, given, rows in STORY:
        touched = run(find(told), **{"id": 1, **given})
        assert rows is None or touched == rows, (told, given)
