"""What `test_confirm_in` runs in a process whose Django has settings: `python -m` with two URLs.

The URLs are of a database with the lock, and of one without the schema. Prints what was found.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict


def database(url: str) -> dict[str, Any]:
    known = conninfo_to_dict(url)
    names = {"HOST": "host", "PORT": "port", "USER": "user", "NAME": "dbname"}
    engine = {"ENGINE": "django.db.backends.postgresql"}
    return engine | {name: known[keyword] for name, keyword in names.items()}


settings.configure(DATABASES={"default": database(sys.argv[1]), "other": database(sys.argv[2])})
django.setup()

from django.db import connection, connections, transaction  # noqa: E402 - needs the settings

from celery_redlock import Lock, Redlock, RedlockError  # noqa: E402
from tests.conftest import NODE_TIMEOUT  # noqa: E402


def confirmed_in(lock: Lock, name: str) -> str:
    """Return why a lock is not confirmed by a cursor of a database; "" if it is."""
    try:
        with connections[name].cursor() as cursor:
            lock.confirm_in(cursor)
    except RedlockError as error:
        return str(error)
    return ""


def main() -> dict[str, object]:
    with Redlock([sys.argv[1]], node_timeout=NODE_TIMEOUT) as redlock:
        redlock.trust()
        with redlock.lock("r") as lock:
            found: dict[str, object] = {"autocommit": confirmed_in(lock, "default")}
            with transaction.atomic(using="other"):
                found["no_schema"] = confirmed_in(lock, "other")
                transaction.set_rollback(True, using="other")
            with transaction.atomic(), connection.cursor() as cursor:
                lock.confirm_in(cursor)
                cursor.execute("INSERT INTO mark VALUES ('django')")
                found["locks"] = free_rows()
            found["locks_after"] = free_rows()
    return found


def free_rows() -> int:
    """Return how many rows of locks another connection could take over now."""
    with (
        contextlib.closing(connections.create_connection("default")) as made,
        made.cursor() as other,
    ):
        other.execute("SELECT FROM redlock.key WHERE name LIKE '%lock:r' FOR UPDATE SKIP LOCKED")
        return int(other.rowcount)


if __name__ == "__main__":
    print(json.dumps(main()))
