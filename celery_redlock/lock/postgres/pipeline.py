"""Words of Redis to calls of the functions in `schema.sql`, and results to replies, by libpq.

In pipeline mode each call is its own transaction, which commits at its sync. So a reply counts only
once the sync has come without an error. Source: "Pipeline Mode" in the manual of libpq.
It also counts only if it names its call: a pooler may hand on the reply to a call of a client that
has gone, or one once more. Each call names the server of the handshake, and another one refuses it:
a pooler may have moved since.
"""

from __future__ import annotations

import os
import select
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import hiredis
import psycopg
from psycopg import pq

from celery_redlock.lock.platform.threads import gevent_here, new_poll
from celery_redlock.lock.postgres.errors import (
    ISOLATION,
    NOT_REPLICATED,
    error_of,
    is_fatal,
    is_not_replicated,
    is_of_another_server,
    is_of_idle_timeout,
    words_of,
)
from celery_redlock.lock.server.requests import SCRIPTS
from celery_redlock.lock.transport.connection import CLOCK, CLOSED_BY_SERVER, CLOSED_BY_TIMEOUT

# Of the transaction alone, as the connection may be a pooler's. Without the path, a role that may
# create an operator in a schema of the user's path could change what the functions do.
_SETTINGS = (
    b"SELECT pg_catalog.set_config('search_path','pg_catalog',true),"
    b"pg_catalog.set_config('lock_timeout',$1,true),"
)
_CALLS = {
    word: _SETTINGS + b'redlock.served_by($3),redlock."%b"($4,$5),$2' % script.name.encode()
    for script in SCRIPTS
    for word in (script.digest, script.source)
}
_COMMAND = _SETTINGS + b"redlock.served_by($3),redlock.command($4),$2"
_FIRST = _SETTINGS + b"redlock.run_id(),redlock.command($4),$2"
# Source: pg_type.dat of PostgreSQL
_BYTEA = 17
_BYTEA_ARRAY = 1001
_TEXT = 25
# of the node timeout: how long a call waits for a row before it costs its vote
LOCK_TIMEOUT_SHARE = 0.5
FOREIGN_REPLY = "the reply to another call has come: a pooler mixes up its clients"
# of a reply: two settings, the server's run id, what the function returns, its call
REPLY_COLUMNS = 5
MARK_BYTES = 8  # random, of each connection
CANCEL_PAUSE = 0.02  # seconds: a cancel request that comes between two calls has no effect
_ISOLATE = b"SET transaction_isolation TO 'read committed'"  # of the transaction up to the sync


def encoded_array(words: Sequence[bytes]) -> bytes:
    """Return words as a bytea[] in PostgreSQL's binary format."""
    size = struct.Struct("!i").pack
    head = struct.pack("!iiiii", bool(words), 0, _BYTEA, len(words), 1)
    if not words:
        head = struct.pack("!iii", 0, 0, _BYTEA)
    return head + b"".join([part for word in words for part in (size(len(word)), word)])


