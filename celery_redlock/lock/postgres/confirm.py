"""Confirms a lock inside a transaction of the body: see `Lock.confirm_in`.

The rows of the lock are locked FOR KEY SHARE until that transaction ends. A renewal passes, because
it changes no key. A takeover needs the whole row, so it is refused (`take_over` in `schema.sql`).
The connection is the body's own, of any driver: what it is follows from its attributes.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from celery_redlock.errors import LockLost, RedlockError, SettingsError
from celery_redlock.lock.transport.command import encoded

# Not `expires_at`: an old snapshot shows the old one of a lock that is renewed. A row that is there
# and has our value is ours. The words are in hex, so that no driver's style of parameters matters.
_CONFIRM = "SELECT 1 FROM redlock.key WHERE (id, value) IN ({}) FOR KEY SHARE"
# A row lock needs a transaction id. With autocommit it has ended with the statement before.
# `clock_timestamp` is VOLATILE: a pooler that balances reads sends that to no standby.
_OPEN_TRANSACTION = "SELECT clock_timestamp() WHERE pg_current_xact_id_if_assigned() IS NOT NULL"
_NO_SCHEMA = ("3F000", "42P01")
_ROW_NOT_SEEN = (
    "the transaction does not see its row: another holder has it, the snapshot is older than the "
    "lock, or this is another database"
)


def confirm(resource: str, keys: Sequence[tuple[str, str]], cursor: Any) -> None:
    """Confirm each key, with its lock value. resource: for the error. Raises as `Lock.confirm_in`.

    cursor: what the body writes with.
    """
    connection = _connection_of(cursor, "confirm_in", is_async=False)
    with _explained():
        _check_rows(resource, keys, _count(connection, _confirmation(keys)))
        _check_open(_count(connection, _OPEN_TRANSACTION))


async def confirm_async(resource: str, keys: Sequence[tuple[str, str]], cursor: Any) -> None:
    """Confirm as `confirm` does, by a connection whose methods are awaited."""
    connection = _connection_of(cursor, "confirm_in_async", is_async=True)
    with _explained():
        _check_rows(resource, keys, await _count_async(connection, _confirmation(keys)))
        _check_open(await _count_async(connection, _OPEN_TRANSACTION))


def _connection_of(cursor: Any, method: str, *, is_async: bool) -> Any:
    """Return the connection, or the session, of a cursor. Raises SettingsError for another kind."""
    hint = (
        "must be a cursor or a connection to PostgreSQL, of psycopg, psycopg2, SQLAlchemy, Django"
    )
    connection = cursor
    if hasattr(cursor, "get_bind"):  # SQLAlchemy's session
        step = cursor.connection
        is_known = cursor.get_bind().dialect.name == "postgresql"
    elif hasattr(cursor, "exec_driver_sql"):  # SQLAlchemy's connection
        step = cursor.exec_driver_sql
        is_known = cursor.dialect.name == "postgresql"
    else:  # a new cursor of it has no rows that the body still reads, and no name on the server
        connection = getattr(cursor, "connection", cursor)
        is_known = hasattr(connection, "pgconn") or hasattr(connection, "get_transaction_status")
        step = getattr(connection, "commit", None)
    if is_known and inspect.iscoroutinefunction(step) is not is_async:
        is_known = False
        hint = f"give it to {'confirm_in' if is_async else 'confirm_in_async'}"
    if not is_known:
        kind = type(cursor)
        name = f"a {kind.__module__}.{kind.__qualname__}"
        raise SettingsError(f"Lock.{method}", "cursor", name, hint)
    return connection


def _count(connection: Any, sql: str) -> int:
    """Run a statement; return the number of its rows."""
    if hasattr(connection, "get_bind"):
        connection = connection.connection()
    if hasattr(connection, "exec_driver_sql"):
        return len(connection.exec_driver_sql(sql).fetchall())
    with connection.cursor(**_options_of(connection)) as new_cursor:
        new_cursor.execute(sql)
        return len(new_cursor.fetchall())


async def _count_async(connection: Any, sql: str) -> int:
    if hasattr(connection, "get_bind"):
        connection = await connection.connection()
    if hasattr(connection, "exec_driver_sql"):
        return len((await connection.exec_driver_sql(sql)).fetchall())
    async with connection.cursor(**_options_of(connection)) as new_cursor:
        await new_cursor.execute(sql)
        return len(await new_cursor.fetchall())


def _options_of(connection: Any) -> dict[str, Any]:
    """Return options of a new cursor: psycopg 3 may make rows that want other columns."""
    return {"row_factory": lambda _: tuple} if hasattr(connection, "pgconn") else {}


def _confirmation(keys: Sequence[tuple[str, str]]) -> str:
    pairs = [(hashlib.sha256(encoded(name)).digest(), encoded(value)) for name, value in keys]
    rows = [
        f"(decode('{key_id.hex()}', 'hex'), decode('{value.hex()}', 'hex'))"
        for key_id, value in pairs
    ]
    return _CONFIRM.format(", ".join(rows))


def _check_rows(resource: str, keys: Sequence[tuple[str, str]], row_count: int) -> None:
    if row_count < len(set(keys)):
        raise LockLost(resource, _ROW_NOT_SEEN)


def _check_open(row_count: int) -> None:
    if not row_count:
        raise RedlockError(
            "confirm_in needs a transaction, and this connection commits each statement by itself "
            "(autocommit): begin one, confirm, write, and commit"
        )


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what is wrong if the database has no schema of ours. SQLAlchemy and Django wrap it."""
    try:
        yield
    except Exception as error:
        for cause in (error, getattr(error, "orig", None), error.__cause__):
            if {getattr(cause, "sqlstate", ""), getattr(cause, "pgcode", "")} & set(_NO_SCHEMA):
                raise RedlockError(
                    "confirm_in needs the lock in the database that the body writes: this "
                    "database has no schema redlock"
                ) from error
        raise
