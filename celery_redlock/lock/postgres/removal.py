"""Drops the schema of a PostgreSQL node, unless something of it is in use: `redlock uninstall`.

The check and the drop are one transaction, under a lock that lets no call of a client in between.
A call that waits for that lock then finds no schema: it grants nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery_redlock.errors import first_names
from celery_redlock.lock.postgres.address import PostgresAddress
from celery_redlock.lock.postgres.schema import PATH_SETTING
from celery_redlock.lock.transport.connection import CLOCK

# The first column is VOLATILE: see `schema.py`. Rows that have expired may be swept any time.
_USES = """
WITH live AS MATERIALIZED (
  SELECT name, expires_at, substr(name, 1, length(%(own)s)) = %(own)s AS is_own FROM redlock.key
  WHERE expires_at IS NULL OR expires_at > clock_timestamp()
), ours AS (
  SELECT oid, relname, relkind FROM pg_class WHERE relnamespace = 'redlock'::regnamespace
)
SELECT clock_timestamp(),
  array(SELECT DISTINCT application_name FROM pg_stat_activity WHERE datname = current_database()
    AND application_name = ANY (%(applications)s) AND pid <> pg_backend_pid() ORDER BY 1),
  array(SELECT DISTINCT substr(name, 2, position('}:'::bytea IN name) - 2) FROM live
    WHERE NOT is_own AND position('}:'::bytea IN name) > 1 ORDER BY 1),
  (SELECT max(expires_at) FROM live WHERE is_own),
  array(
    SELECT oid::regclass::text FROM ours
    WHERE relkind IN ('r', 'p', 'v', 'm', 'f', 'S') AND relname NOT IN ('key', 'item', 'swept')
    UNION
    SELECT r.ev_class::regclass::text FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid
    WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
      AND d.refobjid IN (SELECT oid FROM ours))
"""
# All tables that calls use, in the order in which a sweep does: the other order may deadlock. It
# waits for calls under way, and for transactions that have confirmed a lock.
_EXCLUDE = "LOCK TABLE redlock.swept, redlock.key, redlock.item IN ACCESS EXCLUSIVE MODE"
LOCK_TIMEOUT = "1s"  # until then, clients of other prefixes wait, too
SESSION_END = 2.0  # seconds in which the sessions of a client end that has just closed them
SESSION_PAUSE = 0.05  # seconds between two looks at them


def schema_uses(address: PostgresAddress, prefix: str) -> list[str] | None:
    """Return why the schema has to stay now, a line each; None if there is none.

    prefix: of the app that goes. Raises redis.RedisError.
    """
    return address.operate(lambda client: _settled_uses(client, prefix, address.applications))


def drop_schema(address: PostgresAddress, prefix: str) -> list[str]:
    """Drop the schema with all that is in it; return why it stays, if it has to.

    prefix: of the app that goes. Raises redis.RedisError.
    """
    return address.operate(lambda client: _drop(client, prefix, address.applications))


def _settled_uses(connection: Any, prefix: str, applications: Iterable[str]) -> list[str] | None:
    """Return why the schema has to stay once sessions that were closed have ended."""
    until = CLOCK.now() + SESSION_END
    while True:
        with connection.transaction():
            connection.execute(PATH_SETTING)
            if not _is_there(connection):
                return None
            sessions, others = _uses(connection, prefix, applications)
        if not sessions or CLOCK.now() > until:
            return [*sessions, *others]
        CLOCK.sleep(SESSION_PAUSE)


def _drop(connection: Any, prefix: str, applications: Iterable[str]) -> list[str]:
    uses = _settled_uses(connection, prefix, applications)
    if uses or uses is None:  # without the lock, for which other clients would wait
        return uses or []
    with connection.transaction():
        connection.execute(PATH_SETTING)
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
        connection.execute(_EXCLUDE)
        sessions, others = _uses(connection, prefix, applications)
        if not sessions and not others:
            connection.execute("DROP SCHEMA redlock CASCADE")
    return [*sessions, *others]


def _is_there(connection: Any) -> bool:
    question = "SELECT clock_timestamp(), to_regclass('redlock.key') IS NOT NULL"
    return bool(connection.execute(question).fetchone()[1])


def _uses(connection: Any, prefix: str, applications: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return why the schema has to stay: the sessions of clients, and all else."""
    own = f"{{{prefix}}}:".encode("utf-8", "surrogatepass")
    values = {"own": own, "applications": sorted(applications)}
    _, names, prefixes, last, objects = connection.execute(_USES, values).fetchone()
    sessions = [f"a session named {name} is connected to the database" for name in names]
    others = [
        f"the prefix {name.decode(errors='replace')} has rows in the schema" for name in prefixes
    ]
    if last is not None:
        others.append(
            f"rows in the schema expire by themselves, the last one at {last.isoformat()}"
        )
    if objects:
        others.append(f"the schema has or carries what is not its own: {first_names(objects)}")
    return sessions, others
