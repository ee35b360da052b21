"""`fenced_update`, `fenced_update_async`: an UPDATE of SQLAlchemy that is never a late write.

SQLAlchemy is imported in this file alone. Not here: what its rows mean (`lock/fenced_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.fenced_rows import (
    FENCE,
    FENCED_UPDATE,
    column_error,
    own_value_error,
    rows_written,
    token_of,
    transaction_error,
)
from celery_redlock.lock.lock import Lock

try:
    from sqlalchemy import BigInteger, Update, event, inspect, or_, select
    from sqlalchemy.exc import DBAPIError, InvalidRequestError
    from sqlalchemy.sql import visitors
    from sqlalchemy.sql.dml import UpdateBase
except ImportError as error:
    text = "celery_redlock.sqlalchemy needs SQLAlchemy 2.0 or newer: pip install sqlalchemy"
    raise ImportError(f"{text} ({error})") from error

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import ORMExecuteState, Session, scoped_session

__all__ = ["fenced_update", "fenced_update_async"]

WAY = f'give the table `Column("{FENCE}", BigInteger, nullable=False, server_default="0")`'
INNODB = ("mysql", "mariadb")


def fenced_update(
    session: Session | scoped_session[Any] | Connection, statement: Update, lock: Lock
) -> int:
    """Run an UPDATE unless a later holder of the lock has written one of its rows.

    Returns the number of rows; 0 if its filter matches none. All rows are written or none, also if
    the error is caught inside the transaction. The rows' `fence` becomes the lock's fencing token,
    so a second update with it is allowed. A subquery of the filter must not depend on the values.

    statement: `update(...)` of a table or a mapped class with the column
    `fence BIGINT NOT NULL DEFAULT 0`. Raises LockLost if a later holder has written. Raises
    RedlockError in autocommit, and for a lock without a token; SettingsError for a table that lacks
    the column, and for other arguments.
    """
    run: Any = getattr(session, "execute", None)
    if run is None or iscoroutinefunction(run):
        hint = "must be a Session or a Connection; for async ones await fenced_update_async"
        raise SettingsError(FENCED_UPDATE, "session", _kind_of(session), hint)
    token = token_of(lock)
    fence = _fence_of(statement)
    connection = _begin(session, statement)
    update = _with_value(statement.where(fence <= token), fence, token)
    with _savepoint(session):
        written, executed = _run(session, update)
        # of that connection, because the `get_bind` of a session may send a SELECT to a replica
        fences = connection.execute(_refused(statement, executed, fence, token, connection))
        return rows_written(lock.resource, token, written, fences.scalars().all())


async def fenced_update_async(
    session: AsyncSession | async_scoped_session[Any] | AsyncConnection,
    statement: Update,
    lock: Lock,
) -> int:
    """Run an UPDATE as `fenced_update` does, by an async session or connection.

    Raises the errors of `fenced_update`.
    """
    runner: Any = session
    if not hasattr(runner, "run_sync") and hasattr(runner, "registry"):
        runner = runner()  # of an `async_scoped_session`
    if not hasattr(runner, "run_sync"):
        hint = "must be an AsyncSession or an AsyncConnection; for others call fenced_update"
        raise SettingsError("fenced_update_async", "session", _kind_of(session), hint)
    return int(await runner.run_sync(fenced_update, statement, lock))


def _kind_of(given: object) -> str:
    return f"a {type(given).__module__}.{type(given).__qualname__}"


def _fence_of(statement: Any) -> Any:
    """Return the fence of a statement's table; of a mapped class, the attribute for it."""
    if not isinstance(statement, Update):
        raise SettingsError(
            FENCED_UPDATE, "statement", _kind_of(statement), "must be an update(...) of SQLAlchemy"
        )
    if statement.exported_columns:
        hint = "without it: fenced_update returns the number of rows"
        raise SettingsError(FENCED_UPDATE, "statement", "an update with returning()", hint)
    if _filter_writes(statement):
        hint = "run that statement first, and filter by its rows: the filter is evaluated twice"
        raise SettingsError(FENCED_UPDATE, "statement", "an update whose filter writes", hint)
    table: Any = statement.table
    column = _column_of(table)
    if column is None:
        raise column_error("statement", str(table), "", WAY)
    if not isinstance(column.type, BigInteger):
        raise column_error("statement", str(table), f"{column.type!r}", WAY)
    entity = statement.entity_description.get("entity")
    if entity is None:
        fence: Any = column
    else:
        mapper = inspect(entity).mapper
        own_column = _column_of(mapper.local_table)  # an alias has a column of its own
        fence = getattr(entity, mapper.get_property_by_column(own_column).key)
    for key, value in dict(statement._values or ()).items():
        if getattr(key, "key", key) in (FENCE, fence.key):  # SQLAlchemy would take either of two
            raise own_value_error(getattr(value, "value", value))
    return fence


