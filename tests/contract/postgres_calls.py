"""Calls of a PostgreSQL node in transactions that stay open, and renewals that come at once."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator
from itertools import count
from typing import Any

import hiredis
import psycopg
from redis import ResponseError

from celery_redlock import Lock
from celery_redlock.lock.model.keys import (
    broken_key,
    fence_key,
    guard_keys,
    lock_key,
    rate_keys,
    tenure_key,
    unique_key,
    waiting_key,
)
from celery_redlock.lock.postgres.address import PostgresAddress
from celery_redlock.lock.server.requests import (
    BREAK,
    GRANT,
    PERMIT,
    REGISTER,
    RELEASE,
    RENEW,
    TAKE,
    UNIQUE,
)
from celery_redlock.lock.transport.command import Script
from tests.conftest import eventually
from tests.contract.servers import Command
from tests.postgres import PostgresNode

LOCK, OTHER = lock_key("redlock", "r"), lock_key("redlock", "other")
WAITING, INBOX = waiting_key("redlock", "r"), "inbox:"
RUN, QUIET = guard_keys("redlock")
COUNTER, BROKEN = fence_key("redlock"), broken_key(LOCK, "t1:one")
TAKEN, TOKENS = rate_keys("redlock", "r")
RATE = (TAKEN, TOKENS, RUN, QUIET, tenure_key("redlock"))
ONE, TWO, TTL = "t1:one", "t2:two", "60000"
CLIENTS = 8
ROUNDS = 15
WAITS = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
Call = tuple[Script, tuple[str, ...], tuple[str, ...]]


def grant(value: str, key: str = LOCK, least: str = "", run: str = "") -> Call:
    return GRANT, (key, RUN, QUIET, COUNTER), (value, TTL, least, run, "50000")


def permit(value: str, limit: int = 3, first: int = 0) -> Call:
    return PERMIT, (LOCK, RUN, QUIET), (value, TTL, str(limit), str(first), "", "", "50000")


def take(token: str, limit: int = 3) -> Call:
    return TAKE, RATE, (token, f"{limit}/m", "60000", "0", "", "0", "", "50000")


def release(value: str, limit: int = 1) -> Call:
    return RELEASE, (LOCK, WAITING), (value, INBOX, str(limit))


def register(waiter: str, *asked: str) -> Call:
    return REGISTER, (WAITING, *asked), (waiter, "7", TTL, "0", INBOX, "1", "")


def reclaim(value: str) -> Call:
    return RENEW, (LOCK, COUNTER, BROKEN), (value, TTL, "")


def unique(value: str) -> Call:
    return UNIQUE, (unique_key("redlock", "u"),), ("", value, TTL, TTL)


BREAK_ONE: Call = (BREAK, (LOCK, BROKEN, WAITING), (ONE, TTL, INBOX))


class Session:
    """A connection whose calls are one transaction, until `commit`."""

    def __init__(self, node: PostgresNode) -> None:
        self._node = node
        self.connection = psycopg.connect(node.url, options="-c lock_timeout=60s")
        self._pid = self.connection.info.backend_pid

    def call(self, call: Call) -> Any:
        script, keys, arguments = call
        words = [[word.encode() for word in words] for words in (keys, arguments)]
        sql = f'SELECT redlock."{script.name}"(%s::bytea[], %s::bytea[])'
        reader = hiredis.Reader(encoding="utf-8")
        row = self.connection.execute(sql.encode(), words).fetchone()
        assert row is not None
        reader.feed(row[0])
        return reader.gets()

    def commit(self) -> None:
        self.connection.commit()

    def waits(self) -> bool:
        return bool(self._node.query(WAITS, self._pid))


@contextlib.contextmanager
def sessions_on(node: PostgresNode) -> Iterator[list[Session]]:
    """Give sessions on a node that keeps nothing yet."""
    node.empty()
    with contextlib.ExitStack() as ends:
        made = [Session(node) for _ in range(CLIENTS)]
        for session in made:
            ends.enter_context(contextlib.closing(session.connection))
        yield made


def done(session: Session, call: Call) -> Any:
    reply = session.call(call)
    session.commit()
    return reply


class PostgresEar:
    """A subscriber of a PostgreSQL node."""

    _numbers = count()

    def __init__(self, address: PostgresAddress, names: tuple[str, ...], command: Command) -> None:
        self._command, self._end = command, f"end of {next(self._numbers)}"
        self._pubsub = address.pubsub(60, 60)
        waits = {*names, self._end}
        for name in waits:
            self._pubsub.send("SUBSCRIBE", name)
        while waits:
            waits -= {words[1].decode() for words in self._wait() if words[0] == b"subscribe"}

    def _wait(self) -> list[Any]:
        assert select.select([self._pubsub], [], [], 60)[0], "no message"
        return self._pubsub.receive()[1]

    def heard(self) -> list[tuple[str, str]]:
        """Return the channels and messages since the last call, in their order."""
        self._command("PUBLISH", self._end, "end")
        found: list[tuple[str, str]] = []
        while (self._end, "end") not in found:
            messages = [words[1:] for words in self._wait() if words[0] == b"message"]
            found += [(channel.decode(), text.decode()) for channel, text in messages]
        return found[:-1]

    def close(self) -> None:
        self._pubsub.disconnect()
        eventually(lambda: self._command("PUBSUB", "NUMSUB", self._end) == [self._end, 0])


def valid_until(lock: Lock) -> float:
    """Return the monotonic s until which a held lock is valid unless it is renewed."""
    leases = [lease for one in lock.ownership.acquisitions for lease in one.leases]
    return min(lease.valid_until for lease in leases)


def postgres(address: PostgresAddress, node_timeout: float = 60.0) -> Command:
    """Return a function that asks a PostgreSQL node; an error is returned, too.

    node_timeout: s for which the node waits for locks of its own.
    """
    dialled = address.dial(60.0, node_timeout)

    def command(*words: str) -> Any:
        dialled.send_command(*words)
        try:
            return decoded(dialled.read_response())
        except ResponseError as error:
            return error

    return command


def decoded(reply: Any) -> Any:
    if isinstance(reply, list):
        return [decoded(one) for one in reply]
    return reply.decode() if isinstance(reply, bytes) else reply
