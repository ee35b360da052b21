"""Makes the schema of a PostgreSQL node, and looks at the server: `redlock setup` and `doctor`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from celery_redlock.lock.model.keys import guard_keys, tenure_key

VERSION = 1  # of schema.sql
MOST_USED = 0.8  # of max_connections
LONG = "5 minutes"  # of a transaction: until it ends, no row that was deleted since is vacuumed
# Before all else, and alone: the server reads the strings of a whole query by one setting.
STRINGS = "SET LOCAL standard_conforming_strings = on"
_FACTS = """
SELECT current_setting('fsync'), current_setting('full_page_writes'),
  current_setting('default_transaction_isolation'), current_setting('statement_timeout'),
  current_setting('synchronous_standby_names'),
  (SELECT count(*) FROM pg_stat_replication),
  (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')),
  (SELECT sum(numbackends) FROM pg_stat_database), current_setting('max_connections')::int,
  (SELECT count(*) FROM pg_stat_activity WHERE xact_start < now() - %s::interval),
  pg_has_role('pg_read_all_stats', 'USAGE'), current_user
"""


def schema_sql(prefix: str) -> str:
    """Return the statements that make the schema, and let the server vote for a prefix at once."""
    text = files("celery_redlock.lock.postgres").joinpath("schema.sql").read_text("utf-8")
    keys = ", ".join(_literal(name) for name in (*guard_keys(prefix), tenure_key(prefix)))
    trust = f'SELECT redlock."trust"(array[{keys}], array[redlock.run_id()::bytea]);'
    return f"{text}\n-- A new schema has forgotten no lock: its server votes at once.\n{trust}\n"


def _literal(name: str) -> str:
    return f"'\\x{name.encode().hex()}'::bytea"


def schema_version(connection: Any) -> int | None:
    """Return the version of the schema that is there; None for none. connection: psycopg's."""
    found = connection.execute("SELECT to_regprocedure('redlock.version()')").fetchone()
    if found[0] is None:
        return None
    return int(connection.execute("SELECT redlock.version()").fetchone()[0])


def other_schema(version: int | None) -> str:
    return f"OTHERSCHEMA version {version}, and this release needs {VERSION}"


def create_schema(connection: Any, prefix: str = "redlock") -> bool:
    """Make the schema in one transaction; return False if it is there. connection: psycopg's."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('redlock setup', 0))")
        if schema_version(connection) is not None:
            return False
        connection.execute(STRINGS)
        connection.execute(schema_sql(prefix))
    return True


def doubts_of(connection: Any, unheard: str = "") -> list[tuple[str, str, str]]:
    """Return what could lose locks or slow them down: setting, value, and what to do.

    unheard: why no message arrives; "" if they do.
    """
    row = connection.execute(_FACTS, [LONG]).fetchone()
    fsync, full_pages, isolation, timeout, synchronous, streaming, confirming, *rest = row
    used, most, long_ones, sees_all, user = rest
    version = schema_version(connection)
    crash = "a crash may lose locks: set it to on"
    lost = (
        "a promoted standby may lack the newest locks, so it grants none for the longest ttl; a "
        "synchronous one lacks fewer"
    )
    found = [
        (fsync == "off", "fsync", fsync, crash),
        (full_pages == "off", "full_page_writes", full_pages, crash),
        (isolation != "read committed", "default_transaction_isolation", isolation,
         "each call needs one statement more: set read committed for this user"),
        (timeout not in ("0", ""), "statement_timeout", timeout,
         "it may cut off a call that waits for its turn: set 0 for this user"),
        (bool(synchronous and sees_all) and not confirming,
         "synchronous_standby_names", synchronous,
         "no such standby streams: no lock is granted until one does"),
        (not synchronous and bool(streaming), "synchronous_standby_names", "''", lost),
        (used > MOST_USED * most, "connections", f"{used} of {most}",
         "raise max_connections, or put pgbouncer between"),
        (bool(long_ones), "transactions", f"{long_ones} older than {LONG}",
         "while they are open, deleted rows stay, and locks become slower: end them"),
        (not sees_all, "rights", user,
         f"it sees no standby's state, and no transaction of others: GRANT pg_monitor TO {user}"),
        (bool(unheard), "messages", unheard,
         "none arrives: name listen_host and listen_port of the server itself, or waiters poll"),
        (version != VERSION, "schema", str(version),
         f"version {VERSION} is needed: `celery -A shop redlock setup`"),
    ]  # fmt: skip
    return [(setting, value, hint) for is_doubtful, setting, value, hint in found if is_doubtful]
