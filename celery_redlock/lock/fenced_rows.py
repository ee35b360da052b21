"""What a fenced update decides, whichever library runs it: `django/fenced.py`, `sqlalchemy.py`.

It runs one UPDATE of the rows whose fence is at most its token, and one SELECT of a refused row.
Both run in a savepoint, so an error that is raised here undoes what was written. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_redlock.errors import LockLost, RedlockError, SettingsError
from celery_redlock.lock.lock import Lock

FENCE = "fence"
COLUMN = f"{FENCE} BIGINT NOT NULL DEFAULT 0"
FENCED_UPDATE = "fenced_update"


def token_of(lock: Any) -> int:
    """Return the fencing token of a lock.

    Raises SettingsError for something else, and RedlockError for a lock without a token.
    """
    if not isinstance(lock, Lock):
        hint = "must be a Lock, as self.lock is in a task with lock_fencing=True"
        raise SettingsError(FENCED_UPDATE, "lock", repr(lock), hint)
    return lock.fencing_token


def column_error(argument: str, table: str, found: str, way: str) -> SettingsError:
    """Return the error for rows that have no fence.

    argument: what names them. found: what the column is instead; "" if there is none. way: how it
    is declared.
    """
    lacks = f"its column is {found}" if found else "it has no such column"
    hint = f"the table needs the column `{COLUMN}`, but {lacks}: {way}, and migrate"
    return SettingsError(FENCED_UPDATE, argument, table, hint)


def own_value_error(value: object) -> SettingsError:
    """Return the error for a caller that sets the fence itself. value: what it sets."""
    hint = "leave it out: it is set to the lock's token"
    return SettingsError(FENCED_UPDATE, FENCE, f"{value!r}", hint)


def transaction_error(way: str) -> RedlockError:
    """Return the error for a connection that commits each statement. way: how to begin."""
    return RedlockError(
        "fenced_update needs a transaction, because it writes all rows or none, and this "
        f"connection commits each statement by itself (autocommit): {way}"
    )


def rows_written(resource: str, token: int, written: int, refused: Sequence[int | None]) -> int:
    """Return the number of rows that the UPDATE has written, if it was refused none.

    refused: fences of rows that match its filter and are greater than the token; one is enough.
    Raises LockLost for a later holder's. Raises RedlockError for NULL, which compares with nothing.
    """
    if not refused:
        return written
    (fence, *_) = refused
    if fence is None:
        raise RedlockError(f"fenced_update needs `{COLUMN}`, and a row has NULL: set it to 0 first")
    written_by = f"a later holder has written: its token is {fence}, and this one's is {token}"
    raise LockLost(resource, written_by)
