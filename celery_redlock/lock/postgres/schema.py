"""Makes the schema of a PostgreSQL node, and looks at the server: `redlock setup` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from redis import ResponseError

from celery_redlock.lock.model.keys import guard_keys

VERSION = 4  # of schema.sql
OLDEST = 14  # release of PostgreSQL that reads the statements of schema.sql
# they have all functions that this release calls, with a meaning that it knows
SERVING_VERSIONS = 3, 4
APPLICATION = "celery_redlock"  # the application_name of clients, unless their URL names another
MAX_CONNECTION_SHARE = 0.8  # of max_connections
# of a transaction: until it ends, no row that was deleted since is vacuumed
LONG_TRANSACTION = "5 minutes"
# Before all else, and alone: the server reads the strings of a whole query by one setting.
STRINGS_SETTING = "SET LOCAL standard_conforming_strings = on"
PATH_SETTING = "SELECT pg_catalog.set_config('search_path', 'pg_catalog', true)"
# A column of each question. Pgpool-II may balance reads within a transaction, too, even after a
# write. But it sends none to a standby, which may lag, that calls what is VOLATILE.
_ON_THE_PRIMARY = "pg_catalog.clock_timestamp()"
_TRUST = """
-- A new schema has forgotten no lock, so its server votes at once, unless one was dropped whose
-- clients are still connected. It has no tenure yet: a client that knew another server, as by a
-- pooler that has moved, begins a grace period.
SELECT set_config('redlock.setup', 'trusted', true),
  redlock.put({run}, redlock.run_id()::bytea, NULL, clock_timestamp())
WHERE current_setting('redlock.setup') = 'new' AND NOT EXISTS (
  SELECT FROM pg_stat_activity WHERE datname = current_database()
    AND application_name IN ({applications}) AND pid <> pg_backend_pid());
"""
_FACTS = """
SELECT pg_catalog.clock_timestamp(), current_setting('fsync'), current_setting('full_page_writes'),
  current_setting('default_transaction_isolation'), current_setting('statement_timeout'),
  coalesce(current_setting('idle_session_timeout', true), '0'),
  current_setting('synchronous_standby_names'),
  (SELECT count(*) FROM pg_stat_replication),
  (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')),
  (SELECT sum(numbackends) FROM pg_stat_database), current_setting('max_connections')::int,
  (SELECT count(*) FROM pg_stat_activity WHERE xact_start < now() - %s::interval),
  pg_has_role('pg_read_all_stats', 'USAGE'), current_user
"""


def schema_sql(prefix: str, applications: Iterable[str] = (APPLICATION,)) -> str:
    """Return the statements that make the schema, or move an earlier one in place.

    prefix: for which the server of a new one votes at once, if no client is connected.
    applications: what clients name themselves.
    """
    text = files("celery_redlock.lock.postgres").joinpath("schema.sql").read_text("utf-8")
    run, _ = guard_keys(prefix)
    names = ", ".join(f"convert_from({_literal(name)}, 'UTF8')" for name in applications)
    return f"{text}{_TRUST.format(run=_literal(run), applications=names)}"


def _literal(name: str) -> str:
    return f"'\\x{name.encode().hex()}'::bytea"


def schema_version(connection: Any) -> int | None:
    """Return the version of the schema that is there; None for none. connection: psycopg's."""
    if _asked(connection, "to_regprocedure('redlock.version()')") is None:
        return None
    return int(_asked(connection, "redlock.version()"))


def _asked(connection: Any, expression: str) -> Any:
    return connection.execute(f"SELECT {_ON_THE_PRIMARY}, {expression}").fetchone()[1]


def other_schema(version: int) -> str:
    """Return the error of a schema that is not of this release."""
    age = "NEWER" if version > VERSION else "OLDER"
    return f"{age}SCHEMA version {version}, and this release needs {VERSION}"


def _schema_hint(version: int | None) -> str:
    move = f"`celery -A shop redlock setup` moves it to version {VERSION}"
    if version in SERVING_VERSIONS:
        return f"it serves this release, too: {move} beside running clients"
    return f"version {VERSION} is needed: {move}"


def create_schema(
    connection: Any, prefix: str = "redlock", applications: Iterable[str] = (APPLICATION,)
) -> str:
    """Make the schema, or move an earlier one, in one transaction. connection: psycopg's.

    prefix, applications: as of `schema_sql`. Returns "there" if nothing was to do, "moved",
    "trusted" for a new one, or "new" for one whose server begins with a grace period. Raises
    redis.ResponseError if the server is too old.
    """
    release = connection.info.server_version // 10_000
    if release < OLDEST:
        raise ResponseError(f"PostgreSQL {release} is too old: name a server of {OLDEST} or newer")
    with connection.transaction():
        connection.execute(PATH_SETTING)
        if schema_version(connection) == VERSION:
            return "there"
        connection.execute(STRINGS_SETTING)
        connection.execute(schema_sql(prefix, applications))
        return str(_asked(connection, "current_setting('redlock.setup')"))


def doubts_of(connection: Any, unheard: str = "") -> list[tuple[str, str, str]]:
    """Return what could lose locks or slow them down: setting, value, and what to do.

    unheard: why no message arrives; "" if they do.
    """
    with connection.transaction():
        connection.execute(PATH_SETTING)
        row = connection.execute(_FACTS, [LONG_TRANSACTION]).fetchone()
        version = schema_version(connection)
    _, fsync, full_pages, isolation, timeout, idle, synchronous, streaming, *rest = row
    confirming, used, most, long_ones, sees_all, user = rest
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
        (idle not in ("0", ""), "idle_session_timeout", idle,
         "it ends connections that wait for messages, and each end costs one: set 0 for this user"),
        (bool(synchronous and sees_all) and not confirming,
         "synchronous_standby_names", synchronous,
         "no such standby streams: no lock is granted until one does"),
        (not synchronous and bool(streaming), "synchronous_standby_names", "''", lost),
        (used > MAX_CONNECTION_SHARE * most, "connections", f"{used} of {most}",
         "raise max_connections, or put pgbouncer between"),
        (bool(long_ones), "transactions", f"{long_ones} older than {LONG_TRANSACTION}",
         "while they are open, deleted rows stay, and locks become slower: end them"),
        (not sees_all, "rights", user,
         f"it sees no standby's state, and no transaction of others: GRANT pg_monitor TO {user}"),
        (bool(unheard), "messages", unheard,
         "none arrives: name listen_host and listen_port of the server itself, or waiters poll"),
        (version != VERSION, "schema", str(version), _schema_hint(version)),
    ]  # fmt: skip
    return [(setting, value, hint) for is_doubtful, setting, value, hint in found if is_doubtful]
