"""What an error of PostgreSQL means, in the words that `lock/server/error_hints.py` knows."""

from __future__ import annotations

import re

from psycopg import pq

from celery_redlock.lock.server.error_hints import add_signs
from celery_redlock.lock.transport.connection import CLOSED_BY_SERVER

NOT_REPLICATED = "NOTREPLICATED committed on the primary alone: its standby did not confirm it"
ISOLATION = "TRYAGAIN the isolation level"  # of `begin_call`; sent again, the call sets its own
_LIBPQ_ADVICE = re.compile("This probably means|Is the server running")  # of libpq, for people
# the function of the server that warns of it, in any language
_SYNC_REP_FUNCTION = b"SyncRepWaitForLSN"
# By SQLSTATE: the word with which the error reply begins, as one of Redis. Any other is "ERR".
_CODES = {
    b"40001": "TRYAGAIN", b"40P01": "TRYAGAIN", b"55P03": "TRYAGAIN", b"57014": "TRYAGAIN",
    b"25001": "TRYAGAIN",
    b"25006": "STANDBY", b"55000": "STANDBY", b"53300": "CONNECTIONS",
    b"RL001": "OTHERSERVER", b"3F000": "NOSCHEMA", b"42P01": "NOSCHEMA", b"42883": "NOSCHEMA",
}  # fmt: skip
_STANDBY_HINT = (
    "a standby: name its primary, or all hosts with target_session_attrs=read-write, in its URL; "
    "or its default_transaction_read_only is on"
)
# fmt: off
_TEMPORARY = {
    "NOTREPLICATED": "",
    "the database system is (?:starting up|shutting down|not yet accepting|in recovery)": "",
    "server closed the connection|terminating connection|server conn crashed|pooler error": "",
    'too many connections for (?:role|database) ".{0,63}"':
        "raise its CONNECTION LIMIT, or put pgbouncer between",
    "CONNECTIONS|too many (?:clients|connections)|connection slots are reserved":
        "raise its max_connections, or put pgbouncer between",
    "OTHERSERVER": "",
    "no more connections allowed": "raise max_client_conn of its pgbouncer",
}
_MISCONFIGURED = {
    "NOSCHEMA": "run `celery -A shop redlock setup` once, with the right to create a schema",
    "SETTINGS": "set standard_conforming_strings = on, client_min_messages = notice for its user",
    "OLDERSCHEMA": "run `celery -A shop redlock setup`, which moves the schema in place",
    "NEWERSCHEMA": "install that newer release of this package here, too",
    "STANDBY|session is read-only|server is in hot standby mode": _STANDBY_HINT,
    "password authentication failed|no password supplied":
        "correct user and password in its URL, or set PGPASSWORD",
    "no pg_hba.conf entry|pg_hba.conf rejects": "allow this user and host in its pg_hba.conf",
    'database ".{0,63}" does not exist': "correct the database in its URL",
    'role ".{0,63}" does not exist': "correct the user in its URL",
    "permission denied for database":
        "run it as a user with the right to create a schema, or hand `redlock setup --sql` to one",
    "permission denied":
        "its user needs USAGE of the schema redlock; SELECT, INSERT, UPDATE, DELETE on its tables",
    r"invalid connection option|invalid \w+ value|invalid integer value|could not match \d+":
        "correct the query of its URL",
    "server does not support SSL": "name an sslmode in its URL that the server has",
}
# fmt: on
add_signs(_TEMPORARY, _MISCONFIGURED, _STANDBY_HINT)


def error_of(result: pq.abc.PGresult) -> str:
    """Return an error of the server as an error reply. A primary message has no values of ours."""
    state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
    text = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"unknown error"
    return f"{_CODES.get(state, 'ERR')} {text.decode(errors='replace')}"


def is_of_another_server(result: pq.abc.PGresult) -> bool:
    """Return whether a call has reached another server than it means: see `redlock.served_by`."""
    return result.error_field(pq.DiagnosticField.SQLSTATE) == b"RL001"


def is_fatal(result: pq.abc.PGresult) -> bool:
    """Return whether the server ends the connection with this error."""
    severity = result.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED)
    return severity in (b"FATAL", b"PANIC")


def is_of_idle_timeout(result: pq.abc.PGresult) -> bool:
    """Return whether the server ends the connection because no call has come for a while."""
    return result.error_field(pq.DiagnosticField.SQLSTATE) == b"57P05"


def is_not_replicated(notice: pq.abc.PGresult) -> bool:
    """Return whether a commit did not wait for its standby to the end, because it was cancelled."""
    return notice.error_field(pq.DiagnosticField.SOURCE_FUNCTION) == _SYNC_REP_FUNCTION


def words_of(text: str) -> str:
    """Return why libpq failed, on one line. libpq names the server and the user, no password."""
    message = _LIBPQ_ADVICE.split(text)[0].removeprefix("consuming input failed: ")
    return " ".join(message.split()) or CLOSED_BY_SERVER