class Pipeline:
    """Calls in flight on one libpq connection, and their replies, in order.

    Only `exchange`, `finish` and `cancel` wait.
    timeout: seconds for a reply. A call that waits for a row or a turn for a part of them is
    answered by an error. After an OSError the connection is at its end.
    """

    def __init__(self, connection: pq.abc.PGconn, timeout: float) -> None:
        self.connection = connection
        self._timeout = timeout
        self._lock_timeout = b"%d" % max(1, LOCK_TIMEOUT_SHARE * timeout * 1000)
        self._bound = b"/*%d*/" % max(1, timeout * 1000)  # ms, for ENDWAITS in `schema.sql`
        self.is_pooled = False  # whether a pooler stands between
        self._isolates = False  # whether each call sets its isolation level: see `isolate_each`
        self._requests = hiredis.Reader()
        self._parser = hiredis.Reader()
        self._reply: Any = None  # of the call whose sync is still to come
        self._error = ""
        self._farewell = ""  # of a server that has ended the connection: why
        self._run_id: bytes | None = None  # of the server that sent the first reply
        self._mark = os.urandom(MARK_BYTES).hex().encode()
        self._number = 0
        self._expected: deque[bytes] = deque()  # of calls in flight, what their replies must name
        self.replies: deque[Any] = deque()
        connection.nonblocking = 1
        connection.notice_handler = self._on_notice
        connection.enter_pipeline_mode()

    def isolate_each(self) -> None:
        """Begin each call in READ COMMITTED from now on: the default of the server is another."""
        self._isolates = True

    def send(self, request: bytes) -> None:
        """Queue requests in RESP. `flush` writes them."""
        self._requests.feed(request)
        while (words := self._requests.gets()) is not False:
            self._call(words)

    def _call(self, words: Sequence[bytes]) -> None:
        statement = _FIRST if self._run_id is None else _COMMAND
        values = [encoded_array(words)]
        if words[0] in (b"EVALSHA", b"EVAL") and words[1] in _CALLS:
            statement = _CALLS[words[1]]
            keys = 3 + int(words[2])
            values = [encoded_array(words[3:keys]), encoded_array(words[keys:])]
        elif words[0] == b"SCRIPT":
            values = [encoded_array([b"PING"])]  # the functions are there
        self._number += 1
        mark = b"%b-%d" % (self._mark, self._number)
        arrays = len(values)
        kinds = [_TEXT, _TEXT, _TEXT, *[_BYTEA_ARRAY] * arrays]
        formats = [0, 0, 0, *[1] * arrays]
        connection = self.connection
        values = [self._lock_timeout, mark, self._run_id or b"", *values]
        statement = self._bound + statement if self.is_pooled else statement
        try:
            if self._isolates:
                connection.send_query_params(_ISOLATE, None)
            connection.send_query_params(statement, values, kinds, formats, 1)
            connection.pipeline_sync()
        except psycopg.Error as error:
            raise self._end_by(error) from None
        self._expected.append(mark)

    def flush(self) -> bool:
        """Write what the socket takes; return whether that is all."""
        try:
            return self.connection.flush() == 0
        except psycopg.Error as error:
            raise self._end_by(error) from None

    def fileno(self) -> int:
        """Return the descriptor of its socket, for a poll; -1 if the connection is closed."""
        try:
            return self.connection.socket
        except psycopg.Error:
            return -1

    def exchange(self, until: float) -> bool:
        """Write and read once the server is ready; return False if it is not by then."""
        if not ready(self.fileno(), writes=not self.flush(), until=until):
            return False
        self.receive()
        return True

    def finish(self) -> None:
        """Close once each call is answered or late: a pooler ends what is still running."""
        until = CLOCK.now() + self._timeout
        try:
            with suppress(OSError, ValueError):  # the connection is at its end already
                while self._expected and self.exchange(until):
                    pass
        finally:
            self.cancel(LOCK_TIMEOUT_SHARE * self._timeout)

    def cancel(self, timeout: float | None = None) -> None:
        """Cancel the calls that still run, and close. timeout: seconds; None: a node timeout.

        A commit that waits for its standby looks at no socket, so its process would outlive a close
        for as long. Through a pooler it only closes: by cancel requests, as the stalls of a server
        let them come, pgbouncer 1.18 has ended for all of its clients. The next one that connects
        there ends such a commit: each call begins with how long its client waits.
        """
        until = CLOCK.now() + (self._timeout if timeout is None else timeout)
        try:
            with suppress(OSError, ValueError, psycopg.Error):  # the latter: of libpq before 17
                while self._expected and self._can_cancel and CLOCK.now() < until:
                    self._request_cancel(until)
                    self.exchange(min(until, CLOCK.now() + CANCEL_PAUSE))
        finally:
            self.close()

    @property
    def _can_cancel(self) -> bool:
        """Whether it is the server's, has not ended by itself, and libpq is new enough."""
        connection = self.connection
        if self.is_pooled:
            return False
        return connection.status == pq.ConnStatus.OK and hasattr(connection, "cancel_conn")

    def _request_cancel(self, until: float) -> None:
        request = self.connection.cancel_conn()  # PQcancel of an older libpq would keep the GIL
        request.start()
        while (state := request.poll()) not in (pq.PollingStatus.OK, pq.PollingStatus.FAILED):
            writes = state == pq.PollingStatus.WRITING
            if not ready(request.socket, writes=writes, reads=not writes, until=until):
                raise TimeoutError

    def close(self) -> None:
        self.connection.finish()

    def receive(self) -> None:
        """Read what has come into `replies`. Raises OSError at the end of the connection."""
        connection = self.connection
        try:
            connection.consume_input()
            # also without a call in flight: `is_busy` hands on a farewell that has come unasked
            while not connection.is_busy() and self._expected:
                result = connection.get_result()
                if result is not None and self._take(result):
                    self.replies.append(self._finish())
        except psycopg.Error as error:
            raise self._end_by(error) from None
        if connection.status != pq.ConnStatus.OK or (self._farewell and not self.replies):
            raise OSError(self._farewell or CLOSED_BY_SERVER)

    def _end_by(self, error: psycopg.Error) -> OSError:
        """Return why the connection is at its end, in the words of its server if it has some."""
        text = str(error)
        if "pipeline" in text:  # psycopg's words for each call on a connection that has ended
            text = pq.error_message(self.connection)
        return OSError(self._farewell or words_of(text))

    def _take(self, result: pq.abc.PGresult) -> bool:
        """Note a part of a reply; return whether the reply is complete."""
        status = result.status
        if status == pq.ExecStatus.TUPLES_OK:
            if result.nfields != REPLY_COLUMNS or result.get_value(0, 4) != self._expected[0]:
                raise OSError(FOREIGN_REPLY)
            self._run_id = self._run_id or result.get_value(0, 2)
            self._reply = result.get_value(0, 3)
        elif status == pq.ExecStatus.FATAL_ERROR and not self._error:
            self._error = error_of(result)
            self._note_farewell(result)
            if is_of_another_server(result):
                raise OSError(self._error)
            # behind a pooler the server's default may have changed since the connect
            self._isolates = self._isolates or self._error.startswith(ISOLATION)
        elif status == pq.ExecStatus.PIPELINE_SYNC:
            return True
        return False

    def _finish(self) -> Any:
        reply = self._reply
        error = self._error
        self._reply = None
        self._error = ""
        self._expected.popleft()
        if error:
            return hiredis.ReplyError(error)
        self._parser.feed(reply or b"-ERR no result\r\n")
        return self._parser.gets()

    def _on_notice(self, result: pq.abc.PGresult) -> None:
        if is_not_replicated(result):
            self._error = NOT_REPLICATED
        self._note_farewell(result)  # libpq takes what comes unasked for a notice

    def _note_farewell(self, result: pq.abc.PGresult) -> None:
        if is_fatal(result):
            words = error_of(result).removeprefix("ERR ")
            self._farewell = CLOSED_BY_TIMEOUT if is_of_idle_timeout(result) else words


def ready(descriptor: int, *, writes: bool, until: float, reads: bool = True) -> bool:
    """Return whether a descriptor is ready by then."""
    poll = new_poll(gevent_here() is None)  # another greenlet may run meanwhile
    poll.register(descriptor, (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0))
    remaining = until - CLOCK.now()
    return remaining > 0 and bool(poll.poll(max(1, int(remaining * 1000))))
