"""What a body writes to PostgreSQL with: each kind of cursor, connection and session.

Each is a context that begins no transaction itself. `Writer.given` is what `confirm_in` gets.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import psycopg
import psycopg2
import psycopg2.extras
import sqlalchemy
from psycopg.rows import class_row, dict_row
from sqlalchemy.ext import asyncio as asynchronous
from sqlalchemy.orm import Session


@dataclass(frozen=True)
class Writer:
    """given: for `confirm_in`. run: executes SQL in its transaction, to be awaited if async."""

    given: Any
    run: Callable[[str], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]


class Article:
    """What a row of a body's own is made into; no row of a lock's fits."""

    def __init__(self, *, name: str) -> NoReturn:
        raise AssertionError(name)


@contextlib.contextmanager
def psycopg_cursor(url: str, **options: Any) -> Iterator[Writer]:
    with contextlib.closing(psycopg.connect(url, **options)) as connection:
        cursor = connection.cursor()
        yield Writer(cursor, cursor.execute, connection.commit, connection.rollback)


@contextlib.contextmanager
def psycopg_connection(url: str, **options: Any) -> Iterator[Writer]:
    with contextlib.closing(psycopg.connect(url, **options)) as connection:
        yield Writer(connection, connection.execute, connection.commit, connection.rollback)


def psycopg_rows_of_a_class(url: str) -> contextlib.AbstractContextManager[Writer]:
    return psycopg_cursor(url, row_factory=class_row(Article))


def psycopg_rows_as_dicts(url: str) -> contextlib.AbstractContextManager[Writer]:
    return psycopg_connection(url, row_factory=dict_row)


@contextlib.contextmanager
def psycopg_cursor_on_the_server(url: str) -> Iterator[Writer]:
    with (
        contextlib.closing(psycopg.connect(url)) as connection,
        connection.cursor("rows") as cursor,
    ):
        yield Writer(cursor, connection.execute, connection.commit, connection.rollback)


@contextlib.contextmanager
def psycopg_pipeline(url: str) -> Iterator[Writer]:
    with contextlib.closing(psycopg.connect(url)) as connection, connection.pipeline():
        yield Writer(connection, connection.execute, connection.commit, connection.rollback)


@contextlib.contextmanager
def psycopg2_cursor(url: str, name: str | None = None, **options: Any) -> Iterator[Writer]:
    with contextlib.closing(psycopg2.connect(url, **options)) as connection:
        given, own = connection.cursor(name), connection.cursor()
        yield Writer(given, own.execute, connection.commit, connection.rollback)


def psycopg2_rows_as_dicts(url: str) -> contextlib.AbstractContextManager[Writer]:
    return psycopg2_cursor(url, cursor_factory=psycopg2.extras.RealDictCursor)


def psycopg2_cursor_on_the_server(url: str) -> contextlib.AbstractContextManager[Writer]:
    return psycopg2_cursor(url, "rows")


@contextlib.contextmanager
def psycopg2_connection(url: str) -> Iterator[Writer]:
    with contextlib.closing(psycopg2.connect(url)) as connection:
        run = connection.cursor().execute
        yield Writer(connection, run, connection.commit, connection.rollback)


def of_driver(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")


@contextlib.contextmanager
def sqlalchemy_connection(url: str, driver: str = "psycopg", **options: Any) -> Iterator[Writer]:
    engine = sqlalchemy.create_engine(of_driver(url, driver), **options)
    try:
        with engine.connect() as connection:
            run = connection.exec_driver_sql
            yield Writer(connection, run, connection.commit, connection.rollback)
    finally:
        engine.dispose()


def sqlalchemy_psycopg2(url: str) -> contextlib.AbstractContextManager[Writer]:
    return sqlalchemy_connection(url, "psycopg2")


@contextlib.contextmanager
def sqlalchemy_session(url: str) -> Iterator[Writer]:
    engine = sqlalchemy.create_engine(of_driver(url, "psycopg"))
    try:
        with Session(engine) as session:

            def run(sql: str) -> object:
                return session.execute(sqlalchemy.text(sql))

            yield Writer(session, run, session.commit, session.rollback)
    finally:
        engine.dispose()


KINDS = [
    psycopg_cursor, psycopg_connection, psycopg_rows_of_a_class, psycopg_rows_as_dicts,
    psycopg_cursor_on_the_server, psycopg_pipeline, psycopg2_cursor, psycopg2_rows_as_dicts,
    psycopg2_cursor_on_the_server, psycopg2_connection, sqlalchemy_connection,
    sqlalchemy_psycopg2, sqlalchemy_session,
]  # fmt: skip


@contextlib.asynccontextmanager
async def async_cursor(url: str) -> AsyncIterator[Writer]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        cursor = connection.cursor()
        yield Writer(cursor, cursor.execute, connection.commit, connection.rollback)


@contextlib.asynccontextmanager
async def async_connection(url: str) -> AsyncIterator[Writer]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield Writer(connection, connection.execute, connection.commit, connection.rollback)


@contextlib.asynccontextmanager
async def sqlalchemy_async_connection(url: str) -> AsyncIterator[Writer]:
    engine = asynchronous.create_async_engine(of_driver(url, "psycopg"))
    try:
        async with engine.connect() as connection:
            run = connection.exec_driver_sql
            yield Writer(connection, run, connection.commit, connection.rollback)
    finally:
        await engine.dispose()


@contextlib.asynccontextmanager
async def sqlalchemy_async_session(url: str) -> AsyncIterator[Writer]:
    engine = asynchronous.create_async_engine(of_driver(url, "psycopg"))
    try:
        async with asynchronous.AsyncSession(engine) as session:

            def run(sql: str) -> Awaitable[object]:
                return session.execute(sqlalchemy.text(sql))

            yield Writer(session, run, session.commit, session.rollback)
    finally:
        await engine.dispose()


ASYNC_KINDS = [
    async_cursor, async_connection, sqlalchemy_async_connection, sqlalchemy_async_session,
]  # fmt: skip