def _filter_writes(statement: Update) -> bool:
    """Return whether there is an INSERT, UPDATE or DELETE in a filter, as PostgreSQL's CTE has."""
    filters = statement._where_criteria
    tables = [table for one in filters for table in one._from_objects]
    parts = (part for top in (*filters, *tables) for part in visitors.iterate(top))
    return any(isinstance(part, UpdateBase) for part in parts)


def _column_of(table: Any) -> Any:
    """Return a table's column of that name, whatever its key; None if there is none."""
    return next((column for column in table.columns if column.name == FENCE), None)


def _with_value(statement: Update, fence: Any, token: int) -> Update:
    try:
        return statement.values({fence: token})
    except InvalidRequestError:
        hint = "give them to values(...), which takes one value more"
        kind = "an update with ordered_values()"
        raise SettingsError(FENCED_UPDATE, "statement", kind, hint) from None


@contextmanager
def _savepoint(session: Any) -> Iterator[None]:
    nested = session.begin_nested()
    try:
        yield
    except DBAPIError:
        with suppress(DBAPIError):  # a deadlock of InnoDB ends the transaction, so the savepoint
            nested.rollback()
        raise
    except BaseException:
        nested.rollback()
        raise
    nested.commit()


def _run(session: Any, update: Update) -> tuple[int, Any]:
    """Run an UPDATE. Return the number of rows, and the UPDATE as events of the session made it."""
    if not hasattr(session, "get_bind"):
        return session.execute(update).rowcount, update
    executed: list[Any] = [update]

    def note(state: ORMExecuteState) -> None:
        if state.is_update:
            executed.append(state.statement)

    own = session() if hasattr(session, "registry") else session  # of a `scoped_session`
    event.listen(own, "do_orm_execute", note)  # behind all others, who may add filters
    try:
        written = session.execute(update).rowcount
    finally:
        event.remove(own, "do_orm_execute", note)
    return written, executed[-1]


def _refused(statement: Update, executed: Any, fence: Any, token: int, connection: Any) -> Any:
    """Return the SELECT of one row that a statement matches, and may not write.

    executed: the same with the filter by the fence behind its own ones, and what events have added.
    """
    own = len(statement._where_criteria)
    filters = [*executed._where_criteria[:own], *executed._where_criteria[own + 1 :]]
    refused = select(fence).where(*filters, or_(fence > token, fence.is_(None))).limit(1)
    refused = refused.options(*executed._with_options)  # such as `with_loader_criteria`
    refused = refused.execution_options(**statement.get_execution_options())
    if connection.dialect.name in INNODB:
        # an UPDATE of InnoDB reads what is committed, a plain SELECT may read an old snapshot
        refused = refused.with_for_update(read=True)
    return refused


def _begin(session: Any, statement: Update) -> Any:
    """Return the connection that runs a statement, in a transaction. Raises for autocommit."""
    connection = session
    if hasattr(session, "get_bind"):
        mapper = statement.entity_description.get("entity")
        connection = session.connection({"clause": statement, "mapper": mapper and inspect(mapper)})
    if _commits_each_statement(connection):
        raise transaction_error('use another isolation_level than "AUTOCOMMIT"')
    if not connection.in_transaction():  # an event of the caller's engine may do it
        connection.begin()
    if connection.dialect.name == "sqlite":
        _begin_in_sqlite(connection)
    return connection


def _commits_each_statement(connection: Any) -> bool:
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    driver = connection.connection.dbapi_connection
    if hasattr(driver, "get_autocommit"):  # of the drivers of MySQL
        return bool(driver.get_autocommit())
    return getattr(driver, "autocommit", False) is True


def _begin_in_sqlite(connection: Any) -> None:
    """Begin the transaction that Python's sqlite3 begins only at the first write.

    A savepoint before it would be the transaction itself, and its release would commit.
    """
    driver = connection.connection.driver_connection
    if driver.in_transaction:
        return
    if driver.isolation_level is None:
        raise transaction_error('begin one, or leave out isolation_level="AUTOCOMMIT"')
    connection.exec_driver_sql("BEGIN")
